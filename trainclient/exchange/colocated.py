"""Where rows enter and leave modules that run in phases: the rows of all microbatches of a phase cross at once.

Modules that run one after the other on the same ranks are arranged each for itself, so a microbatch of one has rows of
many microbatches of another. The rows of a rank's microbatches are numbered one after the other; by these numbers both
sides know from their views which rows go where, and one collective takes them from the arrangement of one module
straight into that of the next (OrchMLLM, arXiv 2503.23830, "Rearrangement Composition"). Rounds cross one by one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from dataserver.planning import I64
from dataserver.planning.plan.plan import Routing
from trainclient.client import Batch
from trainclient.exchange.blocks import RoutingError, RowBlocks, covering, items_of, routing_of
from trainclient.exchange.links import Parcel
from trainclient.exchange.messages import Header, Lane, Stamp, decode, encode, make_header
from trainclient.exchange.pipelined import Shipment, Views, stamp_of
from trainclient.exchange.rows import Rows
from trainclient.exchange.transport import Arrival, Collective
from trainclient.upload import upload

Parcels = tuple[Parcel, ...]
"""For each rank what it gets, or gives."""
_START_BITS = 32
"""Of a row's number within its microbatch, which the protocol has as uint32."""


@dataclass(frozen=True, slots=True, eq=False)
class Numbered:
    """The rows of a round's microbatches of a rank, one after the other, on one side of a module."""

    first: int
    """Microbatch with which the round begins."""
    base: I64
    """int64 [microbatches + 1]: first row of each microbatch, and the end."""
    offsets: I64
    """int64 [k + 1]: first row of each item, and the end."""
    parcels: tuple[Parcels, ...]
    """Of each crossing."""

    def rows(self, microbatch: int) -> slice:
        """Those of a microbatch."""
        number = microbatch - self.first
        return slice(*self.base[number : number + 2].tolist())

    def items(self, microbatch: int) -> slice:
        """Those of a microbatch."""
        rows = self.rows(microbatch)
        return slice(*np.searchsorted(self.offsets[:-1], [rows.start, rows.stop]).tolist())


@dataclass(frozen=True, slots=True, eq=False)
class _Flight:
    """Rows on their way, and beside them what is said of them."""

    told: Arrival
    arrival: Arrival
    headers: tuple[Header, ...]
    parcels: Parcels
    width: int
    dtype: torch.dtype


