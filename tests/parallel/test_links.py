"""Transfers between two stages without processes: which rows go where, what is released when, words of errors."""

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from trainclient.client import Batch
from trainclient.parallel.broker import Link, RoutingError, RowBlocks, receive_blocks, send_blocks
from trainclient.parallel.messages import (
    HASH_BYTES,
    HEADER_BYTES,
    BrokerMismatchError,
    Header,
    Kind,
    Stamp,
    decode,
    encode,
    make_header,
)
from trainclient.parallel.roles import Edge, LossWeights, Role
from trainclient.parallel.stopwatch import Stopwatch
from trainclient.parallel.transport import PeerLostError, contact

STAMP = Stamp(bytes(range(32)), step=5, microbatch=7)
CPU = torch.device("cpu")


@dataclass
class Post:
    """A channel whose messages wait in one place, by sender and receiver."""

    rank: int
    boxes: dict[tuple[int, int], deque[Tensor]] = field(default_factory=dict)
    released: list[int | None] = field(default_factory=list)
    sent: list[tuple[int, int, int]] = field(default_factory=list)
    device: torch.device = CPU

    def send(self, peer: int, message: Tensor, microbatch: int) -> None:
        self.sent.append((peer, len(message), microbatch))
        self.boxes.setdefault((self.rank, peer), deque()).append(message)

    def receive(self, peer: int, num_bytes: int) -> Tensor:
        message = self.boxes[peer, self.rank].popleft()
        assert len(message) == num_bytes
        return message

    def release(self, microbatch: int | None = None) -> None:
        self.released.append(microbatch)


def blocks(peer: list[int], start: list[int], rows: list[int], order: list[int]) -> RowBlocks:
    return RowBlocks(*(np.array(column, np.int64) for column in (peer, start, rows, order)))


@settings(max_examples=60, deadline=None)
@given(
    items=st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 1), st.integers(1, 4), st.booleans(), st.integers(0, 9)), max_size=9
    ),
    seed=st.integers(0, 9),
)
def test_every_row_arrives_where_the_routing_wants_it(items: list[tuple[int, int, int, bool, int]], seed: int) -> None:
    """Senders 0 to 2 hold the items in their order, receivers 10 and 11 in a shuffled one."""
    boxes: dict[tuple[int, int], deque[Tensor]] = {}
    shuffled = np.random.default_rng(seed).permutation(len(items)).tolist()
    source_start, target_start = {}, {}
    sizes: dict[int, int] = {}
    for i in range(len(items)):
        source_start[i] = sizes.get(items[i][0], 0)
        sizes[items[i][0]] = source_start[i] + items[i][2]
    for i in shuffled:
        key = 10 + items[i][1]
        target_start[i] = sizes.get(key, 0)
        sizes[key] = target_start[i] + items[i][2]
    values = {
        i: torch.full((item[2], 3), float(i)) + torch.arange(item[2])[:, None] / 8 for i, item in enumerate(items)
    }
    for rank in range(3):
        own = [i for i, item in enumerate(items) if item[0] == rank]
        rows = torch.cat([torch.zeros(0, 3), *(values[i] for i in own)])
        start = [source_start[i] for i in own]
        found = blocks([items[i][1] for i in own], start, [items[i][2] for i in own], start)
        post = Post(rank, boxes)
        valid = torch.tensor([items[i][3] for i in own], dtype=torch.bool)
        send_blocks(Link(post, (10, 11), torch.float32), Kind.EMBEDDINGS, STAMP, found, rows, valid)  # type: ignore[arg-type]
        assert [(peer, microbatch) for peer, _, microbatch in post.sent] == [
            (10 + peer, 7) for peer in sorted({items[i][1] for i in own})
        ]
    for rank in range(2):
        own = [i for i in shuffled if items[i][1] == rank]
        found = blocks(
            [items[i][0] for i in own],
            [target_start[i] for i in own],
            [items[i][2] for i in own],
            [source_start[i] for i in own],
        )
        link = Link(Post(10 + rank, boxes), (0, 1, 2), torch.float32)  # type: ignore[arg-type]
        rows, valid = receive_blocks(link, Kind.EMBEDDINGS, STAMP, found, sizes.get(10 + rank, 0), 3)
        assert torch.equal(rows, torch.cat([torch.zeros(0, 3), *(values[i] for i in own)]))
        assert valid.tolist() == [items[i][3] for i in own]
    assert not any(boxes.values())


