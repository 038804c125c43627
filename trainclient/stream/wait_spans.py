"""The spans of a client: each wait of its caller for a microbatch and, from one rank of a job, whole steps."""

import threading
from time import time_ns

from dataserver.tracing import StepTraces


class WaitSpans:
    """What one reader records. Its caller's thread reports waits; any thread may close it."""

    def __init__(self, traces: StepTraces, *, job_id: str, module: str, rank: int, roots: bool) -> None:
        """Record nothing yet.

        Args:
            traces: which steps are traced.
            job_id: of the job; its first 12 characters name it, as in metrics.
            module: that is read.
            rank: likewise.
            roots: whether it records whole steps, the roots of traces.
        """
        self.traces = traces
        self._job = job_id[:12]
        self._module = module
        self._rank = rank
        self._roots = roots
        self._lock = threading.Lock()
        self._step: tuple[int, int] | None = None
        """The step in hand, and when it began."""

    def waited(self, step: int, microbatch: int, seconds: float) -> None:
        """Record a wait that ends now. A step ends where the caller asks for the next one."""
        end_ns = time_ns()
        begin_ns = end_ns - round(seconds * 1e9)
        times = begin_ns, end_ns
        self.traces.waited(step, microbatch, times, job=self._job, module=self._module, rank=self._rank)
        if self._roots and (self._step is None or self._step[0] != step):
            self._end_step(begin_ns, (step, begin_ns))

    def close(self) -> None:
        """End the step in hand."""
        self._end_step(time_ns(), None)

    def _end_step(self, end_ns: int, following: tuple[int, int] | None) -> None:
        with self._lock:
            before, self._step = self._step, following
        if before is not None:
            self.traces.stepped(before[0], (before[1], end_ns), job=self._job)
