"""Images whose data end too early: invalid, or by a rule decoded as far as they go, and grey from there."""

import struct
import zlib

import numpy as np
import pytest
from images.pictures import ASTRONAUT, encode, noise, png_chunk
from PIL import Image

from dataserver.dataset.shard import ImageRef
from dataserver.images import ImageFault, ImageShape, decode_patches, fault_of
from dataserver.images.png import _inflated
from dataserver.planning.job.fields import Quality, Sizing

SIDE = 28
EXACT = Sizing(patch=SIDE, merge=1, max_patches=1, quality=Quality.EXACT)
PICTURE = ASTRONAUT.resize((SIDE, SIDE))
SMOOTH = Image.linear_gradient("L").resize((SIDE, SIDE)).convert("RGB")


def fault(data: bytes, may_be_truncated: bool, side: int = SIDE) -> ImageFault | None:
    return fault_of(data, ImageRef(0, 0, len(data), side, side, 1, may_be_truncated))


def pixels(data: bytes, may_be_truncated: bool = True) -> np.ndarray | None:
    """uint8 [SIDE, SIDE, 3], as servers decode it; None where it is invalid."""
    out = np.full((1, SIDE * SIDE * 3), 171, np.uint8)
    valid = decode_patches(data, ImageShape(SIDE, SIDE, 1, 1, 1, may_be_truncated), EXACT, out)
    assert valid or not out.any()
    found = fault(data, may_be_truncated)
    assert valid == (found is None or found.is_served)
    return out.reshape(SIDE, SIDE, 3) if valid else None


