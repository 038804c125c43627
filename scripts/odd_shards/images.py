"""Images that are odd, hostile or broken, each with what must become of a pair that has it."""

import io
import struct
import zlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np
from PIL import Image

from odd_shards.verdicts import INVALID, LEFT_OUT, SERVED, Odd

Rng = np.random.Generator
Maker = Callable[[Rng], Odd]


def picture(rng: Rng, mode: str = "RGB", width: int = 0, height: int = 0) -> Image.Image:
    """A small smooth picture with some noise; the sides are drawn where they are not given."""
    width, height = width or int(rng.integers(24, 96)), height or int(rng.integers(24, 96))
    ramp = np.add.outer(np.linspace(0, 180, height), np.linspace(0, 60, width))[..., None] * rng.random(3)
    pixels = np.clip(ramp + rng.integers(0, 24, (height, width, 3)), 0, 255).astype(np.uint8)
    return Image.fromarray(pixels).convert(mode)


def encode(image: Image.Image, image_format: str, **options: Any) -> bytes:
    """An encoded image."""
    buffer = io.BytesIO()
    image.save(buffer, image_format, **options)
    return buffer.getvalue()


def jpeg(rng: Rng, **options: Any) -> bytes:
    """A good JPEG."""
    return encode(picture(rng), "JPEG", **options)


