"""One process's end of the messages between two chunks, in one direction."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainclient.exchange.messages import Header, Lane, Stamp, decode, encode, make_header
from trainclient.exchange.transport import Channel, Departure, Message, Receipt

MAX_UNTAKEN = 8
"""Microbatches of which rows may wait for targets that return no gradients: far more than balanced stages are ahead of
each other, so that nothing waits for it which the plan does not know."""


@dataclass(frozen=True, slots=True, eq=False)
class Parcel:
    """The rows of a microbatch that one message carries."""

    peer: int
    """Data-parallel rank at the other end."""
    num_rows: int
    num_items: int
    """Items that the rows belong to."""
    rows: Tensor | None = None
    """Which rows of this end, int64 [r] on the device of the computation; None for all in their order."""
    items: Tensor | None = None
    """Which items of this end, int64 [k] on the CPU; None for all in their order."""

    def bits(self, valid: Tensor) -> Tensor:
        """Validity of the parcel's items."""
        return valid if self.items is None else valid[self.items]


@dataclass(frozen=True, slots=True, eq=False)
class _Sent:
    """The messages of a microbatch whose memory is in use."""

    microbatch: int
    departure: Departure
    unanswered: set[int]
    """Peers of which nothing says yet that they have them."""


@dataclass(frozen=True, slots=True, eq=False)
class _Posted:
    """The messages of a microbatch that are waited for."""

    receipt: Receipt
    headers: Sequence[Header]
    messages: Sequence[Message]


class Link:
    """Sends or receives what one direction of a way carries, in the order of microbatches.

    Sends do not block: their memory is kept until all peers have answered, or the step ends. Where no answers come, it
    is kept until they have left, and a send waits for one long before it.
    """

    def __init__(self, channel: Channel, peers: Sequence[int], lane: Lane, dtype: torch.dtype) -> None:
        """Make a link.

        Args:
            channel: carries one direction.
            peers: global ranks at the other end, indexed by their data-parallel rank.
            lane: what the messages are.
            dtype: of the rows.
        """
        self.channel = channel
        self.peers = tuple(peers)
        self.lane = lane
        self.dtype = dtype
        self.stamped_ns = 0
        """When the last stamps were there, by `time.perf_counter_ns`: the rows had been sent."""
        self._sent: list[_Sent] = []
        self._posted: dict[int, _Posted] = {}

    def send(self, stamp: Stamp, parcels: Sequence[Parcel], values: Tensor, valid: Tensor | None = None) -> None:
        """Send parcels of `values` [n, width], with the valid bits of their items, out of bool [k] on the CPU."""
        messages = []
        for parcel in parcels:
            to, bits = self.peers[parcel.peer], torch.ones(0, dtype=torch.bool) if valid is None else parcel.bits(valid)
            rows = (values if parcel.rows is None else values.index_select(0, parcel.rows)).contiguous()
            row_bytes = rows.numel() * rows.element_size()
            header = make_header(self.lane, stamp, len(bits), row_bytes, self.channel.rank, to)
            messages.append(Message(to, encode(header, bits), rows))
        if messages:
            departure = self.channel.send(messages, stamp.microbatch)
            self._sent.append(_Sent(stamp.microbatch, departure, {parcel.peer for parcel in parcels}))

    def post(self, stamp: Stamp, parcels: Sequence[Parcel], width: int, *, with_validity: bool) -> None:
        """Begin to receive what the peers' `send` sends, unless that was begun before."""
        if stamp.microbatch in self._posted:
            return
        headers, messages = [], []
        for parcel in parcels:
            source, num_valid = self.peers[parcel.peer], parcel.num_items if with_validity else 0
            row_bytes = parcel.num_rows * width * self.dtype.itemsize
            headers.append(make_header(self.lane, stamp, num_valid, row_bytes, source, self.channel.rank))
            rows = self.channel.empty(parcel.num_rows, width, self.dtype)
            messages.append(Message(source, torch.empty(headers[-1].stamp_bytes, dtype=torch.uint8), rows))
        self._posted[stamp.microbatch] = _Posted(self.channel.post(messages, stamp.microbatch), headers, messages)

    def take(self, microbatch: int) -> list[tuple[Tensor, Tensor]]:
        """Wait for what was posted: for each parcel bool [k or 0] on the CPU, and rows [r, width].

        Raises:
            BrokerMismatchError: a message belongs elsewhere.
            PeerLostError: a peer is gone.
        """
        posted = self._posted.pop(microbatch)
        posted.receipt.wait_stamps()
        if posted.messages:
            self.stamped_ns = time.perf_counter_ns()
        bits = [decode(m.stamp, header) for m, header in zip(posted.messages, posted.headers, strict=True)]
        posted.receipt.wait_rows()
        return [(valid, m.rows) for valid, m in zip(bits, posted.messages, strict=True)]

    def answered(self, peer: int, microbatch: int) -> None:
        """Release what a peer has answered, up to a microbatch; this waits for nothing."""
        for sent in self._sent:
            if sent.microbatch <= microbatch:
                sent.unanswered.discard(peer)
        self._release([sent for sent in self._sent if not sent.unanswered])

    def release_left(self) -> None:
        """Release what has left for peers that answer nothing; wait only where too much has not."""
        self._release([sent for sent in self._sent if sent.departure.has_left()])
        self._release(self._sent[:-MAX_UNTAKEN])

    def release_all(self) -> None:
        """Wait until all that was sent has left."""
        self._release(list(self._sent))

    def _release(self, found: Sequence[_Sent]) -> None:
        for sent in found:
            sent.departure.wait()
            self._sent.remove(sent)
