"""The encoder's part of a step: images in, embeddings out."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trainclient.client import Batch
from trainclient.models.encoder import ImageEncoder
from trainclient.parallel.batches import outgoing, stamp_of
from trainclient.parallel.broker import RowBlocks, receive_blocks, send_blocks
from trainclient.parallel.messages import Kind, Stamp
from trainclient.parallel.roles import Edge, Role


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """A microbatch between forward and backward."""

    stamp: Stamp
    blocks: RowBlocks
    embeddings: Tensor
    """[E, width] with its graph."""
    row_valid: Tensor
    """bool [E, 1]: False in the rows of an image that could not be decoded, which leave as zeros and learn nothing."""


class EncoderRole(Role[Encoded]):
    """Runs an encoder and sends each image's embeddings where the backbone wants them."""

    def __init__(self, name: str, encoder: ImageEncoder, device: torch.device, after: Edge) -> None:
        super().__init__(encoder, device, None, after)
        self._name = name
        self._encoder = encoder
        self._backbone = after

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of the tensors that the role reads from its view."""
        return ("patches", "grid", "cu_patches")

    def _forward(self, batch: Batch) -> Encoded:
        stamp, cu_patches = stamp_of(batch), batch.tensors["cu_patches"]
        patches = batch.tensors["patches"].to(self.device, non_blocking=True)
        with self.forward_times.lap():
            embeddings: Tensor = self._encoder(patches, batch.tensors["grid"], cu_patches)
        starts = cu_patches.numpy().astype(np.int64) // self._encoder.config.merge**2
        blocks = outgoing(batch, self._name, self._backbone.module)
        blocks.check(len(embeddings), len(self._backbone.forward.peers), "embeddings")
        valid = torch.from_numpy(batch.items.valid)
        block_valid = valid[blocks.items(starts, "embeddings")]
        row_valid = valid.repeat_interleave(torch.from_numpy(np.diff(starts)))[:, None].to(self.device)
        sent = embeddings.detach().masked_fill(~row_valid, 0)
        send_blocks(self._backbone.forward, Kind.EMBEDDINGS, stamp, blocks, sent, block_valid)
        return Encoded(stamp, blocks, embeddings, row_valid)

    def _backward(self, kept: Encoded) -> None:
        rows, width = kept.embeddings.shape
        link = self._backbone.backward
        gradient, _ = receive_blocks(link, Kind.EMBEDDING_GRADIENTS, kept.stamp, kept.blocks, rows, width)
        with self.backward_times.lap():
            torch.autograd.backward(kept.embeddings, gradient.masked_fill(~kept.row_valid, 0))