def chunk(kind: bytes, content: bytes) -> bytes:
    """One chunk of a PNG."""
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def declared_png(width: int, height: int) -> bytes:
    """A PNG that declares a size and holds a few bytes of pixels."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = chunk(b"IDAT", zlib.compress(bytes(64)))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + pixels + chunk(b"IEND", b"")


def exif(orientation: int) -> bytes:
    """EXIF data that hold an orientation."""
    found = Image.Exif()
    found[0x0112] = orientation
    return found.tobytes()


def grey16(rng: Rng) -> bytes:
    """A PNG of 16 bits."""
    return encode(Image.fromarray(rng.integers(0, 1 << 16, (40, 30), dtype=np.uint16)), "PNG")


def animated(rng: Rng, image_format: str) -> bytes:
    """Three frames."""
    frames = [picture(rng, "RGB", 40, 32) for _ in range(3)]
    return encode(frames[0], image_format, save_all=True, append_images=frames[1:])


def broken_crc(rng: Rng) -> bytes:
    """A PNG whose pixels have a wrong checksum."""
    data = bytearray(encode(picture(rng), "PNG"))
    at = data.index(b"IDAT") + 8
    data[at] ^= 0xFF
    return bytes(data)


def zero_width(rng: Rng) -> bytes:
    """A JPEG that declares no columns."""
    data = jpeg(rng)
    at = data.index(b"\xff\xc0")
    return data[: at + 7] + b"\0\0" + data[at + 9 :]


def scan_bomb(_rng: Rng) -> bytes:
    """A JPEG of some 100 kilobytes whose last scan over 2^24 pixels comes 130 times."""
    data = encode(Image.new("L", (4096, 4096), 7), "JPEG", quality=10, progressive=True)
    *_, last = data.removesuffix(b"\xff\xd9").split(b"\xff\xda")
    return data[:-2] + (b"\xff\xda" + last) * 129 + data[-2:]


def scans_behind(_rng: Rng) -> bytes:
    """A JPEG of 2^24 pixels before what looks like 200 scans, as the film of a motion photo may."""
    return encode(Image.new("L", (4096, 4096), 7), "JPEG", quality=10) + b"\xff\xda" * 200


def cut(data: bytes, part: float) -> bytes:
    """The first part of an encoded image."""
    return data[: int(len(data) * part)]


def _served(make: Callable[[Rng], bytes]) -> Maker:
    return lambda rng: Odd.pair(make(rng), SERVED)


def _left_out(make: Callable[[Rng], bytes], kind: str = "unreadable_header") -> Maker:
    return lambda rng: Odd.pair(make(rng), LEFT_OUT, kind)


def cut_scan(data: bytes, rng: Rng) -> bytes:
    """A JPEG that ends within its first scan."""
    return data[: int(rng.integers(data.index(b"\xff\xda") + 14, len(data) - 2))]


def with_chunk(data: bytes, kind: bytes, content: bytes, behind: bool) -> bytes:
    """A PNG with one more chunk, before or behind its pixels."""
    at = len(data) - 12 if behind else data.index(b"IDAT") - 4
    return data[:at] + chunk(kind, content) + data[at:]


def raw_profile(rng: Rng) -> bytes:
    """A PNG whose orientation stands where ImageMagick writes it, before or behind the pixels."""
    text = exif(int(rng.integers(1, 9))).hex()
    profile = f"\nexif\n{len(text) // 2:8d}\n{text}\n".encode()
    content = b"Raw profile type exif\0\0" + zlib.compress(profile)
    return with_chunk(encode(picture(rng), "PNG"), b"zTXt", content, bool(rng.integers(2)))


def by_xmp(rng: Rng) -> bytes:
    """An image whose orientation stands in its XMP alone."""
    xmp = f'<x:xmpmeta><rdf:Description tiff:Orientation="{rng.integers(1, 9)}"/></x:xmpmeta>'.encode()
    return encode(picture(rng), ("JPEG", "WEBP")[rng.integers(2)], xmp=xmp)


def _truncated(make: Callable[[Rng], bytes]) -> Maker:
    return lambda rng: replace(Odd.pair(make(rng), INVALID, "undecodable"), truncated=True)


def _invalid(make: Callable[[Rng], bytes]) -> Maker:
    return lambda rng: Odd.pair(make(rng), INVALID, "undecodable")


HEAVY: Final = frozenset({"JPEG with a thousand scans", "JPEG before what looks like scans"})
"""Those that take longer than all others together."""
IMAGES: dict[str, Maker] = {
    "grey JPEG": _served(lambda rng: encode(picture(rng, "L"), "JPEG")),
    "CMYK JPEG": _served(lambda rng: encode(picture(rng, "CMYK"), "JPEG")),
    "progressive JPEG": _served(lambda rng: jpeg(rng, progressive=True)),
    "JPEG with trailing bytes": _served(lambda rng: jpeg(rng) + rng.bytes(700)),
    "JPEG with damaged EXIF": _served(lambda rng: jpeg(rng, exif=b"Exif\0\0" + rng.bytes(60))),
    "JPEG of an unknown orientation": _served(lambda rng: jpeg(rng, exif=exif(9))),
    **{f"JPEG of orientation {n}": _served(partial(jpeg, exif=exif(n))) for n in range(1, 9)},
    "PNG of 16 bits": _served(grey16),
    "PNG of one bit": _served(lambda rng: encode(picture(rng, "1"), "PNG")),
    "PNG with a palette": _served(lambda rng: encode(picture(rng).quantize(7), "PNG")),
    "PNG with a transparent palette": _served(lambda rng: encode(picture(rng).quantize(7), "PNG", transparency=3)),
    "PNG with alpha": _served(lambda rng: encode(picture(rng, "RGBA"), "PNG")),
    "PNG in grey with alpha": _served(lambda rng: encode(picture(rng, "LA"), "PNG")),
    "animated PNG": _served(lambda rng: animated(rng, "PNG")),
    "animated WebP": _served(lambda rng: animated(rng, "WEBP")),
    "lossless WebP": _served(lambda rng: encode(picture(rng), "WEBP", lossless=True)),
    "one pixel": _served(lambda rng: encode(picture(rng, "RGB", 1, 1), "PNG")),
    "a line of pixels": _served(lambda rng: encode(picture(rng, "RGB", 1500, 1), "PNG")),
    "PNG turned by a raw profile": _served(raw_profile),
    "image turned by its XMP": _served(by_xmp),
    "PNG turned behind its pixels": _served(
        lambda rng: with_chunk(encode(picture(rng), "PNG"), b"eXIf", exif(int(rng.integers(1, 9)))[6:], behind=True)
    ),
    "truncated JPEG": _truncated(lambda rng: cut_scan(jpeg(rng), rng)),
    "truncated progressive JPEG": _truncated(lambda rng: cut_scan(jpeg(rng, progressive=True), rng)),
    "truncated PNG": _truncated(lambda rng: cut(encode(picture(rng), "PNG"), rng.uniform(0.3, 0.9))),
    "JPEG without its end marker": _truncated(lambda rng: jpeg(rng)[:-2]),
    "PNG without its end": _truncated(lambda rng: encode(picture(rng), "PNG")[:-12]),
    "PNG with a wrong checksum": _invalid(broken_crc),
    "PNG that declares more than it holds": _invalid(lambda _: declared_png(300, 200)),
    "JPEG with a thousand scans": _invalid(scan_bomb),
    "JPEG before what looks like scans": _served(scans_behind),
    "truncated WebP": _left_out(lambda rng: cut(encode(picture(rng), "WEBP"), 0.6)),
    "JPEG cut within its header": _left_out(lambda rng: jpeg(rng)[:15]),
    "PNG cut within its header": _left_out(lambda rng: encode(picture(rng), "PNG")[:20]),
    "JPEG without columns": _left_out(zero_width),
    "no bytes": _left_out(lambda _: b""),
    "GIF": _served(lambda rng: encode(picture(rng), "GIF")),
    "animated GIF": _served(lambda rng: animated(rng, "GIF")),
    "BMP": _served(lambda rng: encode(picture(rng), "BMP")),
    "TIFF": _served(lambda rng: encode(picture(rng), "TIFF")),
    "compressed TIFF": _served(lambda rng: encode(picture(rng), "TIFF", compression="tiff_lzw")),
    "AVIF": _served(lambda rng: encode(picture(rng), "AVIF")),
    "icon": _left_out(lambda rng: encode(picture(rng, "RGB", 32, 32), "ICO")),
    "portable pixmap": _left_out(lambda rng: encode(picture(rng), "PPM")),
    "HTML of an error page": _left_out(lambda _: b"<!doctype html><title>404 Not Found</title>"),
    "noise": _left_out(lambda rng: b"\0" + rng.bytes(500)),
    "PNG bomb": _left_out(lambda rng: declared_png(int(rng.integers(20_000, 60_000)), 30_000), "image_too_large"),
}
"""By name: makes a pair with such an image."""
