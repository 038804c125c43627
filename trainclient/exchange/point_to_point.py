"""Sends and receives the rows of a chunk by point-to-point messages, over all its edges.

Several sources may make up the input of a chunk, such as several encoders, and several targets may share its output.
The routings in the view say which rank has which rows; between chunks of one module one rank has all of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dataserver.planning import I64
from trainclient.client import Batch
from trainclient.exchange.message_header import MicrobatchId
from trainclient.exchange.message_queue import MessageQueue, RowSelection
from trainclient.exchange.routing import RoutingError, RowBlocks, covering, items_of, routing_of
from trainclient.exchange.rows import Rows
from trainclient.upload import upload

Views = Callable[[int], Sequence[Batch]]
"""Reads all microbatches of a round, given its first one."""


@dataclass(frozen=True, slots=True, eq=False)
class EdgeEnd:
    """This process's end of one edge."""

    source: str
    """Module at the sending end of the forward pass."""
    target: str
    forward: MessageQueue
    backward: MessageQueue
    rank: int | None = None
    """The data-parallel rank at the other end that has all rows; None where routings say which has which."""
    returns: bool = True
    """Whether gradients come back along the edge."""

    @property
    def what(self) -> str:
        """What the rows are, in words."""
        return self.forward.message_type.kind.name.lower()


@dataclass(frozen=True, slots=True, eq=False)
class Transfer:
    """The rows of one microbatch that a chunk sends or receives, from its forward to its backward."""

    microbatch_id: MicrobatchId
    selections: tuple[tuple[EdgeEnd, tuple[RowSelection, ...]], ...]
    num_rows: int
    width: int


@dataclass(slots=True, eq=False)
class _Expected:
    """A microbatch that is being received."""

    transfer: Transfer
    offsets: Tensor | None


class P2PReceiver:
    """A `Receiver` of point-to-point messages."""

    def __init__(self, ends: Sequence[EdgeEnd], device: torch.device, dtype: torch.dtype) -> None:
        self._ends = tuple(ends)
        self._device = device
        self._dtype = dtype
        self._taken: tuple[I64, ...] = ()
        self._expected: dict[int, _Expected] = {}

    @property
    def returns(self) -> bool:
        """Whether any source expects gradients."""
        return any(end.returns for end in self._ends)

    @property
    def sent_ns(self) -> int:
        """When all headers of the last rows had arrived, by `time.perf_counter_ns`."""
        return max(end.forward.sent_ns for end in self._ends)

    def begin_step(self, taken: Sequence[I64], views: Views) -> None:
        """Learn what the sources have done when they send.

        Args:
            taken: for each edge int64 [microbatches]: the last microbatch whose gradients the source takes before it
                sends the rows of this one; -1 for none.
            views: see `Receiver`.
        """
        del views  # rows come microbatch by microbatch, each with its view
        self._taken = tuple(taken)

    def post(self, edge: int, batch: Batch, num_rows: int, width: int) -> None:
        """Begin to receive the rows of a microbatch over one of the edges, unless this has begun already.

        Raises:
            RoutingError: the view's routings do not cover the rows [num_rows, width] of all edges.
        """
        transfer = self._expect(batch, num_rows, width).transfer
        end, selections = transfer.selections[edge]
        end.forward.post(transfer.microbatch_id, selections, width, with_validity=True)

    def receive(self, batch: Batch, num_rows: int, width: int) -> tuple[Rows, Transfer]:
        """Wait for the rows [num_rows, width] of a microbatch.

        Raises:
            RoutingError: the view's routings do not cover these rows.
            BrokerMismatchError: the other rank runs another step or plan.
            RankLostError: the other rank is gone.
        """
        for edge in range(len(self._ends)):
            self.post(edge, batch, num_rows, width)
        expected = self._expected.pop(batch.microbatch)
        transfer, offsets = expected.transfer, expected.offsets
        count = len(batch.items) if offsets is None else len(offsets) - 1
        valid, found = torch.ones(count, dtype=torch.bool), []
        for (end, selections), taken in zip(transfer.selections, self._taken, strict=True):
            for selection, (bits, rows) in zip(selections, end.forward.take(batch.microbatch), strict=True):
                end.backward.answered(selection.rank, int(taken[batch.microbatch]))
                valid[slice(None) if selection.items is None else selection.items] = bits
                found.append((selection, rows))
        return Rows(_together(transfer, found, self._device, self._dtype), valid, offsets), transfer

    def give_back(self, transfer: Transfer, gradient: Tensor) -> None:
        """Send the gradient of a microbatch's rows to where they came from."""
        for end, selections in transfer.selections:
            if end.returns:
                end.backward.send(transfer.microbatch_id, selections, gradient)

    def end_step(self) -> None:
        """Wait until all sends have completed."""
        for end in self._ends:
            end.backward.release_all()

    def _expect(self, batch: Batch, num_rows: int, width: int) -> _Expected:
        if batch.microbatch not in self._expected:
            ends, offsets = self._ends, None
            if ends[0].rank is None:
                blocks = [RowBlocks.arriving(routing_of(batch.routings, j.source, j.target)) for j in ends]
                begins = covering(blocks, num_rows, ends[0].what)
                transfer = _routed(batch, ends, blocks, begins, width, self._device)
                offsets = torch.from_numpy(begins)
            else:
                transfer = _straight(batch, ends[0], num_rows, width)
            self._expected[batch.microbatch] = _Expected(transfer, offsets)
        return self._expected[batch.microbatch]


