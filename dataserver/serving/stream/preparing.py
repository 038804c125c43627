"""Preparing: the microbatches of one stream are made ahead of its consumer, within memory that all streams share.

A stream never waits for another one's memory: it has a reserve for one microbatch, and what lies in the shared budget
only lets it work further ahead. A microbatch leaves memory when its last chunk was handed to gRPC, and that is when the
stream looks for further work: a consumer that does not read stops its stream. A microbatch in memory that is shared
with a consumer on this machine stays in the shared budget until the consumer returns it. One that has as much as it
wants stops its stream likewise, and one that returns nothing is sent the bytes of the rest.
"""

import threading
from collections import deque
from typing import Final

from disttrain.v1 import errors_pb2

from dataserver.planning.plan.plan import StepPlan
from dataserver.serving.errors import DataServiceError, service_error
from dataserver.serving.metrics import Stage, Wait
from dataserver.serving.stream.assembly import Assembly, with_retries
from dataserver.serving.stream.shared import Shared
from dataserver.serving.stream.source import MicrobatchSpec, ViewSource, following
from dataserver.serving.transport.transports import Transports
from dataserver.tracing import Context, StepTraces, opened

MAX_AHEAD: Final = 8
"""Microbatches that a stream prepares ahead, however small they are: plans are cached for a few steps only."""
AHEAD_BYTES: Final = 8 << 20
"""What a stream prepares ahead for each decoding thread, and up to one microbatch more: two tasks of images or so. At
least two microbatches. What lies for longer has left the processor's caches when it is sent: 100 MB ahead cost a server
1.06 times the CPU time."""


