"""Orientations outside the EXIF block, or behind the pixels, are those that Pillow's `exif_transpose` sees."""

import io
import zlib
from collections.abc import Callable

import numpy as np
import pytest
from images.pictures import ASTRONAUT, encode, png_chunk
from PIL import Image, ImageOps, PngImagePlugin

from dataserver.images import ImageShape, decode_patches, read_header
from dataserver.planning.job.fields import Sizing

PICTURE = ASTRONAUT.resize((48, 40))
PNG = encode(PICTURE, "PNG")
SPELLINGS = {
    "attribute": '<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:Description tiff:Orientation="{}"/></x:xmpmeta>',
    "element": "<x:xmpmeta><tiff:Orientation>{}</tiff:Orientation></x:xmpmeta>",
}


def exif(orientation: int) -> bytes:
    found = Image.Exif()
    found[0x0112] = orientation
    return found.tobytes()


def raw_profile(orientation: int) -> bytes:
    """As ImageMagick writes it."""
    text = exif(orientation).hex()
    lines = "\n".join(text[i : i + 72] for i in range(0, len(text), 72))
    return f"\nexif\n{len(text) // 2:8d}\n{lines}\n".encode()


def with_chunk(kind: bytes, content: bytes, behind: bool = False) -> bytes:
    at = len(PNG) - 12 if behind else PNG.index(b"IDAT") - 4
    return PNG[:at] + png_chunk(kind, content) + PNG[at:]


def xmp_of_png(orientation: int) -> bytes:
    about = PngImagePlugin.PngInfo()
    about.add_itxt("XML:com.adobe.xmp", SPELLINGS["attribute"].format(orientation))
    return encode(PICTURE, "PNG", pnginfo=about)


def xmp_of_jpeg(spelling: str) -> Callable[[int], bytes]:
    return lambda orientation: encode(PICTURE, "JPEG", xmp=SPELLINGS[spelling].format(orientation).encode())


KINDS: dict[str, Callable[[int], bytes]] = {
    "eXIf": lambda n: with_chunk(b"eXIf", exif(n)[6:]),
    "eXIf behind the pixels": lambda n: with_chunk(b"eXIf", exif(n)[6:], behind=True),
    "raw profile": lambda n: with_chunk(b"zTXt", b"Raw profile type exif\0\0" + zlib.compress(raw_profile(n))),
    "raw profile as text": lambda n: with_chunk(b"tEXt", b"Raw profile type exif\0" + raw_profile(n)),
    "raw profile behind the pixels": lambda n: with_chunk(
        b"zTXt", b"Raw profile type exif\0\0" + zlib.compress(raw_profile(n)), behind=True
    ),
    "XMP of a PNG": xmp_of_png,
    "XMP of a JPEG": xmp_of_jpeg("attribute"),
    "XMP of a JPEG, as an element": xmp_of_jpeg("element"),
    "XMP of a WebP": lambda n: encode(PICTURE, "WEBP", xmp=SPELLINGS["attribute"].format(n).encode()),
    "EXIF before XMP": lambda n: encode(PICTURE, "JPEG", exif=exif(n), xmp=SPELLINGS["attribute"].format(8).encode()),
    "EXIF without one, and XMP": lambda n: encode(
        PICTURE, "JPEG", exif=Image.Exif().tobytes(), xmp=SPELLINGS["attribute"].format(n).encode()
    ),
    "EXIF of a JPEG": lambda n: encode(PICTURE, "JPEG", exif=exif(n)),
}


@pytest.mark.parametrize("orientation", [0, 1, 3, 6, 8, 9])
@pytest.mark.parametrize("kind", KINDS)
def test_agrees_with_pillow(kind: str, orientation: int) -> None:
    data = KINDS[kind](orientation)
    header = read_header(data)
    with Image.open(io.BytesIO(data)) as image:
        expected = ImageOps.exif_transpose(image)
        found = image.getexif().get(0x0112, 1)
    assert (header.width, header.height) == expected.size
    assert header.orientation == (found if 1 <= found <= 8 else 1)
    assert orientation not in (3, 6, 8) or header.orientation == orientation


TURNED: dict[str, Callable[[int], bytes]] = {
    "tag of a TIFF": lambda n: encode(PICTURE, "TIFF", tiffinfo={274: n}),
    "XMP of a TIFF": lambda n: encode(PICTURE, "TIFF", tiffinfo={700: SPELLINGS["attribute"].format(n).encode()}),
    "XMP of a packed TIFF": lambda n: encode(
        PICTURE, "TIFF", compression="tiff_lzw", tiffinfo={700: SPELLINGS["element"].format(n).encode()}
    ),
    "tag of a TIFF before XMP": lambda n: encode(
        PICTURE, "TIFF", tiffinfo={274: n, 700: SPELLINGS["attribute"].format(9 - n).encode()}
    ),
    "irot and imir of an AVIF": lambda n: encode(PICTURE, "AVIF", quality=100, exif=exif(n)),
    "XMP of an AVIF": lambda n: encode(PICTURE, "AVIF", quality=100, xmp=SPELLINGS["attribute"].format(n).encode()),
    "AVIF of the general brand": lambda n: encode(PICTURE, "AVIF", quality=100, exif=exif(n)).replace(
        b"ftypavif", b"ftypmif1", 1
    ),
    "EXIF of a WebP": lambda n: encode(PICTURE, "WEBP", lossless=True, exif=exif(n)),
}


@pytest.mark.parametrize("orientation", [1, 2, 3, 5, 6, 8])
@pytest.mark.parametrize("kind", TURNED)
def test_size_and_pixels_are_those_of_pillow(kind: str, orientation: int) -> None:
    """Pillow turns a TIFF itself when it loads the pixels, by the tag or by the XMP."""
    data = TURNED[kind](orientation)
    header = read_header(data)
    with Image.open(io.BytesIO(data)) as image:
        expected = np.asarray(ImageOps.exif_transpose(image).convert("RGB"))
    rows, columns = expected.shape[0] // 4, expected.shape[1] // 4
    shape = ImageShape(header.width, header.height, header.orientation, rows, columns)
    out = np.zeros((rows * columns, 48), np.uint8)
    assert decode_patches(data, shape, Sizing(patch=4, merge=1), out)
    pixels = out.reshape(rows, columns, 4, 4, 3).transpose(0, 2, 1, 3, 4).reshape(expected.shape)
    assert (header.height, header.width) == expected.shape[:2]
    assert np.array_equal(pixels, expected)


@pytest.mark.parametrize(
    "data",
    [
        with_chunk(b"tEXt", b"Raw profile type exif\0\nexif\n 4\nzz\n"),
        with_chunk(b"tEXt", b"Raw profile type exif\0"),
        with_chunk(b"zTXt", b"Raw profile type exif\0\0no stream"),
        with_chunk(b"eXIf", b"\xff" * 8, behind=True),
        with_chunk(b"tEXt", b"Raw profile type exif\0" + raw_profile(6), behind=True)[:-40],
    ],
)
def test_damaged_ones_count_as_upright(data: bytes) -> None:
    header = read_header(data)
    assert (header.width, header.height, header.orientation) == (48, 40, 1)
