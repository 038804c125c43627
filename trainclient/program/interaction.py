"""What couples the losses of several microbatches, as a chunk's runner sees it."""

from typing import Protocol

from torch import Tensor

from dataserver.planning.simulation import Operation
from trainclient.client import Batch
from trainclient.modules import Features


class Interaction(Protocol):
    """One process's part in the interactions of a step: each makes one loss of the features of several microbatches."""

    def add(self, batch: Batch, features: Features) -> None:
        """Take what a forward has made."""

    def run(self, operation: Operation) -> Tensor:
        """Run an interaction, after its features have left.

        Returns:
            What this process adds to the sum of the losses, scalar.

        Raises:
            BrokerMismatchError: another process runs another step or plan.
            RankLostError: another process is gone.
        """

    def roots(self, microbatch: int, features: Features) -> list[tuple[Tensor, Tensor]]:
        """What a backward begins with, after the interaction: what a microbatch has made, and the gradient of each."""
