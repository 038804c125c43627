"""Bytes that are no image, or a trap."""

import io
import struct
import subprocess
import sys
import tracemalloc
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from images.pictures import ASTRONAUT, decode, encode, naive_patches, noise, png, png_chunk
from PIL import Image, ImageOps

from dataserver.images import ImageHeaderError, ImageShape, jpeg_decoder, pillow_decoder, read_header
from dataserver.images.errors import InvalidImageError
from dataserver.images.kernels.jpeg import look_at_jpeg
from dataserver.planning.job.fields import Sizing

SIZING = Sizing(patch=4, merge=2, max_patches=64)
SHAPE = ImageShape(width=96, height=64, orientation=1, rows=4, columns=6)
PICTURE = ASTRONAUT.crop((150, 40, 150 + 96, 40 + 64))
FILES = {
    "jpeg": encode(PICTURE, "JPEG", quality=95),
    "progressive": encode(PICTURE, "JPEG", quality=95, progressive=True),
    "png": encode(PICTURE, "PNG"),
    "webp": encode(PICTURE, "WEBP", quality=95),
    "lossless": encode(PICTURE, "WEBP", lossless=True),
    "gif": encode(PICTURE, "GIF"),
    "bmp": encode(PICTURE, "BMP"),
    "avif": encode(PICTURE, "AVIF", quality=90),
    "tiff": encode(PICTURE, "TIFF"),
    "tiff of lzw": encode(PICTURE, "TIFF", compression="tiff_lzw"),
    "tiff of a jpeg": encode(PICTURE, "TIFF", compression="jpeg"),
}


def refused(data: bytes, shape: ImageShape = SHAPE) -> bool:
    """Whether an image is invalid; then its patches must be zero."""
    valid, patches = decode(data, shape, SIZING)
    assert valid or not patches.any()
    return not valid


@pytest.mark.parametrize("name", FILES)
def test_truncated_at_every_hundredth_byte(name: str) -> None:
    data = FILES[name]
    _, whole = decode(data, SHAPE, SIZING)
    assert whole.any()
    # the last bytes hold no pixels: end markers, checksums
    for length in range(0, len(data) - 24, 100):
        assert refused(data[:length]), length
    for length in range(len(data) - 24, len(data)):
        valid, patches = decode(data[:length], SHAPE, SIZING)
        assert np.array_equal(patches, whole if valid else np.zeros_like(whole))


@given(st.sampled_from(sorted(FILES)), st.integers(0, 2**16), st.binary(min_size=1, max_size=8))
@settings(max_examples=300)
def test_damaged_files_are_valid_or_zero_and_always_the_same(name: str, position: int, rubbish: bytes) -> None:
    data = bytearray(FILES[name])
    position %= len(data)
    data[position : position + len(rubbish)] = rubbish
    first_valid, first = decode(bytes(data), SHAPE, SIZING)
    again_valid, again = decode(bytes(data), SHAPE, SIZING)
    assert first_valid == again_valid
    assert np.array_equal(first, again)
    assert first_valid or not first.any()


@given(
    st.binary(max_size=300),
    st.sampled_from(
        [b"", b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"RIFF\0\1\0\0WEBPVP8X", b"GIF89a", b"II*\0", b"\0\0\0 ftypavif"]
    ),
)
def test_rubbish_is_invalid(rubbish: bytes, magic: bytes) -> None:
    assert refused(magic + rubbish)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(("width", "height"), [(64, 96), (95, 64), (96, 65), (192, 128)])
def test_a_size_other_than_the_index_has_is_invalid(name: str, width: int, height: int) -> None:
    assert refused(FILES[name], ImageShape(width, height, 1, 4, 6))


@pytest.mark.parametrize("image_format", ["PPM", "ICO", "JPEG2000", "DDS"])
def test_other_formats_are_invalid(image_format: str) -> None:
    assert refused(encode(PICTURE.resize((32, 32)), image_format), ImageShape(32, 32, 1, 4, 6))


