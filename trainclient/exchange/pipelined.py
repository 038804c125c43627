"""Where rows enter and leave a chunk: all its ways on one side together.

The rows of several sources make up the input of a chunk, as those of several encoders do; and several targets may
share its output. Which rows are whose, the routings in the view say; between chunks of one module it is all of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dataserver.planning import I64
from trainclient.client import Batch
from trainclient.exchange.blocks import RoutingError, RowBlocks, covering, items_of, routing_of
from trainclient.exchange.links import Link, Parcel
from trainclient.exchange.messages import Stamp
from trainclient.exchange.rows import Rows
from trainclient.upload import upload

Views = Callable[[int], Sequence[Batch]]
"""Reads all microbatches of a module's round that begins with a microbatch."""


@dataclass(frozen=True, slots=True, eq=False)
class Joint:
    """This process's end of one way of the graph."""

    source: str
    """Module at the sending end of the forward pass."""
    target: str
    forward: Link
    backward: Link
    peer: int | None = None
    """The rank at the other end that has all rows; None where routings say who has which."""
    returns: bool = True
    """Whether gradients come back."""

    @property
    def what(self) -> str:
        """What the rows are, for messages."""
        return self.forward.lane.kind.name.lower()


@dataclass(frozen=True, slots=True, eq=False)
class Shipment:
    """The rows of one microbatch on one side of a chunk, from its forward to its backward."""

    stamp: Stamp
    parcels: tuple[tuple[Joint, tuple[Parcel, ...]], ...]
    num_rows: int
    width: int


@dataclass(slots=True, eq=False)
class _Expected:
    """A microbatch that is to arrive."""

    shipment: Shipment
    offsets: Tensor | None


class Inlet:
    """Where rows arrive, and their gradients leave, to the sources that take any."""

    def __init__(self, joints: Sequence[Joint], device: torch.device, dtype: torch.dtype) -> None:
        self._joints = tuple(joints)
        self._device = device
        self._dtype = dtype
        self._taken: tuple[I64, ...] = ()
        self._expected: dict[int, _Expected] = {}

    @property
    def returns(self) -> bool:
        """Whether any source takes gradients."""
        return any(joint.returns for joint in self._joints)

    @property
    def stamped_ns(self) -> int:
        """When all stamps of the last rows were there, by `time.perf_counter_ns`."""
        return max(joint.forward.stamped_ns for joint in self._joints)

    def begin_step(self, taken: Sequence[I64], views: Views) -> None:
        """Learn what the sources have done when they send.

        Args:
            taken: for each joint int64 [microbatches]: the last microbatch whose gradients the source takes before it
                sends the rows of this one; -1 for none.
            views: see `Entry`.
        """
        del views  # rows come microbatch by microbatch, each with its view
        self._taken = tuple(taken)

    def post(self, way: int, batch: Batch, num_rows: int, width: int) -> None:
        """Begin to receive the rows of a microbatch over one of the ways, unless that was begun before.

        Raises:
            RoutingError: the view's routings do not cover the rows [num_rows, width] of all ways.
        """
        shipment = self._expect(batch, num_rows, width).shipment
        joint, parcels = shipment.parcels[way]
        joint.forward.post(shipment.stamp, parcels, width, with_validity=True)

    def receive(self, batch: Batch, num_rows: int, width: int) -> tuple[Rows, Shipment]:
        """Wait for the rows [num_rows, width] of a microbatch.

        Raises:
            RoutingError: the view's routings do not cover these rows.
            BrokerMismatchError: a peer runs something else.
            PeerLostError: a peer is gone.
        """
        for way in range(len(self._joints)):
            self.post(way, batch, num_rows, width)
        expected = self._expected.pop(batch.microbatch)
        shipment, offsets = expected.shipment, expected.offsets
        count = len(batch.items) if offsets is None else len(offsets) - 1
        valid, found = torch.ones(count, dtype=torch.bool), []
        for (joint, parcels), taken in zip(shipment.parcels, self._taken, strict=True):
            for parcel, (bits, rows) in zip(parcels, joint.forward.take(batch.microbatch), strict=True):
                joint.backward.answered(parcel.peer, int(taken[batch.microbatch]))
                valid[slice(None) if parcel.items is None else parcel.items] = bits
                found.append((parcel, rows))
        return Rows(_together(shipment, found, self._device, self._dtype), valid, offsets), shipment

    def give_back(self, shipment: Shipment, gradient: Tensor) -> None:
        """Send the gradient of a microbatch's rows to where they came from."""
        for joint, parcels in shipment.parcels:
            if joint.returns:
                joint.backward.send(shipment.stamp, parcels, gradient)

    def end_step(self) -> None:
        """Wait until all that was sent has left."""
        for joint in self._joints:
            joint.backward.release_all()

    def _expect(self, batch: Batch, num_rows: int, width: int) -> _Expected:
        if batch.microbatch not in self._expected:
            joints, offsets = self._joints, None
            if joints[0].peer is None:
                blocks = [RowBlocks.arriving(routing_of(batch.routings, j.source, j.target)) for j in joints]
                begins = covering(blocks, num_rows, joints[0].what)
                shipment = _routed(batch, joints, blocks, begins, width, self._device)
                offsets = torch.from_numpy(begins)
            else:
                shipment = _straight(batch, joints[0], num_rows, width)
            self._expected[batch.microbatch] = _Expected(shipment, offsets)
        return self._expected[batch.microbatch]


