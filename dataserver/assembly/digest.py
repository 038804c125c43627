"""The digest of what this installation makes of known bytes."""

import hashlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from dataserver.assembly.tokens import ByteTokenizer
from dataserver.images import U8, DrawnTransform, ImageShape, decode_patches, transform
from dataserver.planning.job.fields import (
    ColorJitter,
    GaussianBlur,
    Interpolation,
    Quality,
    RandAugment,
    Resampling,
    Sizing,
    SizingRule,
    TileChoice,
    Tiles,
)

SIZINGS: Final = tuple(Sizing.model_construct(patch=7, merge=2, max_patches=64, quality=quality) for quality in Quality)
RESAMPLED: Final = "86f2aa89d6f9dc242b1e6f60f100423bdea2f3a9150b222ed57de95e6380e6a1"
"""What Pillow's filters make of `_png`, as SHA-256, with Pillow 11.3 and 13."""
TRANSFORMED: Final = "e0e50b2507d1a5078719c68fd6961a8cd76f136b3a8d49fe9e991cd92c7043e6"
"""What transforms make that compute colours, as SHA-256, with Pillow 13.0.0."""
AUGMENTED: Final = "a8bba69c98c39b9fba295a0e0f8b91cebb1d9e308159cbbc23a7d55278259534"
"""What RandAugment and changes of hue make, as SHA-256, with Pillow 11.3 and 13."""
TILED: Final = "1c81a11027d5e79436aecaa08fbc50d69b09f36ade327178d7cc24bbd0513a5f"
"""What images are cut into, as SHA-256, with Pillow 13.0.0."""

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
    # The digest of servers from before there were filters, transforms and tiles stays as it was.
    for made, expected in (
        (_resampled(), RESAMPLED),
        (_transformed(), TRANSFORMED),
        (_augmented(), AUGMENTED),
        (_tiled(), TILED),
    ):
        if made != expected:
            digest.update(made.encode())
    return digest.hexdigest()


def _tiled() -> str:
    """SHA-256, hexadecimal, of the parts that an image is cut into by each choice of tiles, and of one that is not."""
    digest, picture = hashlib.sha256(), _png("RGB", 3)
    plain: dict[str, Any] = {"rule": SizingRule.TILES, "patch": 7, "side": 28, "resampling": Resampling.BICUBIC}
    choices: tuple[dict[str, Any], ...] = (
        {"choice": TileChoice.PINPOINTS, "grids": ((2, 1), (2, 2)), "max_tiles": 2},
        {"choice": TileChoice.ASPECT, "min_tiles": 1, "max_tiles": 4},
        {"choice": TileChoice.EDGE, "longest_edge": 56},
    )
    for choice in choices:
        merge = 1 if choice["choice"] is TileChoice.PINPOINTS else 2
        sizing = Sizing.model_construct(**plain, merge=merge, tiles=Tiles.model_construct(**choice))
        for cut in ((2, 1), (2, 2), (0, 0) if merge == 1 else (1, 1)):
            parts = cut[0] * cut[1] + (cut != (1, 1))
            out = np.empty((parts * 16, sizing.patch**2 * 3), np.uint8)
            decode_patches(picture, ImageShape(61, 97, 6, parts * 4, 4, tiles=cut), sizing, out)
            digest.update(out.tobytes())
    return digest.hexdigest()


