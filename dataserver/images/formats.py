"""The image formats that are read: a line of `FORMATS` for each.

A format needs its magic and the plugin of Pillow that opens it. Where something faster agrees with Pillow on most
files, it names that too: a reader of sizes, and a decoder. Both say None to every file that they are not sure of, and
Pillow judges it.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Final

from dataserver.images.bmp_refusal import refusal as bmp_refusal
from dataserver.images.jpeg import complete as complete_jpeg
from dataserver.images.jpeg import is_whole as is_whole_jpeg
from dataserver.images.jpeg import upright_size as jpeg_size
from dataserver.images.libtiff import silence
from dataserver.images.png import SIGNATURE, without_pixels
from dataserver.images.png import complete as complete_png
from dataserver.images.png import is_whole as is_whole_png
from dataserver.images.tiff_refusal import refusal as tiff_refusal
from dataserver.images.truncation import Completed, Size
from dataserver.images.unsupported_formats import other_format
from dataserver.images.webp import canvas_size as webp_canvas
from dataserver.images.webp import upright_size as webp_size

if TYPE_CHECKING:
    from PIL.ImageFile import ImageFile

    from dataserver.images.patches import U8


ORIENTATION_TAG: Final = 0x0112


@dataclass(frozen=True, slots=True)
class ImageFormat:
    """An image format: how it is recognised, and who decodes it."""

    name: str
    title: str
    """The format's name in messages."""
    magic: tuple[tuple[int, bytes], ...]
    """What stands at which byte of every such file."""
    plugin: str
    """Pillow's reader, as `module.Class`. It is named directly: `Image.open` tries all formats."""
    variants: tuple[tuple[tuple[int, bytes], ...], ...] = ()
    """Other bytes that a file may begin with, as `magic`."""
    is_variant: Callable[[bytes], bool] | None = None
    """Whether a file is one of this format that begins in none of these ways."""
    refusal: Callable[[bytes], str] | None = None
    """Says why a file must not come to Pillow, whose work or memory would have no limit; nothing where it may."""
    is_turned: "Callable[[ImageFile], bool]" = lambda _: False
    """Whether Pillow turns an image upright itself, by what `without_turn` leaves."""
    without_turn: "Callable[[ImageFile], None] | None" = None
    """Takes away what Pillow would turn an image by when it loads the pixels, while its size is that of the rest."""
    modes: frozenset[str] = frozenset()
    """Pillow's modes that are read, where not all of a format's become RGB as they should."""
    upright_size: Callable[[bytes], Size | None] | None = None
    """Reads the size of a file that has no EXIF data, at less cost than Pillow."""
    canvas_size: Callable[[bytes], Size | None] | None = None
    """Reads the size where Pillow allocates a canvas as it opens the file, so that a limit comes first."""
    decoder: str = ""
    """Module with `decode(data, size, least)`, which is loaded with the first image; empty where Pillow decodes all."""
    without_pixels: Callable[[bytes], bytes] | None = None
    """Leaves out the pixels, where what says the orientation may stand behind them and Pillow would decode them."""
    is_whole: Callable[[bytes], bool] | None = None
    """Whether a file has its end, which Pillow does not always ask for."""
    complete: Callable[[bytes, Size], Completed | None] | None = None
    """Completes a file whose data end too early; None for any other."""

    def matches(self, data: bytes) -> bool:
        """Whether a file begins as one of this format."""
        for at, text in self.magic:  # a generator takes twice as long, for each member of each shard
            if not data.startswith(text, at):
                break
        else:
            return True
        if any(all(data.startswith(text, at) for at, text in magic) for magic in self.variants):
            return True
        return self.is_variant is not None and self.is_variant(data)

    def load_plugin(self) -> "type[ImageFile]":
        """Pillow's reader, which takes 10 ms to load."""
        module, _, name = self.plugin.rpartition(".")
        plugins = import_module(module)
        if self.name == "avif":
            plugins.DEFAULT_MAX_THREADS = 1  # type: ignore[attr-defined]  # images are decoded side by side already
        if self.name == "tiff":
            silence()
        plugin: type[ImageFile] = getattr(plugins, name)
        return plugin

    def load_decoder(self) -> "Callable[[bytes, Size, Size], U8 | None] | None":
        """The fast decoder, if there is one."""
        return _decoder(self.decoder) if self.decoder else None


