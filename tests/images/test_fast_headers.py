"""The quick readers of image headers: what they say, Pillow says too, also of files that somebody damaged."""

import io
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from dataserver.images import ImageHeader, ImageHeaderError, formats, read_header, sniff_format


def jpeg(mode: str = "RGB", size: tuple[int, int] = (33, 17), **options: Any) -> bytes:
    channels = {"L": (), "RGB": (3,), "CMYK": (4,)}[mode]
    pixels = np.random.default_rng(0).integers(0, 256, (size[1], size[0], *channels), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels, mode).save(buffer, "JPEG", **options)
    return buffer.getvalue()


def webp(size: tuple[int, int] = (33, 17), mode: str = "RGB", **options: Any) -> bytes:
    pixels = np.random.default_rng(0).integers(0, 256, (size[1], size[0], len(mode)), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels, mode).save(buffer, "WEBP", **options)
    return buffer.getvalue()


def ordinary_size(data: bytes) -> tuple[int, int] | None:
    found = formats.format_of(data)
    return None if found is None or found.upright_size is None else found.upright_size(data)


def exif(orientation: int) -> Image.Exif:
    found = Image.Exif()
    found[0x0112] = orientation
    return found


ORDINARY = {
    "plain": jpeg(),
    "gray": jpeg("L"),
    "progressive": jpeg(progressive=True),
    "optimized": jpeg(optimize=True, subsampling=0, quality=95),
    "with a profile": jpeg(icc_profile=b"p" * 70_000),
    "with a comment": jpeg(comment=b"hello"),
    "with a density": jpeg(dpi=(300, 300)),
    "with restarts": jpeg(restart_marker_blocks=1),
    "wide": jpeg("L", (20_000, 3)),
    "WebP": webp(),
    "WebP of odd length": next(data for q in range(50, 90) if len(data := webp(quality=q)) % 4),
    "large WebP": webp((700, 400), quality=20),
}
OTHERS = {
    "four colours": jpeg("CMYK"),
    "turned": jpeg(exif=exif(6)),
    "with EXIF": jpeg(exif=exif(1)),
    "with XMP": jpeg(xmp=b"<x/>"),
    "lossless WebP": webp(lossless=True),
    "WebP with EXIF": webp(exif=exif(6)),
    "WebP with transparency": webp(mode="RGBA"),
    "animated WebP": webp(save_all=True, append_images=[Image.new("RGB", (33, 17))]),
}


def by_pillow(data: bytes, monkeypatch: pytest.MonkeyPatch) -> ImageHeader | str:
    with monkeypatch.context() as patched:
        plain = tuple(replace(found, upright_size=None) for found in formats.FORMATS)
        patched.setattr(formats, "FORMATS", plain)
        return judged(data)


def judged(data: bytes) -> ImageHeader | str:
    try:
        return read_header(data)
    except ImageHeaderError as error:
        return error.kind


