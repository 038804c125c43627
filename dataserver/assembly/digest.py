"""The digest of what this installation makes of known bytes."""

import base64
import hashlib
import io
from collections.abc import Iterator
from typing import Final

import numpy as np

from dataserver.assembly.reference_images import (
    AVIF,
    AVIF_ALPHA,
    BMP,
    GIF,
    JPEG_CMYK,
    JPEG_GREY,
    JPEG_PROGRESSIVE,
    JPEG_SCALED,
    PNG_PALETTE,
    TIFF_JPEG,
    WEBP_LOSSLESS,
    WEBP_LOSSY,
    WEBP_OPAQUE,
)
from dataserver.assembly.tokens import ByteTokenizer
from dataserver.images import ImageShape, decode_patches
from dataserver.planning.job.fields import Quality, Resampling, Sizing

SIZINGS: Final = tuple(Sizing.model_construct(patch=7, merge=2, max_patches=64, quality=quality) for quality in Quality)
RESAMPLED: Final = "f122a95f301ed3a7f92c830c189ab257dcd9989fff3c07b738b7146a7c524943"
"""What Pillow's filters make of `_png`, as SHA-256, in all releases that were tried."""

TEXTS: Final = ("", "a photo of 2 cats", "caf\u00e9 \u732b \U0001f408")


def content_digest() -> str:
    """Return SHA-256, hexadecimal, of what this installation decodes and tokenizes from a small built-in set.

    Servers whose libraries would give other bytes for the same job (another libjpeg, libwebp or Pillow) differ in it;
    a fleet must agree in it. Takes some milliseconds.
    """
    digest = hashlib.sha256(b"disttrain content 2\n")
    for sizing in SIZINGS:
        for data, shape in built_in_images():
            out = np.empty((shape.rows * shape.columns, sizing.patch**2 * 3), np.uint8)
            digest.update(b"valid\n" if decode_patches(data, shape, sizing, out) else b"invalid\n")
            digest.update(out.tobytes())
    for ids in ByteTokenizer().encode_all(list(TEXTS)):
        digest.update(ids.astype("<i4").tobytes() + b"\n")
    resampled = _resampled()
    if resampled != RESAMPLED:  # the digest of servers from before there were filters stays as it was
        digest.update(resampled.encode())
    return digest.hexdigest()


def _resampled() -> str:
    """SHA-256, hexadecimal, of an image that each of Pillow's filters scales down and up."""
    digest, data = hashlib.sha256(), _png("RGB", 3)
    for resampling in Resampling:
        sizing = Sizing.model_construct(patch=7, merge=2, max_patches=64, resampling=resampling)
        for rows, columns in ((4, 2), (16, 12)):
            out = np.empty((rows * columns, sizing.patch**2 * 3), np.uint8)
            decode_patches(data, ImageShape(61, 97, 6, rows, columns), sizing, out)
            digest.update(out.tobytes())
    return digest.hexdigest()


def built_in_images() -> Iterator[tuple[bytes, ImageShape]]:
    """Yield encoded images with their shapes; scaled up, down and by whole factors, and some of them cut off."""
    half = base64.b64decode(JPEG_SCALED)
    yield half, ImageShape(120, 76, 1, 4, 6)
    yield half, ImageShape(120, 76, 3, 2, 4)
    for may_be_truncated in (False, True):
        yield half[: len(half) // 2], ImageShape(120, 76, 1, 4, 6, may_be_truncated)
    for text, width, height in (
        (JPEG_PROGRESSIVE, 52, 38),
        (JPEG_CMYK, 52, 38),
        (JPEG_GREY, 52, 38),
        (WEBP_LOSSY, 52, 38),
        (WEBP_OPAQUE, 52, 38),
        (WEBP_LOSSLESS, 26, 19),
        (PNG_PALETTE, 40, 30),
    ):
        yield base64.b64decode(text), ImageShape(width, height, 1, 6, 8)
    for mode, channels in (("RGB", 3), ("RGBA", 4), ("LA", 2)):
        yield (png := _png(mode, channels)), ImageShape(61, 97, 6, 4, 2)
        yield png[: len(png) // 2], ImageShape(61, 97, 6, 4, 2, may_be_truncated=True)
    yield png[:-12], ImageShape(61, 97, 6, 4, 2)
    progressive = base64.b64decode(JPEG_PROGRESSIVE)
    yield progressive[: len(progressive) // 2], ImageShape(52, 38, 1, 6, 8, may_be_truncated=True)
    for text, width, height in (
        (AVIF, 52, 38),
        (AVIF_ALPHA, 52, 38),
        (GIF, 52, 38),
        (BMP, 26, 19),
        (TIFF_JPEG, 52, 38),
    ):
        yield base64.b64decode(text), ImageShape(width, height, 1, 6, 8)


def _png(mode: str, channels: int) -> bytes:
    """Encode 97 x 61 pixels of a fixed pattern without loss, so that only the decoding side matters."""
    from PIL import Image

    ys, xs, cs = np.mgrid[0:61, 0:97, 0:channels]
    pixels = ((xs * 37 + ys * ys * 11 + xs * ys * 3 + cs * 97) % 256).astype(np.uint8)
    buffer = io.BytesIO()
    Image.frombytes(mode, (97, 61), pixels.tobytes()).save(buffer, "PNG")
    return buffer.getvalue()
