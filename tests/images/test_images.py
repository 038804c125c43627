"""Decoding against slow, obvious references."""

import io
import struct
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from images.pictures import ASTRONAUT, decode, encode, join_patches, naive_patches, noise, png_chunk
from PIL import Image
from skimage import data as photographs

from dataserver.images import ImageShape, decode_patches, silence_pillow_warnings, write_patches
from dataserver.planning.job.fields import Sizing
from dataserver.planning.stream.grids import patch_grid

SIZING = Sizing(patch=4, merge=2, max_patches=64)
SAME_SIZE = ImageShape(width=24, height=16, orientation=1, rows=4, columns=6)
"""24 x 16 pixels are exactly this grid, so nothing is scaled."""


def psnr(a: np.ndarray, b: np.ndarray) -> float:
    error = np.mean((a.astype(np.float64) - b) ** 2)
    return float("inf") if error == 0 else float(10 * np.log10(255**2 / error))


@given(st.integers(1, 5), st.integers(1, 3), st.integers(1, 4), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_patches_are_in_the_order_of_naive_loops(patch: int, merge: int, rows: int, columns: int, seed: int) -> None:
    pixels = np.random.default_rng(seed).integers(0, 256, (rows * merge * patch, columns * merge * patch, 3), np.uint8)
    out = np.empty((rows * columns * merge**2, patch**2 * 3), np.uint8)
    write_patches(pixels, Sizing(patch=patch, merge=merge, max_patches=1024), out)
    assert np.array_equal(out, naive_patches(pixels, patch, merge))
    assert np.array_equal(join_patches(out, rows * merge, columns * merge, patch, merge), pixels)


ORIENTED = {
    1: lambda p: p,
    2: lambda p: p[:, ::-1],
    3: lambda p: p[::-1, ::-1],
    4: lambda p: p[::-1],
    5: lambda p: p.transpose(1, 0, 2),
    6: lambda p: np.rot90(p, -1),
    7: lambda p: p[::-1, ::-1].transpose(1, 0, 2),
    8: lambda p: np.rot90(p, 1),
}
"""How stored pixels become upright ones (EXIF 2.3, tag 0x0112)."""


@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_without_scaling(orientation: int) -> None:
    image = noise("RGB", 24, 16)
    upright = ORIENTED[orientation](np.asarray(image))
    shape = ImageShape(upright.shape[1], upright.shape[0], orientation, upright.shape[0] // 4, upright.shape[1] // 4)
    valid, patches = decode(encode(image, "PNG"), shape, SIZING)
    assert valid
    assert np.array_equal(patches, naive_patches(upright, 4, 2))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_with_scaling_agrees_with_pillow(orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encode(ASTRONAUT.crop((0, 0, 300, 200)), "JPEG", quality=90, exif=exif)
    upright = np.asarray(_transposed(data).resize((48, 32) if orientation < 5 else (32, 48), Image.Resampling.BICUBIC))
    rows, columns = upright.shape[0] // 4, upright.shape[1] // 4
    width, height = (300, 200) if orientation < 5 else (200, 300)
    valid, patches = decode(data, ImageShape(width, height, orientation, rows, columns), SIZING)
    assert valid
    assert psnr(join_patches(patches, rows, columns, 4, 2), upright) > 30


def _transposed(data: bytes) -> Image.Image:
    from PIL import ImageOps

    image = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    assert image is not None
    return image


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "I;16"])
def test_png_modes_without_scaling(mode: str) -> None:
    image = noise("RGB", 24, 16).quantize(32) if mode == "P" else noise(mode, 24, 16)
    valid, patches = decode(encode(image, "PNG"), SAME_SIZE, SIZING)
    assert valid
    assert np.array_equal(patches, naive_patches(_rgb_on_white(image), 4, 2))


def _rgb_on_white(image: Image.Image) -> np.ndarray:
    """Every pixel by the textbook formula, in integers rounded to nearest."""
    if image.mode == "I;16":
        high = np.frombuffer(image.tobytes(), "<u2").reshape(image.height, image.width) // 256
        return np.repeat(high[:, :, None], 3, axis=2).astype(np.uint8)
    rgba = np.asarray(image.convert("RGBA")).astype(np.int64)
    alpha = rgba[:, :, 3:]
    return ((2 * (rgba[:, :, :3] * alpha + 255 * (255 - alpha)) + 255) // 510).astype(np.uint8)


def test_palette_with_transparency_is_white_where_it_is_transparent() -> None:
    image = Image.new("P", (24, 16), 0)
    image.putpalette([200, 10, 10, 10, 200, 10])
    image.paste(1, (0, 0, 12, 16))
    valid, patches = decode(encode(image, "PNG", transparency=0), SAME_SIZE, SIZING)
    pixels = join_patches(patches, 4, 6, 4, 2)
    assert valid
    assert (pixels[:, :12] == [10, 200, 10]).all()
    assert (pixels[:, 12:] == 255).all()


def stored(pixels: np.ndarray, depth: int, transparent: int | tuple[int, int, int], interlaced: bool = False) -> bytes:
    """A PNG of pixels [height, width] or [height, width, 3] of 1 to 16 bits, with a colour that is transparent."""
    height, width = pixels.shape[:2]
    starts = [(0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2)]
    lines = b""
    for x, y, across, down in starts if interlaced else [(0, 0, 1, 1)]:
        for line in pixels[y::down, x::across]:
            bits = "".join(f"{value:0{depth}b}" for value in line.reshape(-1))
            lines += b"\0" + int(bits.ljust(-(-len(bits) // 8) * 8, "0"), 2).to_bytes(-(-len(bits) // 8), "big")
    header = struct.pack(">IIBBBBB", width, height, depth, 2 * (pixels.ndim - 2), 0, 0, interlaced)
    colour = struct.pack(">3H", *transparent) if isinstance(transparent, tuple) else struct.pack(">H", transparent)
    parts = [(b"IHDR", header), (b"tRNS", colour), (b"IDAT", zlib.compress(lines)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(png_chunk(kind, content) for kind, content in parts)


@pytest.mark.parametrize("interlaced", [False, True])
@pytest.mark.parametrize("depth", [1, 2, 4, 8, 16])
def test_transparent_grey_of_any_depth_is_white(depth: int, interlaced: bool) -> None:
    """Of 16 bits all count, though only the high byte is delivered."""
    most = (1 << depth) - 1
    greys = np.random.default_rng(0).integers(0, most + 1, (16, 24))
    for grey in {0, 1, most // 3, most}:
        if depth == 16:
            greys[:, ::3] = grey
            greys[::5] = grey ^ 1
        expected = np.where(greys == grey, 255, greys >> 8 if depth == 16 else greys * 255 // most).astype(np.uint8)
        valid, patches = decode(stored(greys, depth, grey, interlaced), SAME_SIZE, SIZING)
        assert valid
        assert np.array_equal(join_patches(patches, 4, 6, 4, 2), np.repeat(expected[:, :, None], 3, axis=2)), grey


@pytest.mark.parametrize("interlaced", [False, True])
@pytest.mark.parametrize("depth", [8, 16])
def test_a_transparent_colour_of_any_depth_is_white(depth: int, interlaced: bool) -> None:
    colours = np.random.default_rng(0).integers(0, 1 << depth, (16, 24, 3))
    chosen = tuple(colours[3, 4].tolist())
    colours[::2, ::3] = chosen
    colours[1, :3] = np.array(chosen) ^ np.eye(3, dtype=int)  # another low bit of one channel
    expected = (colours >> (depth - 8)).astype(np.uint8)
    expected[(colours == chosen).all(2)] = 255
    valid, patches = decode(stored(colours, depth, chosen, interlaced), SAME_SIZE, SIZING)
    assert valid
    pixels = join_patches(patches, 4, 6, 4, 2)
    assert np.array_equal(pixels, expected)
    assert (pixels[1, :3] != 255).any(1).all()


@pytest.mark.parametrize(("depth", "grey", "white"), [(2, 0xFF01, 1), (4, 0x13, 3)])
def test_of_a_transparent_grey_as_many_bits_count_as_are_stored(depth: int, grey: int, white: int) -> None:
    greys = np.tile(np.arange(24) % (1 << depth), (16, 1))
    _, patches = decode(stored(greys, depth, grey), SAME_SIZE, SIZING)
    pixels = join_patches(patches, 4, 6, 4, 2)[:, :, 0]
    most = (1 << depth) - 1
    assert np.array_equal(pixels == 255, (greys == white) | (greys == most))


@pytest.mark.parametrize(
    ("mode", "image_format", "options"),
    [
        ("L", "JPEG", {}),
        ("CMYK", "JPEG", {}),
        ("RGB", "JPEG", {"progressive": True}),
        ("RGB", "JPEG", {"subsampling": 0}),
        ("RGB", "WEBP", {"quality": 90}),
        ("RGBA", "WEBP", {"lossless": True}),
    ],
)
def test_lossy_formats_are_what_pillow_makes_of_them(mode: str, image_format: str, options: dict[str, object]) -> None:
    image = ASTRONAUT.convert(mode)
    data = encode(image, image_format, **options)
    rows, columns = patch_grid(512, 512, Sizing(patch=14, max_patches=256))
    sizing = Sizing(patch=14, max_patches=256)
    valid, patches = decode(data, ImageShape(512, 512, 1, rows, columns), sizing)
    reference = Image.open(io.BytesIO(data)).convert("RGB").resize((columns * 14, rows * 14), Image.Resampling.BICUBIC)
    assert valid
    assert psnr(join_patches(patches, rows, columns, 14, 2), np.asarray(reference)) > 30


PHOTOGRAPHS = ["astronaut", "coffee", "chelsea", "rocket", "camera", "coins", "brick", "grass", "hubble_deep_field"]


@pytest.mark.parametrize("name", [n for n in PHOTOGRAPHS if hasattr(photographs, n)])
@pytest.mark.parametrize("max_patches", [64, 256, 1024])
def test_photographs_stay_close_to_full_decode_and_bicubic(name: str, max_patches: int) -> None:
    sizing = Sizing(patch=14, max_patches=max_patches)
    image = Image.fromarray(getattr(photographs, name)())
    data = encode(image, "JPEG", quality=90)
    rows, columns = patch_grid(*image.size, sizing)
    valid, patches = decode(data, ImageShape(*image.size, 1, rows, columns), sizing)
    reference = Image.open(io.BytesIO(data)).resize((columns * 14, rows * 14), Image.Resampling.BICUBIC).convert("RGB")
    assert valid
    assert psnr(join_patches(patches, rows, columns, 14, 2), np.asarray(reference)) > 30


@given(st.integers(1, 90), st.integers(1, 90), st.sampled_from(["JPEG", "PNG", "WEBP"]), st.integers(1, 8))
def test_any_size_fills_its_grid(width: int, height: int, image_format: str, orientation: int) -> None:
    data = encode(Image.new("RGB", (width, height), (40, 90, 200)), image_format, quality=100)
    upright = (height, width) if orientation >= 5 else (width, height)
    rows, columns = patch_grid(*upright, SIZING)
    valid, patches = decode(data, ImageShape(*upright, orientation, rows, columns), SIZING)
    assert valid
    assert np.abs(join_patches(patches, rows, columns, 4, 2).astype(int) - [40, 90, 200]).max() <= 4


def test_a_scaled_decode_covers_exactly_the_image() -> None:
    # 17 pixels at scale 1/8 decode to 3; only 2.125 belong to the image
    ramp = np.repeat(np.arange(17, dtype=np.uint8)[None, :, None] * 15, 17, axis=0).repeat(3, axis=2)
    data = encode(Image.fromarray(ramp), "JPEG", quality=95)
    valid, patches = decode(data, ImageShape(17, 17, 1, 2, 2), Sizing(patch=1, merge=1))
    assert valid
    assert np.abs(patches[:, 0].reshape(2, 2) - np.array([[62, 178]] * 2)).max() < 15


def test_only_the_first_frame_of_an_animation_counts() -> None:
    frames = [Image.new("RGB", (24, 16), color) for color in ("red", "lime", "blue")]
    for image_format, options in (("WEBP", {"lossless": True}), ("PNG", {})):
        data = encode(frames[0], image_format, save_all=True, append_images=frames[1:], **options)
        valid, patches = decode(data, SAME_SIZE, SIZING)
        assert valid
        assert (patches.reshape(-1, 3) == [255, 0, 0]).all()


def test_four_threads_make_the_same_bytes() -> None:
    sizing = Sizing(patch=14, max_patches=256)
    pictures = []
    for seed in range(12):
        image = ASTRONAUT.crop((seed * 10, 0, seed * 10 + 150, 200))
        pictures.append(encode(image, ("JPEG", "PNG", "WEBP")[seed % 3]))
    shape = ImageShape(150, 200, 1, *patch_grid(150, 200, sizing))
    alone = [decode(data, shape, sizing)[1] for data in pictures]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda data: decode(data, shape, sizing)[1], pictures * 8))
    assert all(np.array_equal(t, alone[i % 12]) for i, t in enumerate(together))


def test_a_target_that_does_not_fit_is_refused() -> None:
    data = encode(noise("RGB", 24, 16), "PNG")
    with pytest.raises(ValueError, match=r"uint8 \[24, 48\] is required"):
        decode_patches(data, SAME_SIZE, SIZING, np.zeros((24, 47), np.uint8))
    with pytest.raises(ValueError, match="multiples of merge 2"):
        decode_patches(data, ImageShape(24, 16, 1, 3, 6), SIZING, np.zeros((18, 48), np.uint8))
    with pytest.raises(ValueError, match="orientation 9"):
        decode_patches(data, ImageShape(24, 16, 9, 4, 6), SIZING, np.zeros((24, 48), np.uint8))


def test_warnings_of_pillow_are_silenced_on_request() -> None:
    damaged = b"Exif\0\0II*\0\x08\0\0\0\xff\xff" + b"\x12\x01\x03\0\xff\xff\xff\xff" * 4
    data = encode(ASTRONAUT.crop((0, 0, 24, 16)).convert("CMYK"), "JPEG", exif=damaged)  # without JFIF
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert decode(data, SAME_SIZE, SIZING)[0]
        assert caught
        caught.clear()
        silence_pillow_warnings()
        assert decode(data, SAME_SIZE, SIZING)[0]
        assert not caught
