"""Rows that cross between phases, without processes: from any microbatch to any other, and what is refused."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dataserver.planning.plan.plan import Routing
from trainclient.exchange.message_header import BrokerMismatchError, Kind, MessageType
from trainclient.exchange.routing import RoutingError
from trainclient.exchange.rows import Rows
from trainclient.layouts.colocated.all_to_all_edge import AllToAllEdge
from trainclient.layouts.colocated.phases import PhaseReceiver, PhaseSender

CPU = torch.device("cpu")
RANKS, MICROBATCHES, ROUND, WIDTH = 2, 3, 2, 2
LANES = MessageType(Kind.EMBEDDINGS), MessageType(Kind.EMBEDDING_GRADIENTS)
Item = tuple[int, int, int, int, int, bool]
"""Source rank and microbatch, target rank and microbatch, rows, validity."""


@dataclass
class Post:
    """A collective whose messages wait in one place."""

    rank: int
    boxes: dict[tuple[int, int], deque[Tensor]]
    size: int = RANKS
    device: torch.device = CPU

    def all_to_all(
        self, modules: tuple[str, str], messages: Sequence[Tensor], num_bytes: Sequence[int], microbatch: int = 0
    ) -> "Waiting":
        assert modules == ("a", "t")
        assert microbatch % ROUND == 0
        for rank, message in enumerate(messages):
            self.boxes.setdefault((rank, self.rank), deque()).append(message)
        return Waiting(self, num_bytes)


@dataclass
class Waiting:
    post: Post
    num_bytes: Sequence[int]

    def wait(self) -> list[Tensor]:
        found = [self.post.boxes[self.post.rank, rank].popleft() for rank in range(RANKS)]
        assert [len(message) for message in found] == list(self.num_bytes)
        return found


@dataclass
class View:
    """What ends read of a microbatch."""

    microbatch: int
    routings: tuple[Routing, ...]
    plan_hash: bytes = bytes(range(32))
    step: int = 5
    items: list[int] = field(default_factory=list)

    @property
    def round(self) -> range:
        first = self.microbatch // ROUND * ROUND
        return range(first, min(first + ROUND, MICROBATCHES))


def starts(items: Sequence[Item], side: slice) -> list[int]:
    """First row of each item in its microbatch, where items lie in their order."""
    used: dict[tuple[object, ...], int] = {}
    found = []
    for item in items:
        found.append(used.get(item[side], 0))
        used[item[side]] = found[-1] + item[4]
    return found


def view(items: Sequence[Item], side: slice, owner: tuple[int, int]) -> View:
    """The view of a rank's microbatch on one side."""
    source, target = starts(items, slice(0, 2)), starts(items, slice(2, 4))
    own = [i for i, item in enumerate(items) if item[side] == owner]
    entries = [(items[i][1], items[i][0], source[i], items[i][3], items[i][2], target[i], items[i][4]) for i in own]
    columns = np.array(sorted(entries), np.int64).reshape(-1, 7).T
    return View(owner[1], (Routing("a", "t", *columns),))


def ends(boxes: dict[tuple[int, int], deque[Tensor]], rank: int) -> tuple[PhaseSender, PhaseReceiver]:
    post = Post(rank, boxes)
    edge = AllToAllEdge(("a", "t"), post, post, LANES, returns=True)  # type: ignore[arg-type]
    return PhaseSender([edge], CPU, torch.float32), PhaseReceiver([edge], CPU, torch.float32)


def made(items: Sequence[Item], owner: tuple[int, int]) -> Rows:
    """What a rank makes of a microbatch: rows that name their item."""
    own = [i for i, item in enumerate(items) if item[:2] == owner]
    values = [torch.full((items[i][4], WIDTH), float(i)) + torch.arange(items[i][4])[:, None] / 8 for i in own]
    offsets = torch.tensor([0, *(items[i][4] for i in own)]).cumsum(0)
    valid = torch.tensor([items[i][5] for i in own], dtype=torch.bool)
    return Rows(torch.cat([torch.zeros(0, WIDTH), *values]), valid, offsets)


ITEMS = st.lists(
    st.tuples(*(st.integers(0, n - 1) for n in (RANKS, MICROBATCHES) * 2), st.integers(1, 3), st.booleans()),
    max_size=10,
)


def test_rows_for_a_rank_that_does_not_exist_are_refused() -> None:
    items: list[Item] = [(0, 0, RANKS, 0, 2, True)]
    sender, receiver = ends({}, 0)
    receiver.begin_step([], lambda first: [view(items, slice(2, 4), (0, k)) for k in range(first, first + ROUND)])  # type: ignore[arg-type, misc]
    first, last = (view(items, slice(0, 2), (0, k)) for k in range(ROUND))
    sender.send(first, made(items, (0, 0)))  # type: ignore[arg-type]
    with pytest.raises(RoutingError, match=f"names rank {RANKS} of a module with {RANKS} ranks"):
        sender.send(last, made(items, (0, 1)))  # type: ignore[arg-type]


