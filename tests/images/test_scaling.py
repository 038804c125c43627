"""The scaling kernel against exact fractions, and the decoders against Pillow."""

import io
import os
import subprocess
import sys
from fractions import Fraction
from hashlib import sha256
from itertools import accumulate
from math import floor
from pathlib import Path

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from images.pictures import ASTRONAUT, decode, encode, join_patches, noise
from PIL import Image

from dataserver.images import ImageShape, decoding
from dataserver.images.decoding import decode_fast
from dataserver.images.kernels.jpeg import look_at_jpeg
from dataserver.images.patches import UPRIGHT, pixel_offsets, write_patches
from dataserver.images.scaling import write_scaled
from dataserver.images.scratch import MAX_CACHED_BYTES, scratch
from dataserver.planning.job.fields import Quality, Sizing


def triangle(old: int, new: int, extent: Fraction) -> list[list[Fraction]]:
    """Weights of the `old` pixels in each new one, by the definition of the filter."""
    scale = extent / new
    reach = max(scale, Fraction(1))
    rows = []
    for y in range(new):
        heights = [
            max(Fraction(0), 1 - abs(k + Fraction(1, 2) - (y + Fraction(1, 2)) * scale) / reach) for k in range(old)
        ]
        total = sum(heights)
        rows.append([height / total for height in heights])
    return rows


def exactly(pixels: np.ndarray, size: tuple[int, int], goal: tuple[int, int], reduced: int) -> np.ndarray:
    """What `scaled` would return without rounding."""
    columns = np.array(triangle(pixels.shape[1], goal[0], Fraction(size[0], reduced)), float)
    rows = np.array(triangle(pixels.shape[0], goal[1], Fraction(size[1], reduced)), float)
    return np.einsum("yk,kjc,xj->yxc", rows, pixels.astype(float), columns)


def scaled(pixels: np.ndarray, size: tuple[int, int], goal: tuple[int, int]) -> np.ndarray:
    """The scaled image, row by row."""
    out = np.empty((goal[1], goal[0], 3), np.uint8)
    down, across = np.arange(goal[1]) * goal[0], np.arange(goal[0])
    down.flags.writeable = across.flags.writeable = False  # as those of patches: loops are compiled for either kind
    write_scaled(pixels, size, (down, across), out)
    return out


@given(st.integers(1, 40), st.integers(1, 80), st.integers(0, 2**32 - 1))
def test_weights_are_rounded_as_running_sums_and_rows_once(old: int, new: int, seed: int) -> None:
    """To the bit: running sums of the exact weights to the nearest 1/256, halves up, and so is each row or column."""
    pixels = np.random.default_rng(seed).integers(0, 256, (old, 2, 3), np.uint8)
    rows = scaled(pixels, (2, old), (2, new))
    columns = scaled(pixels.swapaxes(0, 1).copy(), (old, 2), (new, 2)).swapaxes(0, 1)
    for y, row in enumerate(triangle(old, new, Fraction(old))):
        sums = [floor(256 * total + Fraction(1, 2)) for total in accumulate(row)]
        weights = np.diff([0, *sums])
        expected = (np.tensordot(weights, pixels.astype(np.int64), 1) + 128) // 256
        np.testing.assert_array_equal(rows[y], expected)
        np.testing.assert_array_equal(columns[y], expected)


@given(
    *(st.integers(1, n) for n in (4, 4, 5, 3)), st.sampled_from(sorted(UPRIGHT)), st.integers(0, 2**32 - 1)
)  # fmt: skip
def test_places_are_those_of_the_patches_of_the_upright_image(
    rows: int, columns: int, patch: int, merge: int, orientation: int, seed: int
) -> None:
    upright = np.random.default_rng(seed).integers(0, 256, (rows * merge * patch, columns * merge * patch, 3), np.uint8)
    inverse = {6: 8, 8: 6}.get(orientation, orientation)
    stored = UPRIGHT[inverse](upright)
    assert np.array_equal(UPRIGHT[orientation](stored), upright)
    cut, placed = np.empty((2, rows * columns * merge**2, patch**2 * 3), np.uint8)
    write_patches(upright, Sizing(patch=patch, merge=merge, max_patches=1024), cut)
    down, across = pixel_offsets(rows * merge, columns * merge, patch, merge, orientation)
    placed.reshape(-1, 3)[down[:, None] + across] = stored
    assert np.array_equal(placed, cut)