def _has_orientation(image: "ImageFile") -> bool:
    """Whether a TIFF has the tag of an orientation."""
    return ORIENTATION_TAG in image.tag_v2  # type: ignore[attr-defined]


def _forget_xmp(image: "ImageFile") -> None:
    """Pillow turns a TIFF by its XMP, too, where it has no such tag; the size that it gives before is not turned."""
    for name in ("xmp", "XML:com.adobe.xmp"):
        image.info.pop(name, None)


def _is_general_avif(data: bytes) -> bool:
    """Whether a file of the brand of all HEIF images, or of all their sequences, says that it is AVIF, too."""
    if data[4:12] not in (b"ftypmif1", b"ftypmsf1", b"ftypmiaf"):
        return False
    brands = data[16 : min(int.from_bytes(data[:4], "big"), 256)]
    return any(brands[at : at + 4] in (b"avif", b"avis") for at in range(0, len(brands), 4))


FORMATS: Final = (
    ImageFormat(
        "jpeg",
        "JPEG",
        ((0, b"\xff\xd8\xff"),),
        "PIL.JpegImagePlugin.JpegImageFile",
        upright_size=jpeg_size,
        decoder="dataserver.images.jpeg_decoder",
        is_whole=is_whole_jpeg,
        complete=complete_jpeg,
    ),
    ImageFormat(
        "png",
        "PNG",
        ((0, SIGNATURE),),
        "PIL.PngImagePlugin.PngImageFile",
        without_pixels=without_pixels,
        is_whole=is_whole_png,
        complete=complete_png,
    ),
    ImageFormat(
        "webp",
        "WebP",
        ((0, b"RIFF"), (8, b"WEBP")),
        "PIL.WebPImagePlugin.WebPImageFile",
        upright_size=webp_size,
        canvas_size=webp_canvas,
        decoder="dataserver.images.webp_decoder",
    ),
    ImageFormat("gif", "GIF", ((0, b"GIF87a"),), "PIL.GifImagePlugin.GifImageFile", variants=(((0, b"GIF89a"),),)),
    ImageFormat(
        "bmp",
        "BMP",
        ((0, b"BM"), (15, bytes(3))),  # the size of a header: two letters alone begin many a text
        "PIL.BmpImagePlugin.BmpImageFile",
        refusal=bmp_refusal,
    ),
    ImageFormat(
        "avif",
        "AVIF",
        ((4, b"ftypavif"),),
        "PIL.AvifImagePlugin.AvifImageFile",
        variants=(((4, b"ftypavis"),),),
        is_variant=_is_general_avif,
    ),
    ImageFormat(
        "tiff",
        "TIFF",
        ((0, b"II*\0"),),
        "PIL.TiffImagePlugin.TiffImageFile",
        variants=(((0, b"MM\0*"),), ((0, b"II+\0"),), ((0, b"MM\0+"),)),
        refusal=tiff_refusal,
        is_turned=_has_orientation,
        without_turn=_forget_xmp,
        modes=frozenset(
            {"1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "I;16", "I;16B", "I;16L", "I;16N"}
        ),
    ),
)
"""An index stores the position of a format in this tuple: a new one is added at the end."""
FORMAT_NAMES: Final = tuple(found.name for found in FORMATS)
IMAGE_SUFFIXES: Final = frozenset(
    {"jpg", "jpeg", "jpe", "jfif", "png", "webp", "gif", "bmp", "tif", "tiff", "avif", "heic", "ppm", "img"}
)
"""Types of files that claim to be images; the magic decides what they are."""


def format_of(data: bytes) -> ImageFormat | None:
    """The format of a file by its magic; None for anything else."""
    for found in FORMATS:
        if found.matches(data):
            return found
    return None


def sniff_format(data: bytes) -> str | None:
    """The name of a file's format by its magic; None for anything else."""
    found = format_of(data)
    return None if found is None else found.name


def none_of_them(data: bytes) -> str:
    """What a file is instead of one of these formats, for messages."""
    *others, last = (found.title for found in FORMATS)
    known = f"neither {', '.join(others)} nor {last}"
    if name := other_format(data):
        return f"it is {name}; {known}"
    return f"{known}: starts with {data[:8].hex()}"


@functools.cache
def _decoder(module: str) -> "Callable[[bytes, Size, Size], U8 | None]":
    decode: Callable[[bytes, Size, Size], U8 | None] = import_module(module).decode
    return decode
