"""The generator's part of a step: conditions and target images in, loss out."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dataserver.planning.randomness import dataset_key
from trainclient.client import Batch
from trainclient.models.generator import ImageGenerator
from trainclient.models.noise import diffusion_noise, timesteps
from trainclient.parallel.batches import incoming, stamp_of
from trainclient.parallel.broker import RowBlocks, receive_blocks, send_blocks
from trainclient.parallel.messages import Kind, Stamp
from trainclient.parallel.roles import Edge, Role


@dataclass(frozen=True, slots=True)
class NoiseKey:
    """What the diffusion noise of a job depends on besides the sample."""

    seed: int
    datasets: tuple[int, ...]
    """`dataset_key` of each dataset of the job."""

    @classmethod
    def of(cls, seed: int, names: Sequence[str]) -> "NoiseKey":
        """The key of a stream with these dataset names."""
        return cls(seed, tuple(dataset_key(name) for name in names))


@dataclass(frozen=True, slots=True, eq=False)
class Generated:
    """A microbatch between forward and backward."""

    stamp: Stamp
    blocks: RowBlocks
    conditions: Tensor
    """[Q, width], a leaf whose gradient goes back."""
    loss: Tensor


class GeneratorRole(Role[Generated]):
    """Runs a generator on the conditions that the backbone sends."""

    def __init__(
        self, name: str, generator: ImageGenerator, device: torch.device, before: Edge, key: NoiseKey, weight: float
    ) -> None:
        super().__init__(generator, device, before, None)
        self._name = name
        self._generator = generator
        self._backbone = before
        self._key = key
        self._weight = weight

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of the tensors that the role reads from its view."""
        return ("patches", "grid", "cu_patches", "loss_mask", "condition_offsets")

    def _forward(self, batch: Batch) -> Generated:
        stamp, tensors = stamp_of(batch), batch.tensors
        blocks = incoming(batch, self._backbone.module, self._name)
        offsets = tensors["condition_offsets"]
        num_rows, width = int(offsets[-1]), self._generator.config.condition_dim
        blocks.check(num_rows, len(self._backbone.forward.peers), "conditions")
        noise, time = view_noise(batch, self._key, self._generator.config.patch_dim)
        patches = tensors["patches"].to(self.device, non_blocking=True)
        received, valid = receive_blocks(self._backbone.forward, Kind.CONDITIONS, stamp, blocks, num_rows, width)
        conditions = received.requires_grad_()
        mask = tensors["loss_mask"].bool()
        mask[blocks.items(offsets.numpy().astype(np.int64), "conditions")] &= valid
        with self.forward_times.lap():
            loss_sum = self._generator(
                patches, tensors["grid"], tensors["cu_patches"], conditions, offsets, noise, time, mask
            )
        self.loss_sum += loss_sum.detach()
        return Generated(stamp, blocks, conditions, self._weight * loss_sum / max(1, batch.target_patches))

    def _backward(self, kept: Generated) -> None:
        with self.backward_times.lap():
            torch.autograd.backward(kept.loss)
        gradient = kept.conditions.grad
        gradient = torch.zeros_like(kept.conditions) if gradient is None else gradient
        valid = torch.ones(len(kept.blocks.peer), dtype=torch.bool)
        link = self._backbone.backward
        send_blocks(link, Kind.CONDITION_GRADIENTS, kept.stamp, kept.blocks, gradient, valid)


def view_noise(batch: Batch, key: NoiseKey, patch_dim: int) -> tuple[Tensor, Tensor]:
    """Noise and times of a generator view, the same wherever the samples are.

    Returns:
        float64 [P, patch_dim] and float64 [I], on the CPU.
    """
    items, patches = batch.items, np.diff(batch.tensors["cu_patches"].numpy().astype(np.int64))
    noise, times = [np.zeros(0)], []
    for i, count in enumerate(patches.tolist()):
        image = int(items.image[i])
        where = (key.seed, key.datasets[int(items.dataset[i])], int(items.pass_[i]), int(items.sample[i]))
        noise.append(diffusion_noise(*where, image, count * patch_dim))
        times.append(float(timesteps(*where, image + 1)[image]))
    packed = torch.from_numpy(np.concatenate(noise)).view(-1, patch_dim)
    return packed, torch.tensor(times, dtype=torch.float64)
