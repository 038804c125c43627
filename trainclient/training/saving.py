"""Checkpoints of a run: where it continues from, when they are begun, and that none is lost at the end."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from dataserver.planning.job.identity import Job
from trainclient.checkpoint.folder import Checkpoints
from trainclient.checkpoint.lease import Lease
from trainclient.checkpoint.resume_from import ResumeFrom
from trainclient.checkpoint.saver import Saver
from trainclient.checkpoint.selection import Stored
from trainclient.checkpoint.state import CheckpointError, SaveError, TrainerState
from trainclient.client import DataClient
from trainclient.exchange.lost_ranks import translate_rank_errors
from trainclient.topology.process_groups import Groups
from trainclient.training.config import CheckpointConfig
from trainclient.training.streams import Streams


def continue_from(found: Stored, client: DataClient | Streams, sizes: dict[str, Any]) -> TrainerState:
    """Set a client to where a checkpoint ended.

    Args:
        found: the checkpoint.
        client: of any views of the job.
        sizes: of every module (`Models.describe`).

    Raises:
        StateError: the checkpoint belongs to another stream.
        CheckpointError: it belongs to other models.
    """
    state = found.manifest.state
    client.load_state_dict(state.cursor)
    state.require_modules(sizes, found.path)
    return state


def require_new(job: Job) -> None:
    """Raise CheckpointError if a job continues another stream, where there is no checkpoint to go on from."""
    if job.stream.continues is not None:
        raise CheckpointError(
            f"the job continues another stream from step {job.stream.first_step} on, and there is no checkpoint to "
            "resume: name the folder of that run (--checkpoint.directory), or leave stream.continues out of a new run"
        )


class Saving:
    """The checkpoints of one process's run; without a folder for them it does nothing."""

    def __init__(self, config: CheckpointConfig, groups: Groups, lease: Lease | None) -> None:
        """Save as the configuration says; all processes call all methods in the same order.

        Args:
            config: of the checkpoints.
            groups: this process and the others.
            lease: of the folder; only the first process has it.
        """
        self._checkpoints: Checkpoints | None = None
        self._saver: Saver | None = None
        if config.directory is not None:
            self._checkpoints = Checkpoints(config.directory, config.keep, groups.saving, lease)
            replicas, tp_rank = groups.data_parallel, groups.process.tp
            self._saver = Saver(self._checkpoints, replicas, groups.device, beside=config.asynchronous, tp_rank=tp_rank)

    def resume(
        self,
        streams: Streams,
        sizes: dict[str, Any],
        tensors: dict[str, Tensor],
        wanted: int | ResumeFrom,
        settings: str,
    ) -> TrainerState | None:
        """Continue from a checkpoint: set the streams, fill the tensors. None if there is none.

        Args:
            streams: of this process.
            sizes: of every module (`Models.describe`).
            tensors: to fill.
            wanted: a step, or which checkpoint.
            settings: digest of what losses depend on, see `resumption`.

        Raises:
            ValueError: as in `continue_from` and `resume_point`; or a tensor is not there, or has another shape.
        """
        found = None
        if self._checkpoints is not None:
            with translate_rank_errors("other ranks"):
                found = self._checkpoints.resume_point(wanted, settings)
        if self._checkpoints is None or found is None:
            require_new(streams.job)
            return None
        state = continue_from(found, streams, sizes)
        self._checkpoints.load(found.path, state.readable(tensors))
        return state

    def save(self, tensors: Mapping[str, Tensor], state: TrainerState) -> None:
        """Write or begin a checkpoint; SaveError if this one or the one before cannot be written."""
        if self._saver is not None:
            with translate_rank_errors("other ranks"):
                self._saver.save(tensors, state)

    def amend(self, state: TrainerState) -> None:
        """Replace what the checkpoint of that step holds besides tensors; SaveError if it cannot be written."""
        if self._checkpoints is not None:
            self.wait()
            with translate_rank_errors("other ranks"):
                self._checkpoints.amend(state)

    @property
    def failed(self) -> bool:
        """Whether this process knows that the checkpoint under way cannot be written."""
        return self._saver is not None and self._saver.failed

    def wait(self) -> None:
        """Wait until no checkpoint is under way; SaveError on all processes if the one that was cannot be written."""
        if self._saver is not None:
            with translate_rank_errors("other ranks"):
                self._saver.wait()

    @contextmanager
    def completed(self) -> Iterator[None]:
        """Wait at the end for the checkpoint under way, unless only this process fails: the others need it for that."""
        try:
            yield
        except Exception as error:
            if getattr(error, "known_to_all", False) and not isinstance(error, SaveError):
                self.wait()
            raise
        self.wait()
