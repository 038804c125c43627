"""Megatron-Bridge's training data over the stream: `cfg.dataset = ServedProvider(...)`.

    cfg.dataset = ServedProvider(servers="data-0:50051", job="job.yaml")
    pretrain(cfg, forward_step, callbacks=[cfg.dataset.begins()])

Bridge tells its providers of data neither which update a run begins with nor where its checkpoints are; its callbacks
know both. The state of the stream is not given to its checkpoints, which refuse it on another number of ranks.
"""

from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from trainclient.adapters.versions import require

require("megatron-bridge", "0.6", "0.7")
from megatron.bridge.data.base import DatasetBuildContext, DatasetProvider  # noqa: E402
from megatron.bridge.training.callbacks import Callback  # noqa: E402
from megatron.core.num_microbatches_calculator import get_num_microbatches  # noqa: E402

from trainclient.adapters.megatron import MegatronBatches, ServedIterator  # noqa: E402
from trainclient.adapters.whole_rank import WholeRankStream  # noqa: E402

if TYPE_CHECKING:
    from megatron.bridge.training.callbacks import CallbackContext
    from megatron.bridge.training.state import GlobalState


@dataclass(kw_only=True)
class ServedProvider(DatasetProvider):
    """Makes the iterator of each data-parallel rank, of the batches that `MegatronBatches` says."""

    servers: str
    """`host:port` entries with commas between."""
    job: str
    """A job's file, or its text."""
    modality: str | None = None
    """See `MegatronBatches`, also of the next three."""
    encoder: str = "encoder"
    image_token: int = 0
    dense_mask: bool = False
    dataloader_type: Literal["external"] = "external"

    def __post_init__(self) -> None:
        self._state: GlobalState | None = None  # no field: configurations are saved

    def begins(self) -> Callback:
        """What Bridge has to be given as a callback."""
        return _Begins(self)

    def build_datasets(self, context: DatasetBuildContext) -> tuple[ServedIterator | None, None, None]:
        """The iterator behind the updates that were made; None on stages between the first and the last.

        Raises:
            ValueError: the callback is missing, or the job is for other ranks.
            StateError: the updates were of another stream.
            ClientError: no server could be reached, or they refuse the job.
        """
        if self._state is None:
            raise ValueError(
                "nothing says which update the run begins with: give Megatron-Bridge's pretrain callbacks="
                "[cfg.dataset.begins()]"
            )
        groups, checkpoints = context.pg_collection, self._state.cfg.checkpoint
        if groups.pp.rank() not in (0, groups.pp.size() - 1):
            return None, None, None
        place = {"rank": groups.dp.rank(), "world_size": groups.dp.size()}
        with ExitStack() as failing:
            stream = failing.enter_context(WholeRankStream(self.servers, self.job, **place))
            batches = MegatronBatches(stream, self.modality, self.encoder, self.image_token, self.dense_mask)
            folders = {"load": checkpoints.load, "save": checkpoints.save}
            done, count = self._state.train_state.step, get_num_microbatches()
            iterator = ServedIterator(stream, batches, num_microbatches=count, start_step=done, **folders)
            failing.pop_all()  # the stream is the iterator's now
        return iterator, None, None


class _Begins(Callback):
    def __init__(self, provider: ServedProvider) -> None:
        self._provider = provider

    def on_data_init_start(self, context: "CallbackContext") -> None:
        """Called when the checkpoint has been read, before data are opened."""
        self._provider._state = context.state
