"""What a chunk calls to receive rows and to send them, however they move."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from dataserver.planning import I64
from trainclient.client import Batch
from trainclient.exchange.point_to_point import Transfer, Views
from trainclient.exchange.rows import Rows


class Receiver(Protocol):
    """Receives the rows of a chunk, and sends their gradients back."""

    @property
    def returns(self) -> bool:
        """Whether any source expects gradients."""

    @property
    def sent_ns(self) -> int:
        """When all of the last rows were known to have been sent, by `time.perf_counter_ns`; 0 for collectives."""

    def begin_step(self, taken: Sequence[I64], views: Views) -> None:
        """Prepare for the rows of a step.

        Args:
            taken: for each edge int64 [microbatches]: the last microbatch whose gradients the source takes before it
                sends the rows of this one; -1 for none.
            views: those of this chunk's module.
        """

    def post(self, edge: int, batch: Batch, num_rows: int, width: int) -> None:
        """Begin to receive the rows of a microbatch over one of the edges."""

    def receive(self, batch: Batch, num_rows: int, width: int) -> tuple[Rows, Transfer]:
        """Wait for the rows [num_rows, width] of a microbatch."""

    def give_back(self, transfer: Transfer, gradient: Tensor) -> None:
        """Send the gradient of a microbatch's rows back."""

    def end_step(self) -> None:
        """Wait until all that was sent has left, and forget the step."""


class Sender(Protocol):
    """Sends the rows of a chunk, and receives their gradients."""

    @property
    def sent_ns(self) -> int:
        """When all of the last gradients were known to have been sent, as in `Receiver`."""

    def send(self, batch: Batch, rows: Rows) -> Transfer:
        """Send the rows of a microbatch."""

    def gradient(self, transfer: Transfer) -> Tensor:
        """Wait for the gradient of a microbatch's rows, [n, width]."""

    def end_step(self) -> None:
        """Forget what belongs to the step that ends."""


class Buffer(Protocol):
    """Collects what several microbatches send, until the program has it exchanged at once."""

    def flush(self, number: int) -> None:
        """Begin to send what was collected, if anything; this does not wait for it to arrive.

        Args:
            number: the number of the operation.

        Raises:
            RankLostError: another rank is gone.
        """
