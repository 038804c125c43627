"""Before ranks exchange anything of a step by collectives, they make sure that it is the same step of the same plan."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from trainclient.client import Batch
from trainclient.exchange.lost_ranks import translate_rank_errors
from trainclient.exchange.message_header import BrokerMismatchError
from trainclient.exchange.view_broadcast import Batches

_STEP_BYTES = 8


class PlanCheckedBatches(Iterator[Batch]):
    """Microbatches; the first of each step is compared with that of the first rank.

    Collectives take the sizes of their messages from the plan, and a backend may end a process that gets a message of
    another size than it expects, before any header in it can be read.
    """

    def __init__(self, batches: Batches, group: ProcessGroup) -> None:
        """Compare the microbatches of all ranks of a group over gloo, on which nothing else runs meanwhile."""
        self._batches = batches
        self._group = group
        self._step: int | None = None

    @property
    def ready(self) -> bool:
        """Whether the next view is there already."""
        return self._batches.ready

    def __next__(self) -> Batch:
        """The next one.

        Raises:
            BrokerMismatchError: the first rank has another step or plan.
            RankLostError: another rank is gone.
        """
        batch = next(self._batches)
        if batch.step != self._step:
            self._compare(batch)
            self._step = batch.step
        return batch

    def _compare(self, batch: Batch) -> None:
        own = batch.step.to_bytes(_STEP_BYTES) + batch.plan_hash
        told = torch.frombuffer(bytearray(own), dtype=torch.uint8)
        with translate_rank_errors("other ranks"):
            dist.broadcast(told, group_src=0, group=self._group)
        found = told.numpy().tobytes()
        if found != own:
            step, plan = int.from_bytes(found[:_STEP_BYTES]), found[_STEP_BYTES:].hex()
            raise BrokerMismatchError(
                f"this rank was sent step {batch.step} of plan {batch.plan_hash.hex()[:16]}, and rank "
                f"{dist.get_global_rank(self._group, 0)} step {step} of plan {plan[:16]}; all ranks must read the same "
                "job from servers of one fleet, and resume from the same checkpoint"
            )