def test_what_has_no_format_is_refused_by_its_name() -> None:
    with pytest.raises(InvalidImageError, match=r"^it is PPM; neither JPEG, PNG, WebP, GIF, BMP, AVIF nor TIFF$"):
        pillow_decoder.decode(encode(PICTURE, "PPM"), PICTURE.size, PICTURE.size)


def bilevel(width: int, height: int) -> bytes:
    """A whole, black PNG of one bit a pixel."""
    pixels = zlib.compress(bytes((width // 8 + 1) * height), 1)
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    parts = [(b"IHDR", header), (b"IDAT", pixels), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(png_chunk(kind, content) for kind, content in parts)


def test_the_limit_of_pixels() -> None:
    width, height = 1 << 14, 1 << 13
    assert not refused(bilevel(width, height), ImageShape(width, height, 1, 4, 8))
    assert refused(bilevel(width, height + 1), ImageShape(width, height + 1, 1, 4, 8))


SCARCE = """
import re, resource, sys
from pathlib import Path
import numpy as np
from dataserver.planning.job.fields import Sizing
from dataserver.assembly import content_digest
from dataserver.images import ImageShape, decode_patches, jpeg_decoder, pillow_decoder, webp_decoder

content_digest()  # as a server that begins: all loops are loaded
data = Path(sys.argv[1]).read_bytes()
used_bytes = int(re.search("VmSize: *([0-9]+)", Path("/proc/self/status").read_text().expandtabs()).group(1)) * 1024
for spare_bytes in map(int, sys.argv[2:]):
    resource.setrlimit(resource.RLIMIT_AS, (used_bytes + spare_bytes, resource.RLIM_INFINITY))
    try:
        print(decode_patches(data, ImageShape(5000, 5000, 1, 8, 8), Sizing(patch=4), np.zeros((64, 48), np.uint8)))
    except MemoryError:
        print("MemoryError")
"""


@pytest.mark.parametrize(
    ("image_format", "options"),
    [
        ("JPEG", {"progressive": True}),
        pytest.param("WEBP", {"lossless": True}, marks=pytest.mark.long),
        pytest.param("PNG", {}, marks=pytest.mark.long),
    ],
)
def test_lack_of_memory_is_no_verdict_on_the_image(tmp_path: Path, image_format: str, options: dict[str, bool]) -> None:
    """One process decodes it, or does not, by what memory it may take; lack of it is nothing to be remembered."""
    path = tmp_path / "large"
    path.write_bytes(encode(Image.new("RGB", (5000, 5000), "teal"), image_format, **options))
    command = [sys.executable, "-c", SCARCE, str(path), str(20 << 20), str(4 << 30)]
    verdicts = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert verdicts == ["MemoryError", "True"]


def test_the_limit_of_bytes() -> None:
    data = FILES["jpeg"]
    assert not refused(data + bytes((64 << 20) - len(data)))
    assert refused(data + bytes((64 << 20) + 1 - len(data)))


def test_the_limit_of_scans(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encode(PICTURE, "JPEG", progressive=True)
    scanned = PICTURE.width * PICTURE.height * data.count(b"\xff\xda")
    shape = ImageShape(*PICTURE.size, 1, SHAPE.rows, SHAPE.columns)
    monkeypatch.setattr(jpeg_decoder, "MAX_SCANNED_PIXELS", scanned)
    assert not refused(data, shape)
    monkeypatch.setattr(jpeg_decoder, "MAX_SCANNED_PIXELS", scanned - 1)
    assert refused(data, shape)


def segment(marker: int, content: bytes) -> bytes:
    return struct.pack(">BBH", 0xFF, marker, len(content) + 2) + content


SCANS = b"\xff\xda" * 400
"""What looks like scans; random bytes of 25 MB hold as many."""
PROGRESSIVE = FILES["progressive"]


@pytest.mark.parametrize(
    "data",
    [
        PROGRESSIVE + SCANS,
        PROGRESSIVE + PROGRESSIVE * 3,
        PROGRESSIVE[:2] + segment(0xE1, PROGRESSIVE) + segment(0xEF, SCANS) + segment(0xFE, SCANS) + PROGRESSIVE[2:],
        PROGRESSIVE[:-2] + segment(0xE4, SCANS) + PROGRESSIVE[-2:],
        PROGRESSIVE[:-2] + b"\xff\xff\xff" + PROGRESSIVE[-1:] + SCANS,
        encode(PICTURE, "JPEG", progressive=True, restart_marker_blocks=1) + SCANS,
    ],
    ids=["behind the end", "several images", "segments", "a segment behind scans", "filling", "restarts"],
)
def test_scans_are_those_that_are_decoded(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    scanned = PICTURE.width * PICTURE.height * 10
    assert data.count(b"\xff\xda") > 10
    assert look_at_jpeg(np.frombuffer(data, np.uint8), 0)[0] == 10
    with Image.open(io.BytesIO(data)) as image:
        image.load()
    monkeypatch.setattr(jpeg_decoder, "MAX_SCANNED_PIXELS", scanned)
    assert not refused(data)
    monkeypatch.setattr(jpeg_decoder, "MAX_SCANNED_PIXELS", scanned - 1)
    assert refused(data)


@pytest.mark.parametrize(
    ("begin", "counted"),
    [
        (b"\xff\xe0\xff\xff", 400),  # longer than the file
        (b"\xff\xe0\0\1", 400),  # shorter than the length itself
        (b"\xff\xda\0\1", 401),
        (b"\xff\x02\6\x42", 400),  # no marker that has a length
        (b"rubbish\xff\0\xff", 400),
        (b"\xff\xe0\6\x3e", 1),  # this one does hide them, up to the last
    ],
)
def test_all_that_may_be_scans_counts_where_a_file_goes_wrong(begin: bytes, counted: int) -> None:
    data = np.frombuffer(b"\xff\xd8" + begin + b"\xff\xda\0\2" * 400, np.uint8)
    assert look_at_jpeg(data, 0)[0] == counted
    assert look_at_jpeg(data, 400 + (counted > 400))[0] == 400 + (counted > 400)
    assert look_at_jpeg(data[:-12], 0)[0] == max(397, counted - 3)


@pytest.mark.long
def test_an_ordinary_progressive_image_of_the_largest_size_is_valid() -> None:
    width, height = 1 << 14, 1 << 13
    data = encode(Image.new("RGB", (width, height), "teal"), "JPEG", progressive=True)
    assert data.count(b"\xff\xda") == 10
    assert not refused(data, ImageShape(width, height, 1, 4, 8))


def test_a_png_that_declares_more_than_it_holds_is_invalid() -> None:
    assert refused(png(width=5000, height=5000), ImageShape(5000, 5000, 1, 8, 8))


def animation(width: int, height: int) -> bytes:
    """A WebP of two small frames on a canvas of any size."""
    frames = [PICTURE, PICTURE.transpose(Image.Transpose.ROTATE_180)]
    data = encode(frames[0], "WEBP", save_all=True, append_images=frames[1:])
    return data[:24] + (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little") + data[30:]


VM_PEAK = """
import re, sys
from pathlib import Path
import numpy as np
from dataserver.planning.job.fields import Sizing
from dataserver.images import ImageShape, decode_patches, jpeg_decoder, pillow_decoder, webp_decoder

def peak_kib():
    return int(re.search("VmPeak: *([0-9]+)", Path("/proc/self/status").read_text().expandtabs()).group(1))

data = Path(sys.argv[1]).read_bytes()
before = peak_kib()
valid = decode_patches(data, ImageShape(96, 64, 1, 4, 6), Sizing(patch=4), np.zeros((24, 48), np.uint8))
print(valid, peak_kib() - before)
"""


def test_a_webp_canvas_is_compared_before_it_is_allocated(tmp_path: Path) -> None:
    assert not refused(animation(96, 64))
    path = tmp_path / "canvas.webp"
    path.write_bytes(animation(11000, 11000))
    command = [sys.executable, "-c", VM_PEAK, str(path)]
    valid, grown_kib = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert valid == "False"
    # two canvases of 4 bytes a pixel would be 945,000 KiB
    assert int(grown_kib) < 100_000


def test_text_and_profile_bombs_in_a_png_are_harmless() -> None:
    bomb = zlib.compress(bytes(256 << 20), 9)
    shape = ImageShape(8, 8, 1, 2, 2)
    assert not refused(png(), shape)
    tracemalloc.start()
    assert refused(png((b"zTXt", b"Comment\0\0" + bomb)), shape)
    assert refused(png((b"iTXt", b"Comment\0\1\0\0\0" + bomb)), shape)
    refused(png((b"iCCP", b"profile\0\0" + bomb)), shape)
    megabyte = zlib.compress(bytes(1 << 20), 9)
    assert refused(png(*[(b"zTXt", b"Comment\0\0" + megabyte)] * 80), shape)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 160 << 20


def test_a_wrong_checksum_in_a_png_is_invalid() -> None:
    data = png()
    after_header = 8 + 4 + 4 + 13
    assert refused(data[:after_header] + bytes(4) + data[after_header + 4 :], ImageShape(8, 8, 1, 2, 2))


def test_a_scan_bomb_is_invalid() -> None:
    image = noise("L", 8, 8).resize((4096, 4096))
    data = encode(image, "JPEG", quality=1, progressive=True)
    scans = [part for part in data.split(b"\xff\xda") if part]
    shape = ImageShape(4096, 4096, 1, 8, 8)
    assert not refused(data, shape)
    needed = 2**31 // 4096**2 + 1
    bomb = b"\xff\xda".join(scans[:-1] + [scans[-1].removesuffix(b"\xff\xd9")] * needed) + b"\xff\xd9"
    assert refused(bomb, shape)


def tiff(*entries: tuple[int, int, int, int], is_big: bool = False) -> bytes:
    """A TIFF of one directory: tag, type, count and value of each entry."""
    if is_big:
        body = b"".join(struct.pack("<HHQQ", *entry) for entry in entries)
        return b"II+\0" + struct.pack("<HHQQ", 8, 0, 16, len(entries)) + body + bytes(600)
    body = b"".join(struct.pack("<HHII", *entry) for entry in entries)
    return b"II*\0" + struct.pack("<IH", 8, len(entries)) + body + bytes(600)


SIDES = (256, 4, 1, 16), (257, 4, 1, 16)


@pytest.mark.parametrize("is_big", [False, True])
@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        ((*SIDES, (322, 4, 1, 1 << 15), (323, 4, 1, 1 << 15)), "tiles of 32768 x 32768 pixels, limit 134217728"),
        ((*SIDES, (273, 4, 1 << 20, 8)), "tag 273 has 1048576 values, which the file does not hold"),
        ((*SIDES, (322, 9, 1, 1 << 15), (323, 9, 1, 1 << 15)), "tag 322 is no single whole number"),
        (((256, 9, 1, 16), SIDES[1]), "tag 256 is no single whole number"),
        ((*SIDES, (258, 3, 1, 12)), "12 bits a pixel; convert it to 8 or 16"),
        ((*SIDES, (258, 3, 1, 16), (262, 3, 1, 0)), "16 bits a pixel where 0 is white"),
        ((SIDES[0],), "its size is missing"),
        ((*SIDES, *[(400, 3, 1, 0)] * 600), "602 tags, limit 512"),
    ],
)
def test_a_tiff_that_would_take_memory_never_comes_to_pillow(
    monkeypatch: pytest.MonkeyPatch, entries: tuple[tuple[int, int, int, int], ...], reason: str, is_big: bool
) -> None:
    monkeypatch.setattr("dataserver.images.formats.ImageFormat.load_plugin", lambda _: pytest.fail("it came to Pillow"))
    data = tiff(*entries, is_big=is_big)
    with pytest.raises(ImageHeaderError, match=reason) as caught:
        read_header(data)
    assert caught.value.kind == "unreadable_header"
    with pytest.raises(InvalidImageError, match=reason):
        pillow_decoder.decode(data, (16, 16), (16, 16))


def test_strips_of_a_tiff_are_counted_before_each_becomes_an_object() -> None:
    data = tiff(*SIDES, (273, 4, 1 << 17, 8)) + bytes(1 << 20)
    with pytest.raises(ImageHeaderError, match="131072 strips or tiles, limit 65536"):
        read_header(data)


def test_runs_of_a_bmp_are_bounded() -> None:
    def runs(width: int, height: int, num_bytes: int) -> bytes:
        header = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 8, 1, 0, 0, 0, 2, 0)
        return b"BM" + struct.pack("<IHHI", num_bytes, 0, 0, 62) + header + bytes(8) + bytes(num_bytes)

    assert read_header(runs(16, 16, 64)).format == "bmp"
    for width, height, num_bytes in ((1 << 15, 2, 64), (16, 1 << 15, 64), (16, 16, 5 << 20)):
        with pytest.raises(ImageHeaderError, match=r"runs \(RLE\) of"):
            read_header(runs(width, height, num_bytes))


@pytest.mark.parametrize("image_format", ["GIF", "BMP", "AVIF", "TIFF"])
@pytest.mark.parametrize("orientation", [1, 6])
def test_formats_of_pillow_are_what_pillow_makes_of_them(image_format: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"exif": exif} if image_format in ("AVIF", "TIFF") else {}
    data = encode(PICTURE, image_format, **options)
    header = read_header(data)
    shape = ImageShape(header.width, header.height, header.orientation, header.height // 4, header.width // 4)
    valid, patches = decode(data, shape, Sizing(patch=4, merge=2, max_patches=1024))
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")
    assert valid
    assert expected.size == (header.width, header.height)
    assert np.array_equal(patches, naive_patches(np.asarray(expected), 4, 2))


def test_damaged_tiffs_write_nothing_to_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    data = bytearray(FILES["tiff of lzw"])
    data[2000:2200] = b"\xff" * 200
    assert refused(bytes(data))
    assert capfd.readouterr().err == ""


def test_deep_tiffs_keep_their_high_bytes_and_floats_are_named() -> None:
    deep = np.random.default_rng(1).integers(0, 1 << 16, (64, 96), dtype=np.uint16)
    valid, patches = decode(encode(Image.fromarray(deep), "TIFF"), SHAPE._replace(rows=16, columns=24), SIZING)
    assert valid
    grey = np.repeat((deep >> 8).astype(np.uint8)[..., None], 3, -1)
    assert np.array_equal(patches, naive_patches(grey, 4, 2))
    with pytest.raises(ImageHeaderError, match="a TIFF of pixels that are F; convert it"):
        read_header(encode(Image.fromarray(deep.astype(np.float32)), "TIFF"))


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (b"\0\0\0 ftypheic" + bytes(40), "HEIC"),
        (b"\xff\x0a" + bytes(40), "JPEG XL"),
        (b"\xef\xbb\xbf<?xml version='1.0'?><svg/>", "SVG"),
        (b" <!DOCTYPE html><p>404", "HTML"),
        (b"\0\0\0 ftypisom", "MP4"),
        (encode(PICTURE.resize((32, 32)), "ICO"), "ICO"),
    ],
)
def test_what_is_not_read_is_named(data: bytes, name: str) -> None:
    with pytest.raises(ImageHeaderError, match=f"^unreadable_header: it is {name}; neither"):
        read_header(data)
