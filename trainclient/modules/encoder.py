"""An image encoder as a module of a job: images in, embeddings out."""

import torch

from trainclient.exchange.rows import Rows
from trainclient.models.encoder import EncoderConfig, ImageEncoder
from trainclient.modules.protocol import Output, TrainedModule, View
from trainclient.modules.work import forward_flops


class Encoder(TrainedModule):
    """Embeds the images of a view; those that cannot be decoded become zeros and teach nothing."""

    tensors: tuple[str, ...] = ("patches", "grid", "cu_patches")

    def __init__(self, encoder: ImageEncoder, *, tiled: bool = False) -> None:
        """Hold the encoder; `tiled` says whether images of the job are cut into tiles."""
        super().__init__(encoder)
        self._encoder = encoder
        self._tiled = tiled
        if tiled:
            self.tensors = (*Encoder.tensors, "tiles", "cu_rows")

    def forward_flops(self, view: View) -> int:
        """Count the operations of a forward over the view's images."""
        c: EncoderConfig = self._encoder.config
        return forward_flops("encoder", c.size, view.tensors["cu_patches"])

    def forward(self, view: View, rows: Rows | None = None) -> Output:
        """Compute the embeddings of the view's images."""
        del rows
        patches, grid, cu_patches = (view.tensors[name] for name in Encoder.tensors)
        config: EncoderConfig = self._encoder.config
        tiles = view.tensors["tiles"] if self._tiled else None
        embeddings = self._encoder(patches.to(self.device, non_blocking=True), grid, cu_patches, tiles)
        valid = torch.from_numpy(view.items.valid)
        cu_rows = view.tensors["cu_rows"] if self._tiled else cu_patches // config.merge**2
        return Output(Rows.of_items(embeddings, valid, cu_rows))