@given(
    st.tuples(st.integers(1, 40), st.integers(1, 40)),
    st.tuples(st.integers(1, 40), st.integers(1, 40)),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(0, 2**32 - 1),
)
def test_scaling_rounds_the_exact_filter(size: tuple[int, int], goal: tuple[int, int], reduced: int, seed: int) -> None:
    stored = (-(-size[0] // reduced), -(-size[1] // reduced))
    reduced = next(s for s in (1, 2, 4, 8) if (-(-size[0] // s), -(-size[1] // s)) == stored)
    pixels = np.random.default_rng(seed).integers(0, 256, (stored[1], stored[0], 3), np.uint8)
    found = scaled(pixels, size, goal)
    # Weights of 8 bits are off by up to 1/512 each, and both passes round.
    assert np.abs(found - exactly(pixels, size, goal, reduced)).max() < 4


def test_a_single_colour_stays_as_it_is() -> None:
    for value in (0, 1, 128, 254, 255):
        pixels = np.full((37, 53, 3), value, np.uint8)
        assert (scaled(pixels, (53, 37), (11, 90)) == value).all()


def test_a_picture_comes_out_as_pillow_scales_it() -> None:
    for goal in ((512, 100), (100, 512), (200, 300), (513, 511), (700, 600)):
        found = scaled(np.array(ASTRONAUT), ASTRONAUT.size, goal).astype(int)
        assert np.abs(found - np.asarray(ASTRONAUT.resize(goal, Image.Resampling.BILINEAR))).max() <= 2


@pytest.mark.parametrize("size", [(300, 200), (64, 64), (1000, 17), (17, 17)])
def test_a_jpeg_is_reduced_as_far_as_it_covers_the_grid(size: tuple[int, int]) -> None:
    data = encode(noise("RGB", *size), "JPEG")
    for least in ((1, 1), (8, 8), (9, 3), (38, 25), (75, 50), (76, 50), (150, 101), size):
        pixels = decode_fast(data, size, least)
        covering = [s for s in (1, 2, 4, 8) if all(-(-a // s) >= b for a, b in zip(size, least, strict=True))]
        scale = max(covering, default=1)
        assert pixels is not None
        assert pixels.shape == (-(-size[1] // scale), -(-size[0] // scale), 3)


def test_exact_quality_decodes_the_whole_image() -> None:
    image = ASTRONAUT.crop((0, 0, 500, 300))
    data = encode(image, "JPEG", quality=95)
    shape, reference = ImageShape(500, 300, 1, 4, 6), np.asarray(Image.open(io.BytesIO(data)).resize((42, 28), 2))
    errors = {}
    for quality in Quality:
        valid, patches = decode(data, shape, Sizing(patch=7, merge=2, quality=quality))
        assert valid
        errors[quality] = float(np.abs(join_patches(patches, 4, 6, 7, 2) - reference.astype(float)).mean())
    assert errors[Quality.EXACT] < 0.5 < errors[Quality.FAST] < 4


ORDINARY = {
    "grey JPEG": encode(ASTRONAUT.convert("L").resize((52, 38)), "JPEG"),
    "JPEG": encode(ASTRONAUT.resize((52, 38)), "JPEG"),
    "progressive JPEG": encode(ASTRONAUT.resize((52, 38)), "JPEG", progressive=True),
    "JPEG 4:4:4": encode(ASTRONAUT.resize((52, 38)), "JPEG", subsampling=0),
    "lossy WebP": encode(ASTRONAUT.resize((52, 38)), "WEBP"),
    "lossless WebP": encode(ASTRONAUT.resize((52, 38)), "WEBP", lossless=True),
    "extended WebP": encode(ASTRONAUT.resize((52, 38)), "WEBP", icc_profile=b"profile" * 20),
}
ODDITIES = {
    "CMYK JPEG": encode(ASTRONAUT.resize((52, 38)).convert("CMYK"), "JPEG"),
    "PNG": encode(ASTRONAUT.resize((52, 38)), "PNG"),
    "transparent WebP": encode(noise("RGBA", 52, 38), "WEBP"),
    "transparent lossless WebP": encode(noise("RGBA", 52, 38), "WEBP", lossless=True),
    "animated WebP": encode(
        ASTRONAUT.resize((52, 38)), "WEBP", save_all=True, append_images=[noise("RGB", 52, 38)], duration=9
    ),
    "JPEG with rubbish in it": (lambda d: d[:-200] + bytes(150) + d[-50:])(encode(ASTRONAUT.resize((52, 38)), "JPEG")),
}


@pytest.mark.parametrize("name", [*ORDINARY, *ODDITIES])
def test_only_unusual_images_go_to_pillow_and_all_come_out_like_pillows(name: str) -> None:
    data = ORDINARY.get(name) or ODDITIES[name]
    assert (decode_fast(data, (52, 38), (52, 38)) is None) == (name in ODDITIES)
    valid, patches = decode(data, ImageShape(52, 38, 1, 38, 52), Sizing(patch=1, merge=1, max_patches=4000))
    assert valid
    image = Image.open(io.BytesIO(data))
    white = Image.new("RGBA", image.size, "white")
    white.alpha_composite(image.convert("RGBA"))
    assert np.abs(join_patches(patches, 38, 52, 1, 1).astype(int) - np.asarray(white.convert("RGB"))).max() <= 1


@pytest.mark.parametrize("name", [*ORDINARY, *ODDITIES])
@pytest.mark.parametrize("share", [0.3, 0.6, 0.9, 0.99])
def test_a_cut_image_is_what_pillow_says_it_is(name: str, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    data = ORDINARY.get(name) or ODDITIES[name]
    cut, shape = data[: int(len(data) * share)], ImageShape(52, 38, 1, 2, 2)
    found = decode(cut, shape, Sizing(patch=7, merge=1))
    by_pillow: list[bool] = []

    def none_is_ordinary(*_: object) -> None:
        by_pillow.append(True)

    monkeypatch.setattr(decoding, "decode_fast", none_is_ordinary)
    assert found[0] == decode(cut, shape, Sizing(patch=7, merge=1))[0]
    assert by_pillow


@pytest.mark.parametrize("name", [name for name in (*ORDINARY, *ODDITIES) if "JPEG" in name])
def test_the_frame_of_a_jpeg_is_found(name: str) -> None:
    data = ORDINARY.get(name) or ODDITIES[name]
    components = {"grey JPEG": 1, "CMYK JPEG": 4}.get(name, 3)
    scans = data.count(b"\xff\xda")
    assert look_at_jpeg(np.frombuffer(data, np.uint8), 0) == (scans, 52, 38, components)
    # Filling between segments is in order, and left to the decoder.
    filled = data[:2] + b"\xff\xff" + data[2:]
    assert look_at_jpeg(np.frombuffer(filled, np.uint8), 0) == (scans, 0, 0, 0)
    pixels = decode_fast(filled, (52, 38), (52, 38))
    assert pixels is None or (pixels == decode_fast(data, (52, 38), (52, 38))).all()
    assert (pixels is None) == (name in ODDITIES)


@pytest.mark.parametrize("name", ORDINARY)
def test_another_size_than_the_index_has_is_invalid(name: str) -> None:
    for width, height in ((51, 38), (52, 39), (38, 52)):
        assert not decode(ORDINARY[name], ImageShape(width, height, 1, 2, 2), Sizing(patch=7, merge=1))[0]


SCRIPT = """
import sys
from pathlib import Path
import cv2
from images.test_scaling import digest_of_all
cv2.setUseOptimized(False)
cv2.ipp.setUseIPP(False)
print(digest_of_all(Path(sys.argv[1])))
"""


def digest_of_all(folder: Path) -> str:
    """Of what is decoded from encoded images, in all qualities and many sizes."""
    digest = sha256()
    for path in sorted(folder.iterdir()):
        width, height = (1531, 1117) if path.name == "large" else (52, 38)
        for quality in Quality:
            for rows, columns, patch in ((1, 1, 5), (2, 3, 11), (5, 4, 10), (9, 11, 17)):
                shape = ImageShape(width, height, 1, rows, columns)
                digest.update(decode(path.read_bytes(), shape, Sizing(patch=patch, merge=1, quality=quality))[1])
    return digest.hexdigest()


@pytest.mark.parametrize(
    "variables", [{"JSIMD_FORCENONE": "1"}, pytest.param({"NUMBA_CPU_FEATURES": ""}, marks=pytest.mark.long)]
)
def test_the_bytes_are_the_same_without_vector_instructions(variables: dict[str, str], tmp_path: Path) -> None:
    large = encode(ASTRONAUT.resize((1531, 1117)), "JPEG", quality=90)
    for name, data in {**ORDINARY, **ODDITIES, "large": large}.items():
        if "rubbish" not in name:  # coefficients beyond all limits overflow in libjpeg-turbo's vectors only
            (tmp_path / name).write_bytes(data)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **variables}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True, check=True, env=environment
    )
    assert done.stdout.strip() == digest_of_all(tmp_path)


def test_one_image_takes_one_thread() -> None:
    assert cv2.getNumThreads() == 1


@pytest.mark.parametrize("size", [(9, 10), (10, 21), (41, 39), (160, 80), (81, 80)])
def test_pixels_that_are_no_scale_of_their_image_are_refused(size: tuple[int, int]) -> None:
    out = np.empty((4, 588), np.uint8)
    write_scaled(np.zeros((10, 10, 3), np.uint8), (80, 73), pixel_offsets(2, 2, 14, 2, 1), out)
    with pytest.raises(
        ValueError, match=rf"pixels of \(10, 10\) that are no scale of an image of \({size[0]}, {size[1]}\)"
    ):
        write_scaled(np.zeros((10, 10, 3), np.uint8), size, pixel_offsets(2, 2, 14, 2, 1), out)


def test_scratch_is_kept_up_to_a_bound() -> None:
    small = scratch("test", 100)
    assert scratch("test", 3) is scratch("test") is small
    assert not np.shares_memory(scratch("other", 3), small)
    large = scratch("test", MAX_CACHED_BYTES + 1)
    assert not np.shares_memory(scratch("test", MAX_CACHED_BYTES + 1), large)
    assert scratch("test", MAX_CACHED_BYTES).nbytes == MAX_CACHED_BYTES
