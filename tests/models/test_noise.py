"""Keyed diffusion noise and times: against Random123's vectors, and against the mapping in plain Python."""

import math

import numpy as np
import pytest
import torch

from dataserver.planning.stream.randomness import Operator
from trainclient.models.noise import NOISE_VERSION, diffusion_noise, diffusion_times, image_words, philox

SEED = 2**64 - 12345
NAMES = torch.tensor([[2**63 - 3, 1, 77, 0], [-(2**63) + 9, 0, 2**40 + 5, 2], [-1, 2**32 - 1, 0, 65535]])
NOISE = Operator.DIFFUSION_NOISE
MASK = 0xFFFFFFFF

VECTORS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]
"""Counter, key and words of philox4x32-10 in Random123's `kat_vectors`."""

GOLDEN_WORDS = [3931706061, 3743854492, 371771565, 2874651304]
GOLDEN_NOISE = [
    [-0.5926622, -0.4808047, -1.1423757, -1.5406895, 0.6387917, -1.2850641],
    [0.7989523, 0.1096821, -1.2667128, -1.7887107, -0.94724, -1.037818],
]
GOLDEN_TIME = 0.7550362428883091


def words_of(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


def plain_philox(counter: list[int], key: list[int]) -> list[int]:
    x, k = [*counter], [*key]
    for _ in range(10):
        first, second = x[0] * 0xD2511F53, x[2] * 0xCD9E8D57
        x = [second >> 32 ^ x[1] ^ k[0], second & MASK, first >> 32 ^ x[3] ^ k[1], first & MASK]
        k = [k[0] + 0x9E3779B9 & MASK, k[1] + 0xBB67AE85 & MASK]
    return x


def plain_image(seed: int, operator: int, name: list[int]) -> list[int]:
    dataset, epoch, sample, image = name[0] % 2**64, *name[1:]
    stream = plain_philox([dataset & MASK, dataset >> 32, epoch & MASK, operator], [seed & MASK, seed >> 32])
    return plain_philox([sample & MASK, sample >> 32, image & MASK, stream[2]], stream[:2])


def plain_noise(words: list[int], patch: int, patch_dim: int) -> list[float]:
    values: list[float] = []
    for block in range(-(-patch_dim // 4)):
        made = [(w + 0.5) / 2**32 for w in plain_philox([block, patch, *words[2:]], words[:2])]
        for u, v in (made[:2], made[2:]):
            radius = math.sqrt(-2 * math.log(u))
            values += [radius * math.cos(2 * math.pi * v), radius * math.sin(2 * math.pi * v)]
    return values[:patch_dim]


@pytest.mark.parametrize(("counter", "key", "expected"), VECTORS)
def test_philox_gives_the_reference_words(counter: str, key: str, expected: str) -> None:
    c, k = (tuple(torch.tensor([word]) for word in words_of(text)) for text in (counter, key))
    assert [int(word) for word in philox(c, k)] == words_of(expected) == plain_philox(words_of(counter), words_of(key))


def test_words_follow_the_documented_mapping() -> None:
    for operator in (NOISE, Operator.DIFFUSION_TIME):
        expected = [plain_image(SEED, int(operator), name) for name in NAMES.tolist()]
        assert image_words(SEED, operator, NAMES).tolist() == expected


def test_noise_follows_the_documented_mapping_within_two_ulp() -> None:
    patches, dim = torch.tensor([3, 0, 2]), 37
    words = image_words(SEED, NOISE, NAMES)
    made = diffusion_noise(words, patches, dim)
    assert made.dtype == torch.float32
    rows = [(image, row) for image, count in enumerate(patches.tolist()) for row in range(count)]
    expected = np.array([plain_noise(words[image].tolist(), row, dim) for image, row in rows])
    ulp = np.spacing(np.abs(expected).astype(np.float32)).astype(np.float64)
    assert (np.abs(made.numpy().astype(np.float64) - expected) <= 2 * ulp).all()


def test_goldens_of_this_version() -> None:
    """A new mapping gets a new NOISE_VERSION, and goldens of its own."""
    assert NOISE_VERSION == 2
    words = image_words(7, NOISE, torch.tensor([[1234567890123, 3, 42, 1]]))
    assert words.tolist() == [GOLDEN_WORDS]
    made = diffusion_noise(words, torch.tensor([2]), 6)
    torch.testing.assert_close(made, torch.tensor(GOLDEN_NOISE), rtol=0, atol=1e-6)
    times = diffusion_times(image_words(7, Operator.DIFFUSION_TIME, torch.tensor([[1234567890123, 3, 42, 1]])))
    assert times.tolist() == [GOLDEN_TIME]


def test_an_image_has_the_same_noise_wherever_it_stands() -> None:
    patches = torch.tensor([4, 9, 2])
    words = image_words(SEED, NOISE, NAMES)
    packed = diffusion_noise(words, patches, 588).split(patches.tolist())
    for order in ([2, 0, 1], [1], [0, 2]):
        again = diffusion_noise(image_words(SEED, NOISE, NAMES[order]), patches[order], 588)
        assert torch.equal(again, torch.cat([packed[i] for i in order]))
    assert torch.equal(diffusion_noise(words[1:2], torch.tensor([5]), 588), packed[1][:5]), "patches stand alone"
    assert torch.equal(diffusion_noise(words[1:2], torch.tensor([9]), 12), packed[1][:, :12])


def test_whatever_differs_gives_other_noise() -> None:
    name = [5, 1, 77, 3]
    base = diffusion_noise(image_words(9, NOISE, torch.tensor([name])), torch.tensor([40]), 60).flatten()
    others = [(9, NOISE, [*name[:k], name[k] + step, *name[k + 1 :]]) for k in range(4) for step in (1, 2**20)]
    others += [(10, NOISE, name), (9 + 2**32, NOISE, name), (9, Operator.DIFFUSION_TIME, name)]
    others += [(9, NOISE, [5 + 2**40, *name[1:]]), (9, NOISE, [5, 1, 77 + 2**33, 3])]
    for seed, operator, other in others:
        made = diffusion_noise(image_words(seed, operator, torch.tensor([other])), torch.tensor([40]), 60).flatten()
        assert abs(np.corrcoef(base, made)[0, 1]) < 0.1
    rows = base.view(40, 60)
    assert np.abs(np.corrcoef(rows) - np.eye(40)).max() < 0.6, "patches differ"


def test_noise_is_standard_normal() -> None:
    noise = diffusion_noise(image_words(3, NOISE, NAMES), torch.tensor([100, 40, 30]), 588).flatten()
    values = np.sort(noise.numpy())
    below = np.searchsorted(values, [-2.0, -1.0, 0.0, 1.0, 2.0]) / len(values)
    np.testing.assert_allclose(below, [0.02275, 0.15866, 0.5, 0.84134, 0.97725], atol=0.006)
    assert abs(values.var() - 1) < 0.02
    assert abs(np.corrcoef(noise[:-1], noise[1:])[0, 1]) < 0.02
    assert np.abs(values).max() < 6.8


def test_the_outermost_words_are_finite() -> None:
    """The logarithm of no word is infinite."""
    from trainclient.models.noise import _normals, _open_uniform

    ends = torch.tensor([0, MASK])
    assert (_open_uniform(ends) > 0).all()
    assert (_open_uniform(ends) < 1).all()
    assert max(float(x.abs().max()) for x in _normals(ends, ends)) == pytest.approx(6.764, abs=1e-3)


def test_times_are_uniform() -> None:
    names = torch.stack([torch.tensor([5, 0, sample, 0]) for sample in range(4096)])
    times = diffusion_times(image_words(1, Operator.DIFFUSION_TIME, names))
    assert times.dtype == torch.float64
    assert float(times.min()) > 0
    assert float(times.max()) < 1
    np.testing.assert_allclose(np.quantile(times, [0.25, 0.5, 0.75]), [0.25, 0.5, 0.75], atol=0.03)


def test_nothing_asked_for_is_nothing() -> None:
    words = image_words(1, NOISE, torch.zeros(0, 4, dtype=torch.int64))
    assert words.shape == (0, 4)
    assert diffusion_noise(words, torch.zeros(0, dtype=torch.int64), 12).shape == (0, 12)
    assert diffusion_times(words).shape == (0,)
    assert diffusion_noise(image_words(1, NOISE, NAMES), torch.zeros(3, dtype=torch.int64), 12).shape == (0, 12)


def test_what_does_not_fit_is_refused() -> None:
    words = image_words(1, NOISE, NAMES)
    with pytest.raises(ValueError, match=r"names has shape \[3, 3\]; \['any', 4\] is required"):
        image_words(1, NOISE, NAMES[:, :3])
    with pytest.raises(ValueError, match=r"names has dtype torch\.float64"):
        image_words(1, NOISE, NAMES.double())
    with pytest.raises(ValueError, match=r"patches has shape \[2\]; \[3\] is required"):
        diffusion_noise(words, torch.tensor([1, 2]), 12)
    with pytest.raises(ValueError, match="an image has -4 patches"):
        diffusion_noise(words, torch.tensor([1, -4, 2]), 12)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_makes_the_same_words_and_normals_within_two_ulp() -> None:
    patches = torch.tensor([30, 0, 21])
    words = image_words(SEED, NOISE, NAMES)
    there = image_words(SEED, NOISE, NAMES.cuda())
    assert torch.equal(words, there.cpu())
    here, made = diffusion_noise(words, patches, 588), diffusion_noise(there, patches, 588).cpu()
    assert (np.abs(made.numpy() - here.numpy()) <= 2 * np.spacing(np.abs(here.numpy()))).all()