class Crossing:
    """One way between two modules of the same ranks, there and back."""

    def __init__(
        self,
        way: tuple[str, str],
        collective: Collective,
        headers: Collective,
        lanes: tuple[Lane, Lane],
        *,
        returns: bool,
    ) -> None:
        """Make a crossing.

        Args:
            way: names of the modules, as rows go forward.
            collective: all ranks, each of which runs both modules.
            headers: the same ranks, between their CPUs.
            lanes: what the messages are, forward and backward.
            returns: whether gradients come back.
        """
        self.way = way
        self.returns = returns
        self._collective = collective
        self._headers = headers
        self._lanes = lanes
        self._expected: Callable[[int], Parcels] | None = None
        self._sides: tuple[Parcels, Parcels] = (), ()
        self._flight: _Flight | None = None

    @property
    def what(self) -> str:
        """What the rows are, for messages."""
        return self._lanes[0].kind.name.lower()

    @property
    def num_ranks(self) -> int:
        """Of each module."""
        return self._collective.size

    def expect(self, parcels: Callable[[int], Parcels]) -> None:
        """Let the target say, when it is asked, what it will get in the round that begins with a microbatch."""
        self._expected = parcels

    def begin_round(self, first: int, parcels: Parcels) -> None:
        """Learn what this rank gives in the round that begins with a microbatch, and what it gets."""
        if self._expected is None:
            raise RuntimeError(f"rows leave {self.way[0]} before {self.way[1]} has begun the step")
        self._sides = parcels, self._expected(first)

    def forward(self, stamp: Stamp, values: Tensor, valid: Tensor) -> None:
        """Send off rows [n, width] and the validity of their items, bool [k] on the CPU.

        The stamp is that of the first microbatch of the round, here and on the way back.
        """
        self._flight = self._begin(self._lanes[0], stamp, self._sides, values, valid)

    def backward(self, stamp: Stamp, gradient: Tensor) -> None:
        """Send off the gradient of the rows that arrived, [n, width]."""
        self._flight = self._begin(self._lanes[1], stamp, self._sides[::-1], gradient, None)

    def arrive(self, values: Tensor, valid: Tensor | None = None) -> None:
        """Wait for what was sent off last, and put it into its places in `values` [n, width] and `valid` [k].

        Raises:
            BrokerMismatchError: a rank runs something else.
            PeerLostError: a rank is gone.
        """
        flight, self._flight = self._flight, None
        if flight is None:
            raise RuntimeError(f"nothing is on its way between {' and '.join(self.way)}")
        decoded = [decode(told, header) for told, header in zip(flight.told.wait(), flight.headers, strict=True)]
        for rows, bits, parcel in zip(flight.arrival.wait(), decoded, flight.parcels, strict=True):
            values[parcel.rows] = rows.view(flight.dtype).view(-1, flight.width)
            if valid is not None:
                valid[parcel.items] = bits

    def _begin(
        self, lane: Lane, stamp: Stamp, sides: tuple[Parcels, Parcels], values: Tensor, valid: Tensor | None
    ) -> _Flight:
        leaving, arriving = sides
        rank, row_bytes = self._collective.rank, values.shape[1] * values.element_size()

        def header(parcel: Parcel, source: int, target: int) -> Header:
            num_valid = 0 if valid is None else parcel.num_items
            return make_header(lane, stamp, num_valid, parcel.num_rows * row_bytes, source, target)

        said, messages = [], []
        for peer, parcel in enumerate(leaving):
            bits = torch.ones(0, dtype=torch.bool) if valid is None else parcel.bits(valid)
            rows = values if parcel.rows is None else values.index_select(0, parcel.rows)
            said.append(encode(header(parcel, rank, peer), bits))
            messages.append(rows.reshape(-1).view(torch.uint8))
        headers = tuple(header(parcel, peer, rank) for peer, parcel in enumerate(arriving))
        told = self._headers.all_to_all(self.way, said, [h.stamp_bytes for h in headers], stamp.microbatch)
        arrival = self._collective.all_to_all(self.way, messages, [h.row_bytes for h in headers], stamp.microbatch)
        return _Flight(told, arrival, headers, arriving, values.shape[1], values.dtype)


