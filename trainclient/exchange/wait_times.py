"""Records how long a process waits for others in the middle of what it computes."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch


class Instants(Protocol):
    """Timestamps in the order of a device's work, taken without waiting for it."""

    def now(self) -> Any:
        """The time at which all work given to the device so far is done."""

    def between(self, start: Any, end: Any) -> int:
        """Nanoseconds between two instants that are over."""

    def settle(self, last: Any) -> None:
        """Wait until an instant is over."""


class HostInstants:
    """Instants of a CPU, as `time.perf_counter_ns`."""

    def now(self) -> int:
        """Return the present time of the host."""
        return time.perf_counter_ns()

    def between(self, start: int, end: int) -> int:
        """Return the nanoseconds between two instants."""
        return end - start

    def settle(self, last: int) -> None:
        """Return at once: instants of the host are known when they are taken."""


class DeviceInstants:
    """Instants of CUDA, as events on the current stream."""

    def now(self) -> torch.cuda.Event:
        """Record an event on the current stream."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def between(self, start: torch.cuda.Event, end: torch.cuda.Event) -> int:
        """Return the nanoseconds between two events."""
        return round(float(start.elapsed_time(end)) * 1e6)

    def settle(self, last: torch.cuda.Event) -> None:
        """Wait until the device has reached the event."""
        last.synchronize()


def instants_of(device: torch.device) -> Instants:
    """The clock of a device."""
    return DeviceInstants() if device.type == "cuda" else HostInstants()


class Waits:
    """The waits of one process for others, to be taken for each operation.

    A wait begins and ends where a backend has the device wait for what others hand it: on CUDA a stream waits, and not
    this process.
    """

    def __init__(self, device: torch.device) -> None:
        """Note waits of what a device computes."""
        self._instants = instants_of(device)
        self._begun: Any = None
        self._taken: list[tuple[Any, Any]] = []

    def begin(self) -> None:
        """Begin to record: from here on the device waits."""
        self._begun = self._instants.now()

    def end(self) -> None:
        """Up to here it has waited."""
        self._taken.append((self._begun, self._instants.now()))

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The device waits while the body runs."""
        self.begin()
        yield
        self.end()

    def take(self) -> list[tuple[Any, Any]]:
        """Begin and end of all waits since the last call."""
        taken, self._taken = self._taken, []
        return taken
