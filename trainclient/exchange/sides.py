"""What the two sides of a chunk are to whoever runs it, however its rows move."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from dataserver.planning import I64
from trainclient.client import Batch
from trainclient.exchange.pipelined import Shipment, Views
from trainclient.exchange.rows import Rows


class Entry(Protocol):
    """Where rows enter a chunk, and their gradients leave it."""

    @property
    def returns(self) -> bool:
        """Whether any source takes gradients."""

    @property
    def stamped_ns(self) -> int:
        """When all of the last rows were known to have been sent, by `time.perf_counter_ns`; of collectives 0."""

    def begin_step(self, taken: Sequence[I64], views: Views) -> None:
        """Learn what there is to know of a step before its rows come.

        Args:
            taken: for each way int64 [microbatches]: the last microbatch whose gradients the source takes before it
                sends the rows of this one; -1 for none.
            views: of this chunk's module.
        """

    def post(self, way: int, batch: Batch, num_rows: int, width: int) -> None:
        """Begin to receive the rows of a microbatch over one of the ways."""

    def receive(self, batch: Batch, num_rows: int, width: int) -> tuple[Rows, Shipment]:
        """Wait for the rows [num_rows, width] of a microbatch."""

    def give_back(self, shipment: Shipment, gradient: Tensor) -> None:
        """Hand on the gradient of a microbatch's rows."""

    def end_step(self) -> None:
        """Wait until all that was sent has left, and forget the step."""


class Exit(Protocol):
    """Where rows leave a chunk, and their gradients enter it."""

    @property
    def stamped_ns(self) -> int:
        """As of `Entry`, of gradients."""

    def send(self, batch: Batch, rows: Rows) -> Shipment:
        """Hand on the rows of a microbatch."""

    def gradient(self, shipment: Shipment) -> Tensor:
        """Wait for the gradient of a microbatch's rows, [n, width]."""

    def end_step(self) -> None:
        """See `Entry`."""


class Collecting(Protocol):
    """What keeps the rows of several microbatches until the program has them exchanged."""

    def depart(self, number: int) -> None:
        """Begin to hand all ranks what was collected, if anything was; whoever needs it waits for it.

        Args:
            number: that of the operation.

        Raises:
            PeerLostError: a rank is gone.
        """
