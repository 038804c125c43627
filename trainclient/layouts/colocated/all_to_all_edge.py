"""An edge between two modules of the same ranks, whose rows and gradients move by all-to-alls."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from trainclient.exchange.communicators import Collective, CollectiveWork
from trainclient.exchange.message_header import MessageHeader, MessageType, MicrobatchId, decode, encode, make_header
from trainclient.exchange.message_queue import RowSelection
from trainclient.layouts.colocated.round_rows import RowSelections


@dataclass(frozen=True, slots=True, eq=False)
class _Flight:
    """Rows that are being exchanged, and their headers."""

    told: CollectiveWork
    work: CollectiveWork
    headers: tuple[MessageHeader, ...]
    selections: RowSelections
    width: int
    dtype: torch.dtype


class AllToAllEdge:
    """An edge between two modules of the same ranks, over which rows and gradients move by all-to-alls."""

    def __init__(
        self,
        modules: tuple[str, str],
        collective: Collective,
        headers: Collective,
        message_types: tuple[MessageType, MessageType],
        *,
        returns: bool,
    ) -> None:
        """Exchange rows between two modules.

        Args:
            modules: names of the modules, as rows go forward.
            collective: connects all ranks; each runs both modules.
            headers: connects the CPUs of the same ranks.
            message_types: what the messages carry, forward and backward.
            returns: whether gradients come back.
        """
        self.modules = modules
        self.returns = returns
        self._collective = collective
        self._headers = headers
        self._message_types = message_types
        self._expected: Callable[[int], RowSelections] | None = None
        self._selections: tuple[RowSelections, RowSelections] = (), ()
        self._flight: _Flight | None = None

    @property
    def what(self) -> str:
        """What the rows are, in words."""
        return self._message_types[0].kind.name.lower()

    @property
    def num_ranks(self) -> int:
        """Number of ranks that each module runs on."""
        return self._collective.size

    def expect(self, selections: Callable[[int], RowSelections]) -> None:
        """Set what tells which rows the target gets in the round that begins with a given microbatch."""
        self._expected = selections

    def begin_round(self, first: int, selections: RowSelections) -> None:
        """Prepare the round that begins with a microbatch, in which this rank gives `selections`."""
        if self._expected is None:
            raise RuntimeError(f"rows leave {self.modules[0]} before {self.modules[1]} has begun the step")
        self._selections = selections, self._expected(first)

    def forward(self, microbatch_id: MicrobatchId, values: Tensor, valid: Tensor) -> None:
        """Begin to send rows [n, width] and the validity of their items, bool [k] on the CPU.

        Forward and backward, headers name the first microbatch of the round.
        """
        self._flight = self._begin(self._message_types[0], microbatch_id, self._selections, values, valid)

    def backward(self, microbatch_id: MicrobatchId, gradient: Tensor) -> None:
        """Begin to send the gradient of the received rows, [n, width]."""
        self._flight = self._begin(self._message_types[1], microbatch_id, self._selections[::-1], gradient, None)

    def arrive(self, values: Tensor, valid: Tensor | None = None) -> None:
        """Wait for the last exchange, and write what it brings into `values` [n, width] and `valid` [k].

        Raises:
            BrokerMismatchError: another rank runs another step or plan.
            RankLostError: a rank is gone.
        """
        flight, self._flight = self._flight, None
        if flight is None:
            raise RuntimeError(f"no exchange has begun between {' and '.join(self.modules)}")
        decoded = [decode(told, header) for told, header in zip(flight.told.wait(), flight.headers, strict=True)]
        for rows, bits, selection in zip(flight.work.wait(), decoded, flight.selections, strict=True):
            values[selection.rows] = rows.view(flight.dtype).view(-1, flight.width)
            if valid is not None:
                valid[selection.items] = bits

    def _begin(
        self,
        message_type: MessageType,
        microbatch_id: MicrobatchId,
        sides: tuple[RowSelections, RowSelections],
        values: Tensor,
        valid: Tensor | None,
    ) -> _Flight:
        leaving, arriving = sides
        own_rank, row_bytes = self._collective.rank, values.shape[1] * values.element_size()

        def header(selection: RowSelection, source: int, target: int) -> MessageHeader:
            num_valid = 0 if valid is None else selection.num_items
            return make_header(message_type, microbatch_id, num_valid, selection.num_rows * row_bytes, source, target)

        said, messages = [], []
        for rank, selection in enumerate(leaving):
            bits = torch.ones(0, dtype=torch.bool) if valid is None else selection.bits(valid)
            rows = values if selection.rows is None else values.index_select(0, selection.rows)
            said.append(encode(header(selection, own_rank, rank), bits))
            messages.append(rows.reshape(-1).view(torch.uint8))
        headers = tuple(header(selection, rank, own_rank) for rank, selection in enumerate(arriving))
        told = self._headers.all_to_all(
            self.modules, said, [h.encoded_bytes for h in headers], microbatch_id.microbatch
        )
        work = self._collective.all_to_all(
            self.modules, messages, [h.row_bytes for h in headers], microbatch_id.microbatch
        )
        return _Flight(told, work, headers, arriving, values.shape[1], values.dtype)