class Preparation:
    """The microbatches that one stream has ahead of its consumer, and the work on them. Thread-safe."""

    def __init__(
        self,
        shared: Shared,
        source: ViewSource,
        start: tuple[int, int],
        transports: Transports,
        traces: StepTraces | None = None,
    ) -> None:
        """Prepare nothing yet.

        Args:
            shared: by all streams.
            source: what is prepared.
            start: step and microbatch of the first one.
            transports: give the memory.
            traces: which steps are traced; None for no one.
        """
        self._shared = shared
        self._source = source
        self._transports = transports
        self._traces = traces
        self._laying_out = shared.laying_out.queue(source.job_id)
        self._decoding = shared.decoding.queue(source.job_id)
        self._stop = threading.Event()
        self._condition = threading.Condition()
        """Guards what follows. Preparing tasks alone, one at a time, set `_cursor`, `_pending` and `_plan` till the end
        and read them without it. Locks of transports are taken under it, none of `Streams` or an assembly."""
        self._cursor = start
        """The microbatch that is prepared next."""
        self._pending: MicrobatchSpec | None = None
        """What that microbatch will hold, where it waits for memory, or for those before it."""
        self._plan: StepPlan | None = None
        """The plan of its step, so that it is made once, whatever the server caches for others."""
        self._queue: deque[Assembly] = deque()
        self._settled: set[Assembly] = set()
        self._memory_wait: Wait | None = None
        """For memory to work ahead."""
        self._preparing = False
        self._exhausted = False
        self._failure: DataServiceError | None = None
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether all was given up."""
        return self._closed

    def counts(self) -> tuple[int, int]:
        """Microbatches that wait for the consumer, and those in the making behind them."""
        with self._condition:
            ready = sum(assembly in self._settled for assembly in self._queue)
            return ready, len(self._queue) - ready

    def more(self) -> None:
        """Begin the next microbatch, unless one is begun already, or there are enough."""
        with self._condition:
            if self._preparing or self._closed or self._exhausted:
                return
            if self._pending is not None and self._is_far_ahead():
                return
            self._preparing = True
            if self._is_planned():
                self._laying_out.submit(self._lay_out_next)
            else:
                self._shared.planning.submit(self._plan_next)

    def take(self) -> Assembly | None:
        """The next microbatch as soon as it is settled; None where the stream ends. It is to be released.

        Raises:
            DataServiceError: it cannot be made.
        """
        with self._condition:
            with self._shared.metrics.waiting(Stage.PLANNING):
                self._condition.wait_for(lambda: self._queue or self._is_planned() or self._has_news())
            with self._shared.metrics.waiting(Stage.DECODING):
                self._condition.wait_for(self._has_news)
            if self._closed or self._shared.draining.is_set():
                return None
            if self._queue:
                return self._queue.popleft()
            if self._failure is not None:
                raise self._failure
            return None

    def release(self, assembly: Assembly) -> None:
        """Give the memory of a settled assembly back, once."""
        with self._condition:
            if assembly not in self._settled:
                return
            self._settled.discard(assembly)
        assembly.memory.transport.give(assembly.memory)

    def wake(self) -> None:
        """Have `take` check again whether the server is draining."""
        with self._condition:
            self._condition.notify_all()

    def await_end(self, timeout_s: float) -> None:
        """Wait at most so long until all is given up."""
        self._stop.wait(timeout_s)

    def close(self) -> None:
        """Give up what is prepared and being prepared, except what was taken. May be called again."""
        with self._condition:
            if self._closed:
                return
            self._closed = True
            self._shared.metrics.end(self._memory_wait)
            # Those settled by now are released below, the others by `_settle`, which will find `_closed` set.
            abandoned = tuple(self._queue)
            made = [a for a in abandoned if a in self._settled]
            self._queue.clear()
            self._pending = self._plan = self._failure = None
            self._condition.notify_all()
        self._stop.set()
        for assembly in abandoned:  # without the lock: a cancelled task may settle its assembly in this thread
            assembly.cancel()
        for assembly in made:
            self.release(assembly)
        self._transports.close()  # `_admit` takes nothing from them once `_closed` is set

    def _has_news(self) -> bool:
        if self._closed or self._shared.draining.is_set():
            return True
        return self._queue[0] in self._settled if self._queue else self._exhausted

    def _is_far_ahead(self) -> bool:
        queued = sum(assembly.spec.num_bytes for assembly in self._queue)
        # However large they are, two: behind the last images of one alone, threads would have nothing to do.
        return len(self._queue) >= MAX_AHEAD or (len(self._queue) > 1 and queued >= self._shared.ahead_bytes)

    def _is_planned(self) -> bool:
        """Whether the next microbatch can be laid out, as its plan is here, or there is none."""
        step, _ = self._cursor
        return step >= self._source.num_steps or (self._plan is not None and self._plan.step == step)

    def _plan_next(self) -> None:
        """Get the plan of the next microbatch, in one of the planning threads, and have it laid out in turn."""
        step, microbatch = self._cursor
        try:
            with opened(self._wait_for(step, microbatch), "plan", step=step):
                plan = with_retries(
                    lambda: self._source.plan(step, self._stop.is_set), self._stop, self._shared.metrics
                )
            with self._condition:
                if not self._closed:
                    self._plan = plan
                    self._laying_out.submit(self._lay_out_next)
                    self._condition.notify_all()
        except Exception as error:
            self._exhaust(service_error(error))

    def _lay_out_next(self) -> None:
        """Begin the next microbatch, if there is memory for it, in one of the threads that lay out."""
        try:
            spec = self._next_spec()
            if spec is None:
                self._exhaust(None)
                return
            # Refusal and the end of `_preparing` are one step: memory given back before it is seen by `_admit`, and the
            # consumer that gives any back later finds `_preparing` false and submits a new task. No wake-up is lost.
            with self._condition:
                assembly = self._admit(spec)
                if assembly is None:
                    self._preparing = False
                    return
        except Exception as error:  # MemoryError of `_admit` is one
            self._exhaust(service_error(error))
            return
        # Without the lock: this reads token ids. If `close` cancelled the assembly meanwhile, `start` only settles it.
        assembly.start(self._source, self._decoding)
        with self._condition:
            self._preparing = False
        self.more()

    def _exhaust(self, failure: DataServiceError | None) -> None:
        with self._condition:
            # A closed stream needs no failure, whose traceback would keep the stream, and its job, until a collection.
            self._exhausted, self._failure, self._preparing = True, None if self._closed else failure, False
            self._condition.notify_all()

    def _next_spec(self) -> MicrobatchSpec | None:
        """What the next microbatch will hold; None at the end of the job, and of a stream that was closed."""
        if (pending := self._pending) is not None:
            return pending
        (step, microbatch), plan = self._cursor, self._plan
        if step >= self._source.num_steps or plan is None:
            return None
        if microbatch >= plan.num_microbatches:
            raise DataServiceError(
                errors_pb2.ERROR_REASON_STEP_OUT_OF_RANGE,
                f"microbatch {microbatch} of step {step} was asked for; the step has {plan.num_microbatches}",
            )
        spec = self._source.specify(plan, microbatch)
        self._check_size(spec, step, microbatch)
        return spec

    def _check_size(self, spec: MicrobatchSpec, step: int, microbatch: int) -> None:
        """Refuse what is too large, for any stream or for the memory that is left."""
        if spec.num_bytes > self._shared.stream_bytes:
            raise DataServiceError(
                errors_pb2.ERROR_REASON_SERVER_LIMIT,
                f"microbatch {microbatch} of step {step} has {spec.num_bytes} bytes for module "
                f"{self._source.module}; a stream of this server may take {self._shared.stream_bytes}: lower "
                "execution.microbatch or the sizes of images (stream.sizing), or raise the server's stream_bytes",
            )
        if not self._transports.reserve(spec.num_bytes):
            raise DataServiceError(
                errors_pb2.ERROR_REASON_TOO_MANY_STREAMS,
                f"this server has no memory left for a stream whose microbatches have {spec.num_bytes} bytes; go to "
                "another one, give this one more memory, or lower its prefetch_bytes or job_bytes",
            )

    def _admit(self, spec: MicrobatchSpec) -> Assembly | None:
        """An assembly in the queue, with memory; None if there is none left or the stream was closed."""
        if self._closed:
            return None
        self._pending = spec
        if self._is_far_ahead():  # with what comes next known, so that nothing waits for its plan
            return None
        if (memory := self._transports.memory(spec.num_bytes)) is None:
            self._memory_wait = self._memory_wait or self._shared.metrics.begin(Stage.MEMORY)
            return None
        self._shared.metrics.end(self._memory_wait)
        self._pending = self._memory_wait = None
        self._cursor = following(spec)
        parent = self._wait_for(spec.plan.step, spec.view.microbatch)
        assembly = Assembly(spec, memory, self._shared.metrics, self._settle, opened(parent, "prepare"))
        self._queue.append(assembly)
        return assembly

    def _wait_for(self, step: int, microbatch: int) -> Context | None:
        """The trainer's wait for a microbatch, which all that is done for it belongs to; None if it is not traced."""
        return None if self._traces is None else self._traces.of_wait(step, microbatch)

    def _settle(self, assembly: Assembly) -> None:
        with self._condition:
            self._settled.add(assembly)
            abandoned = self._closed
            self._condition.notify_all()
        if abandoned:
            self.release(assembly)
