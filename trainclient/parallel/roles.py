"""What one process computes for a microbatch: forward, then backward, by the kind of its module.

A role receives its inputs from the stage before, runs its module, and sends the outputs on; backward it receives the
gradients of its outputs and sends back those of its inputs. It keeps a microbatch's graph between the two.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import nn

from trainclient.client import Batch
from trainclient.parallel.broker import Link
from trainclient.parallel.stopwatch import Stopwatch

Kept = TypeVar("Kept")


@dataclass(frozen=True, slots=True)
class LossWeights:
    """Factors of the losses, each of which is a mean over its planned targets of the step."""

    text: float = 1.0
    image: float = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class Edge:
    """The links between this process and a neighbouring stage of the pipeline."""

    module: str
    """Name of the module at the other end."""
    forward: Link
    backward: Link


class Role(ABC, Generic[Kept]):
    """Forward and backward of one process."""

    def __init__(self, module: nn.Module, device: torch.device, before: Edge | None, after: Edge | None) -> None:
        self.module = module
        self.device = device
        self.forward_times = Stopwatch(device)
        self.backward_times = Stopwatch(device)
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        """Sum of this process's loss over the targets of the step so far, without weight or denominator."""
        self._before = before
        self._after = after
        self._kept: dict[int, Kept] = {}

    @property
    @abstractmethod
    def tensors(self) -> tuple[str, ...]:
        """Names of the tensors that the role reads from its view."""

    def begin_step(self) -> None:
        """Forget the step before."""
        self.loss_sum.zero_()
        self.forward_times.reset()
        self.backward_times.reset()

    def forward(self, batch: Batch) -> None:
        """Run the forward pass of a microbatch, transfers included."""
        self._kept[batch.microbatch] = self._forward(batch)

    def backward(self, microbatch: int, taken: int) -> None:
        """Run its backward pass, transfers included.

        Afterwards the gradients of what was sent forward have arrived, so those buffers are free.

        Args:
            microbatch: the microbatch.
            taken: the last microbatch whose gradients the stage before has taken by now. If it holds h microbatches, it
                runs the backward of the one h before the newest that it has sent here; so releasing those buffers
                waits for nothing.
        """
        self._backward(self._kept.pop(microbatch))
        if self._after is not None:
            self._after.forward.channel.release(microbatch)
        if self._before is not None:
            self._before.backward.channel.release(taken)

    def end_step(self) -> None:
        """Wait until all that was sent has left."""
        if self._after is not None:
            self._after.forward.channel.release()
        if self._before is not None:
            self._before.backward.channel.release()

    @abstractmethod
    def _forward(self, batch: Batch) -> Kept: ...

    @abstractmethod
    def _backward(self, kept: Kept) -> None: ...
