"""Transfers between chunks without processes: which rows go where, what is released when, the bytes of a message."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dataserver.planning.plan.plan import Routing
from trainclient.exchange.communicators import Message
from trainclient.exchange.message_header import (
    HASH_BYTES,
    HEADER_BYTES,
    BrokerMismatchError,
    Kind,
    MessageHeader,
    MessageType,
    MicrobatchId,
    decode,
    encode,
    make_header,
)
from trainclient.exchange.message_queue import MAX_UNTAKEN, MessageQueue, RowSelection
from trainclient.exchange.point_to_point import EdgeEnd, P2PReceiver, P2PSender
from trainclient.exchange.routing import RoutingError
from trainclient.exchange.rows import Rows

MICROBATCH = MicrobatchId(bytes(range(32)), step=5, microbatch=7)
CPU = torch.device("cpu")
NOTHING = [np.full(9, -1, np.int64)]
"""A source that takes no gradients before it sends."""
Boxes = dict[tuple[int, int], deque[Message]]


def unread(first: int) -> Any:
    raise AssertionError(f"a whole round from microbatch {first} is read where rows come microbatch by microbatch")


@dataclass
class Post:
    """Point-to-point messages through queues by sender and receiver, which notes all calls."""

    rank: int
    boxes: Boxes = field(default_factory=dict)
    waited: list[tuple[tuple[int, ...], int]] = field(default_factory=list)
    sent: list[tuple[int, int, int, int]] = field(default_factory=list)
    posted: list[int] = field(default_factory=list)
    left: int = -1
    """The last microbatch whose messages have left."""

    def empty(self, num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(num_rows, width, dtype=dtype)

    def send(self, messages: Sequence[Message], microbatch: int) -> Any:
        for m in messages:
            self.sent.append((m.rank, len(m.header), m.rows.numel() * m.rows.itemsize, microbatch))
            self.boxes.setdefault((self.rank, m.rank), deque()).append(m)
        return Going(self.waited, (tuple(m.rank for m in messages), microbatch), lambda k: k <= self.left)

    def post(self, messages: Sequence[Message], microbatch: int) -> Any:
        self.posted.append(microbatch)
        return Coming(self, messages)


@dataclass
class Going:
    """Messages being sent."""

    log: list[tuple[tuple[int, ...], int]]
    name: tuple[tuple[int, ...], int]
    left: Callable[[int], bool]

    def wait(self) -> None:
        self.log.append(self.name)

    def is_completed(self) -> bool:
        return self.left(self.name[1])


@dataclass
class Coming:
    """Messages that are waited for: first their headers, then their rows."""

    p2p: Post
    messages: Sequence[Message]
    found: list[Message] = field(default_factory=list)

    def wait_headers(self) -> None:
        for m in self.messages:
            self.found.append(self.p2p.boxes[m.rank, self.p2p.rank].popleft())
            m.header.copy_(self.found[-1].header)

    def wait_rows(self) -> None:
        for m, found in zip(self.messages, self.found, strict=True):
            m.rows.copy_(found.rows)


@dataclass
class View:
    """What ends read of a microbatch."""

    items: list[int]
    routings: tuple[Routing, ...] = ()
    microbatch: int = 7
    plan_hash: bytes = MICROBATCH.plan_hash
    step: int = MICROBATCH.step


def routing(source: str, target: str, entries: list[tuple[int, int, int, int, int]]) -> Routing:
    """Entries of (source rank, source start, target rank, target start, rows)."""
    columns = [np.array([e[i] for e in entries], np.int64) for i in range(5)]
    wave = np.full(len(entries), 7, np.int64)
    return Routing(source, target, wave, columns[0], columns[1], wave, columns[2], columns[3], columns[4])


def edge_end(
    source: str, target: str, here: int, ranks: tuple[int, ...], boxes: tuple[Boxes, Boxes], **options: Any
) -> EdgeEnd:
    forward, backward = (Post(here, b) for b in boxes)
    kinds = Kind.EMBEDDINGS, Kind.EMBEDDING_GRADIENTS
    queues = (
        MessageQueue(c, ranks, MessageType(k), torch.float32)  # type: ignore[arg-type]
        for c, k in zip((forward, backward), kinds, strict=True)
    )
    return EdgeEnd(source, target, *queues, **options)


ITEMS = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 1), st.integers(1, 4), st.booleans(), st.booleans()), max_size=9
)
"""Source rank, target rank, rows, validity, and whether the second source module holds the item."""


@settings(max_examples=60, deadline=None)
@given(items=ITEMS, seed=st.integers(0, 9))
def test_every_row_arrives_where_the_routings_want_it_and_its_gradient_comes_back(
    items: list[tuple[int, int, int, bool, bool]], seed: int
) -> None:
    """Ranks 0 to 2 of `a` and 3 to 5 of `b` hold the items in their order, ranks 10 and 11 of `t` in a shuffled one."""
    boxes: tuple[Boxes, Boxes] = {}, {}
    shuffled = np.random.default_rng(seed).permutation(len(items)).tolist()
    start: dict[int, int] = {}
    sizes: dict[object, int] = {}
    for i, (rank, _, rows, _, second) in enumerate(items):
        start[i] = sizes.get((rank, second), 0)
        sizes[rank, second] = start[i] + rows
    entries: dict[str, list[tuple[int, int, int, int, int]]] = {"a": [], "b": []}
    position: dict[int, int] = {}
    for i in shuffled:
        rank, target, rows, _, second = items[i]
        position[i] = sizes.get(target, 0)
        sizes[target] = position[i] + rows
        entries["ab"[second]].append((rank, start[i], target, position[i], rows))
    values = {i: torch.full((e[2], 3), float(i)) + torch.arange(e[2])[:, None] / 8 for i, e in enumerate(items)}
    senders = {}
    for second, name in enumerate("ab"):
        for rank in range(3):
            own = [i for i, e in enumerate(items) if (e[0], e[4]) == (rank, bool(second))]
            end = edge_end(name, "t", rank + 3 * second, (10, 11), boxes)
            sender = P2PSender([end], CPU, torch.float32)
            mine = [e for e in entries[name] if e[0] == rank]
            counts = torch.tensor([0, *(items[i][2] for i in own)])
            made = Rows(
                torch.cat([torch.zeros(0, 3), *(values[i] for i in own)]),
                torch.tensor([items[i][3] for i in own], dtype=torch.bool),
                counts.cumsum(0),
            )
            transfer = sender.send(View([], (routing(name, "t", mine),)), made)  # type: ignore[arg-type]
            senders[name, rank] = sender, transfer, made.values
            ranks = [(rank, microbatch) for rank, _, _, microbatch in end.forward.p2p.sent]  # type: ignore[attr-defined]
            assert ranks == [(10 + p, 7) for p in sorted({items[i][1] for i in own})]
    for target in range(2):
        edge_ends = [
            edge_end(name, "t", 10 + target, ranks, boxes) for name, ranks in (("a", (0, 1, 2)), ("b", (3, 4, 5)))
        ]
        receiver = P2PReceiver(edge_ends, CPU, torch.float32)
        receiver.begin_step(NOTHING * 2, unread)
        view = View([], tuple(routing(name, "t", [e for e in entries[name] if e[2] == target]) for name in "ab"))
        rows, transfer = receiver.receive(view, sizes.get(target, 0), 3)  # type: ignore[arg-type]
        own = sorted((i for i in shuffled if items[i][1] == target), key=position.__getitem__)
        assert torch.equal(rows.values, torch.cat([torch.zeros(0, 3), *(values[i] for i in own)]))
        assert rows.valid.tolist() == [items[i][3] for i in own]
        assert rows.offsets is not None
        assert rows.offsets.tolist() == [*(position[i] for i in own), sizes.get(target, 0)]
        receiver.give_back(transfer, 2 * rows.values)
    for sender, transfer, made in senders.values():
        assert torch.equal(sender.gradient(transfer), 2 * made)
    assert not any(box for direction in boxes for box in direction.values())


def test_between_chunks_all_rows_go_straight_on_even_where_there_are_none() -> None:
    boxes: tuple[Boxes, Boxes] = {}, {}
    there, here = (edge_end("m", "m", rank, ranks, boxes, rank=1) for rank, ranks in ((4, (8, 5)), (5, (9, 4))))
    sender, receiver = P2PSender([there], CPU, torch.float32), P2PReceiver([here], CPU, torch.float32)
    receiver.begin_step(NOTHING, unread)
    for count in (3, 0):
        made = Rows(torch.arange(2.0 * count).view(count, 2), torch.tensor([True, False]), None)
        view: Any = View([0, 1], microbatch=count)
        sender.send(view, made)
        found, transfer = receiver.receive(view, count, 2)
        assert (found.values.tolist(), found.valid.tolist(), found.offsets) == (
            made.values.tolist(),
            [True, False],
            None,
        )
        receiver.give_back(transfer, torch.ones(count, 2))
    forward, backward = (queue.p2p for queue in (there.forward, here.backward))
    assert forward.sent == [(5, 64 + 2, 24, 3), (5, 64 + 2, 0, 0)]  # type: ignore[attr-defined]
    assert backward.sent == [(4, 64, 24, 3), (4, 64, 0, 0)]  # type: ignore[attr-defined]


def test_where_no_gradients_return_none_are_sent_and_what_has_left_is_released() -> None:
    boxes: tuple[Boxes, Boxes] = {}, {}
    ends = edge_end("a", "t", 0, (10,), boxes, rank=0, returns=False), edge_end("a", "t", 10, (0,), boxes, rank=0)
    sender, post = P2PSender([ends[0]], CPU, torch.float32), ends[0].forward.p2p
    receiver = P2PReceiver([replace(ends[1], returns=False)], CPU, torch.float32)
    assert isinstance(post, Post)
    for microbatch in range(4):
        post.left = microbatch - 2
        sent = Rows(torch.ones(1, 3), torch.ones(1, dtype=torch.bool), None)
        sender.send(View([0], microbatch=microbatch), sent)  # type: ignore[arg-type]
        assert post.waited == [((10,), k) for k in range(microbatch - 1)], "nothing that has not left is waited for"
    receiver.begin_step([np.full(9, -1, np.int64)], unread)
    assert not receiver.returns
    _, transfer = receiver.receive(View([0], microbatch=0), 1, 3)  # type: ignore[arg-type]
    receiver.give_back(transfer, torch.ones(1, 3))
    assert not boxes[1]
    sender.end_step()
    assert post.waited == [((10,), k) for k in range(4)]


def test_a_source_without_gradients_waits_for_what_it_sent_long_before() -> None:
    sender = P2PSender([edge_end("a", "t", 0, (10,), ({}, {}), rank=0, returns=False)], CPU, torch.float32)
    post = sender._ends[0].forward.p2p
    assert isinstance(post, Post)
    rows = Rows(torch.ones(1, 3), torch.ones(1, dtype=torch.bool), None)
    for microbatch in range(MAX_UNTAKEN + 3):
        sender.send(View([0], microbatch=microbatch), rows)  # type: ignore[arg-type]
        assert post.waited == [((10,), k) for k in range(microbatch + 1 - MAX_UNTAKEN)]


def test_what_was_sent_is_released_once_the_other_rank_has_answered() -> None:
    boxes: tuple[Boxes, Boxes] = {}, {}
    there, here = (edge_end("m", "m", rank, ranks, boxes, rank=0) for rank, ranks in ((4, (5,)), (5, (4,))))
    sender, receiver = P2PSender([there], CPU, torch.float32), P2PReceiver([here], CPU, torch.float32)
    receiver.begin_step([np.array([-1, -1, 0, 1])], unread)
    shipped, arrived = {}, {}
    forward, backward = there.forward.p2p.waited, here.backward.p2p.waited  # type: ignore[attr-defined]

    def pass_on(k: int) -> None:
        rows = Rows(torch.zeros(1, 2), torch.tensor([True]), None)
        shipped[k] = sender.send(View([0], microbatch=k), rows)  # type: ignore[arg-type]
        arrived[k] = receiver.receive(View([0], microbatch=k), 1, 2)[1]  # type: ignore[arg-type]

    def come_back(k: int) -> None:
        receiver.give_back(arrived[k], torch.zeros(1, 2))
        sender.gradient(shipped[k])

    for k in (0, 1):
        pass_on(k)
    come_back(0)
    assert (forward, backward) == ([((5,), 0)], [])
    pass_on(2)
    assert backward == [((4,), 0)]
    come_back(1)
    pass_on(3)
    assert (forward, backward) == ([((5,), 0), ((5,), 1)], [((4,), 0), ((4,), 1)])
    for end in (sender, receiver, sender):
        end.end_step()
    assert (forward, backward) == ([((5,), k) for k in range(4)], [((4,), 0), ((4,), 1)])


def test_routings_that_do_not_belong_to_the_view_are_refused() -> None:
    boxes: tuple[Boxes, Boxes] = {}, {}
    sender = P2PSender([edge_end("a", "t", 0, (1, 2), boxes)], CPU, torch.float32)
    made = Rows(torch.zeros(4, 2), torch.ones(2, dtype=torch.bool), torch.tensor([0, 2, 4]))
    with pytest.raises(RoutingError, match=r"no routing a -> t, only \['b -> t'\]; the server planned another job"):
        sender.send(View([], (routing("b", "t", []),)), made)  # type: ignore[arg-type]
    for entries, message in (
        ([(0, 0, 0, 0, 2)], "covers 2 rows of embeddings where the view has 4"),
        ([(0, 0, 0, 0, 3), (0, 3, 1, 0, 1)], "cuts embeddings within an item"),
        ([(0, 0, 0, 0, 2), (0, 2, 2, 0, 2)], "names rank 2 of a module with 2 ranks"),
    ):
        with pytest.raises(RoutingError, match=message):
            sender.send(View([], (routing("a", "t", entries),)), made)  # type: ignore[arg-type]
    whole = View([], (routing("a", "t", [(0, 0, 0, 0, 4)]),))
    with pytest.raises(RoutingError, match="without saying where its items begin"):
        sender.send(whole, Rows(made.values, made.valid, None))  # type: ignore[arg-type]


def test_a_module_learns_the_validity_of_its_own_items() -> None:
    rows = Rows(torch.zeros(5, 1), torch.tensor([True, False]), torch.tensor([0, 2, 5]))
    assert rows.valid_of(torch.tensor([0, 0, 2, 5, 5])).tolist() == [True, True, False, True]
    for offsets in ([0, 3, 5], [0, 5], [0, 1, 2, 5]):
        with pytest.raises(ValueError, match="the routing cuts rows within an item"):
            rows.valid_of(torch.tensor(offsets))


def test_a_queue_sends_messages_of_its_type() -> None:
    boxes: Boxes = {}
    there, here = (
        MessageQueue(Post(rank, boxes), (other,), MessageType(Kind.ACTIVATIONS, chunk), torch.float32)  # type: ignore[arg-type]
        for rank, other, chunk in ((1, 4, 2), (4, 1, 3))
    )
    selections = [RowSelection(0, 1, 1)]
    there.send(MICROBATCH, selections, torch.ones(1, 3), torch.tensor([True]))
    here.post(MICROBATCH, selections, 3, with_validity=True)
    with pytest.raises(BrokerMismatchError, match=r"waited for activations of chunk 3 .* got activations of chunk 2"):
        here.take(MICROBATCH.microbatch)


def test_what_several_ranks_share_is_released_once_all_have_answered() -> None:
    post = Post(1)
    queue = MessageQueue(post, (4, 5), MessageType(Kind.EMBEDDINGS), torch.float32)  # type: ignore[arg-type]
    for k, ranks in enumerate([(0, 1), (1,), (0,)]):
        selections = [RowSelection(rank, 1, 1, torch.tensor([0])) for rank in ranks]
        queue.send(replace(MICROBATCH, microbatch=k), selections, torch.ones(1, 3))
    queue.answered(1, 1)
    assert post.waited == [((5,), 1)]
    queue.answered(0, 0)
    assert post.waited == [((5,), 1), ((4, 5), 0)]
    queue.answered(1, 2)
    assert len(post.waited) == 2
    queue.release_all()
    assert post.waited[2:] == [((4,), 2)]
    queue.send(MICROBATCH, [], torch.ones(0, 3))
    assert len(post.sent) == 4, "nothing is sent to nobody"


def test_receives_are_posted_once_ahead_or_when_they_are_needed() -> None:
    boxes: tuple[Boxes, Boxes] = {}, {}
    there, here = (edge_end("m", "m", rank, ranks, boxes, rank=0) for rank, ranks in ((4, (5,)), (5, (4,))))
    sender, receiver = P2PSender([there], CPU, torch.float32), P2PReceiver([here], CPU, torch.float32)
    receiver.begin_step(NOTHING, unread)
    views: list[Any] = [View([0], microbatch=k) for k in range(3)]
    for k in (0, 1, 1):
        receiver.post(0, views[k], 1, 2)
    assert here.forward.p2p.posted == [0, 1]  # type: ignore[attr-defined]
    for k, view in enumerate(views):
        made = Rows(torch.full((1, 2), float(k)), torch.tensor([True]), None)
        sender.send(view, made)
        assert there.backward.p2p.posted == list(range(k + 1))  # type: ignore[attr-defined]
    for k, view in enumerate(views):
        assert receiver.receive(view, 1, 2)[0].values.tolist() == [[k, k]]
    assert here.forward.p2p.posted == [0, 1, 2]  # type: ignore[attr-defined]


def test_the_bytes_and_words_of_a_header() -> None:
    for num_valid in (0, 1, 64, 65):
        header = make_header(MessageType(Kind.CONDITIONS, 5), MICROBATCH, num_valid, 12, 258, 3)
        assert header.encoded_bytes == 64 + num_valid
        valid = torch.arange(num_valid) % 3 == 0
        microbatch_id = encode(header, valid)
        little = [(3, 2), (5, 2), *((byte, 1) for byte in range(24)), (5, 8), (7, 4)]
        little += [(num_valid, 4), (12, 8), (258, 4), (3, 4)]
        head = b"DTB2" + b"".join(value.to_bytes(size, "little") for value, size in little)
        assert microbatch_id.numpy().tobytes() == head + bytes(valid.to(torch.uint8).tolist())
        assert decode(microbatch_id, header).tolist() == valid.tolist()
    assert str(header) == (
        "conditions of chunk 5 from rank 258 to rank 3 of step 5, microbatch 7, plan 0001020304050607, 65 entries, "
        "12 bytes"
    )
    assert str(MessageHeader(9, 0, b"", 0, 0, 0, 0, 0, 0)).startswith("kind 9 from rank 0")
    assert [(kind.name, int(kind)) for kind in Kind] == [
        ("EMBEDDINGS", 1),
        ("ACTIVATIONS", 2),
        ("CONDITIONS", 3),
        ("EMBEDDING_GRADIENTS", 4),
        ("ACTIVATION_GRADIENTS", 5),
        ("CONDITION_GRADIENTS", 6),
        ("FEATURES", 7),
        ("NORMALISERS", 8),
    ]
    assert (HEADER_BYTES, HASH_BYTES) == (64, 24)
    microbatch_id[0] += 1
    with pytest.raises(BrokerMismatchError) as caught:
        decode(microbatch_id, header)
    assert str(caught.value).startswith(f"rank 3 got bytes that are no message where it waited for {header}; all")
