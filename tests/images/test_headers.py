"""Image headers against Pillow's own decode and transpose, and against damaged and absurd headers."""

import contextlib
import io
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps
from shards import make_image

from dataserver.images import ImageHeaderError, read_header, sniff_format


def encode(image_format: str, mode: str, orientation: int | None, **options: object) -> bytes:
    image = Image.new(mode, (37, 21))
    exif = Image.Exif()
    if orientation is not None:
        exif[0x0112] = orientation
    buffer = io.BytesIO()
    image.save(buffer, image_format, exif=exif.tobytes() if orientation is not None else b"", **options)
    return buffer.getvalue()


@pytest.mark.parametrize("orientation", [None, *range(1, 9)])
@pytest.mark.parametrize(
    ("image_format", "mode", "options"),
    [
        ("JPEG", "RGB", {}),
        ("JPEG", "L", {"progressive": True}),
        ("JPEG", "CMYK", {}),
        ("PNG", "RGBA", {}),
        ("PNG", "P", {}),
        ("WEBP", "RGB", {}),
        ("WEBP", "RGBA", {"lossless": True}),
    ],
)
def test_agrees_with_pillow(image_format: str, mode: str, options: dict[str, object], orientation: int | None) -> None:
    data = encode(image_format, mode, orientation, **options)
    header = read_header(data)
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    assert (header.width, header.height) == upright.size
    assert header.orientation == (orientation or 1)
    assert header.format == image_format.lower()


def png(width: int, height: int) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")


def test_declared_pixels_are_limited_before_decoding() -> None:
    header = read_header(png(1 << 14, 1 << 13))
    assert header.width * header.height == 1 << 27
    with pytest.raises(ImageHeaderError) as caught:
        read_header(png(1 << 14, (1 << 13) + 1))
    assert caught.value.kind == "image_too_large"


@pytest.mark.parametrize("data", [b"", b"\xff\xd8\xff", b"GIF89a" + bytes(64), b"\x89PNG\r\n\x1a\n", png(0, 5)])
def test_unreadable_headers(data: bytes) -> None:
    with pytest.raises(ImageHeaderError) as caught:
        read_header(data)
    assert caught.value.kind == "unreadable_header"


@pytest.mark.parametrize("size", [(1, 1), (1, 2), (2, 1)])
@pytest.mark.parametrize("image_format", ["JPEG", "PNG", "WEBP"])
def test_the_smallest_images(image_format: str, size: tuple[int, int]) -> None:
    buffer = io.BytesIO()
    Image.new("RGB", size).save(buffer, image_format)
    header = read_header(buffer.getvalue())
    assert (header.format, header.width, header.height) == (image_format.lower(), *size)


@pytest.mark.parametrize("size", [(0, 5), (5, 0), (0, 0)])
def test_images_without_pixels(size: tuple[int, int]) -> None:
    with pytest.raises(ImageHeaderError) as caught:
        read_header(png(*size))
    assert caught.value.kind == "unreadable_header"


def test_damaged_exif_counts_as_upright() -> None:
    data = encode("JPEG", "RGB", 6)
    start = data.index(b"Exif\0\0") + 6
    assert read_header(data[:start] + b"XXXXXXXX" + data[start + 8 :]).orientation == 1


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(["JPEG", "PNG", "WEBP"]), st.data())
def test_damage_raises_sample_errors_only(image_format: str, data: st.DataObject) -> None:
    image = bytearray(make_image(np.random.default_rng(0), 40, 30, image_format))
    for _ in range(data.draw(st.integers(1, 6))):
        image[data.draw(st.integers(0, min(len(image), 700) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(image[: data.draw(st.integers(0, len(image)))])
    header = None
    with contextlib.suppress(ImageHeaderError):
        header = read_header(cut)
    if header is not None:
        assert header.format == sniff_format(cut)
        assert 0 < header.width * header.height <= 1 << 27


def test_a_lack_of_memory_is_no_fault_of_an_image(monkeypatch: pytest.MonkeyPatch) -> None:
    def unavailable(*_: object) -> None:
        raise MemoryError

    for place in ("PngImagePlugin.PngImageFile", "Image.Exif.load"):
        with monkeypatch.context() as patch:
            patch.setattr(f"PIL.{place}", unavailable)
            with pytest.raises(MemoryError):
                read_header(encode("PNG", "RGB", 6))