@settings(max_examples=60, deadline=None)
@given(items=ITEMS)
def test_every_row_crosses_to_its_microbatch_and_its_gradient_comes_back(items: list[Item]) -> None:
    """Round after round: the first of two microbatches, and one of a single one."""
    everyone = range(RANKS)
    boxes: dict[tuple[int, int], deque[Tensor]] = {}
    found = [ends(boxes, rank) for rank in everyone]
    items = [item for item in items if item[1] // ROUND == item[3] // ROUND]
    targets = [[view(items, slice(2, 4), (rank, k)) for k in range(MICROBATCHES)] for rank in everyone]
    for (_, receiver), views in zip(found, targets, strict=True):
        receiver.begin_step([], lambda first, views=views: [views[k] for k in views[first].round])  # type: ignore[arg-type, misc]
    for first in range(0, MICROBATCHES, ROUND):
        microbatches, sent = targets[0][first].round, {}
        for rank, (sender, _) in enumerate(found):
            for k in microbatches:
                source = view(items, slice(0, 2), (rank, k))
                sent[rank, k] = sender.send(source, made(items, (rank, k)))  # type: ignore[arg-type]
        assert not any(boxes.values()), "rows leave when they are told to"
        for sender, receiver in found:
            receiver.flush(first)  # which has nothing yet
            sender.flush(first)
        for rank, (_, receiver) in enumerate(found):
            for batch in [targets[rank][k] for k in microbatches]:
                own = [i for i, item in enumerate(items) if item[2:4] == (rank, batch.microbatch)]
                rows, transfer = receiver.receive(batch, sum(items[i][4] for i in own), WIDTH)  # type: ignore[arg-type]
                wanted = [float(i) + r / 8 for i in own for r in range(items[i][4])]
                assert rows.values[:, 0].tolist() == wanted
                assert rows.valid.tolist() == [items[i][5] for i in own]
                assert rows.offsets is not None
                assert rows.offsets.diff().tolist() == [items[i][4] for i in own]
                receiver.give_back(transfer, rows.values * 2)
        assert not any(boxes.values())
        for sender, receiver in found:
            sender.flush(first)  # all has left
            receiver.flush(first)
        for (rank, k), transfer in sent.items():
            gradient = found[rank][0].gradient(transfer)
            assert torch.equal(gradient, made(items, (rank, k)).values * 2)
        assert not any(boxes.values())


def one_step(items: list[Item], sender: PhaseSender, rows: Rows) -> None:
    for k in range(ROUND):
        sender.send(view(items, slice(0, 2), (0, k)), rows if k == 0 else made(items, (0, k)))  # type: ignore[arg-type]


ONE: list[Item] = [(0, 0, 0, 1, 2, True)]


def test_rows_that_routings_do_not_cover_are_refused() -> None:
    sender, receiver = ends({}, 0)
    receiver.begin_step([], lambda _: [view(ONE, slice(2, 4), (0, k)) for k in range(ROUND)])  # type: ignore[arg-type, return-value]
    offsets, valid = torch.tensor([0, 3]), torch.ones(1, dtype=torch.bool)
    with pytest.raises(RoutingError, match="covers 2 rows of embeddings where the view has 3"):
        one_step(ONE, sender, Rows(torch.zeros(3, WIDTH), valid, offsets))
    halves = Rows(torch.zeros(2, WIDTH), torch.ones(2, dtype=torch.bool), torch.tensor([0, 1, 2]))
    with pytest.raises(RoutingError, match="cuts embeddings within an item"):
        one_step(ONE, ends({}, 0)[0], halves)
    with pytest.raises(RoutingError, match="without saying where its items begin; give offsets"):
        one_step(ONE, ends({}, 0)[0], Rows(torch.zeros(2, WIDTH), valid, None))


def test_a_module_that_waits_for_other_rows_than_are_routed_is_refused() -> None:
    boxes: dict[tuple[int, int], deque[Tensor]] = {}
    found = [ends(boxes, rank) for rank in range(RANKS)]
    for rank, (sender, receiver) in enumerate(found):
        views = [view(ONE, slice(2, 4), (rank, k)) for k in range(ROUND)]
        receiver.begin_step([], lambda _, views=views: views)  # type: ignore[arg-type, misc]
        for k in range(ROUND):
            sender.send(view(ONE, slice(0, 2), (rank, k)), made(ONE, (rank, k)))  # type: ignore[arg-type]
        sender.flush(0)
    with pytest.raises(RoutingError, match="cover 2 rows of embeddings of microbatch 1 where the view has 5"):
        found[0][1].receive(view(ONE, slice(2, 4), (0, 1)), 5, WIDTH)  # type: ignore[arg-type]


def test_another_plan_is_found_out_also_where_no_rows_cross() -> None:
    boxes: dict[tuple[int, int], deque[Tensor]] = {}
    found = [ends(boxes, rank) for rank in range(RANKS)]
    for rank, (sender, receiver) in enumerate(found):
        views = [view([], slice(2, 4), (rank, k)) for k in range(ROUND)]
        receiver.begin_step([], lambda _, views=views: views)  # type: ignore[arg-type, misc]
        for k in range(ROUND):
            batch = view([], slice(0, 2), (rank, k))
            batch.plan_hash = bytes(32) if rank else batch.plan_hash
            sender.send(batch, made([], (rank, k)))  # type: ignore[arg-type]
        sender.flush(0)
    with pytest.raises(BrokerMismatchError, match="rank 0 waited for embeddings from rank 1"):
        found[0][1].receive(view([], slice(2, 4), (0, 0)), 0, WIDTH)  # type: ignore[arg-type]


def test_rows_that_no_exchange_of_the_program_takes_are_not_forgotten() -> None:
    (sender, receiver), batch = ends({}, 0), view([], slice(0, 2), (0, 0))
    transfer = sender.send(batch, made([], (0, 0)))  # type: ignore[arg-type]
    receiver.give_back(transfer, torch.zeros(0, WIDTH))
    for end in (sender, receiver):
        with pytest.raises(RuntimeError, match="1 microbatches of rows or gradients were not sent"):
            end.end_step()