def test_links_exchange_nothing_without_rows() -> None:
    post = Post(0)
    link = Link(post, [4], torch.float32)  # type: ignore[arg-type]
    link.send(Kind.ACTIVATIONS, STAMP, 0, torch.ones(2, dtype=torch.bool), torch.zeros(0, 3))
    assert post.sent == []
    valid, rows = link.receive(Kind.ACTIVATIONS, STAMP, 0, 2, 0, 3)
    assert (valid.tolist(), rows.shape, rows.dtype) == ([True, True], (0, 3), torch.float32)
    link.send(Kind.ACTIVATIONS, STAMP, 0, torch.tensor([True, False]), torch.ones(1, 3))
    assert post.sent == [(4, 64 + 64 + 12, 7)]
    far = Link(Post(4, post.boxes), [0], torch.float32)  # type: ignore[arg-type]
    valid, rows = far.receive(Kind.ACTIVATIONS, STAMP, 0, 2, 1, 3)
    assert (valid.tolist(), rows.tolist()) == ([True, False], [[1, 1, 1]])


def test_the_bytes_and_words_of_a_header() -> None:
    for num_valid, offset in ((0, 64), (1, 128), (64, 128), (65, 192), (128, 192)):
        header = make_header(Kind.CONDITIONS, STAMP, num_valid, 12, 258, 3)
        assert (header.rows_offset, header.message_bytes) == (offset, offset + 12)
        valid = torch.arange(num_valid) % 3 == 0
        message = encode(header, valid, torch.tensor([[1.0, 2.0, 4.0]]))
        little = [(3, 4), *((byte, 1) for byte in range(24)), (5, 8), (7, 4), (num_valid, 4), (12, 8), (258, 4), (3, 4)]
        head = b"DTB1" + b"".join(value.to_bytes(size, "little") for value, size in little)
        body = bytes(valid.to(torch.uint8).tolist()).ljust(offset - 64, b"\0")
        rows = b"\0\0\x80\x3f\0\0\0\x40\0\0\x80\x40"
        assert message.numpy().tobytes() == head + body + rows
        found, values = decode(message, header, 3, torch.float32)
        assert (found.tolist(), values.tolist()) == (valid.tolist(), [[1.0, 2.0, 4.0]])
    assert str(header) == (
        "conditions from rank 258 to rank 3 of step 5, microbatch 7, plan 0001020304050607, 128 entries, 12 bytes"
    )
    assert str(Header(9, b"", 0, 0, 0, 0, 0, 0)).startswith("kind 9 from rank 0")
    assert [kind.name for kind in Kind] == [
        "EMBEDDINGS",
        "ACTIVATIONS",
        "CONDITIONS",
        "EMBEDDING_GRADIENTS",
        "ACTIVATION_GRADIENTS",
        "CONDITION_GRADIENTS",
    ]
    assert [int(kind) for kind in Kind] == [1, 2, 3, 4, 5, 6]
    assert (HEADER_BYTES, HASH_BYTES) == (64, 24)
    message[0] += 1
    with pytest.raises(BrokerMismatchError) as caught:
        decode(message, header, 3, torch.float32)
    assert str(caught.value).startswith(f"rank 3 got bytes that are no message where it waited for {header}; all")


def test_blocks_name_every_peer_and_cover_every_row_once() -> None:
    found = blocks([1, 0, 2], [3, 0, 5], [2, 3, 1], [0, 0, 0])
    found.check(6, 3, "embeddings")
    for num_rows in (5, 7):
        with pytest.raises(RoutingError, match=f"covers 6 rows of embeddings where the view has {num_rows}, or"):
            found.check(num_rows, 3, "embeddings")
    with pytest.raises(RoutingError, match="the routing of embeddings names rank 2 of a module with 2 ranks; all"):
        found.check(6, 2, "embeddings")
    blocks([], [], [], []).check(0, 0, "embeddings")
    with pytest.raises(RoutingError, match="covers 0 rows of embeddings where the view has 1"):
        blocks([], [], [], []).check(1, 1, "embeddings")
    for wrong in (
        blocks([0], [1], [3], [0]),
        blocks([0, 0], [0, 1], [2, 1], [0, 0]),
        blocks([0, 0], [0, 3], [3, 0], [0, 0]),
    ):
        with pytest.raises(RoutingError, match="covers 3 rows"):
            wrong.check(3, 1, "embeddings")


