"""What processes are to each other that work on the same view."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from trainclient.client import Batch
from trainclient.exchange.messages import BrokerMismatchError


class Peers(Protocol):
    """The peers of a process, itself among them."""

    @property
    def leader(self) -> int:
        """Global rank of the first one."""

    @property
    def leads(self) -> bool:
        """Whether this process is the first one."""

    def hand_on(self, message: Tensor) -> None:
        """Overwrite a tensor with the first peer's, of the same shape; all peers call this together."""


class Sharers(Peers, Protocol):
    """Peers that share the rows of a microbatch's sequences: each computes a part of them."""

    @property
    def size(self) -> int:
        """Number of peers."""

    @property
    def position(self) -> int:
        """Of this process among them."""

    def begin(
        self, values: Tensor, leaving: Sequence[int], arriving: Sequence[int], *, midway: bool = False
    ) -> Callable[[], Tensor]:
        """Hand rows to all peers, and take theirs; their gradients go the other way.

        All peers call this together, also again before what was begun has been waited for.

        Args:
            values: [n, ...], first those for the first peer.
            leaving: how many rows each peer gets.
            arriving: how many rows each peer has for this one.
            midway: whether all peers are in the middle of the same computing; else one may have yet to receive what it
                hands on.

        Returns:
            What waits for theirs, [m, ...], first those of the first peer.
        """


@dataclass(frozen=True, slots=True)
class SharedSequences:
    """The groups in which a process may share the sequences of a microbatch; made once, for all microbatches."""

    rank: int
    """Data-parallel rank of this process within the module."""
    pool: Mapping[tuple[int, ...], Sharers]
    """By their ranks; by one alone where the processes of a rank share all of its microbatches (sp)."""

    @property
    def always(self) -> Sharers | None:
        """Those of all microbatches, where they are the same; None where groups change."""
        return self.pool.get((self.rank,))

    def of(self, batch: Batch) -> Sharers | None:
        """Those of a microbatch; None where this process has its sequences alone. Errors as in `ranks`."""
        return self.pool.get(self.ranks(batch))

    def ranks(self, batch: Batch) -> tuple[int, ...]:
        """All ranks that share the sequences of a microbatch with this one, itself among them.

        Raises:
            BrokerMismatchError: the plan has a group that no layout of the job has.
        """
        ranks = next((g.ranks for g in batch.sequence_parallel_groups if self.rank in g.ranks), (self.rank,))
        if len(ranks) > 1 and ranks not in self.pool:
            raise BrokerMismatchError(
                f"the plan of step {batch.step} has rank {self.rank} share microbatch {batch.microbatch} with ranks "
                f"{list(ranks)}; groups of this job are runs of {sorted({len(found) for found in self.pool})} ranks "
                "that begin at a multiple of that: all ranks must be started with the job that the servers plan"
            )
        return ranks