def interlaced(image: Image.Image) -> bytes:
    """Pillow writes none: seven passes of unfiltered rows."""
    values = np.asarray(image)
    steps = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))
    raw = b"".join(b"\0" + row.tobytes() for x, y, dx, dy in steps for row in values[y::dy, x::dx])
    header = struct.pack(">IIBBBBB", *image.size, 8, 2, 0, 0, 1)
    chunks = (b"IHDR", header), (b"IDAT", zlib.compress(raw)), (b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(png_chunk(*chunk) for chunk in chunks)


WHOLE = {
    "baseline": encode(PICTURE, "JPEG", quality=90),
    "progressive": encode(PICTURE, "JPEG", quality=90, progressive=True),
    "grey": encode(PICTURE.convert("L"), "JPEG", quality=90),
    "restarts": encode(PICTURE, "JPEG", quality=90, restart_marker_blocks=1),
    "png": encode(PICTURE, "PNG"),
    "palette": encode(PICTURE.convert("P"), "PNG"),
    "transparent": encode(PICTURE.convert("RGBA"), "PNG"),
    "bilevel": encode(PICTURE.convert("1"), "PNG"),
    "deep grey": encode(noise("I;16", SIDE, SIDE), "PNG"),
    "interlaced": interlaced(PICTURE),
}


@pytest.mark.parametrize("name", WHOLE)
def test_an_end_marker_alone_costs_no_pixel(name: str) -> None:
    """JPEG and PNG alike."""
    data = WHOLE[name]
    cut = data[: -2 if data[:2] == b"\xff\xd8" else -12]
    whole = pixels(data)
    assert whole is not None
    assert fault(data, may_be_truncated=True) is None
    assert pixels(cut, may_be_truncated=False) is None
    found = pixels(cut)
    assert found is not None
    assert (found == whole).all()
    why = fault(cut, may_be_truncated=True)
    assert why is not None
    assert why.is_served


@pytest.mark.parametrize("name", WHOLE)
def test_every_cut_is_decoded_as_far_as_it_goes(name: str) -> None:
    data, previous = WHOLE[name], -1
    whole = pixels(data)
    for end in range(4, len(data) - 1, 7):
        cut = data[:end]
        assert pixels(cut, may_be_truncated=False) is None
        found = pixels(cut)
        if found is None:  # before the first pixel
            assert previous <= 0, end
            continue
        right = int((found == whole).all(axis=2).sum())
        if name in ("png", "palette", "transparent", "bilevel", "deep grey", "interlaced"):
            missing = ~(found == whole).all(axis=2)
            assert (found[missing] == 128).all()
            assert right >= previous
        previous = max(previous, right)
    assert previous > SIDE * SIDE * 3 // 4


@pytest.mark.parametrize("seed", range(6))
def test_no_jpeg_is_whole_without_its_end_marker(seed: int) -> None:
    """Pillow loads some of them: those whose rows are all there."""
    data = encode(noise("RGB", SIDE, SIDE, seed), "JPEG", quality=30 + 10 * seed)
    for end in range(len(data) - 6, len(data)):
        assert pixels(data[:end], may_be_truncated=False) is None, end
        assert pixels(data[:end]) is not None, end


def test_what_a_jpeg_lacks_is_grey() -> None:
    data = encode(noise("RGB", SIDE, SIDE), "JPEG", quality=95)
    found = pixels(data[: len(data) * 2 // 3])
    assert found is not None
    assert (found[-8:, -8:] == 128).all()
    assert not (found[:8, :8] == 128).all()


@pytest.mark.parametrize("quality", [Quality.FAST, Quality.EXACT])
def test_all_scales_decode_it(quality: Quality) -> None:
    data = encode(ASTRONAUT, "JPEG", quality=90)
    sizing = Sizing(patch=SIDE, merge=1, max_patches=1, quality=quality)
    out = np.zeros((1, SIDE * SIDE * 3), np.uint8)
    assert decode_patches(data[: len(data) // 2], ImageShape(*ASTRONAUT.size, 1, 1, 1, True), sizing, out)
    assert (out.reshape(SIDE, SIDE, 3)[-8:] == 128).all()


def test_damage_is_no_truncation() -> None:
    """Neither a whole file whose pixels are damaged, nor other data behind the point where it breaks."""
    png = bytearray(WHOLE["png"])
    at = png.index(b"IDAT") + 12
    png[at : at + 8] = b"\xff" * 8
    assert pixels(bytes(png)) is None
    assert pixels(bytes(png[:-12])) is None
    assert pixels(WHOLE["png"][:-12], may_be_truncated=True) is not None
    assert pixels(encode(PICTURE, "WEBP")[:-2]) is None


def test_a_png_with_much_behind_its_pixels_is_whole() -> None:
    data = WHOLE["png"]
    assert pixels(data + b"anything", may_be_truncated=False) is not None
    behind = data[:-12] + png_chunk(b"tEXt", b"a\0b") + data[-12:]
    assert pixels(behind, may_be_truncated=False) is not None
    assert pixels(behind[:-13], may_be_truncated=False) is None


def test_a_header_that_lies_takes_no_memory() -> None:
    """The size must be that of the index before rows are made."""
    header = struct.pack(">IIBBBBB", 1 << 30, 1 << 30, 8, 6, 0, 0, 0)
    data = b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", header) + png_chunk(b"IDAT", zlib.compress(b"\0"))
    assert pixels(data) is None
    assert pixels(data[:-14]) is None
    assert pixels(b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", b"") + png_chunk(b"IDAT", zlib.compress(b"\0"))) is None


def test_a_header_without_content_is_invalid() -> None:
    assert pixels(b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", b"")) is None


def test_no_more_is_inflated_than_an_image_has() -> None:
    stream = zlib.compress(np.random.default_rng(0).bytes(1 << 18) + bytes(1 << 24))
    assert [sum(map(len, _inflated(stream, most))) for most in (0, 1000, 1 << 30)] == [0, 1000, (1 << 18) + (1 << 24)]
    cut = b"".join(_inflated(stream[: 1 << 17], 1 << 30))
    assert cut == zlib.decompressobj().decompress(stream[: 1 << 17])