class Doubling(Role[int]):
    """Keeps and gives back numbers of microbatches."""

    tensors = ("x",)

    def __init__(self, before: Edge | None, after: Edge | None) -> None:
        super().__init__(nn.Linear(1, 1), CPU, before, after)
        self.done: list[int] = []

    def _forward(self, batch: Batch) -> int:
        with self.forward_times.lap():
            self.loss_sum += 1
        return 2 * batch.microbatch

    def _backward(self, kept: int) -> None:
        with self.backward_times.lap():
            self.done.append(kept)


@dataclass
class Numbered:
    microbatch: int


def edge() -> tuple[Edge, Any, Any]:
    forward, backward = Post(0), Post(0)
    return Edge("llm", Link(forward, (1,), torch.float32), Link(backward, (1,), torch.float32)), forward, backward  # type: ignore[arg-type]


def test_a_role_releases_what_was_taken_on_either_side() -> None:
    (before, before_forward, before_backward), (after, after_forward, after_backward) = edge(), edge()
    role = Doubling(before, after)
    for number in (3, 4):
        role.forward(Numbered(number))  # type: ignore[arg-type]
    assert (float(role.loss_sum), role.loss_sum.dtype, len(role.forward_times.nanoseconds())) == (2, torch.float64, 2)
    role.backward(4, taken=1)
    role.backward(3, taken=2)
    assert role.done == [8, 6]
    with pytest.raises(KeyError):
        role.backward(3, taken=2)
    role.end_step()
    assert (after_forward.released, before_backward.released) == ([4, 3, None], [1, 2, None])
    assert (after_backward.released, before_forward.released) == ([], [])
    role.begin_step()
    assert float(role.loss_sum) == 0
    assert (role.forward_times.nanoseconds(), role.backward_times.nanoseconds()) == ([], [])
    alone = Doubling(None, None)
    alone.forward(Numbered(0))  # type: ignore[arg-type]
    alone.backward(0, taken=0)
    alone.end_step()
    assert alone.done == [0]
    assert LossWeights() == LossWeights(text=1.0, image=1.0)


def test_a_lost_peer_is_named_with_the_first_sentence_of_the_backend() -> None:
    see = "; see what the process that ended first has reported"
    for text, reason in (
        ("[a/pair.cc:1] Closed by peer [x]. This may be", "Closed by peer [x]"),
        ("Timed out\nsecond line", "Timed out"),
        ("waits [b] still", "waits [b] still"),
        ("", "RuntimeError"),
    ):
        with pytest.raises(PeerLostError) as caught, contact("rank 3"):
            raise RuntimeError(text)
        assert str(caught.value) == f"lost contact to rank 3 ({reason}){see}"
        assert isinstance(caught.value.__cause__, RuntimeError)
    with contact("rank 3"):
        pass
    with pytest.raises(ValueError, match="other"), contact("rank 3"):
        raise ValueError("other")


def test_a_stopwatch_on_cuda_reads_events_after_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, waited = iter((10.0, 10.5, 20.0, 20.25, 30.0, 30.75)), []

    class Event:
        """Milliseconds, as CUDA's; readable once the last one was waited for."""

        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing
            self.at = float("nan")

        def record(self) -> None:
            self.at = next(clock)

        def synchronize(self) -> None:
            waited.append(self.at)

        def elapsed_time(self, end: "Event") -> float:
            return end.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Event)
    watch = Stopwatch(torch.device("cuda"))
    assert (watch.nanoseconds(), waited) == ([], [])
    for _ in range(3):
        with watch.lap():
            pass
    assert (watch.nanoseconds(), waited) == ([500_000, 250_000, 750_000], [30.75])
    watch.reset()
    assert (watch.nanoseconds(), waited) == ([], [30.75])
