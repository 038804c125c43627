"""Diffusion noise and times, keyed by the sample they belong to.

The same sample in the same pass gets the same noise on any rank, in any microbatch, in any layout.
"""

import numpy as np
from numpy.typing import NDArray

from dataserver.planning.randomness import Operator, draws

MAX_IMAGES = 1 << 16
"""Images of one sample, and so words drawn to tell them apart."""


def diffusion_noise(
    seed: int, dataset: int, pass_: int, sample: int, image: int, num_values: int
) -> NDArray[np.float64]:
    """Standard normal noise of one target image.

    The image's word of the sample's stream becomes the seed of the image's own stream; the stream's words become
    normals by Box and Muller, "A Note on the Generation of Random Normal Deviates" (1958).

    Args:
        seed: the job's seed, in [0, 2**64).
        dataset: `dataset_key` of the dataset.
        pass_: pass over the dataset.
        sample: number of the sample in the dataset.
        image: number of the image in the sample, in [0, 65536).
        num_values: patches * patch * patch * 3.

    Returns:
        float64 [num_values].

    Raises:
        ValueError: the image or the number of values is out of range.
    """
    if not 0 <= image < MAX_IMAGES:
        raise ValueError(f"image is {image}; it must lie in [0, {MAX_IMAGES})")
    if num_values < 0:
        raise ValueError(f"num_values is {num_values}; it must not be negative")
    operator = Operator.DIFFUSION_NOISE
    image_seed = int(draws(seed, operator, dataset, pass_, sample, image + 1)[image])
    pairs = -(-num_values // 2)
    uniform = _open_uniform(draws(image_seed, operator, dataset, pass_, sample, 2 * pairs)).reshape(pairs, 2)
    radius = np.sqrt(-2 * np.log(uniform[:, 0]))
    angle = 2 * np.pi * uniform[:, 1]
    normal = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1)
    return normal.reshape(-1)[:num_values]


def timesteps(seed: int, dataset: int, pass_: int, sample: int, num_images: int) -> NDArray[np.float64]:
    """Diffusion times of a sample's target images, uniform in (0, 1); a longer call begins with a shorter one's.

    Returns:
        float64 [num_images].

    Raises:
        ValueError: the number of images is out of range.
    """
    if not 0 <= num_images <= MAX_IMAGES:
        raise ValueError(f"num_images is {num_images}; it must lie in [0, {MAX_IMAGES}]")
    return _open_uniform(draws(seed, Operator.DIFFUSION_TIME, dataset, pass_, sample, num_images))


def _open_uniform(words: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Words as numbers in (0, 1): the middles of 2**52 intervals, all of them exact in float64."""
    return ((words >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
