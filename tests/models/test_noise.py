"""Keyed diffusion noise and times."""

import numpy as np
import pytest

from dataserver.planning.randomness import Operator, draws
from trainclient.models.noise import diffusion_noise, timesteps

KEY = (5, 2**64 - 3, 1, 77)


def test_noise_is_a_pure_function_of_its_key() -> None:
    noise = diffusion_noise(*KEY, 0, 1001)
    assert noise.dtype == np.float64
    assert noise.shape == (1001,)
    np.testing.assert_array_equal(noise, diffusion_noise(*KEY, 0, 1001))
    np.testing.assert_array_equal(noise[:500], diffusion_noise(*KEY, 0, 500))
    others = [(6, *KEY[1:]), (KEY[0], 4, *KEY[2:]), (*KEY[:2], 2, KEY[3]), (*KEY[:3], 78)]
    for other in [diffusion_noise(*key, 0, 1001) for key in others] + [diffusion_noise(*KEY, 1, 1001)]:
        assert abs(np.corrcoef(noise, other)[0, 1]) < 0.15


def test_noise_is_box_muller_on_the_words_of_the_image() -> None:
    image_seed = int(draws(5, Operator.DIFFUSION_NOISE, 8, 1, 2, 4)[3])
    words = draws(image_seed, Operator.DIFFUSION_NOISE, 8, 1, 2, 2)
    first, second = ((int(word) // 4096 + 0.5) / 2**52 for word in words)
    expected = np.sqrt(-2 * np.log(first)) * np.exp(2j * np.pi * second)
    np.testing.assert_allclose(diffusion_noise(5, 8, 1, 2, 3, 2), [expected.real, expected.imag], rtol=1e-14)


def test_noise_is_standard_normal() -> None:
    noise = np.sort(diffusion_noise(*KEY, 2, 100_000))
    below = np.searchsorted(noise, [-2.0, -1.0, 0.0, 1.0, 2.0]) / len(noise)
    np.testing.assert_allclose(below, [0.02275, 0.15866, 0.5, 0.84134, 0.97725], atol=0.006)
    assert abs(noise.var() - 1) < 0.02
    assert noise[-1] < 9


def test_times_are_uniform_and_do_not_depend_on_the_count() -> None:
    times = timesteps(*KEY, 4096)
    np.testing.assert_array_equal(times[:10], timesteps(*KEY, 10))
    assert times.min() > 0
    assert times.max() < 1
    np.testing.assert_allclose(np.quantile(times, [0.25, 0.5, 0.75]), [0.25, 0.5, 0.75], atol=0.03)
    assert not np.intersect1d(times, timesteps(*KEY[:3], 78, 4096)).size


def test_nothing_asked_for_is_nothing() -> None:
    assert diffusion_noise(*KEY, 0, 0).shape == (0,)
    assert timesteps(*KEY, 0).shape == (0,)


def test_what_is_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match="image is -1"):
        diffusion_noise(*KEY, -1, 4)
    with pytest.raises(ValueError, match="image is 65536"):
        diffusion_noise(*KEY, 65536, 4)
    with pytest.raises(ValueError, match="num_values is -4"):
        diffusion_noise(*KEY, 0, -4)
    with pytest.raises(ValueError, match="num_images is 65537"):
        timesteps(*KEY, 65537)