class Outlet:
    """Where rows leave, and their gradients arrive."""

    def __init__(self, joints: Sequence[Joint], device: torch.device, dtype: torch.dtype) -> None:
        self._joints = tuple(joints)
        self._device = device
        self._dtype = dtype

    @property
    def stamped_ns(self) -> int:
        """When all stamps of the last gradients were there, by `time.perf_counter_ns`."""
        return max(joint.backward.stamped_ns for joint in self._joints)

    def send(self, batch: Batch, rows: Rows) -> Shipment:
        """Send the rows of a microbatch to whom they belong, and post the receives of their gradients.

        Raises:
            RoutingError: the view's routings do not cover these rows, or cut them within an item.
        """
        values = rows.values.detach()
        if self._joints[0].peer is None:
            what = self._joints[0].what
            blocks = [RowBlocks.leaving(routing_of(batch.routings, j.source, j.target)) for j in self._joints]
            covering(blocks, len(values), what)
            if rows.offsets is None:
                raise RoutingError(f"the module hands on {what} without saying where its items begin; give offsets")
            offsets = rows.offsets.numpy().astype(np.int64)
            shipment = _routed(batch, self._joints, blocks, offsets, values.shape[1], self._device)
        else:
            shipment = _straight(batch, self._joints[0], len(values), values.shape[1])
        for joint, parcels in shipment.parcels:
            joint.forward.send(shipment.stamp, parcels, values, rows.valid)
            if joint.returns:
                joint.backward.post(shipment.stamp, parcels, shipment.width, with_validity=False)
            else:  # no answer will say that it has arrived
                joint.forward.release_left()
        return shipment

    def gradient(self, shipment: Shipment) -> Tensor:
        """Wait for the gradient of a microbatch's rows, [n, width].

        Raises:
            BrokerMismatchError: a peer runs something else.
            PeerLostError: a peer is gone.
        """
        found, microbatch = [], shipment.stamp.microbatch
        for joint, parcels in shipment.parcels:
            for parcel, (_, rows) in zip(parcels, joint.backward.take(microbatch), strict=True):
                joint.forward.answered(parcel.peer, microbatch)
                found.append((parcel, rows))
        return _together(shipment, found, self._device, self._dtype)

    def end_step(self) -> None:
        """Wait until all that was sent has left."""
        for joint in self._joints:
            joint.forward.release_all()


def stamp_of(batch: Batch) -> Stamp:
    """What the messages of a microbatch are stamped with."""
    return Stamp(batch.plan_hash, batch.step, batch.microbatch)


def _straight(batch: Batch, joint: Joint, num_rows: int, width: int) -> Shipment:
    """All rows to or from one rank, even where there are none; the items are those of the view."""
    if joint.peer is None:
        raise TypeError(f"{joint.source} and {joint.target} exchange rows by routings")
    parcel = Parcel(joint.peer, num_rows, len(batch.items))
    return Shipment(stamp_of(batch), ((joint, (parcel,)),), num_rows, width)


def _routed(
    batch: Batch, joints: Sequence[Joint], several: Sequence[RowBlocks], offsets: I64, width: int, device: torch.device
) -> Shipment:
    """What the routings say; ranks that share no rows exchange nothing."""
    found, num_rows = [], int(offsets[-1])
    for joint, blocks in zip(joints, several, strict=True):
        blocks.check_peers(len(joint.forward.peers), joint.what)
        items, parcels = items_of(blocks, offsets, joint.what), []
        for peer, entries in blocks.by_peer():
            index, whole = blocks.row_index(entries), None
            if len(index) < num_rows or not torch.equal(index, torch.arange(num_rows)):
                whole = upload(index, device)
            parcels.append(Parcel(peer, len(index), len(entries), whole, torch.from_numpy(items[entries])))
        found.append((joint, tuple(parcels)))
    return Shipment(stamp_of(batch), tuple(found), num_rows, width)


def _together(
    shipment: Shipment, found: Sequence[tuple[Parcel, Tensor]], device: torch.device, dtype: torch.dtype
) -> Tensor:
    """The rows of all parcels in their places, [n, width]."""
    placed = [(parcel.rows, rows) for parcel, rows in found if parcel.rows is not None]
    if found and not placed:
        return found[0][1]
    values = torch.empty(shipment.num_rows, shipment.width, dtype=dtype, device=device)
    for index, rows in placed:
        values.index_copy_(0, index, rows)
    return values
