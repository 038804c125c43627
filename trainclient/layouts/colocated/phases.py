"""Moves rows between colocated modules, which run in phases: those of all microbatches of a round by one all-to-all.

Modules that run one after the other on the same ranks are each arranged on their own, so a microbatch of one has rows
of many microbatches of another. The rows of a rank's microbatches are numbered consecutively. By these numbers both
ends know from their views which rows go where, and one collective takes them from the arrangement of one module
straight into that of the next (OrchMLLM, arXiv 2503.23830, "Rearrangement Composition"). Rounds follow one another.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from dataserver.planning import I64
from trainclient.client import Batch
from trainclient.exchange.message_header import MicrobatchId
from trainclient.exchange.message_queue import RowSelection
from trainclient.exchange.point_to_point import Transfer, Views, microbatch_id_of
from trainclient.exchange.routing import RoutingError, RowBlocks, covering, items_of, routing_of
from trainclient.exchange.rows import Rows
from trainclient.layouts.colocated.all_to_all_edge import AllToAllEdge
from trainclient.layouts.colocated.round_rows import RoundRows, round_blocks
from trainclient.upload import upload


class PhaseReceiver:
    """A `Receiver` of the rows that all-to-alls bring."""

    sent_ns = 0
    """A collective does not tell when all ranks have sent."""

    def __init__(self, edges: Sequence[AllToAllEdge], device: torch.device, dtype: torch.dtype) -> None:
        self._edges = tuple(edges)
        self._device = device
        self._dtype = dtype
        self._views: Views | None = None
        self._numbered: RoundRows | None = None
        self._arrived: tuple[Tensor, Tensor] | None = None
        self._returned: list[tuple[MicrobatchId, Tensor]] = []

    @property
    def returns(self) -> bool:
        """Whether any source expects gradients."""
        return any(edge.returns for edge in self._edges)

    def begin_step(self, taken: Sequence[I64], views: Views) -> None:
        """Keep what reads the views of the step, for when the rows of a round are sent."""
        del taken
        self._views = views
        for position, edge in enumerate(self._edges):
            edge.expect(lambda first, position=position: self._number(first).selections[position])  # type: ignore[misc]

    def post(self, edge: int, batch: Batch, num_rows: int, width: int) -> None:
        """Do nothing: the all-to-all that sends rows also receives them."""
        del edge, batch, num_rows, width

    def receive(self, batch: Batch, num_rows: int, width: int) -> tuple[Rows, Transfer]:
        """The rows [num_rows, width] of a microbatch; the first one of a round waits for those of all.

        Raises:
            RoutingError: the views' routings do not cover these rows.
            BrokerMismatchError: another rank runs another step or plan.
            RankLostError: a rank is gone.
        """
        numbered = self._number(batch.round.start)
        if self._arrived is None:
            values = torch.empty(int(numbered.base[-1]), width, dtype=self._dtype, device=self._device)
            self._arrived = values, torch.ones(len(numbered.offsets) - 1, dtype=torch.bool)
            for edge in self._edges:
                edge.arrive(*self._arrived)
        values, valid = self._arrived
        rows, items = numbered.rows(batch.microbatch), numbered.items(batch.microbatch)
        if rows.stop - rows.start != num_rows:
            raise RoutingError(
                f"the routings cover {rows.stop - rows.start} rows of {self._edges[0].what} of microbatch "
                f"{batch.microbatch} where the view has {num_rows}; the server's plan and view do not belong together"
            )
        offsets = torch.from_numpy(np.append(numbered.offsets[items], rows.stop) - rows.start)
        found = Rows(values[rows], valid[items], offsets)
        return found, Transfer(microbatch_id_of(batch), (), num_rows, width)

    def give_back(self, transfer: Transfer, gradient: Tensor) -> None:
        """Collect the gradient of a microbatch's rows, to be sent with those of its round."""
        self._returned.append((transfer.microbatch_id, gradient))

    def flush(self, number: int) -> None:
        """Begin to send the gradients of a round, if there are any."""
        del number
        if not self._returned:
            return
        (microbatch_id, _), *_ = self._returned
        together = torch.cat([gradient for _, gradient in self._returned])
        for edge in self._edges:
            if edge.returns:
                edge.backward(microbatch_id, together)
        self._returned.clear()

    def end_step(self) -> None:
        """Forget the step, whose gradients must all have been sent."""
        _require_flushed(self._returned)
        self._views = self._numbered = self._arrived = None

    def _number(self, first: int) -> RoundRows:
        """Number the rows of the round that begins with a microbatch, and forget those of the round before."""
        if self._numbered is None or self._numbered.first != first:
            if self._views is None:
                raise RuntimeError("rows were asked for before the step began")
            batches, self._arrived = self._views(first), None
            routings = [[routing_of(b.routings, *c.modules) for b in batches] for c in self._edges]
            counts = np.array([[int(r.rows.sum()) for r in found] for found in routings]).sum(axis=0)
            base = np.append(0, counts.cumsum())
            blocks = [round_blocks(found, RowBlocks.arriving, base) for found in routings]
            offsets = covering(blocks, int(base[-1]), self._edges[0].what)
            self._numbered = _number_rows(self._edges, blocks, first, base, offsets, self._device)
        return self._numbered


