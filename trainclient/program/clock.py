"""Clocks: how long operations take, on the device that computes."""

import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from dataserver.planning.simulation import Operation, OperationKind
from trainclient.exchange.wait_times import Waits, instants_of


@dataclass(frozen=True, slots=True)
class Executed:
    """An operation that was run, and when."""

    operation: Operation
    start_ns: int
    end_ns: int
    waited_ns: int = 0
    """Part of it in which it waited for other processes: for their rows, or their shares of parameters."""


class Clock(Protocol):
    """What tells the time of operations."""

    def begin_step(self) -> None:
        """Forget the times of the step before."""

    def running(self, operation: Operation) -> AbstractContextManager[None]:
        """The time of the body, which computes an operation when its inputs are there and before its outputs leave."""


@dataclass(frozen=True, slots=True)
class _Lap:
    """An operation, with instants of the device."""

    operation: Operation
    start: Any
    end: Any
    waits: Sequence[tuple[Any, Any]]
    thread_ns: int


class Stopwatch:
    """Times operations; on CUDA by events, which does not wait for the device.

    Waits for other processes within an operation are no part of the time that is reported. On a CPU that is the time
    that the calling thread computes, which takes a full share of all work: what other programs make it wait is not
    what a microbatch costs.
    """

    def __init__(self, device: torch.device, waits: Waits | None = None) -> None:
        """Measure what a device computes, whose waits for other processes are noted."""
        self._cuda = device.type == "cuda"
        self._instants = instants_of(device)
        self._waits = waits or Waits(device)
        self._laps: list[_Lap] = []
        self._begin: tuple[int, Any] = (0, 0)

    def begin_step(self) -> None:
        """Forget the laps of the step before, and start the clock."""
        self._laps.clear()
        self._begin = time.perf_counter_ns(), self._instants.now()

    @contextmanager
    def running(self, operation: Operation) -> Iterator[None]:
        """Time the body, without its waits for other ranks."""
        self._waits.take()
        start, begun = self._instants.now(), time.thread_time_ns()
        yield
        thread_ns, end = time.thread_time_ns() - begun, self._instants.now()
        self._laps.append(_Lap(operation, start, end, self._waits.take(), thread_ns))

    def executed(self) -> list[Executed]:
        """The operations of the step in their order, by `time.perf_counter_ns`; on CUDA waits for the last one.

        On CUDA they are counted from where the device was when the step began, as if it had been idle then.
        """
        laps, (begin_ns, begin) = self._settled(), self._begin

        def at(instant: Any) -> int:
            return begin_ns + self._instants.between(begin, instant)

        return [Executed(lap.operation, at(lap.start), at(lap.end), self._waited(lap)) for lap in laps]

    def nanoseconds(self, kind: OperationKind, chunks: Collection[int]) -> list[int]:
        """Time of every microbatch of the step in order, of these chunks together; on CUDA waits for the last one."""
        found: dict[int, int] = {}
        for lap in self._settled():
            operation = lap.operation
            if operation.kind is kind and operation.chunk in chunks:
                ns = self._instants.between(lap.start, lap.end) - self._waited(lap) if self._cuda else lap.thread_ns
                found[operation.microbatch] = found.get(operation.microbatch, 0) + ns
        return [found[microbatch] for microbatch in sorted(found)]

    def _settled(self) -> list[_Lap]:
        if self._laps:
            self._instants.settle(self._laps[-1].end)
        return self._laps

    def _waited(self, lap: _Lap) -> int:
        return sum(self._instants.between(start, end) for start, end in lap.waits)
