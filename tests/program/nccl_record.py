"""Notes what each process of a run gives to its process groups, and what it waits for, as it would beside NCCL.

The run itself goes over gloo, with rows in the order that they have on GPUs: a receive begins behind its header.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch._C._distributed_c10d import ProcessGroup, Work
from torch.distributed import distributed_c10d

from trainclient.exchange.host_staging import HostStaging

ALL = -1
"""Instead of a peer: all ranks of the group."""
COLLECTIVES = (
    "broadcast", "allreduce", "allgather", "_allgather_base", "all_gather_single", "_reduce_scatter_base",
    "reduce_scatter_single", "alltoall_base", "all_to_all_single", "alltoall", "barrier", "reduce", "gather",
    "allgather_coalesced", "allreduce_coalesced",
)  # fmt: skip
"""Methods of `ProcessGroup`; each torch has some of them."""
FUNCTIONAL = ("all_reduce", "all_gather_single", "reduce_scatter_single", "all_gather_tensor", "reduce_scatter_tensor")
"""What DTensor calls; each is waited for at once, as far as the order is concerned."""


@dataclass(frozen=True)
class Event:
    """Something that a process did."""

    number: int
    """Of the transfer."""
    waits: bool = False
    """Whether it waited for the transfer, and did not begin it."""
    group: str = ""
    """Name of the process group, the same on all ranks."""
    ranks: tuple[int, ...] = ()
    """Global ranks of the group."""
    on_device: bool = False
    """Whether the group would be one of NCCL."""
    sends: bool = False
    peer: int = ALL
    """Global rank at the other end."""
    batch: int = -1
    """Transfers of one batch are one kernel."""
    num_bytes: int = 0
    tag: int = 0
    """By which gloo tells messages apart, and NCCL does not."""


class Recorder:
    """The events of this process."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._works: dict[int, tuple[Work, int]] = {}
        self._device_groups: set[str] = set()
        self._count = self._batches = 0
        self._batch = -1

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Note everything meanwhile; groups must be made meanwhile, too."""
        with ExitStack() as stack:
            for name in ("send", "recv"):
                stack.enter_context(patch.object(ProcessGroup, name, self._message(name, getattr(ProcessGroup, name))))
            for name in COLLECTIVES:
                if hasattr(ProcessGroup, name):
                    found = getattr(ProcessGroup, name)
                    stack.enter_context(patch.object(ProcessGroup, name, self._collective(found)))
            for name in FUNCTIONAL:
                if hasattr(functional, name):
                    stack.enter_context(patch.object(functional, name, self._functional(getattr(functional, name))))
            stack.enter_context(patch.object(Work, "wait", self._wait(Work.wait)))
            stack.enter_context(patch.object(dist, "batch_isend_irecv", self._one_batch(dist.batch_isend_irecv)))
            stack.enter_context(patch.object(dist, "new_group", self._new_group(dist.new_group)))
            stack.enter_context(patch.object(HostStaging, "__init__", _as_on_a_gpu(HostStaging.__init__)))
            yield

    def write(self, path: Path) -> None:
        """All events so far, as JSON."""
        path.write_text(json.dumps([asdict(event) for event in self.events]))

    def _begun(
        self, group: ProcessGroup, peer: int, work: Any, *, sends: bool = True, num_bytes: int = 0, tag: int = 0
    ) -> int:
        number, self._count = self._count, self._count + 1
        if isinstance(work, Work):
            self._works[id(work)] = work, number  # with the work, so that its number is no other one's
        on_device = group.group_name in self._device_groups or group is dist.group.WORLD
        ranks = tuple(dist.get_process_group_ranks(group))
        where = peer if peer == ALL else ranks[peer]
        self.events.append(
            Event(number, False, group.group_name, ranks, on_device, sends, where, self._batch, num_bytes, tag)
        )
        return number

    def _message(self, name: str, does: Callable[..., Any]) -> Callable[..., Any]:
        def begin(group: ProcessGroup, tensors: list[Any], peer: int, tag: int) -> Any:
            work = does(group, tensors, peer, tag)
            size = sum(tensor.nbytes for tensor in tensors)
            self._begun(group, peer, work, sends=name == "send", num_bytes=size, tag=tag)
            return work

        return begin

    def _collective(self, does: Callable[..., Any]) -> Callable[..., Any]:
        def begin(group: ProcessGroup, *args: Any, **named: Any) -> Any:
            work = does(group, *args, **named)
            self._begun(group, ALL, work)
            return work

        return begin

    def _functional(self, does: Callable[..., Any]) -> Callable[..., Any]:
        def run(tensor: Any, *args: Any, **named: Any) -> Any:
            made = does(tensor, *args, **named)
            group = named["group"] if "group" in named else args[-1]
            name = functional._resolve_group_name(group)
            number = self._begun(distributed_c10d._resolve_process_group(name), ALL, None)
            self.events.append(Event(number, waits=True))
            return made

        return run

    def _wait(self, does: Callable[..., Any]) -> Callable[..., Any]:
        def wait(work: Work, *args: Any) -> Any:
            known = self._works.get(id(work))
            if known is not None:
                self.events.append(Event(known[1], waits=True))
            return does(work, *args)

        return wait

    def _one_batch(self, does: Callable[..., Any]) -> Callable[..., Any]:
        def begin(operations: Any) -> Any:
            self._batch, self._batches = self._batches, self._batches + 1
            try:
                return does(operations)
            finally:
                self._batch = -1

        return begin

    def _new_group(self, does: Callable[..., Any]) -> Callable[..., Any]:
        def make(*args: Any, **named: Any) -> Any:
            group = does(*args, **named)
            if isinstance(group, ProcessGroup) and named.get("backend") is None:
                self._device_groups.add(group.group_name)
            return group

        return make


def _as_on_a_gpu(init: Callable[..., None]) -> Callable[..., None]:
    def made(staging: HostStaging, *args: Any, **named: Any) -> None:
        init(staging, *args, **named)
        staging.ahead, staging.loads_kernels = False, True

    return made


def read(folder: Path, world_size: int) -> list[list[Event]]:
    """The events of all processes of a run."""
    found = [json.loads((folder / f"{rank}.transfers").read_text()) for rank in range(world_size)]
    return [[Event(**{**e, "ranks": tuple(e["ranks"])}) for e in events] for events in found]