@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_files_are_read_quickly(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ordinary_size(ORDINARY[name]) == Image.open(io.BytesIO(ORDINARY[name])).size
    assert judged(ORDINARY[name]) == by_pillow(ORDINARY[name], monkeypatch)


@pytest.mark.parametrize("name", OTHERS)
def test_everything_else_is_left_to_pillow(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ordinary_size(OTHERS[name]) is None
    assert judged(OTHERS[name]) == by_pillow(OTHERS[name], monkeypatch)


def test_a_header_is_read_to_its_last_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file is ordinary from where its first scan begins, and no earlier, whatever segment it ends in."""
    plain = ORDINARY["plain"]
    scan = plain.index(b"\xff\xda")
    begin = scan + 2 + int.from_bytes(plain[scan + 2 : scan + 4], "big")
    assert [n for n in range(begin + 2) if ordinary_size(plain[:n])] == [begin, begin + 1]
    for end in range(scan, begin + 2):
        assert judged(plain[:end]) == by_pillow(plain[:end], monkeypatch)


@pytest.mark.parametrize("at", [*range(8, 16), *range(23, 26)])
def test_a_webp_with_another_chunk_or_start_code_is_left_to_pillow(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    data = bytearray(ORDINARY["WebP"])
    data[at] ^= 1
    assert ordinary_size(bytes(data)) is None
    assert judged(bytes(data)) == by_pillow(bytes(data), monkeypatch)


def test_photographs_are_read_quickly(shared_data: Path) -> None:
    quick = []
    with tarfile.open(shared_data / "laion-mini" / "00000.tar") as tar:
        for member in tar:
            file = tar.extractfile(member)
            data = b"" if file is None else file.read()
            if sniff_format(data) is not None:
                quick.append(ordinary_size(data) is not None)
    assert np.mean(quick) > 0.9


BEGINNINGS = [b"JFIF\0", b"Exif\0\0", b"ICC_PROFILE\0", b"Adobe", b"Photoshop 3.0\0", b"MPF\0", b"FPXR\0"]
CHANGES = ["set", "cut", "insert", "drop"]
SEEDS = [*ORDINARY.values(), *OTHERS.values()]


@settings(max_examples=600)
@given(
    st.integers(0, len(SEEDS) - 1),
    st.lists(
        st.tuples(st.floats(0, 1), st.integers(0, 255), st.sampled_from(["set", "cut", "insert", "drop"])), max_size=4
    ),
    st.booleans(),
)
def test_damaged_files_are_judged_as_pillow_does(seed: int, edits: list[tuple[float, int, str]], near: bool) -> None:
    """Most changes fall into the first 700 bytes, where the header is."""
    data = bytearray(SEEDS[seed])
    for place, value, kind in edits:
        at = int(place * (min(len(data), 700) if near else len(data) - 1)) if data else 0
        if kind == "set" and data:
            data[min(at, len(data) - 1)] = value
        elif kind == "cut":
            del data[at:]
        elif kind == "insert":
            data[at:at] = bytes([255, value, 0, 2][: 1 + value % 4])
        else:
            del data[at : at + 1 + value % 5]
    with pytest.MonkeyPatch.context() as patch:
        assert judged(bytes(data)) == by_pillow(bytes(data), patch)


@settings(max_examples=600)
@given(st.data())
def test_segments_of_any_kind_and_length_are_judged_as_pillow_does(data: st.DataObject) -> None:
    """An ordinary file with other segments between its own, well formed or not."""
    plain = ORDINARY["plain"]
    payload = st.one_of(
        st.binary(max_size=20),
        st.builds(
            lambda begin, rest: begin + rest,
            st.sampled_from(
                [b"JFIF\0", b"Exif\0\0", b"ICC_PROFILE\0", b"Adobe", b"Photoshop 3.0\0", b"MPF\0", b"FPXR\0"]
            ),
            st.binary(max_size=20),
        ),
        st.builds(lambda n, fill: bytes([fill]) * n, st.sampled_from([64, 65, 66, 129, 130]), st.integers(0, 40)),
        st.builds(
            lambda n, bits, extra: bytes([bits, 0, 9, 0, 7, n]) + b"\1\x11\0" * n + extra,
            st.integers(0, 5),
            st.sampled_from([8, 8, 8, 12]),
            st.binary(max_size=2),
        ),
    )
    marker = st.one_of(st.integers(0xC0, 0xFE), st.sampled_from([0xC0, 0xC2, 0xDA, 0xDB, 0xE0, 0xE1, 0xE2, 0xED, 0xEE]))
    extra = b""
    for kind, content in data.draw(st.lists(st.tuples(marker, payload), max_size=3)):
        extra += bytes([0xFF, kind]) + (len(content) + 2).to_bytes(2, "big") + content
    at = data.draw(st.sampled_from([2, 20, plain.index(b"\xff\xc4")]))
    whole = plain[:at] + extra + plain[at:]
    with pytest.MonkeyPatch.context() as patch:
        assert judged(whole) == by_pillow(whole, patch)
