"""Times of computations, on the device that computes."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Stopwatch:
    """Measures laps; on CUDA by events, so that measuring does not wait for the device."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._host: list[int] = []
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def reset(self) -> None:
        """Forget all laps."""
        self._host.clear()
        self._events.clear()

    @contextmanager
    def lap(self) -> Iterator[None]:
        """Measure the body."""
        if self._cuda:
            start, end = _event(), _event()
            start.record()
            yield
            end.record()
            self._events.append((start, end))
        else:
            begun = time.perf_counter_ns()
            yield
            self._host.append(time.perf_counter_ns() - begun)

    def nanoseconds(self) -> list[int]:
        """All laps in order; on CUDA waits for the last one."""
        if not self._cuda:
            return list(self._host)
        if self._events:
            self._events[-1][1].synchronize()
        return [round(start.elapsed_time(end) * 1e6) for start, end in self._events]


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
