"""Programs: what each pipeline stage does in a step, one operation after the other.

Programs are data: a layout makes them from a plan (`layout.Layout.programs`), the simulator runs any, and the trainer
runs the ones that were simulated.
"""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import overload

import numpy as np

from dataserver.planning import I64


class OperationKind(StrEnum):
    """What an operation does; the order of the members is the order of the numbers in the protos."""

    FORWARD = "forward"
    BACKWARD = "backward"
    INTERACTION = "interaction"
    """Forward and backward of what couples all samples of a contrastive batch: a barrier of all its microbatches."""
    EXCHANGE = "exchange"
    """What a chunk has made leaves for all ranks at once: rows or gradients of a phase, features of a contrastive
    batch. Who needs it waits for it."""
    UNSHARD = "unshard"
    """The parameters of a chunk are gathered, if its ranks hold shares."""
    REDUCE = "reduce"
    """The gradients of a chunk are summed over its ranks."""


KINDS = tuple(OperationKind)
FORWARD, BACKWARD, INTERACTION, EXCHANGE, UNSHARD, REDUCE = range(len(KINDS))
"""Numbers of the kinds in arrays. From `EXCHANGE` on they are collectives, which plans give no time: what rows take on
their way is a transfer, and how parameters are held is not theirs to know."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One pass of one microbatch, the interaction of one contrastive batch, or a collective."""

    kind: OperationKind
    microbatch: int
    """Number of the microbatch; of an interaction and the exchange before it the number of the contrastive batch, of
    other exchanges the last microbatch of what leaves; of a whole chunk's collectives 0."""
    chunk: int = 0
    """Which of the stage's chunks; see `Program.modules`."""

    @property
    def computes(self) -> bool:
        """Whether it takes time in plans, as passes and interactions do."""
        return KINDS.index(self.kind) < EXCHANGE


@dataclass(frozen=True, slots=True, eq=False)
class Operations(Sequence[Operation]):
    """The operations of one stage in their order, as arrays: a list of thousands costs as much as one of ten."""

    kind: I64
    """int64 [n], numbers of `KINDS`."""
    microbatch: I64
    """int64 [n]: the microbatch of each operation."""
    chunk: I64
    """int64 [n]: the stage's own chunk that each operation runs."""

    @property
    def computing(self) -> "Operations":
        """Those that compute, as plans give them time."""
        kept = self.kind < EXCHANGE
        return Operations(self.kind[kept], self.microbatch[kept], self.chunk[kept])

    def __len__(self) -> int:
        return len(self.kind)

    @overload
    def __getitem__(self, index: int) -> Operation: ...
    @overload
    def __getitem__(self, index: slice) -> "Operations": ...
    def __getitem__(self, index: int | slice) -> "Operation | Operations":
        kind, microbatch, chunk = self.kind[index], self.microbatch[index], self.chunk[index]
        if isinstance(index, slice):
            return Operations(kind, microbatch, chunk)
        return Operation(KINDS[int(kind)], int(microbatch), int(chunk))

    def __iter__(self) -> Iterator[Operation]:
        rows = zip(self.kind.tolist(), self.microbatch.tolist(), self.chunk.tolist(), strict=True)
        return (Operation(KINDS[kind], microbatch, chunk) for kind, microbatch, chunk in rows)

    def __add__(self, other: "Operations") -> "Operations":
        return self.joined([self, other])

    @classmethod
    def joined(cls, parts: Sequence["Operations"]) -> "Operations":
        """All parts, one behind the other."""
        columns = ([p.kind for p in parts], [p.microbatch for p in parts], [p.chunk for p in parts])
        return Operations(*(np.concatenate(column) for column in columns))


@dataclass(frozen=True, slots=True)
class Program:
    """What the devices of one stage do in a step."""

    modules: tuple[str, ...]
    """The module of each chunk: one module, several times where its model chunks are interleaved; several modules where
    they share the devices."""
    stage: int
    """Number of the stage within its modules."""
    operations: Operations


