"""An image generator as a module of a job: conditions and target images in, loss out."""

import numpy as np
import torch
from torch import Tensor

from dataserver.planning.stream.randomness import Operator
from trainclient.exchange.rows import Rows
from trainclient.models.generator import ImageGenerator
from trainclient.models.noise import diffusion_noise, diffusion_times, image_words
from trainclient.modules.protocol import Output, Target, TrainedModule, View
from trainclient.modules.work import forward_flops
from trainclient.upload import upload


class Generator(TrainedModule):
    """Learns to draw the target images of a view from the conditions that arrive."""

    tensors = ("patches", "grid", "cu_patches", "loss_mask", "condition_offsets")
    target = Target.IMAGE

    def __init__(self, generator: ImageGenerator) -> None:
        super().__init__(generator)
        self._generator = generator

    def forward_flops(self, view: View) -> int:
        """Count the operations of a forward over the view's images."""
        c = self._generator.config
        return forward_flops("generator", c.size, view.tensors["cu_patches"])

    def num_rows(self, view: View) -> int:
        """Conditions of all target images."""
        return int(view.tensors["condition_offsets"][-1])

    def forward(self, view: View, rows: Rows | None) -> Output:
        """Compute the loss of the view's images under the backbone's conditions."""
        if rows is None:
            raise ValueError("a generator needs the conditions of a backbone; add one to the job's modules")
        patches, grid, cu_patches, mask, offsets = (view.tensors[name] for name in self.tensors)
        noise, time = view_noise(view, self._generator.config.patch_dim, self.device)
        learned = mask.bool() & rows.valid_of(offsets)
        patches = patches.to(self.device, non_blocking=True)
        loss_sum = self._generator(patches, grid, cu_patches, rows.values, offsets, noise, time, learned)
        return Output(loss_sum=loss_sum)


def view_noise(view: View, patch_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Noise and times of a generator's view, the same wherever the samples are.

    Returns:
        float32 [P, patch_dim] and float64 [I], on the device.
    """
    items, key = view.items, view.key
    datasets = np.array(key.datasets, np.uint64).view(np.int64)[items.dataset]
    columns = [datasets, *(numbers.astype(np.int64) for numbers in (items.epoch, items.sample, items.image))]
    names = upload(torch.from_numpy(np.stack(columns, axis=1)), device)
    noise, time = (
        image_words(key.seed, operator, names) for operator in (Operator.DIFFUSION_NOISE, Operator.DIFFUSION_TIME)
    )
    patches = view.tensors["cu_patches"].to(torch.int64).diff()
    return diffusion_noise(noise, patches, patch_dim), diffusion_times(time)