class P2PSender:
    """A `Sender` of point-to-point messages."""

    def __init__(self, ends: Sequence[EdgeEnd], device: torch.device, dtype: torch.dtype) -> None:
        self._ends = tuple(ends)
        self._device = device
        self._dtype = dtype

    @property
    def sent_ns(self) -> int:
        """When all headers of the last gradients had arrived, by `time.perf_counter_ns`."""
        return max(end.backward.sent_ns for end in self._ends)

    def send(self, batch: Batch, rows: Rows) -> Transfer:
        """Send the rows of a microbatch to their ranks, and post the receives of their gradients.

        Raises:
            RoutingError: the view's routings do not cover these rows, or cut them within an item.
        """
        values = rows.values.detach()
        if self._ends[0].rank is None:
            what = self._ends[0].what
            blocks = [RowBlocks.leaving(routing_of(batch.routings, j.source, j.target)) for j in self._ends]
            covering(blocks, len(values), what)
            if rows.offsets is None:
                raise RoutingError(f"the module hands on {what} without saying where its items begin; give offsets")
            offsets = rows.offsets.numpy().astype(np.int64)
            transfer = _routed(batch, self._ends, blocks, offsets, values.shape[1], self._device)
        else:
            transfer = _straight(batch, self._ends[0], len(values), values.shape[1])
        for end, selections in transfer.selections:
            end.forward.send(transfer.microbatch_id, selections, values, rows.valid)
            if end.returns:
                end.backward.post(transfer.microbatch_id, selections, transfer.width, with_validity=False)
            else:  # no answer will say that it has arrived
                end.forward.release_completed()
        return transfer

    def gradient(self, transfer: Transfer) -> Tensor:
        """Wait for the gradient of a microbatch's rows, [n, width].

        Raises:
            BrokerMismatchError: the other rank runs another step or plan.
            RankLostError: the other rank is gone.
        """
        found, microbatch = [], transfer.microbatch_id.microbatch
        for end, selections in transfer.selections:
            for selection, (_, rows) in zip(selections, end.backward.take(microbatch), strict=True):
                end.forward.answered(selection.rank, microbatch)
                found.append((selection, rows))
        return _together(transfer, found, self._device, self._dtype)

    def end_step(self) -> None:
        """Wait until all sends have completed."""
        for end in self._ends:
            end.forward.release_all()


def microbatch_id_of(batch: Batch) -> MicrobatchId:
    """The microbatch as headers of messages name it."""
    return MicrobatchId(batch.plan_hash, batch.step, batch.microbatch)


def _straight(batch: Batch, end: EdgeEnd, num_rows: int, width: int) -> Transfer:
    """All rows to or from one rank, even where there are none; the items are those of the view."""
    if end.rank is None:
        raise TypeError(f"{end.source} and {end.target} exchange rows by routings")
    selection = RowSelection(end.rank, num_rows, len(batch.items))
    return Transfer(microbatch_id_of(batch), ((end, (selection,)),), num_rows, width)


def _routed(
    batch: Batch,
    ends: Sequence[EdgeEnd],
    several: Sequence[RowBlocks],
    offsets: I64,
    width: int,
    device: torch.device,
) -> Transfer:
    """What the routings say; ranks that share no rows exchange nothing."""
    found, num_rows = [], int(offsets[-1])
    for end, blocks in zip(ends, several, strict=True):
        blocks.check_ranks(len(end.forward.ranks), end.what)
        items, selections = items_of(blocks, offsets, end.what), []
        for rank, entries in blocks.by_rank():
            index, whole = blocks.row_index(entries), None
            if len(index) < num_rows or not torch.equal(index, torch.arange(num_rows)):
                whole = upload(index, device)
            selections.append(RowSelection(rank, len(index), len(entries), whole, torch.from_numpy(items[entries])))
        found.append((end, tuple(selections)))
    return Transfer(microbatch_id_of(batch), tuple(found), num_rows, width)


def _together(
    transfer: Transfer, found: Sequence[tuple[RowSelection, Tensor]], device: torch.device, dtype: torch.dtype
) -> Tensor:
    """The rows of all messages in order, [n, width]."""
    indexed = [(selection.rows, rows) for selection, rows in found if selection.rows is not None]
    if found and not indexed:
        return found[0][1]
    values = torch.empty(transfer.num_rows, transfer.width, dtype=dtype, device=device)
    for index, rows in indexed:
        values.index_copy_(0, index, rows)
    return values