class PhaseInlet:
    """Where rows arrive, and their gradients leave, to the sources that take any: an `Entry`."""

    stamped_ns = 0
    """Of a collective nothing says that all have sent, before it is over."""

    def __init__(self, crossings: Sequence[Crossing], device: torch.device, dtype: torch.dtype) -> None:
        self._crossings = tuple(crossings)
        self._device = device
        self._dtype = dtype
        self._views: Views | None = None
        self._numbered: Numbered | None = None
        self._arrived: tuple[Tensor, Tensor] | None = None
        self._returned: list[tuple[Stamp, Tensor]] = []

    @property
    def returns(self) -> bool:
        """Whether any source takes gradients."""
        return any(crossing.returns for crossing in self._crossings)

    def begin_step(self, taken: Sequence[I64], views: Views) -> None:
        """Learn how to read the views of the step, which are asked for when the rows of their round leave."""
        del taken
        self._views = views
        for position, crossing in enumerate(self._crossings):
            crossing.expect(lambda first, position=position: self._number(first).parcels[position])  # type: ignore[misc]

    def post(self, way: int, batch: Batch, num_rows: int, width: int) -> None:
        """See `Entry`; the collective by which rows leave is also how they arrive."""
        del way, batch, num_rows, width

    def receive(self, batch: Batch, num_rows: int, width: int) -> tuple[Rows, Shipment]:
        """The rows [num_rows, width] of a microbatch; the first one of a round waits for those of all.

        Raises:
            RoutingError: the views' routings do not cover these rows.
            BrokerMismatchError: a rank runs something else.
            PeerLostError: a rank is gone.
        """
        numbered = self._number(batch.round.start)
        if self._arrived is None:
            values = torch.empty(int(numbered.base[-1]), width, dtype=self._dtype, device=self._device)
            self._arrived = values, torch.ones(len(numbered.offsets) - 1, dtype=torch.bool)
            for crossing in self._crossings:
                crossing.arrive(*self._arrived)
        values, valid = self._arrived
        rows, items = numbered.rows(batch.microbatch), numbered.items(batch.microbatch)
        if rows.stop - rows.start != num_rows:
            raise RoutingError(
                f"the routings cover {rows.stop - rows.start} rows of {self._crossings[0].what} of microbatch "
                f"{batch.microbatch} where the view has {num_rows}; the server's plan and view do not belong together"
            )
        offsets = torch.from_numpy(np.append(numbered.offsets[items], rows.stop) - rows.start)
        found = Rows(values[rows], valid[items], offsets)
        return found, Shipment(stamp_of(batch), (), num_rows, width)

    def give_back(self, shipment: Shipment, gradient: Tensor) -> None:
        """Take the gradient of a microbatch's rows; those of a round leave together."""
        self._returned.append((shipment.stamp, gradient))

    def depart(self, number: int) -> None:
        """Send off the gradients of a round, if they were given back."""
        del number
        if not self._returned:
            return
        (stamp, _), *_ = self._returned
        together = torch.cat([gradient for _, gradient in self._returned])
        for crossing in self._crossings:
            if crossing.returns:
                crossing.backward(stamp, together)
        self._returned.clear()

    def end_step(self) -> None:
        """Forget the step."""
        _require_departed(self._returned)
        self._views = self._numbered = self._arrived = None

    def _number(self, first: int) -> Numbered:
        """Number the rows of the round that begins with a microbatch, and forget those of the round before."""
        if self._numbered is None or self._numbered.first != first:
            if self._views is None:
                raise RuntimeError("rows arrive before the step has begun")
            batches, self._arrived = self._views(first), None
            routings = [[routing_of(b.routings, *c.way) for b in batches] for c in self._crossings]
            counts = np.array([[int(r.rows.sum()) for r in found] for found in routings]).sum(axis=0)
            base = np.append(0, counts.cumsum())
            blocks = [_shifted(found, RowBlocks.arriving, base) for found in routings]
            offsets = covering(blocks, int(base[-1]), self._crossings[0].what)
            self._numbered = _numbered(self._crossings, blocks, first, base, offsets, self._device)
        return self._numbered


