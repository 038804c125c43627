"""An audio encoder as a module of a job: spectrograms in, embeddings out."""

import torch

from trainclient.exchange.rows import Rows
from trainclient.models.audio_encoder import AudioEncoder
from trainclient.modules.protocol import Output, TrainedModule, View
from trainclient.modules.work import forward_flops


class EncoderOfAudio(TrainedModule):
    """Embeds the clips of a view; those that cannot be decoded become zeros and teach nothing."""

    tensors = ("mel", "cu_frames", "cu_positions", "cu_rows")

    def __init__(self, encoder: AudioEncoder) -> None:
        super().__init__(encoder)
        self._encoder = encoder

    def forward_flops(self, view: View) -> int:
        """Count the operations of a forward over the view's clips."""
        return forward_flops("encoder", self._encoder.config.size, view.tensors["cu_positions"])

    def forward(self, view: View, rows: Rows | None = None) -> Output:
        """Compute the embeddings of the view's clips."""
        del rows
        mel, cu_frames, cu_positions, cu_rows = (view.tensors[name] for name in self.tensors)
        embeddings = self._encoder(mel.to(self.device, non_blocking=True), cu_frames, cu_positions)
        valid = torch.from_numpy(view.items.valid)
        return Output(Rows.of_items(embeddings, valid, cu_rows))
