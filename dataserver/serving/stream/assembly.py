"""One microbatch on its way from its spec to encoded bytes, its images decoded by a shared thread pool.

Images that a store was asked for are handed to the pool when they have come: a store that hangs holds no thread of it.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any, Final, TypeVar

from dataserver.assembly import Coming, DecodeTask, PreparedView, UncountedError, UnreadableError
from dataserver.dataset import ShardReadError, gave_up
from dataserver.serving.metrics import Metrics
from dataserver.serving.stream.source import MicrobatchSpec, ViewSource
from dataserver.serving.transport.interface import EncodedMicrobatch, Memory
from dataserver.tracing import Span, opened

READ_ATTEMPTS: Final = 4
READ_BACKOFF_S: Final = 0.05
"""Wait after the first failed read; it doubles with each further one."""

Result = TypeVar("Result")


def with_retries(action: Callable[[], Result], stop: threading.Event, metrics: Metrics) -> Result:
    """Do what reads storage, again after a while where that fails; `stop` ends the waiting. Failures are counted.

    What an object store's own budget of retries gave up is not tried again here: that took long enough.

    Raises:
        ShardReadError, OSError: every attempt failed, or one did when `stop` was set.
    """
    attempt = 1
    while True:
        try:
            return action()
        except (ShardReadError, OSError) as error:
            is_last = attempt == READ_ATTEMPTS or gave_up(error)
            again = not is_last and not stop.wait(READ_BACKOFF_S * 2 ** (attempt - 1))
            metrics.storage_failed(retried=again, final=not again and not stop.is_set())
            if not again:
                raise
        attempt += 1


def when_done(futures: Sequence[Future[Any]], call: Callable[[], object]) -> None:
    """Call, in whatever thread, when all of one or more futures are done."""
    lock, left = threading.Lock(), len(futures)

    def done(_: object) -> None:
        nonlocal left
        with lock:
            left -= 1
            is_last = left == 0
        if is_last:
            call()

    for future in futures:
        future.add_done_callback(done)


class Assembly:
    """A microbatch in the making. It owns its memory until it is released."""

    def __init__(
        self,
        spec: MicrobatchSpec,
        memory: Memory,
        metrics: Metrics,
        settled: Callable[["Assembly"], None],
        span: Span,
    ) -> None:
        """Make an assembly that has not begun.

        Args:
            spec: what to make.
            memory: for at least `spec.num_bytes`.
            metrics: are told of images and bytes.
            settled: called once, from any thread, when the assembly is made, has failed or was cancelled, and no thread
                writes to the memory any more.
            span: ends with the assembly.
        """
        self.spec = spec
        self.memory = memory
        self.encoded: EncodedMicrobatch | None = None
        self.error: Exception | None = None
        self._metrics = metrics
        self._settled = settled
        self._span = span
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._futures: list[Future[None]] = []
        """Of each task."""
        self._begun: list[Future[None]] = []
        """Of those in the pool that had to wait for a store."""
        self._outstanding = 1
        """`start` itself and each submitted task, until it is done. Whoever brings it to 0 owns the memory alone."""

    def start(self, source: ViewSource, pool: Executor) -> None:
        """Fill in what needs no decoding and hand the images to the pool. Errors end in `error`.

        What was cancelled before is settled at once.
        """
        prepared: PreparedView | None = None
        try:
            if not self._stop.is_set():
                used = self.memory.buffer[: self.spec.num_bytes]
                with opened(self._span.context, "lay out"):
                    prepare = partial(self._noted, source, lambda: source.prepare(self.spec, used))
                    prepared = with_retries(prepare, self._stop, self._metrics)
                for task in prepared.tasks:
                    self._submit(source, pool, task)
        except Exception as error:
            self._fail(error)
        self._part_done(source, prepared)
        # By callbacks, because a cancelled task never runs. If a task is over already, its callback runs here.
        for future in tuple(self._futures):
            future.add_done_callback(lambda _: self._part_done(source, prepared))

    def cancel(self) -> None:
        """Give up what is still to be done; what runs ends after the images in hand."""
        self._stop.set()
        with self._lock:
            futures = (*self._futures, *self._begun)
        for future in futures:  # without the lock, which the callback of a cancelled task takes
            future.cancel()

    def _submit(self, source: ViewSource, pool: Executor, task: DecodeTask) -> None:
        work, coming = partial(self._noted, source, task), task.coming()
        with self._lock:  # with `cancel`: a task is either not submitted, or among those that are cancelled
            if self._stop.is_set():
                return
            here: Future[None] = Future() if coming else pool.submit(self._run, work)
            self._futures.append(here)
            self._outstanding += 1
        if coming:
            go_on = [partial(self._go_on, source, pool, work, coming, here)]
            # What futures of a store hold of the microbatch. They let go of it when its task is done or given up: a
            # store may answer much later, and a future that held who holds it would keep its bytes until a collection.
            here.add_done_callback(lambda _: go_on.clear())
            when_done([one.future for one in coming], lambda: [call() for call in tuple(go_on)])

    def _go_on(
        self, source: ViewSource, pool: Executor, work: Callable[[], int], coming: list[Coming], here: Future[None]
    ) -> None:
        """Hand a task to the pool whose bytes have come, or did not; `here` is done with it."""
        if not here.set_running_or_notify_cancel():
            return
        begun: Future[None] | None = None
        try:
            for one in coming:
                if (unreadable := one.given_up()) is not None:
                    self._metrics.storage_failed(retried=False, final=not self._stop.is_set())
                    source.note_unreadable(unreadable, self._metrics.failures)
                    self._fail(unreadable)  # not raised: its traceback would hold what else has come
                    break
            with self._lock:
                if not self._stop.is_set():
                    begun = pool.submit(self._run, work)
                    self._begun.append(begun)
        except Exception as error:  # or the pool takes no tasks any more
            self._fail(error)
        if begun is None:
            here.set_result(None)
        else:
            begun.add_done_callback(lambda _: here.set_result(None))

    def _run(self, task: Callable[[], int]) -> None:
        if self._stop.is_set():
            return
        try:
            with opened(self._span.context, "decode") as span:
                num_bytes = with_retries(task, self._stop, self._metrics)
                span.note(bytes=num_bytes)
            self._metrics.read(num_bytes)
        except Exception as error:
            self._fail(error)

    def _noted(self, source: ViewSource, work: Callable[[], Result]) -> Result:
        try:
            return work()
        except (UnreadableError, UncountedError) as error:
            source.note_unreadable(error, self._metrics.failures)
            raise

    def _fail(self, error: Exception) -> None:
        with self._lock:
            self.error = self.error or error
        self.cancel()

    def _part_done(self, source: ViewSource, prepared: PreparedView | None) -> None:
        with self._lock:
            self._outstanding -= 1
            if self._outstanding:
                return
        if prepared is not None and not self._stop.is_set():
            try:
                with opened(self._span.context, "encode"):
                    prepared.finish()
                    self.encoded = source.encode(self.spec, prepared, self.memory.transport.sends_payload)
                self._span.note(
                    bytes=self.encoded.num_bytes, images=prepared.num_images, invalid_images=prepared.num_invalid
                )
                self._metrics.prepared(prepared.num_images, prepared.num_invalid)
                if prepared.num_invalid:
                    source.note_invalid(self.spec.plan, prepared, self._metrics.failures)
            except Exception as error:
                self._fail(error)
        self._futures, self._begun = [], []  # their callbacks hold the prepared view
        self._span.end(self.error)
        self._settled(self)
