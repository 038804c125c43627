"""Clocks: how long operations take, on the device that computes."""

import time
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from dataserver.planning.simulation import Operation, OperationKind


@dataclass(frozen=True, slots=True)
class Executed:
    """An operation that was run, and when."""

    operation: Operation
    start_ns: int
    end_ns: int


class Clock(Protocol):
    """What tells the time of operations."""

    def begin_step(self) -> None:
        """Forget the step before."""

    def next_phase(self) -> None:
        """Where modules are colocated, the phase of another one begins."""

    def running(self, operation: Operation) -> AbstractContextManager[None]:
        """The time of the body, which computes an operation when its inputs are there and before its outputs leave."""


class Stopwatch:
    """Measures operations: on CUDA by events, so that measuring does not wait for the device.

    On a CPU it counts the time that the calling thread computes, which takes a full share of all work: what other
    programs make it wait is not what a microbatch costs.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._host: list[tuple[Executed, int]] = []
        self._events: list[tuple[Operation, torch.cuda.Event, torch.cuda.Event]] = []
        self._begin: tuple[int, torch.cuda.Event | None] = (0, None)

    def begin_step(self) -> None:
        """See `Clock`."""
        self._host.clear()
        self._events.clear()
        event = _event() if self._cuda else None
        if event is not None:
            event.record()
        self._begin = time.perf_counter_ns(), event

    def next_phase(self) -> None:
        """See `Clock`; what is measured needs no barrier that rows do not ask for."""

    @contextmanager
    def running(self, operation: Operation) -> Iterator[None]:
        """See `Clock`."""
        if self._cuda:
            start, end = _event(), _event()
            start.record()
            yield
            end.record()
            self._events.append((operation, start, end))
        else:
            start_ns, begun = time.perf_counter_ns(), time.thread_time_ns()
            yield
            computed = time.thread_time_ns() - begun
            self._host.append((Executed(operation, start_ns, time.perf_counter_ns()), computed))

    def executed(self) -> list[Executed]:
        """The operations of the step in their order, by `time.perf_counter_ns`; on CUDA waits for the last one.

        On CUDA they are counted from where the device was when the step began, as if it had been idle then.
        """
        begin_ns, begin = self._begin
        if begin is None:
            return [executed for executed, _ in self._host]
        if self._events:
            self._events[-1][2].synchronize()

        def at(event: torch.cuda.Event) -> int:
            return begin_ns + round(float(begin.elapsed_time(event)) * 1e6)

        return [Executed(operation, at(start), at(end)) for operation, start, end in self._events]

    def nanoseconds(self, kind: OperationKind, chunks: Collection[int]) -> list[int]:
        """Time of every microbatch of the step in order, of these chunks together; on CUDA waits for the last one."""
        laps = [(executed.operation, computed) for executed, computed in self._host]
        if self._events:
            self._events[-1][2].synchronize()
            laps = [(operation, round(start.elapsed_time(end) * 1e6)) for operation, start, end in self._events]
        found: dict[int, int] = {}
        for operation, lap in laps:
            if operation.kind is kind and operation.chunk in chunks:
                found[operation.microbatch] = found.get(operation.microbatch, 0) + lap
        return [found[microbatch] for microbatch in sorted(found)]


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
