"""The iterator over one view of a job."""

import os
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Self

from dataserver.planning.job.identity import Job
from trainclient.stream.buffers import Buffers
from trainclient.stream.endpoint import CallGuard
from trainclient.stream.errors import ForkError
from trainclient.stream.fleet import Fleet
from trainclient.stream.follower import Follower, ViewRequest
from trainclient.stream.handoff import Handoff
from trainclient.stream.microbatch import Array, Cursor, Microbatch
from trainclient.stream.progress import ProgressReports
from trainclient.stream.wait_spans import WaitSpans

PREFETCH_BYTES = 128 << 20
MAX_MICROBATCH_BYTES = 4 << 30
JOIN_S = 10.0


class MicrobatchReader(Iterator[Microbatch[Any]]):
    """Iterates over the microbatches of one (module, rank) in plan order, to the end of the job.

    A thread receives ahead of the caller, so that transfer overlaps computing; a lost server costs a reconnect at the
    next (step, microbatch). Another one tells servers how far the caller is. One thread may iterate. Close it, or use
    it as a context manager; at the exit of the interpreter it closes itself.
    """

    def __init__(
        self,
        fleet: Fleet,
        job: Job,
        view: ViewRequest,
        *,
        num_steps: int,
        start: Cursor | None = None,
        prefetch_bytes: int = PREFETCH_BYTES,
        max_microbatch_bytes: int = MAX_MICROBATCH_BYTES,
        buffers: Buffers | None = None,
        shown: Callable[[Microbatch[Array]], Microbatch[Any]] = lambda microbatch: microbatch,
        spans: WaitSpans | None = None,
    ) -> None:
        """Begin to receive.

        Args:
            fleet: the servers; it stays open when the reader closes.
            job: with all fields filled in.
            view: what to ask for.
            num_steps: steps of the job, as `Fleet.register` returns it.
            start: first microbatch; the job's first one by default.
            prefetch_bytes: received and not yet asked for; one microbatch always may be.
            max_microbatch_bytes: a larger one is refused before memory is taken for it.
            buffers: where microbatches are put; by default they stay in memory shared by a server on this machine, and
                go into a pool of this reader's own otherwise.
            shown: what a received microbatch is turned into, in the receiving thread; nothing by default. It must not
                refer to whoever owns this reader, or that would never be dropped.
            spans: records the caller's waits; None for no traces.
        """
        self._cursor = start or Cursor(0)
        self._pid = os.getpid()
        self._guard = CallGuard()
        self._handoff = Handoff(prefetch_bytes, fleet.timeouts.stall)
        self._progress = ProgressReports()
        self._spans = spans
        follower = Follower(
            fleet,
            job,
            view,
            num_steps=num_steps,
            start=self._cursor,
            max_bytes=max_microbatch_bytes,
            buffers=buffers,
            prefetch_bytes=prefetch_bytes,
            handoff=self._handoff,
            shown=shown,
            guard=self._guard,
            progress=self._progress,
            traces=None if spans is None else spans.traces,
        )
        name = f"{view.module}-{view.rank}"
        # Daemons, because the interpreter joins other threads before anything could tell them to end.
        threads = (
            threading.Thread(target=follower.run, name=f"reader-{name}", daemon=True),
            threading.Thread(target=self._progress.run, name=f"progress-{name}", daemon=True),
        )
        # Neither the threads nor the finalizer refer to this reader: dropped without `close`, it is closed as well.
        # Only an error raised from `next` keeps it: the handoff holds the error, whose traceback holds the reader.
        self._finalizer = weakref.finalize(
            self, _stop, self._guard, self._handoff, self._progress, threads, self._pid, spans
        )
        for thread in threads:
            thread.start()

    @property
    def cursor(self) -> Cursor:
        """The microbatch that comes next."""
        return self._cursor

    @property
    def wait_s(self) -> float:
        """Seconds that the caller waited for all microbatches so far, a wait that goes on included."""
        return self._progress.waited_s

    @property
    def ready(self) -> bool:
        """Whether the next microbatch has been received."""
        return self._handoff.ready

    def __next__(self) -> Microbatch[Any]:
        """The next microbatch; StopIteration after the job's last one.

        Raises:
            ClientError: no server can go on, or servers disagree.
        """
        if os.getpid() != self._pid:
            raise ForkError(
                f"this reader was opened in process {self._pid} and is used in its fork {os.getpid()}, which has no "
                "receiving thread: open it in the process that reads, or start processes with 'spawn'"
            )
        self._progress.begin_wait()
        microbatch = None
        try:
            microbatch = self._handoff.take(self._guard.interrupt)
        finally:
            waited = self._progress.end_wait(microbatch is not None)
        if microbatch is None:
            raise StopIteration
        if self._spans is not None:
            self._spans.waited(microbatch.step, microbatch.microbatch, waited)
        self._progress.step = microbatch.step
        self._cursor = microbatch.cursor.after(microbatch.num_microbatches)
        # Nobody else has seen it; a copy of all its fields would take longer than the rest, within what is waited.
        object.__setattr__(microbatch, "wait_s", waited)
        return microbatch

    def close(self) -> None:
        """End the stream and the thread; microbatches handed out stay valid. Closing again changes nothing."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _stop(
    guard: CallGuard,
    handoff: Handoff,
    progress: ProgressReports,
    threads: tuple[threading.Thread, ...],
    pid: int,
    spans: WaitSpans | None,
) -> None:
    if os.getpid() != pid:
        return  # a fork inherits the reader, but neither its thread nor its calls
    if spans is not None:
        spans.close()
    handoff.close()  # first: what the receiver then ends with is no end of the job
    guard.stop()
    progress.stop()
    # A collection may run this in any thread, also in one of these, and before they were started.
    for thread in threads:
        if thread is not threading.current_thread() and thread.ident is not None:
            thread.join(JOIN_S)
