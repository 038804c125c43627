"""Megatron-Bridge's training data over the stream: `cfg.dataset = ServedProvider(...)`.

    cfg.dataset = ServedProvider(servers="data-0:50051", job="job.yaml")
    pretrain(cfg, forward_step, callbacks=[cfg.dataset.begins()])

Bridge tells its providers of data neither which update a run begins with nor where its checkpoints are; its callbacks
know both. The state of the stream is not given to its checkpoints, which refuse it on another number of ranks.
"""

from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from dataserver.security import Credentials
from dataserver.tracing import Tracing
from trainclient.adapters.versions import require

require("megatron-bridge", "0.6", "0.7")
from megatron.bridge.data.base import DatasetBuildContext, DatasetProvider  # noqa: E402
from megatron.bridge.training.callbacks import Callback  # noqa: E402
from megatron.core.num_microbatches_calculator import get_num_microbatches  # noqa: E402

from trainclient.adapters.full_model import FullModelStream  # noqa: E402
from trainclient.adapters.megatron import MegatronBatches, ServedIterator, check_loss  # noqa: E402

if TYPE_CHECKING:
    from megatron.bridge.training.callbacks import CallbackContext
    from megatron.bridge.training.config import ConfigContainer
    from megatron.bridge.training.state import GlobalState
    from torch.distributed import ProcessGroup


@dataclass(kw_only=True)
class ServedProvider(DatasetProvider):
    """Makes the iterator of each data-parallel rank, of the batches that `MegatronBatches` says."""

    servers: str
    """`host:port` entries with commas between."""
    job: str
    """A job's file, or its text."""
    modality: str | None = None
    """Name of the modality, as in `MegatronBatches`; so are the next three fields."""
    encoder: str = "encoder"
    image_token: int = 0
    dense_mask: bool = False
    credentials: dict[str, str] = field(default_factory=dict)
    """Files of `Credentials` by their names, such as tls_ca and token_file: what to show the servers."""
    tracing: dict[str, Any] = field(default_factory=dict)
    """Fields of `Tracing`, such as endpoint and every: which steps to trace, and where to; nothing by default."""
    dataloader_type: Literal["external"] = "external"

    def __post_init__(self) -> None:
        self._state: GlobalState | None = None  # no fields: configurations are saved
        self._iterator: ServedIterator | None = None

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
        groups, cfg = context.pg_collection, self._state.cfg
        if groups.pp.rank() not in (0, groups.pp.size() - 1):
            return None, None, None
        return self.opened(groups.dp, cfg, cfg.model.seq_length, self._state.train_state.step), None, None

    def opened(self, ranks: "ProcessGroup", cfg: "ConfigContainer", seq_length: int, updates: int) -> ServedIterator:
        """Return the iterator of a data-parallel rank after so many updates; see `build_datasets`."""
        check_loss(cfg.model)
        with ExitStack() as failing:
            shown = Credentials.of(**self.credentials)
            traced = Tracing(**self.tracing) if self.tracing else None
            where = {"rank": ranks.rank(), "world_size": ranks.size()}
            stream = failing.enter_context(
                FullModelStream(self.servers, self.job, **where, credentials=shown, tracing=traced)
            )
            names = self.modality, self.encoder, self.image_token, self.dense_mask
            self._iterator = ServedIterator(
                stream,
                MegatronBatches(stream, seq_length, *names),
                num_microbatches=get_num_microbatches,
                start_step=updates,
                load=cfg.checkpoint.load,
                save=cfg.checkpoint.save,
            )
            failing.pop_all()  # the stream is the iterator's now
        return self._iterator

    def close(self) -> None:
        """End the stream, if it was opened; done behind the training."""
        if self._iterator is not None:
            self._iterator.close()


class _Begins(Callback):
    def __init__(self, provider: ServedProvider) -> None:
        self._provider = provider

    def on_data_init_start(self, context: "CallbackContext") -> None:
        """Called when the checkpoint has been read, before data are opened."""
        self._provider._state = context.state

    def on_train_end(self, context: "CallbackContext") -> None:  # noqa: ARG002
        """Called behind the last update."""
        self._provider.close()