class PhaseSender:
    """A `Sender` whose rows leave by all-to-alls."""

    sent_ns = 0
    """A collective does not tell when all ranks have sent."""

    def __init__(self, edges: Sequence[AllToAllEdge], device: torch.device, dtype: torch.dtype) -> None:
        self._edges = tuple(edges)
        self._device = device
        self._dtype = dtype
        self._pending: list[tuple[Batch, Rows]] = []
        self._numbered: RoundRows | None = None
        self._gradient: Tensor | None = None

    def send(self, batch: Batch, rows: Rows) -> Transfer:
        """Collect the rows of a microbatch, to be sent with those of its round.

        Raises:
            RoutingError: the views' routings do not cover these rows, or cut them within an item.
        """
        if rows.offsets is None:
            what = self._edges[0].what
            raise RoutingError(f"the module hands on {what} without saying where its items begin; give offsets")
        self._pending.append((batch, replace(rows, values=rows.values.detach())))
        if batch.microbatch == batch.round[-1]:
            self._begin_round()
        return Transfer(microbatch_id_of(batch), (), len(rows.values), rows.values.shape[1])

    def flush(self, number: int) -> None:
        """Begin to send the rows of a round, if there are any."""
        del number
        if not self._pending:
            return
        batches, several = zip(*self._pending, strict=True)
        values, valid = torch.cat([rows.values for rows in several]), torch.cat([rows.valid for rows in several])
        for edge in self._edges:
            edge.forward(microbatch_id_of(batches[0]), values, valid)
        self._pending.clear()

    def gradient(self, transfer: Transfer) -> Tensor:
        """The gradient of a microbatch's rows, [n, width]; the first one of a round waits for those of all.

        Raises:
            BrokerMismatchError: another rank runs another step or plan.
            RankLostError: a rank is gone.
        """
        if self._numbered is None:
            raise RuntimeError("a gradient was asked for before its rows were sent")
        if self._gradient is None:
            shape = int(self._numbered.base[-1]), transfer.width
            self._gradient = torch.empty(shape, dtype=self._dtype, device=self._device)
            for edge in self._edges:
                edge.arrive(self._gradient)
        return self._gradient[self._numbered.rows(transfer.microbatch_id.microbatch)]

    def end_step(self) -> None:
        """Forget the step, whose rows must all have been sent."""
        _require_flushed(self._pending)
        self._numbered = self._gradient = None

    def _begin_round(self) -> None:
        """Number the rows of the round's microbatches, and find out which rank gets which."""
        batches, several = zip(*self._pending, strict=True)
        self._gradient, first = None, batches[0].microbatch
        base = np.append(0, np.cumsum([len(rows.values) for rows in several]))
        offsets = [rows.offsets.numpy()[:-1] + before for rows, before in zip(several, base, strict=False)]
        found = [[routing_of(b.routings, *c.modules) for b in batches] for c in self._edges]
        blocks = [round_blocks(routings, RowBlocks.leaving, base) for routings in found]
        covering(blocks, int(base[-1]), self._edges[0].what)
        ends = np.concatenate([*offsets, base[-1:]]).astype(np.int64)
        self._numbered = _number_rows(self._edges, blocks, first, base, ends, self._device)
        for edge, selections in zip(self._edges, self._numbered.selections, strict=True):
            edge.begin_round(first, selections)


def _require_flushed(left: Sequence[object]) -> None:
    """Raise RuntimeError if rows of a step were not sent, because its program lacks an exchange."""
    if left:
        raise RuntimeError(f"{len(left)} microbatches of rows or gradients were not sent by the end of the step")


def _number_rows(
    edges: Sequence[AllToAllEdge],
    several: Sequence[RowBlocks],
    first: int,
    base: I64,
    offsets: I64,
    device: torch.device,
) -> RoundRows:
    found = []
    for edge, blocks in zip(edges, several, strict=True):
        blocks.check_ranks(edge.num_ranks, edge.what)
        items, entries = items_of(blocks, offsets, edge.what), dict(blocks.by_rank())
        found.append(tuple(_selection(blocks, items, entries, rank, device) for rank in range(edge.num_ranks)))
    return RoundRows(first, base, offsets, tuple(found))


def _selection(blocks: RowBlocks, items: I64, entries: dict[int, I64], rank: int, device: torch.device) -> RowSelection:
    own = entries.get(rank, np.zeros(0, np.int64))
    rows = blocks.row_index(own)
    return RowSelection(rank, len(rows), len(own), upload(rows, device), torch.from_numpy(items[own]))
