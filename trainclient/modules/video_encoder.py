"""An encoder of videos as a module of a job: patches of sampled frames in, embeddings out."""

from trainclient.models.encoder import EncoderConfig
from trainclient.models.video_encoder import groups_of
from trainclient.modules.encoder import Encoder
from trainclient.modules.protocol import View
from trainclient.modules.work import forward_flops


class EncoderOfVideos(Encoder):
    """Embeds the videos of a view; those that cannot be decoded become zeros and teach nothing."""

    def forward_flops(self, view: View) -> int:
        """Count the operations of a forward over the view's videos."""
        c: EncoderConfig = self._encoder.config
        return forward_flops("encoder", c.size, groups_of(view.tensors["grid"])[1])
