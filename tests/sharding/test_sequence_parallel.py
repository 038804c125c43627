"""Rows that ranks share: who has which, and what they hand each other."""

import copy
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import Queue
from threading import Event
from types import SimpleNamespace
from typing import Any, ClassVar, TypeVar

import pytest
import torch
import torch.distributed as dist
from builders.gloo_threads import in_threads
from torch import Tensor

from dataserver.planning.simulation import Operation, OperationKind
from trainclient.exchange.leader_broadcast import TorchViewGroup
from trainclient.exchange.message_header import BrokerMismatchError
from trainclient.exchange.view_groups import SharedSequences
from trainclient.exchange.wait_times import Waits
from trainclient.models.attention import Segments
from trainclient.models.layers import SelfAttention
from trainclient.models.rotary import Rotation
from trainclient.program.clock import Executed, Stopwatch
from trainclient.sharding.sequence_parallel import SharedRows
from trainclient.stream.microbatch import SequenceParallelGroup

Found = TypeVar("Found")
DEADLINE_S = 30


@dataclass
class Threads:
    """Ranks that are threads."""

    position: int
    size: int
    boxes: dict[tuple[int, int], "Queue[Tensor]"]
    leader: int = 0

    @property
    def is_leader(self) -> bool:
        return self.position == 0

    def begin_all_to_all(
        self, values: Tensor, leaving: Sequence[int], arriving: Sequence[int], *, midway: bool = False
    ) -> Callable[[], Tensor]:
        del midway
        for peer, rows in enumerate(torch.split(values, list(leaving))):
            self.boxes[self.position, peer].put(rows)

        def arrived() -> Tensor:
            found = [self.boxes[peer, self.position].get(timeout=DEADLINE_S) for peer in range(self.size)]
            assert [len(rows) for rows in found] == list(arriving)
            return torch.cat(found)

        return arrived

    def broadcast(self, message: Tensor) -> None:
        counts = [len(message) if self.is_leader else 0] * self.size
        came = [len(message), *[0] * (self.size - 1)]
        message.copy_(
            self.begin_all_to_all(message.repeat(self.size) if self.is_leader else message[:0], counts, came)()
        )


def together(size: int, num_rows: int, run: Callable[[SharedRows, int], Found]) -> list[Found]:
    """What each rank finds."""
    boxes: dict[tuple[int, int], Queue[Tensor]] = {(a, b): Queue() for a in range(size) for b in range(size)}
    shared = [SharedRows(Threads(rank, size, boxes), num_rows) for rank in range(size)]
    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(run, shared, range(size)))


