"""RandAugment and turned hues: each operation against its definition in numpy, what words draw, and small images."""

import colorsys
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from images.pictures import ASTRONAUT, noise
from numpy.typing import NDArray

from dataserver.images import rand_augment
from dataserver.images.rand_augment import OPERATIONS
from dataserver.images.transforms import TRANSFORM_WORDS, DrawnTransform, transform
from dataserver.planning.job.fields import ColorJitter, Interpolation, RandAugment
from dataserver.planning.job.fields.transforms import MOST_OPS

ROOT = Path(__file__).parents[2]
FILL = (9, 99, 199)
GREY = np.array([0.299, 0.587, 0.114])
PIXELS = np.asarray(ASTRONAUT)[60:160, 150:281]
STEP, BINS = 12, 31
SHARE = STEP / (BINS - 1)
Pixels = NDArray[Any]
NAMES = [
    *("identity", "shear_x", "shear_y", "translate_x", "translate_y", "rotate", "brightness", "color", "contrast"),
    *("sharpness", "posterize", "solarize", "auto_contrast", "equalize"),
]
"""Of the operations, in the order of torchvision's."""


def word_of(name: str, *, is_negative: bool = False) -> int:
    """The least word that draws the operation with the sign."""
    return -(-((2 * NAMES.index(name) + is_negative) << 64) // (2 * len(NAMES)))


def augmented(pixels: Pixels, *words: int, **options: Any) -> Pixels:
    wanted = RandAugment(**{"kind": "rand_augment", "num_ops": len(words), "magnitude": STEP, "fill": FILL, **options})
    return transform(pixels, [DrawnTransform(wanted, words)])


def mapped(pixels: Pixels, matrix: Pixels) -> tuple[Pixels, Pixels]:
    """What lies at matrix * (x, y, 1) for the middle of each pixel; and where that is no matter of rounding."""
    height, width = pixels.shape[:2]
    rows, columns = np.mgrid[0:height, 0:width] + 0.5
    at = np.stack([columns, rows, np.ones_like(rows)], axis=2) @ matrix.T
    x, y = np.floor(at[..., 0]).astype(int), np.floor(at[..., 1]).astype(int)
    inside = (x >= 0) & (x < width) & (y >= 0) & (y < height)
    found = np.where(inside[..., None], pixels[y.clip(0, height - 1), x.clip(0, width - 1)], FILL)
    return found, (np.abs(at - np.round(at)) > 1e-2).all(axis=2)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("name", ["shear_x", "shear_y", "translate_x", "translate_y", "rotate"])
def test_pixels_are_moved_as_the_matrix_says(name: str, sign: int) -> None:
    height, width = PIXELS.shape[:2]
    shear, turn = sign * 0.3 * SHARE, np.radians(sign * 30 * SHARE)
    x, y = (int(sign * 150 / 331 * side * SHARE) for side in (width, height))
    middle = np.array([[1, 0, width / 2], [0, 1, height / 2], [0, 0, 1]])
    turned = np.array([[np.cos(turn), -np.sin(turn), 0], [np.sin(turn), np.cos(turn), 0], [0, 0, 1]])
    matrix = {
        "shear_x": np.array([[1, shear, 0], [0, 1, 0]]),
        "shear_y": np.array([[1, 0, 0], [shear, 1, 0]]),
        "translate_x": np.array([[1, 0, -x], [0, 1, 0]]),
        "translate_y": np.array([[1, 0, 0], [0, 1, -y]]),
        "rotate": (middle @ turned @ np.linalg.inv(middle))[:2],
    }[name]
    found = augmented(PIXELS, word_of(name, is_negative=sign < 0))
    wanted, sure = mapped(PIXELS, matrix)
    assert sure.mean() > 0.9
    assert np.array_equal(found[sure], wanted[sure])
    smooth = augmented(PIXELS, word_of(name, is_negative=sign < 0), interpolation=Interpolation.BILINEAR)
    assert (smooth != found).any() != name.startswith("translate")
    assert np.abs(smooth.astype(int) - found).mean() < 12


def blended(name: str, sign: int) -> Pixels:
    """The image and what it lacks of the effect, blended: towards black, grey, the mean grey, or a smoothed image."""
    values = PIXELS.astype(float)
    smooth = values.copy()
    around = [
        values[1 + i : len(values) - 1 + i, 1 + j : values.shape[1] - 1 + j] for i in (-1, 0, 1) for j in (-1, 0, 1)
    ]
    smooth[1:-1, 1:-1] = (sum(around) + 4 * values[1:-1, 1:-1]) / 13
    least = {
        "brightness": np.zeros_like(values),
        "color": np.repeat((values @ GREY)[..., None], 3, axis=2),
        "contrast": np.full_like(values, np.round((values @ GREY).mean())),
        "sharpness": smooth,
    }[name]
    return np.clip(least + (1 + sign * 0.9 * SHARE) * (values - least), 0, 255)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("name", ["brightness", "color", "contrast", "sharpness"])
def test_colours_are_enhanced_by_a_factor(name: str, sign: int) -> None:
    found = augmented(PIXELS, word_of(name, is_negative=sign < 0))
    assert np.abs(found - blended(name, sign)).max() < 2
    assert np.abs(found - PIXELS.astype(int)).mean() > 0.5


def equalized(channel: Pixels) -> Pixels:
    counts = np.bincount(channel.reshape(-1), minlength=256)
    step = (counts.sum() - counts[counts > 0][-1]) // 255
    before = np.concatenate([[0], np.cumsum(counts)[:-1]])
    return ((step // 2 + before) // step).clip(0, 255)[channel]


@pytest.mark.parametrize("is_negative", [False, True])
@pytest.mark.parametrize("name", ["identity", "posterize", "solarize", "auto_contrast", "equalize"])
def test_values_are_mapped(name: str, is_negative: bool) -> None:
    dull = (PIXELS // 2 + 40).astype(np.uint8)
    low, high = dull.min(axis=(0, 1)).astype(float), dull.max(axis=(0, 1)).astype(float)
    wanted = {
        "identity": dull,
        "posterize": dull & (0xFF << round(4 * SHARE) & 0xFF),
        "solarize": np.where(dull < 255 * (1 - SHARE), dull, 255 - dull),
        "auto_contrast": (dull - low) * 255 / (high - low),
        "equalize": np.stack([equalized(dull[..., channel]) for channel in range(3)], axis=2),
    }[name]
    found = augmented(dull, word_of(name, is_negative=is_negative))
    assert np.abs(found - wanted.astype(float)).max() <= (1 if name == "auto_contrast" else 0)
    assert (found != dull).any() == (name != "identity")


def test_each_operation_and_sign_has_the_same_share_of_words(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[tuple[int, float]] = []
    for number, operation in enumerate(OPERATIONS):

        def noted(image: Any, magnitude: Any, _options: Any, number: int = number) -> Any:
            drawn.append((number, float(magnitude)))
            return image

        changed = [*rand_augment.OPERATIONS]
        changed[number] = operation._replace(apply=noted)
        monkeypatch.setattr(rand_augment, "OPERATIONS", tuple(changed))
    for name in NAMES:
        for is_negative in (False, True):
            first = word_of(name, is_negative=is_negative)
            augmented(PIXELS, first, first + 2**64 // 28 - 1)
    signs = [[1, 1, -1, -1] if operation.is_signed else [1] * 4 for operation in OPERATIONS]
    wanted = [(n, sign * float(OPERATIONS[n].most) * SHARE) for n, own in enumerate(signs) for sign in own]
    assert [number for number, _ in drawn] == [number for number, _ in wanted]
    assert [magnitude for _, magnitude in drawn] == pytest.approx([magnitude for _, magnitude in wanted])
    assert MOST_OPS <= TRANSFORM_WORDS


def test_operations_follow_each_other_as_their_words_do() -> None:
    words = [word_of(name) for name in ("solarize", "rotate", "contrast", "posterize")]
    one_by_one = PIXELS
    for word in words:
        one_by_one = augmented(one_by_one, word)
    assert np.array_equal(augmented(PIXELS, *words), one_by_one)
    assert not np.array_equal(augmented(PIXELS, *words[::-1]), one_by_one)
    assert np.array_equal(augmented(PIXELS, *words, num_ops=2), augmented(PIXELS, *words[:2]))


def test_magnitudes_go_from_nothing_to_the_strongest() -> None:
    for name in NAMES[:-3]:
        assert np.array_equal(augmented(PIXELS, word_of(name), magnitude=0), PIXELS), name
    black = augmented(PIXELS, word_of("brightness", is_negative=True), magnitude=99, num_magnitude_bins=100)
    assert np.abs(black - PIXELS * 0.1).max() <= 1
    assert (augmented(PIXELS, word_of("posterize"), magnitude=1, num_magnitude_bins=2) & 15).max() == 0
    assert np.array_equal(augmented(PIXELS, word_of("solarize"), magnitude=1, num_magnitude_bins=2), 255 - PIXELS)


@pytest.mark.parametrize("shape", [(1, 1), (1, 9), (9, 1), (2, 2)])
def test_small_images_have_their_size_after_all_operations(shape: tuple[int, int]) -> None:
    pixels = np.asarray(noise("RGB", *shape[::-1]))[:, ::-1]
    before = pixels.copy()
    for name in NAMES:
        for is_negative in (False, True):
            found = augmented(pixels, word_of(name, is_negative=is_negative), magnitude=30)
            assert (found.shape, found.dtype) == (pixels.shape, np.uint8), name
    jitter = ColorJitter(kind="color_jitter", hue="0.5")
    assert transform(pixels, [DrawnTransform(jitter, (1, 2, 3, 4))]).shape == pixels.shape
    assert np.array_equal(pixels, before), "what is given is not changed"


@pytest.mark.parametrize(("hue", "word"), [("0.5", 0), ("0.3", 1 << 62), ("0.1", 2**64 - 1), ("0.5", 3 << 62)])
def test_hues_are_turned(hue: str, word: int) -> None:
    pixels = np.asarray(noise("RGB", 19, 23))
    options = ColorJitter(kind="color_jitter", brightness="0", contrast="0", saturation="0", hue=hue)
    found = transform(pixels, [DrawnTransform(options, (0, 0, 0, word))])
    turn = float(hue) * (2 * word / 2**64 - 1)
    each = [colorsys.rgb_to_hsv(*(pixel / 255)) for pixel in pixels.reshape(-1, 3)]
    wanted = np.array([colorsys.hsv_to_rgb((h + turn) % 1, s, v) for h, s, v in each]).reshape(pixels.shape) * 255
    # Hue, turn and a whole turn of 256 are each off by up to a 255th, which is 6 of a ramp; the rest is rounding.
    assert np.abs(found - wanted).max() < 3 * 6 + 2
    assert np.abs(found - wanted).mean() < 3
    assert np.abs(pixels - wanted).mean() > 10
    assert np.abs(found.max(axis=2).astype(int) - pixels.max(axis=2)).max() <= 1, "the value stays"


def test_hues_are_turned_behind_the_other_three() -> None:
    pixels, words = np.asarray(noise("RGB", 19, 23)), (1 << 62, 1 << 63, 1 << 61, 1 << 60)
    plain = DrawnTransform(ColorJitter(kind="color_jitter"), words)
    still = ColorJitter(kind="color_jitter", brightness="0", contrast="0", saturation="0", hue="0.4")
    both = DrawnTransform(ColorJitter(kind="color_jitter", hue="0.4"), words)
    assert np.array_equal(transform(pixels, [both]), transform(pixels, [plain, DrawnTransform(still, words)]))
    nothing = DrawnTransform(ColorJitter(kind="color_jitter", hue="0"), words)
    assert np.array_equal(transform(pixels, [nothing]), transform(pixels, [plain]))


@pytest.mark.long
@pytest.mark.timeout(900)
def test_torchvision_makes_the_same(python_with: Callable[[str], Path]) -> None:
    folders = [str(ROOT), *(str(ROOT / name) for name in ("tests", "scripts", "protos"))]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}
    line = [python_with("torchvision"), ROOT / "tests" / "images" / "by_torchvision.py"]
    done = subprocess.run(line, capture_output=True, text=True, env=variables, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads(done.stdout) == {"compared": 2464, "off": []}
