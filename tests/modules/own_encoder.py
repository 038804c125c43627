"""An encoder of one's own: an MLP that sees each block of patches by itself."""

import torch
from torch import nn

from trainclient.modules import Output, Rows, Site, TrainedModule, View


class BlockEncoder(TrainedModule):
    """Turns each block of merge x merge patches into one embedding."""

    tensors = ("patches", "cu_patches")  # what it reads of its view: protos/disttrain/v1/microbatch.proto

    def __init__(self, site: Site, hidden: int = 128) -> None:
        sizing = site.job.stream.sizing
        self.block = sizing.merge**2
        self.pixels = self.block * sizing.patch**2 * 3
        layers = nn.Linear(self.pixels, hidden), nn.GELU(), nn.Linear(hidden, site.row_width)
        super().__init__(nn.Sequential(*layers))

    def forward(self, view: View, _rows: Rows | None) -> Output:
        patches, cu_patches = (view.tensors[name] for name in self.tensors)
        blocks = patches.to(self.device).view(-1, self.pixels).to(self.dtype) / 127.5 - 1
        valid = torch.from_numpy(view.items.valid)
        return Output(Rows.of_items(self.network(blocks), valid, cu_patches // self.block))