def passes(kind: int, microbatch: I64, chunk: I64 | None = None) -> Operations:
    """Operations of one kind: all forwards, or all backwards."""
    chunk = np.zeros_like(microbatch) if chunk is None else chunk
    return Operations(np.full(len(microbatch), kind, np.int64), microbatch, chunk)


def forwards(operations: Operations) -> Operations:
    """The forwards among some operations: what a stage does that has no backward to run."""
    kept = operations.kind == FORWARD
    return Operations(operations.kind[kept], operations.microbatch[kept], operations.chunk[kept])


def stage_operations(in_flight: int, num_microbatches: int, drain_every: int = 0) -> Operations:
    """The operations of a stage that holds at most `in_flight` microbatches between forward and backward.

    `in_flight - 1` forwards fill the pipeline, then forwards and backwards alternate, then the remaining backwards
    drain it (PipeDream-Flush, Narayanan et al. 2021, section 2.2). Waves go in order in both directions. No stage may
    hold more than the one before it, or it would wait for what that one cannot send yet.

    Args:
        in_flight: at least 1.
        num_microbatches: of the step.
        drain_every: microbatches after which all backwards that are left come before the next forward; it divides
            `num_microbatches`. 0: only the end of the step drains the stage.
    """
    run = np.arange(drain_every or num_microbatches, dtype=np.int64)
    once = alternating(passes(FORWARD, run), passes(BACKWARD, run), in_flight - 1)
    if not drain_every:
        return once
    times = num_microbatches // drain_every
    first = np.repeat(np.arange(times) * drain_every, len(once))
    return Operations(np.tile(once.kind, times), np.tile(once.microbatch, times) + first, np.tile(once.chunk, times))


def alternating(forward: Operations, backward: Operations, warmup: int) -> Operations:
    """`warmup` forwards, then a forward and a backward in turn, then the backwards that are left."""
    turns = max(0, len(forward) - warmup)
    pairs = (forward.kind, backward.kind), (forward.microbatch, backward.microbatch), (forward.chunk, backward.chunk)
    return Operations(*(_alternating(*pair, turns) for pair in pairs))


def _alternating(forward: I64, backward: I64, turns: int) -> I64:
    warmup, both = len(forward) - turns, np.empty(2 * len(forward), np.int64)
    drain = warmup + 2 * turns
    both[:warmup], both[warmup:drain:2] = forward[:warmup], forward[warmup:]
    both[warmup + 1 : drain : 2], both[drain:] = backward[:turns], backward[turns:]
    return both


def whole_step(operations: Operations, num_chunks: int = 1, *, runs_backward: bool = True, trained: bool) -> Operations:
    """What a stage does in a step: its chunks' parameters are gathered, it computes, and gradients are summed.

    In between no rank of a pipeline waits for others that hold the same chunks: each has other microbatches.

    Args:
        operations: those that compute, as if the stage ran backwards.
        num_chunks: of the stage.
        runs_backward: whether it does.
        trained: whether gradients of its parameters are summed.
    """
    operations = operations if runs_backward else forwards(operations)
    first, last = (_of_all_chunks(kind, num_chunks) for kind in (UNSHARD, REDUCE))
    return Operations.joined([first, operations, last] if trained else [first, operations])


@functools.cache  # a plan makes them for each stage of each candidate
def _of_all_chunks(kind: int, num_chunks: int) -> Operations:
    chunks = np.arange(num_chunks, dtype=np.int64)
    return passes(kind, np.zeros_like(chunks), chunks)


def pass_times(operations: Operations, forward_ns: I64, backward_ns: I64) -> I64:
    """What each operation takes on each of n nodes, 0 where it is no pass. int64 [n, operations].

    Args:
        operations: of all nodes.
        forward_ns: int64 [n, chunks, microbatches].
        backward_ns: the same of the backward passes.
    """
    found = np.zeros((len(forward_ns), len(operations)), np.int64)
    for kind, times in ((FORWARD, forward_ns), (BACKWARD, backward_ns)):
        mine = operations.kind == kind
        found[:, mine] = times[:, operations.chunk[mine], operations.microbatch[mine]]
    return found