def _transformed() -> str:
    """SHA-256, hexadecimal, of what the transforms make that compute colours: the blur is made by Pillow."""
    digest, pixels = hashlib.sha256(), _pixels()
    jitter = ColorJitter(kind="color_jitter", brightness="0.4", contrast="0.4", saturation="0.4")
    blur = GaussianBlur(kind="gaussian_blur", probability="1", max_sigma="0.25")
    for word in (1 << 56, 1 << 61, 1 << 63, (1 << 64) - 1):  # deviations from 0.05 to 12 pixels
        for options in (jitter, blur):
            made = transform(pixels, [DrawnTransform(options, (word, word, word // 3, word // 7))])
            digest.update(np.ascontiguousarray(made).tobytes())
    return digest.hexdigest()


def _augmented() -> str:
    """SHA-256, hexadecimal, of what each operation of RandAugment makes with both signs, and of hues that are turned:
    by Pillow."""
    digest, pixels = hashlib.sha256(), _pixels()
    still: dict[str, Any] = dict.fromkeys(("brightness", "contrast", "saturation"), "0")
    drawn = [
        DrawnTransform(ColorJitter(kind="color_jitter", hue="0.5", **still), (0, 0, 0, word))
        for word in (1 << 56, 1 << 62, 7 << 61)
    ]
    for interpolation in Interpolation:
        options = RandAugment(kind="rand_augment", num_ops=1, interpolation=interpolation, fill=(9, 99, 199))
        drawn += [DrawnTransform(options, ((n << 64) // 28 + 1,)) for n in range(28)]
    for step in drawn:
        digest.update(np.ascontiguousarray(transform(pixels, [step])).tobytes())
    return digest.hexdigest()


def _pixels() -> U8:
    """Pixels of a fixed pattern."""
    return (np.arange(64 * 48 * 3) ** 2 % 251).astype(np.uint8).reshape(64, 48, 3)


def _resampled() -> str:
    """SHA-256, hexadecimal, of images that each of Pillow's filters scales down, up, and along one axis each."""
    digest, tall = hashlib.sha256(), {"width": 30, "height": 200}
    pictures = (
        (_png("RGB", 3), ImageShape(61, 97, 6, 4, 2)),
        (_png("RGB", 3), ImageShape(61, 97, 6, 16, 12)),
        (_png("RGB", 3, **tall), ImageShape(30, 200, 1, 10, 2)),  # Pillow 13 scales such columns first
        (_png("RGB", 3, **tall), ImageShape(30, 200, 1, 6, 6)),
    )
    for resampling in Resampling:
        sizing = Sizing.model_construct(patch=7, merge=2, max_patches=64, resampling=resampling)
        for data, shape in pictures:
            out = np.empty((shape.rows * shape.columns, sizing.patch**2 * 3), np.uint8)
            decode_patches(data, shape, sizing, out)
            digest.update(out.tobytes())
    return digest.hexdigest()


def built_in_images() -> Iterator[tuple[bytes, ImageShape]]:
    """Yield encoded images with their shapes; scaled up, down and by whole factors, and some of them cut off."""
    half = _stored("plain.jpg")
    yield half, ImageShape(120, 76, 1, 4, 6)
    yield half, ImageShape(120, 76, 3, 2, 4)
    for may_be_truncated in (False, True):
        yield half[: len(half) // 2], ImageShape(120, 76, 1, 4, 6, may_be_truncated)
    for name, width, height in (
        ("progressive.jpg", 52, 38),
        ("cmyk.jpg", 52, 38),
        ("grey.jpg", 52, 38),
        ("lossy.webp", 52, 38),
        ("opaque.webp", 52, 38),
        ("lossless.webp", 26, 19),
        ("palette.png", 40, 30),
    ):
        yield _stored(name), ImageShape(width, height, 1, 6, 8)
    for mode, channels in (("RGB", 3), ("RGBA", 4), ("LA", 2)):
        yield (png := _png(mode, channels)), ImageShape(61, 97, 6, 4, 2)
        yield png[: len(png) // 2], ImageShape(61, 97, 6, 4, 2, may_be_truncated=True)
    yield png[:-12], ImageShape(61, 97, 6, 4, 2)
    progressive = _stored("progressive.jpg")
    yield progressive[: len(progressive) // 2], ImageShape(52, 38, 1, 6, 8, may_be_truncated=True)
    for name, width, height in (
        ("opaque.avif", 52, 38),
        ("alpha.avif", 52, 38),
        ("palette.gif", 52, 38),
        ("palette.bmp", 26, 19),
        ("jpeg.tiff", 52, 38),
    ):
        yield _stored(name), ImageShape(width, height, 1, 6, 8)


def _stored(name: str) -> bytes:
    """An image of `reference_images`."""
    return Path(__file__).with_name("reference_images").joinpath(name).read_bytes()


def _png(mode: str, channels: int, width: int = 97, height: int = 61) -> bytes:
    """Encode pixels of a fixed pattern without loss, so that only the decoding side matters."""
    from PIL import Image

    ys, xs, cs = np.mgrid[0:height, 0:width, 0:channels]
    pixels = ((xs * 37 + ys * ys * 11 + xs * ys * 3 + cs * 97) % 256).astype(np.uint8)
    buffer = io.BytesIO()
    Image.frombytes(mode, (width, height), pixels.tobytes()).save(buffer, "PNG")
    return buffer.getvalue()
