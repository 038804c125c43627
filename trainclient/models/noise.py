"""Diffusion noise and times, keyed by the image that they belong to, made where the generator runs.

The same image in the same pass gets the same noise on any rank, in any microbatch, in any layout, and every patch of it
can be made alone. Random words come from Philox 4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3",
SC 2011) in integer operations of torch, so they are equal to the bit on every device; their normals are computed in
float64 and rounded once, so two devices differ in the last place at most. The mapping, in words of 32 bits:

    stream = philox(key = seed, counter = (dataset, dataset >> 32, pass, operator))
    image  = philox(key = stream[0:2], counter = (sample, sample >> 32, number of the image, stream[2]))
    words  = philox(key = image[0:2], counter = (block, number of the patch, image[2], image[3]))

Each block of four words makes four values of a patch.
"""

from typing import Final

import torch
from torch import Tensor

from dataserver.planning.stream.randomness import Operator
from trainclient.models.checks import require_integers, require_shape
from trainclient.upload import upload

NOISE_VERSION: Final = 2
"""Version of the mapping above: what resumes a run must make the same noise. Version 1 was numpy's Philox 4x64-10."""

_MULTIPLIERS: Final = (0xD2511F53, 0xCD9E8D57)
_WEYL: Final = (0x9E3779B9, 0xBB67AE85)
_ROUNDS: Final = 10
_MASK: Final = 0xFFFFFFFF

Words = tuple[Tensor, Tensor, Tensor, Tensor]
"""Numbers in [0, 2**32) in int64 tensors that broadcast with each other."""


def philox(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """Philox 4x32-10 of many counters, under as many keys. Torch has no unsigned words of 32 bits to compute with."""
    x0, x1, x2, x3 = counter
    key_0, key_1 = key
    for _ in range(_ROUNDS):
        # The product may pass 2**63: its bits are right, and the shift drags its sign only into bits that are cut.
        first, second = x0 * _MULTIPLIERS[0], x2 * _MULTIPLIERS[1]
        x0, x1 = (second >> 32 & _MASK) ^ x1 ^ key_0, second & _MASK
        x2, x3 = (first >> 32 & _MASK) ^ x3 ^ key_1, first & _MASK
        key_0, key_1 = (key_0 + _WEYL[0]) & _MASK, (key_1 + _WEYL[1]) & _MASK
    return x0, x1, x2, x3


def image_words(seed: int, operator: Operator, names: Tensor) -> Tensor:
    """The words that stand for each of some images.

    Args:
        seed: the job's seed, in [0, 2**64).
        operator: what they are for.
        names: int64 [n, 4], on any device: `dataset_key` of its dataset (its 64 bits, so it may be negative), pass,
            sample, and the number of the image in the sample.

    Returns:
        int64 [n, 4], each in [0, 2**32), on the same device.

    Raises:
        ValueError: names of another shape or dtype.
    """
    require_integers("names", names)
    require_shape("names", names, -1, 4)
    dataset, epoch, sample, image = names.unbind(1)
    dataset_words, sample_words = (_split(dataset), _split(sample))
    whole = torch.zeros_like(epoch)
    key = (whole + (seed & _MASK), whole + (seed >> 32))
    stream = philox((*dataset_words, epoch & _MASK, whole + int(operator)), key)
    return torch.stack(philox((*sample_words, image & _MASK, stream[2]), stream[:2]), dim=1)


def diffusion_noise(words: Tensor, patches: Tensor, patch_dim: int) -> Tensor:
    """Standard normal noise of the patches of some images.

    Args:
        words: [n, 4], from `image_words` for `Operator.DIFFUSION_NOISE`, on the device that needs the noise.
        patches: int64 [n], how many patches each image has, on the CPU.
        patch_dim: values of a patch.

    Returns:
        float32 [sum of patches, patch_dim] on the same device, image by image.

    Raises:
        ValueError: another number of images, or negative patches.
    """
    require_shape("patches", patches, len(words))
    if patches.numel() and int(patches.min()) < 0:
        raise ValueError(f"an image has {int(patches.min())} patches; a number must not be negative")
    total = int(patches.sum())
    number = torch.arange(total) - (patches.cumsum(0) - patches).repeat_interleave(patches, output_size=total)
    image = upload(torch.arange(len(words)).repeat_interleave(patches, output_size=total), words.device)
    key_0, key_1, high_0, high_1 = words.index_select(0, image).unsqueeze(2).unbind(1)
    block = torch.arange(-(-patch_dim // 4), device=words.device)
    row = upload(number, words.device)[:, None]
    made = philox((block, row, high_0, high_1), (key_0, key_1))
    return torch.stack([*_normals(*made[:2]), *_normals(*made[2:])], dim=2).flatten(1)[:, :patch_dim]


def diffusion_times(words: Tensor) -> Tensor:
    """Diffusion times of some images, uniform in (0, 1): float64 [n].

    Args:
        words: [n, 4], from `image_words` for `Operator.DIFFUSION_TIME`.
    """
    return _open_uniform(words[:, 0])


def _split(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """The low and the high word of the bits of int64."""
    return numbers & _MASK, numbers >> 32 & _MASK


def _open_uniform(words: Tensor) -> Tensor:
    """Words as numbers in (0, 1): the middles of 2**32 intervals, all of them exact in float64."""
    return (words.to(torch.float64) + 0.5) * 2.0**-32


def _normals(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Two normals for two words (Box and Muller, "A Note on the Generation of Random Normal Deviates", 1958), float32.

    None is further out than 6.8.
    """
    radius = (-2 * _open_uniform(first).log()).sqrt()
    angle = 2 * torch.pi * _open_uniform(second)
    return (radius * angle.cos()).to(torch.float32), (radius * angle.sin()).to(torch.float32)
