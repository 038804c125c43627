"""The messages of one direction of an edge, as one process sends or receives them in the order of microbatches."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainclient.exchange.communicators import P2P, Message, ReceiveWork, SendWork
from trainclient.exchange.message_header import MessageHeader, MessageType, MicrobatchId, decode, encode, make_header

MAX_UNTAKEN = 8
"""Unreceived microbatches that a sender keeps before it waits, where no gradients acknowledge them. Balanced stages are
never so far ahead of each other, so the plan's times hold."""


@dataclass(frozen=True, slots=True, eq=False)
class RowSelection:
    """Which rows of a microbatch go into one message."""

    rank: int
    """Data-parallel rank at the other end."""
    num_rows: int
    num_items: int
    """How many items the rows belong to."""
    rows: Tensor | None = None
    """Indices of the rows at this end, int64 [r] on the computing device; None for all rows in order."""
    items: Tensor | None = None
    """Indices of the items at this end, int64 [k] on the CPU; None for all items in order."""

    def bits(self, valid: Tensor) -> Tensor:
        """The validity of the selected items."""
        return valid if self.items is None else valid[self.items]


@dataclass(frozen=True, slots=True, eq=False)
class _Sent:
    """Sent messages of a microbatch, whose memory is still in use."""

    microbatch: int
    send_work: SendWork
    unanswered: set[int]
    """Ranks that have not answered yet."""


@dataclass(frozen=True, slots=True, eq=False)
class _Posted:
    """Messages of a microbatch that are being received."""

    receive_work: ReceiveWork
    headers: Sequence[MessageHeader]
    messages: Sequence[Message]


class MessageQueue:
    """Sends or receives the messages of one direction of an edge, in the order of microbatches.

    Sends do not block: their memory is kept until every receiver has answered with a gradient, or the step ends. Where
    no gradients return, it is kept until the send has completed.
    """

    def __init__(self, p2p: P2P, ranks: Sequence[int], message_type: MessageType, dtype: torch.dtype) -> None:
        """Send and receive over one direction of an edge.

        Args:
            p2p: moves the messages.
            ranks: global ranks at the other end, indexed by their data-parallel rank.
            message_type: what the messages carry.
            dtype: of the rows.
        """
        self.p2p = p2p
        self.ranks = tuple(ranks)
        self.message_type = message_type
        self.dtype = dtype
        self.sent_ns = 0
        """When the last headers had arrived, by `time.perf_counter_ns`: their rows had been sent by then."""
        self._sent: list[_Sent] = []
        self._posted: dict[int, _Posted] = {}

    def send(
        self,
        microbatch_id: MicrobatchId,
        selections: Sequence[RowSelection],
        values: Tensor,
        valid: Tensor | None = None,
    ) -> None:
        """Send selected rows of `values` [n, width], and the validity of their items out of bool [k] on the CPU."""
        messages = []
        for selection in selections:
            to = self.ranks[selection.rank]
            bits = torch.ones(0, dtype=torch.bool) if valid is None else selection.bits(valid)
            rows = (values if selection.rows is None else values.index_select(0, selection.rows)).contiguous()
            row_bytes = rows.numel() * rows.element_size()
            header = make_header(self.message_type, microbatch_id, len(bits), row_bytes, self.p2p.rank, to)
            messages.append(Message(to, encode(header, bits), rows))
        if messages:
            send_work = self.p2p.send(messages, microbatch_id.microbatch)
            self._sent.append(_Sent(microbatch_id.microbatch, send_work, {selection.rank for selection in selections}))

    def post(
        self, microbatch_id: MicrobatchId, selections: Sequence[RowSelection], width: int, *, with_validity: bool
    ) -> None:
        """Begin to receive what the other ranks send, unless this has begun already."""
        if microbatch_id.microbatch in self._posted:
            return
        headers, messages = [], []
        for selection in selections:
            source, num_valid = self.ranks[selection.rank], selection.num_items if with_validity else 0
            row_bytes = selection.num_rows * width * self.dtype.itemsize
            headers.append(make_header(self.message_type, microbatch_id, num_valid, row_bytes, source, self.p2p.rank))
            rows = self.p2p.empty(selection.num_rows, width, self.dtype)
            messages.append(Message(source, torch.empty(headers[-1].encoded_bytes, dtype=torch.uint8), rows))
        self._posted[microbatch_id.microbatch] = _Posted(
            self.p2p.post(messages, microbatch_id.microbatch), headers, messages
        )

    def take(self, microbatch: int) -> list[tuple[Tensor, Tensor]]:
        """Wait for posted messages: of each the validity, bool [k or 0] on the CPU, and the rows [r, width].

        Raises:
            BrokerMismatchError: a message belongs elsewhere.
            RankLostError: the other rank is gone.
        """
        posted = self._posted.pop(microbatch)
        posted.receive_work.wait_headers()
        if posted.messages:
            self.sent_ns = time.perf_counter_ns()
        bits = [decode(m.header, header) for m, header in zip(posted.messages, posted.headers, strict=True)]
        posted.receive_work.wait_rows()
        return [(valid, m.rows) for valid, m in zip(bits, posted.messages, strict=True)]

    def answered(self, rank: int, microbatch: int) -> None:
        """Release what a rank has answered, up to a microbatch, without waiting."""
        for sent in self._sent:
            if sent.microbatch <= microbatch:
                sent.unanswered.discard(rank)
        self._release([sent for sent in self._sent if not sent.unanswered])

    def release_completed(self) -> None:
        """Release completed sends to ranks that answer nothing; wait only if too many are not completed."""
        self._release([sent for sent in self._sent if sent.send_work.is_completed()])
        self._release(self._sent[:-MAX_UNTAKEN])

    def release_all(self) -> None:
        """Wait until all sends have completed."""
        self._release(list(self._sent))

    def _release(self, found: Sequence[_Sent]) -> None:
        for sent in found:
            sent.send_work.wait()
            self._sent.remove(sent)
