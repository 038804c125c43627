"""Saving beside training: a copy is taken, and written by a thread while the next steps run."""

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.staging import StagingOptions

from trainclient.checkpoint.folder import Checkpoints
from trainclient.checkpoint.state import TrainerState
from trainclient.checkpoint.sums import dealt
from trainclient.sharding.dtensors import dealt_over
from trainclient.torch_compat import Stager


class Saver:
    """Saves checkpoints, at most one at a time. All processes call all methods in the same order."""

    def __init__(
        self, checkpoints: Checkpoints, replicas: ProcessGroup, device: torch.device, *, beside: bool, tp_rank: int = 0
    ) -> None:
        """Save into a folder.

        Args:
            checkpoints: the folder; its group is used by a thread, so that nothing else may use it while one is saved.
            replicas: processes that have the same tensors, but for those that are dealt to them (DTensors): each of
                them saves its share.
            tp_rank: tensor-parallel rank of this process.
            device: where the tensors are.
            beside: whether to save beside training. Then host memory is kept for a copy of what this process saves.
        """
        self._checkpoints = checkpoints
        self._replicas = replicas
        self._tp_rank = tp_rank
        on_gpu = device.type == "cuda"
        options = StagingOptions(
            use_pinned_memory=on_gpu, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=on_gpu
        )
        self._stager = Stager(options) if beside else None
        choose = partial(torch.cuda.set_device, device) if on_gpu else None  # torch's writer makes streams
        self._pool = ThreadPoolExecutor(1, "checkpoint", choose)
        self._under_way: Future[None] | None = None

    def save(self, tensors: Mapping[str, Tensor], state: TrainerState) -> None:
        """Save a checkpoint once the one before is complete; beside training, it is only begun here.

        Raises:
            SaveError: this one, or the one before, cannot be written.
        """
        self.wait()
        own = share(tensors, self._replicas.rank(), self._replicas.size(), self._tp_rank)
        if self._stager is None:
            self._checkpoints.save(own, state)
            return
        copies = self._stager.stage(own)
        if isinstance(copies, Future):
            raise TypeError("the copy of a checkpoint is still under way; a stager that waits for it is required")
        self._under_way = self._pool.submit(self._checkpoints.save, copies, state)

    @property
    def failed(self) -> bool:
        """Whether the checkpoint under way is known to have failed; `wait` says why."""
        return self._under_way is not None and self._under_way.done() and self._under_way.exception() is not None

    def wait(self) -> None:
        """Wait until no checkpoint is under way; SaveError if the one that was cannot be written."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.result()


def share(tensors: Mapping[str, Tensor], rank: int, size: int, tp_rank: int = 0) -> dict[str, Tensor]:
    """What one of several processes with the same tensors saves: all together each once.

    Data-parallel ranks save about the same bytes each; what tensor-parallel ranks have alike, the first one saves.
    Each saves its part of what is dealt to them (DTensors).

    Args:
        tensors: of this process, by names that all of them have.
        rank: data-parallel rank.
        size: data-parallel ranks.
        tp_rank: tensor-parallel rank of this process.
    """
    savers = dealt({name: tensor.nbytes for name, tensor in tensors.items() if "dp" not in dealt_over(tensor)}, size)
    return {
        name: tensor
        for name, tensor in tensors.items()
        if savers.get(name, rank) == rank and (tp_rank == 0 or "tp" in dealt_over(tensor))
    }