@pytest.mark.parametrize(("size", "num_rows"), [(2, 7), (4, 18), (4, 3), (2, 0)])
def test_heads_and_rows(size: int, num_rows: int) -> None:
    """Each rank sees all rows of its heads, in their order, and gets its rows of all heads back."""
    query, key = torch.randn(num_rows, 8, 2), torch.randn(num_rows, 4, 2)

    def run(shared: SharedRows, rank: int) -> Tensor:
        begun = [shared.to_heads(rows[shared.own]) for rows in (query, key, -key)]
        q, k, v = (arrived() for arrived in begun)
        heads, groups = (slice(rank * n // size, (rank + 1) * n // size) for n in (8, 4))
        assert torch.equal(q, query[:, heads])
        assert torch.equal(k, key[:, groups])
        assert torch.equal(v, -k)
        return shared.to_rows(q)

    found = together(size, num_rows, run)
    assert torch.equal(torch.cat(found), query)
    assert {len(rows) for rows in found} <= {num_rows // size, -(-num_rows // size)}


class Noting(TorchViewGroup):
    """Peers that note what is begun, and what has been waited for."""

    notes: ClassVar[dict[int, list[str]]] = {}

    def begin_all_to_all(
        self, values: Tensor, leaving: Sequence[int], arriving: Sequence[int], *, midway: bool = False
    ) -> Callable[[], Tensor]:
        notes, arrived = (
            self.notes.setdefault(self.position, []),
            super().begin_all_to_all(values, leaving, arriving, midway=midway),
        )
        notes.append("begun")

        def waited() -> Tensor:
            notes.append("waited")
            return arrived()

        return waited


@pytest.mark.parametrize("size", [2, 4])
def test_attention_of_rows_that_ranks_share(size: int) -> None:
    """Outputs and gradients are those of one process; queries and keys are on their way while values are computed."""
    torch.manual_seed(size)
    alone = SelfAttention(16, 8, 4, bias=True, causal=True).double()
    several = [copy.deepcopy(alone) for _ in range(size)]
    x, offsets = torch.randn(21, 16, dtype=torch.float64, requires_grad=True), torch.tensor([0, 9, 9, 10, 21])
    rotation = Rotation.of(torch.arange(21)[:, None], 2, 1e4, torch.float64)
    cpu = torch.device("cpu")
    expected = alone(x, Segments.from_offsets("x", offsets, 21, cpu), rotation)
    torch.autograd.backward(expected, expected.detach().cos())

    def run(group: dist.ProcessGroup, rank: int) -> tuple[Tensor, Tensor | None]:
        peers = Noting(0, cpu, group, group, Waits(cpu))
        shared, own = SharedRows(peers, 21), several[rank]
        peers.notes[rank] = []
        own.value.register_forward_hook(lambda *_: peers.notes[rank].append("values"))
        mine, segments = x.detach()[shared.own].requires_grad_(), Segments.from_offsets("x", offsets, 21, cpu, shared)
        found = own(mine, segments, Rotation(rotation.cosine[shared.own], rotation.sine[shared.own]))
        torch.autograd.backward(found, found.detach().cos())
        return found.detach(), mine.grad

    found, order = in_threads(size, run), ["begun", "begun", "values", "begun", *["waited"] * 3, "begun", "waited"]
    assert [Noting.notes[rank] for rank in range(size)] == [order] * size
    assert torch.allclose(torch.cat([rows for rows, _ in found]), expected, rtol=0, atol=1e-13)
    assert x.grad is not None
    assert torch.allclose(torch.cat([g for _, g in found if g is not None]), x.grad, rtol=0, atol=1e-13)
    for name, parameter in alone.named_parameters():
        gradients = [own.get_parameter(name).grad for own in several]
        total = torch.stack([g for g in gradients if g is not None]).sum(dim=0)
        assert torch.allclose(total, parameter.grad if parameter.grad is not None else total[:0], rtol=0, atol=1e-12)


def test_what_the_first_rank_has_goes_to_the_rows_and_back() -> None:
    """Whatever the order of the slots; a rank may have none."""
    slots = torch.tensor([9, 0, 8, 2, 1, 5], dtype=torch.int32)
    values = torch.arange(6.0)[:, None]

    def run(shared: SharedRows, rank: int) -> tuple[list[float], list[float], list[bool]]:
        dealt = shared.deal(values if rank == 0 else values[:0], slots)
        collected = shared.collect(dealt + 10, slots)
        told = shared.told(torch.tensor([rank == 0, False, True]))
        return dealt.flatten().tolist(), collected.flatten().tolist(), told.tolist()

    found = together(4, 10, run)  # rows 0 and 1, 2 to 4, 5 and 6, 7 to 9
    assert [dealt for dealt, _, _ in found] == [[1, 4], [3], [5], [0, 2]]
    assert [collected for _, collected, _ in found] == [[10, 11, 12, 13, 14, 15], [], [], []]
    assert all(told == [True, False, True] for _, _, told in found)


class Announced(Waits):
    """Waits that others see begin."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.begun = Event()

    def begin(self) -> None:
        super().begin()
        self.begun.set()


@pytest.mark.parametrize("late_in", ["forward", "backward"])
def test_what_a_rank_waits_for_a_late_peer_is_not_computed(late_in: str) -> None:
    """Neither forward nor backward."""
    cpu = torch.device("cpu")
    waits, late = [Announced(cpu) for _ in range(2)], []

    def delay() -> None:
        """Of the second rank, until the first one waits for it and then some."""
        assert waits[0].begun.wait(DEADLINE_S)
        since = time.perf_counter_ns()
        time.sleep(0.05)
        late.append(time.perf_counter_ns() - since)

    def run(group: dist.ProcessGroup, rank: int) -> list[Executed]:
        shared = SharedRows(TorchViewGroup(0, cpu, group, group, waits[rank]), 8)
        clock, rows = Stopwatch(cpu, waits[rank]), torch.ones(4, 2, 3, requires_grad=True)
        if rank == 1 and late_in == "forward":
            delay()
        with clock.running(Operation(OperationKind.FORWARD, 0)):
            mixed = shared.to_heads(rows)()
        group.barrier().wait()
        waits[0].begun.clear()
        group.barrier().wait()
        if rank == 1 and late_in == "backward":
            delay()
        with clock.running(Operation(OperationKind.BACKWARD, 0)):
            mixed.sum().backward()
        return clock.executed()

    first, second = in_threads(2, run)
    delayed, other = first if late_in == "forward" else first[::-1]
    assert delayed.waited_ns >= late[0] > other.waited_ns
    assert delayed.end_ns - delayed.start_ns - delayed.waited_ns < late[0]
    assert all(e.waited_ns < late[0] for e in second)


def test_a_group_that_the_job_has_not_is_refused() -> None:
    peers: Any = object()
    shared = SharedSequences(2, {(2, 3): peers, (0, 1, 2, 3): peers})

    def of(*several: tuple[int, ...]) -> object:
        groups = tuple(SequenceParallelGroup(i, len(ranks), ranks, ranks[0]) for i, ranks in enumerate(several))
        batch: Any = SimpleNamespace(sequence_parallel_groups=groups, step=3, microbatch=1)
        return shared.of(batch)

    assert of((0, 1), (2, 3)) is of((0, 1, 2, 3)) is peers
    assert of((0, 1), (2,), (3,)) is of() is None
    with pytest.raises(BrokerMismatchError, match=r"rank 2 share microbatch 1 with ranks \[1, 2\]; .* \[2, 4\]"):
        of((0,), (1, 2), (3,))
