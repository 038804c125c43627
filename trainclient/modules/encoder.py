"""An image encoder as a module of a job: images in, embeddings out."""

import torch

from trainclient.exchange.rows import Rows
from trainclient.models.encoder import EncoderConfig, ImageEncoder
from trainclient.modules.protocol import Output, TrainedModule, View
from trainclient.modules.work import forward_flops


class Encoder(TrainedModule):
    """Embeds the images of a view; those that cannot be decoded become zeros and teach nothing."""

    tensors = ("patches", "grid", "cu_patches")

    def __init__(self, encoder: ImageEncoder) -> None:
        super().__init__(encoder)
        self._encoder = encoder

    def forward_flops(self, view: View) -> int:
        """See `TrainedModule`."""
        c: EncoderConfig = self._encoder.config
        return forward_flops("encoder", c.size, view.tensors["cu_patches"])

    def forward(self, view: View, rows: Rows | None = None) -> Output:
        """See `TrainedModule`."""
        del rows
        patches, grid, cu_patches = (view.tensors[name] for name in self.tensors)
        config: EncoderConfig = self._encoder.config
        embeddings = self._encoder(patches.to(self.device, non_blocking=True), grid, cu_patches)
        valid = torch.from_numpy(view.items.valid)
        return Output(Rows.of_items(embeddings, valid, cu_patches // config.merge**2))