class PhaseOutlet:
    """Where rows leave, and their gradients arrive: an `Exit`."""

    stamped_ns = 0
    """Of a collective nothing says that all have sent, before it is over."""

    def __init__(self, crossings: Sequence[Crossing], device: torch.device, dtype: torch.dtype) -> None:
        self._crossings = tuple(crossings)
        self._device = device
        self._dtype = dtype
        self._kept: list[tuple[Batch, Rows]] = []
        self._numbered: Numbered | None = None
        self._gradient: Tensor | None = None

    def send(self, batch: Batch, rows: Rows) -> Shipment:
        """Take the rows of a microbatch; those of a round leave together.

        Raises:
            RoutingError: the views' routings do not cover these rows, or cut them within an item.
        """
        if rows.offsets is None:
            what = self._crossings[0].what
            raise RoutingError(f"the module hands on {what} without saying where its items begin; give offsets")
        self._kept.append((batch, replace(rows, values=rows.values.detach())))
        if batch.microbatch == batch.round[-1]:
            self._begin_round()
        return Shipment(stamp_of(batch), (), len(rows.values), rows.values.shape[1])

    def depart(self, number: int) -> None:
        """Send off the rows of a round, if there were any sent."""
        del number
        if not self._kept:
            return
        batches, several = zip(*self._kept, strict=True)
        values, valid = torch.cat([rows.values for rows in several]), torch.cat([rows.valid for rows in several])
        for crossing in self._crossings:
            crossing.forward(stamp_of(batches[0]), values, valid)
        self._kept.clear()

    def gradient(self, shipment: Shipment) -> Tensor:
        """The gradient of a microbatch's rows, [n, width]; the first one of a round waits for those of all.

        Raises:
            BrokerMismatchError: a rank runs something else.
            PeerLostError: a rank is gone.
        """
        if self._numbered is None:
            raise RuntimeError("a gradient is asked for before the rows have left")
        if self._gradient is None:
            shape = int(self._numbered.base[-1]), shipment.width
            self._gradient = torch.empty(shape, dtype=self._dtype, device=self._device)
            for crossing in self._crossings:
                crossing.arrive(self._gradient)
        return self._gradient[self._numbered.rows(shipment.stamp.microbatch)]

    def end_step(self) -> None:
        """Forget the step."""
        _require_departed(self._kept)
        self._numbered = self._gradient = None

    def _begin_round(self) -> None:
        """Number the rows of the microbatches that were sent, and find out who gets which."""
        batches, several = zip(*self._kept, strict=True)
        self._gradient, first = None, batches[0].microbatch
        base = np.append(0, np.cumsum([len(rows.values) for rows in several]))
        offsets = [rows.offsets.numpy()[:-1] + before for rows, before in zip(several, base, strict=False)]
        found = [[routing_of(b.routings, *c.way) for b in batches] for c in self._crossings]
        blocks = [_shifted(routings, RowBlocks.leaving, base) for routings in found]
        covering(blocks, int(base[-1]), self._crossings[0].what)
        ends = np.concatenate([*offsets, base[-1:]]).astype(np.int64)
        self._numbered = _numbered(self._crossings, blocks, first, base, ends, self._device)
        for crossing, parcels in zip(self._crossings, self._numbered.parcels, strict=True):
            crossing.begin_round(first, parcels)


def _require_departed(left: Sequence[object]) -> None:
    """Raise RuntimeError for rows of a step that are left behind: its program lacks an exchange."""
    if left:
        raise RuntimeError(f"{len(left)} microbatches of rows, or of gradients, have not left at the end of the step")


def _shifted(routings: Sequence[Routing], side: Callable[[Routing], RowBlocks], base: I64) -> RowBlocks:
    """The blocks of all microbatches, by the numbers of their rows; ordered as they leave."""
    several = [side(routing) for routing in routings]
    leaving = [(r.source_microbatch << _START_BITS) | r.source_start for r in routings]
    return RowBlocks(
        peer=np.concatenate([blocks.peer for blocks in several]),
        start=np.concatenate([blocks.start + first for blocks, first in zip(several, base, strict=False)]),
        rows=np.concatenate([blocks.rows for blocks in several]),
        order=np.concatenate(leaving),
    )


def _numbered(
    crossings: Sequence[Crossing],
    several: Sequence[RowBlocks],
    first: int,
    base: I64,
    offsets: I64,
    device: torch.device,
) -> Numbered:
    found = []
    for crossing, blocks in zip(crossings, several, strict=True):
        blocks.check_peers(crossing.num_ranks, crossing.what)
        items, entries = items_of(blocks, offsets, crossing.what), dict(blocks.by_peer())
        found.append(tuple(_parcel(blocks, items, entries, peer, device) for peer in range(crossing.num_ranks)))
    return Numbered(first, base, offsets, tuple(found))


def _parcel(blocks: RowBlocks, items: I64, entries: dict[int, I64], peer: int, device: torch.device) -> Parcel:
    own = entries.get(peer, np.zeros(0, np.int64))
    rows = blocks.row_index(own)
    return Parcel(peer, len(rows), len(own), upload(rows, device), torch.from_numpy(items[own]))
