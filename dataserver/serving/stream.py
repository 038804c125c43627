"""One open stream: it prepares microbatches ahead of its consumer, within memory that all streams share.

A stream never waits for another one's memory: it has a reserve for one microbatch, and what lies in the shared budget
only lets it work further ahead. A microbatch leaves memory when its last chunk was handed to gRPC, and that is when the
stream looks for further work: a consumer that does not read stops its stream. A microbatch in memory that is shared
with a consumer on this machine stays in the shared budget until the consumer returns it. One that has as much as it
wants stops its stream likewise, and one that returns nothing is sent the bytes of the rest.

gRPC takes a message off this stream's hands when the consumer's window has room, and cannot be asked for it back. So
a stream whose consumer has stopped reading gives up all else that it holds (`end_if_idle`). Its call, which is one
message and a waiting thread, stays for the end message that comes behind; `Streams` bounds the number of such calls.
"""

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from time import monotonic
from typing import Final

from disttrain.v1 import errors_pb2
from disttrain.v1.data_service_pb2 import EndOfStream

from dataserver.planning.plan.plan import StepPlan
from dataserver.serving.assembly import Assembly, with_retries
from dataserver.serving.errors import DataServiceError, service_error
from dataserver.serving.fair_pool import FairPool
from dataserver.serving.memory import BufferPool, ByteBudget, size_class
from dataserver.serving.metrics import JOB_CHARS, Metrics, Progress, Stage, Wait
from dataserver.serving.shared_memory import SharedMemoryListener
from dataserver.serving.source import MicrobatchSpec, ViewSource
from dataserver.serving.wire import end_of_stream

MAX_AHEAD: Final = 8
"""Microbatches that a stream prepares ahead, however small they are: plans are kept for a few steps only."""
AHEAD_BYTES: Final = 8 << 20
"""What a stream prepares ahead for each decoding thread, and up to one microbatch more: two tasks of images or so. At
least two microbatches. What lies for longer has left the processor's caches when it is sent: 100 MB ahead cost a server
1.06 times the CPU time."""
LOOK_S: Final = 0.1
"""Time between two looks at whether a stream is to end, while its consumer wants no more memory."""


@dataclass(frozen=True, slots=True, eq=False)
class Shared:
    """What all streams of a server share."""

    stream_bytes: int
    """Largest microbatch."""
    ahead_bytes: int
    """Of a stream's microbatches beyond which it begins no further one."""
    budget: ByteBudget
    buffers: BufferPool
    preparing: Executor
    """Plans and lays out views, in a thread for each stream: one whose job is queued keeps no other from
    planning. Decoding has threads of its own, so that a new stream's plan need not wait for images."""
    laying_out: AbstractContextManager[bool]
    """Held while a stream reads token ids and lays out a view, which few of them do at once."""
    decoding: FairPool
    """Of images; a queue for each stream."""
    shared_memory: SharedMemoryListener
    draining: threading.Event
    """Set when streams are to end after the microbatch in hand."""
    metrics: Metrics


class MicrobatchStream:
    """One open stream: an iterator of messages for one consumer, and the work ahead of it."""

    def __init__(
        self,
        shared: Shared,
        source: ViewSource,
        step: int,
        microbatch: int,
        cancel: Callable[[], object],
        on_close: Callable[["MicrobatchStream"], None],
        memory_token: bytes = b"",
    ) -> None:
        """Make a stream that has not begun.

        Args:
            shared: what it shares with others.
            source: what it reads.
            step: of the first microbatch.
            microbatch: the first one.
            cancel: ends the call of the stream, whatever its consumer reads.
            on_close: called whenever the stream is closed, without a lock.
            memory_token: of a consumer that maps memory instead of receiving bytes.
        """
        self.cancel = cancel
        self._shared = shared
        self._on_close = on_close
        self._source = source
        self._account = shared.budget.open()
        self._decoding = shared.decoding.queue()
        self._consumer = shared.shared_memory.consumer(memory_token, self._account)
        self._condition = threading.Condition()
        """Guards what follows, except `_position` (the consumer's), `_cursor`, `_pending` and `_plan` (the preparing
        task's, one at a time, until the stream is closed). No lock of `Streams` or an assembly is taken under it."""
        self._stop = threading.Event()
        self._position = (step, microbatch)
        """First microbatch that the consumer was not given whole."""
        self._cursor = (step, microbatch)
        """Next microbatch to prepare."""
        self._pending: MicrobatchSpec | None = None
        """What that microbatch will hold, where it waits for memory, or for those before it."""
        self._plan: StepPlan | None = None
        """The plan of its step, so that it is made once, whatever the server keeps for others."""
        self._queue: deque[Assembly] = deque()
        self._settled: set[Assembly] = set()
        self._own_memory: Assembly | None = None
        """The assembly in this stream's reserve; the others are in the shared budget."""
        self._in_hand: Assembly | None = None
        """The assembly whose messages the consumer is given: out of the queue, `close` leaves it and its buffer alone.
        It belongs to the consumer's thread, and to `end_if_idle` while gRPC has that."""
        self._sent_step: int | None = None
        """Step of the microbatch that the consumer took last."""
        self._sending: Wait | None = None
        """For the consumer that has a microbatch in hand."""
        self._memory_wait: Wait | None = None
        """For memory to work ahead."""
        self._offered_at: float | None = None
        """Since when the consumer is waited for, on the monotonic clock: gRPC has a message that it has not sent, or
        what is in hand is more than the consumer wants to have; None if it is not."""
        self._idle = False
        """Whether the stream ended because of its consumer."""
        self._preparing = False
        self._exhausted = False
        self._failure: DataServiceError | None = None
        self._closed = False

    def start(self) -> None:
        """Begin to prepare."""
        self._prepare_more()

    def messages(self) -> Iterator[bytes]:
        """The messages of the stream in order; ends early, without a last message, when the stream is cut.

        Raises:
            DataServiceError: the next microbatch cannot be made.
        """
        try:
            while self._take():
                try:
                    yield from self._given()
                finally:
                    self._put_down()
                self._prepare_more()
            # Without the lock: an end message sent while the stream is cut is true all the same.
            if self._idle or not self._closed:
                yield from self._offered(self._end())
        finally:
            self.close()

    def end_if_idle(self, timeout_s: float) -> bool:
        """Give up all memory if the consumer has taken nothing for so long; whether it was so.

        The call stays open, and ends in order if the consumer reads again. May be called from any thread.
        """
        with self._condition:
            if self._closed or self._offered_at is None or monotonic() < self._offered_at + timeout_s:
                return False
            self._idle = True
        self._put_down()
        self._give_up()
        return True

    def progress(self) -> Progress:
        """How far this stream is. May be called from any thread."""
        with self._condition:
            ready = sum(assembly in self._settled for assembly in self._queue)
            return Progress(
                job_id=self._source.served.job.job_id[:JOB_CHARS],
                module=self._source.module,
                rank=self._source.rank,
                sent_step=self._sent_step,
                ready=ready,
                preparing=len(self._queue) - ready,
                unread_s=0.0 if self._offered_at is None else monotonic() - self._offered_at,
            )

    def wake(self) -> None:
        """Check again whether the server is draining."""
        with self._condition:
            self._condition.notify_all()

    def close(self) -> None:
        """Give up what is prepared and being prepared. May be called from any thread, and again."""
        self._give_up()
        self._on_close(self)

    def _given(self) -> Iterator[bytes]:
        """The messages of the microbatch in hand; ends early if that was taken away."""
        self._await_consumer()
        for i in itertools.count():
            if (message := self._message(i)) is None:
                return
            yield from self._offered(message)

    def _message(self, i: int) -> bytes | None:
        """A message of the microbatch in hand; None behind the last one. Apart, so that no waiting frame holds it."""
        if self._idle or (assembly := self._in_hand) is None:
            return None
        if assembly.error is not None:
            raise service_error(assembly.error)
        if assembly.encoded is None:
            return None
        if i == assembly.encoded.num_messages:  # the consumer has taken the last one
            self._sent_step = assembly.spec.plan.step
            shared_bytes = 0 if assembly.block is None else assembly.encoded.payload.nbytes
            self._shared.metrics.sent(assembly.encoded.num_bytes, shared_bytes)
            return None
        if i == assembly.encoded.num_messages - 1:
            self._position = _following(assembly.spec)
            if self._consumer is not None and assembly.block is not None:
                with self._condition:
                    self._consumer.share(assembly.block)
        return assembly.encoded.message(i)

    def _await_consumer(self) -> None:
        """Wait until a consumer that shares memory wants more of it.

        Messages without bytes leave gRPC however little is read. Unlike one that keeps what it has for good, a
        consumer that is slow soon returns some, and need not be sent the next ones.
        """
        with self._offering():
            while not self._is_wanted() and self._consumer is not None:
                self._consumer.wait(LOOK_S)

    def _is_wanted(self) -> bool:
        with self._condition:
            if self._closed or self._idle or self._shared.draining.is_set():
                return True
            block = None if self._in_hand is None else self._in_hand.block
            return block is None or self._consumer is None or self._consumer.wants(block)

    def _offered(self, message: bytes) -> Iterator[bytes]:
        with self._offering():
            yield message

    @contextmanager
    def _offering(self) -> Iterator[None]:
        """While it is the consumer who is waited for."""
        with self._condition:
            self._offered_at = monotonic()
        yield
        with self._condition:  # so that `end_if_idle` comes before, and `_idle` is seen, or after, and finds no message
            self._offered_at = None

    def _give_up(self) -> None:
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
            if self._consumer is not None:
                self._consumer.close()
            self._condition.notify_all()
        self._stop.set()
        for assembly in abandoned:  # without the lock: a cancelled task may settle its assembly in this thread
            assembly.cancel()
        for assembly in made:
            self._release(assembly)
        self._account.close()  # `_admit` takes nothing from it once `_closed` is set

    def _take(self) -> bool:
        """Take the next microbatch in hand when it is settled; False at the end of the stream."""
        with self._condition:
            with self._shared.metrics.waiting(Stage.PLANNING):
                self._condition.wait_for(lambda: self._queue or self._has_news())
            with self._shared.metrics.waiting(Stage.DECODING):
                self._condition.wait_for(self._has_news)
            if self._closed or self._idle or self._shared.draining.is_set():
                return False
            if not self._queue:
                if self._failure is not None:
                    raise self._failure
                return False
            self._in_hand = self._queue.popleft()
            self._sending = self._shared.metrics.begin(Stage.CONSUMER)
            return True

    def _put_down(self) -> None:
        in_hand, self._in_hand = self._in_hand, None
        self._shared.metrics.end(self._sending)
        if in_hand is not None:
            self._release(in_hand)

    def _has_news(self) -> bool:
        if self._closed or self._idle or self._shared.draining.is_set():
            return True
        return self._queue[0] in self._settled if self._queue else self._exhausted

    def _end(self) -> bytes:
        if self._position == (self._source.num_steps, 0):
            reason = EndOfStream.REASON_END_OF_JOB
        else:
            reason = EndOfStream.REASON_IDLE if self._idle else EndOfStream.REASON_DRAINING
        return end_of_stream(reason, *self._position)

    def _prepare_more(self) -> None:
        with self._condition:
            if self._preparing or self._closed or self._exhausted:
                return
            if self._pending is not None and self._is_far_ahead():
                return
            self._preparing = True
            self._shared.preparing.submit(self._prepare_next)

    def _is_far_ahead(self) -> bool:
        queued = sum(assembly.spec.num_bytes for assembly in self._queue)
        # However large they are, two: behind the last images of one alone, threads would have nothing to do.
        return len(self._queue) >= MAX_AHEAD or (len(self._queue) > 1 and queued >= self._shared.ahead_bytes)

    def _prepare_next(self) -> None:
        """Begin the next microbatch, if there is memory for it, in one of the preparing threads."""
        try:
            spec = self._next_spec()
        except Exception as error:
            self._exhaust(service_error(error))
            return
        if spec is None:
            self._exhaust(None)
            return
        # Refusal and the end of `_preparing` are one step: memory released before it is seen by `_admit`, and the
        # consumer that releases any later finds `_preparing` false and submits a new task. No wake-up is lost.
        with self._condition:
            try:
                assembly = self._admit(spec)
            except Exception as error:  # such as MemoryError
                self._exhaust(service_error(error))
                return
            if assembly is None:
                self._preparing = False
                return
        # Without the lock: this reads token ids. If `close` cancelled the assembly meanwhile, `start` only settles it.
        with self._shared.laying_out:
            assembly.start(self._source, self._decoding)
        with self._condition:
            self._preparing = False
        self._prepare_more()

    def _exhaust(self, failure: DataServiceError | None) -> None:
        with self._condition:
            # A closed stream needs no failure, whose traceback would keep the stream, and its job, until a collection.
            self._exhausted, self._failure, self._preparing = True, None if self._closed else failure, False
            self._condition.notify_all()

    def _next_spec(self) -> MicrobatchSpec | None:
        if (pending := self._pending) is not None:
            return pending
        step, microbatch = self._cursor
        if step >= self._source.num_steps:
            return None
        if self._plan is None or self._plan.step != step:
            self._plan = with_retries(
                lambda: self._source.plan(step, self._stop.is_set), self._stop, self._shared.metrics
            )
        plan = self._plan
        if microbatch >= plan.num_microbatches:
            raise DataServiceError(
                errors_pb2.ERROR_REASON_STEP_OUT_OF_RANGE,
                f"microbatch {microbatch} of step {step} was asked for; the step has {plan.num_microbatches}",
            )
        spec = self._source.specify(plan, microbatch)
        if spec.num_bytes > self._shared.stream_bytes:
            raise DataServiceError(
                errors_pb2.ERROR_REASON_SERVER_LIMIT,
                f"microbatch {microbatch} of step {step} has {spec.num_bytes} bytes for module "
                f"{self._source.module}; a stream of this server may take {self._shared.stream_bytes}: lower "
                "execution.microbatch or sizing.max_patches, or raise the server's stream_bytes",
            )
        if not self._account.reserve(size_class(spec.num_bytes)):
            raise DataServiceError(
                errors_pb2.ERROR_REASON_TOO_MANY_STREAMS,
                f"this server has no memory left for a stream whose microbatches have {spec.num_bytes} bytes; go to "
                "another one, give this one more memory, or lower its prefetch_bytes or job_bytes",
            )
        return spec

    def _admit(self, spec: MicrobatchSpec) -> Assembly | None:
        """An assembly in the queue, with memory; None if there is none left or the stream was closed."""
        if self._closed:
            self._plan = None  # it may have come after `_give_up`
            return None
        self._pending = spec
        if self._is_far_ahead():  # with what comes next known, so that nothing waits for its plan
            return None
        if (assembly := self._in_shared_memory(spec) or self._in_own_memory(spec)) is None:
            self._memory_wait = self._memory_wait or self._shared.metrics.begin(Stage.MEMORY)
            return None
        self._shared.metrics.end(self._memory_wait)
        self._pending = self._memory_wait = None
        self._cursor = _following(spec)
        self._queue.append(assembly)
        return assembly

    def _in_shared_memory(self, spec: MicrobatchSpec) -> Assembly | None:
        """An assembly in memory that the consumer sees; None if that takes none, or no more of it, for now."""
        if self._consumer is None or (block := self._consumer.block(spec.num_bytes)) is None:
            return None
        self._shared.buffers.trim()  # in whose place it may have come
        return Assembly(spec, block.buffer, self._shared.metrics, self._settle, block)

    def _in_own_memory(self, spec: MicrobatchSpec) -> Assembly | None:
        """An assembly in memory of this server alone; None if there is none left."""
        own, capacity = self._own_memory is None, size_class(spec.num_bytes)
        if not own and not self._account.take(capacity):
            return None
        try:
            buffer = self._shared.buffers.take(spec.num_bytes)
        except MemoryError:
            if not own:
                self._account.give(capacity)
            raise
        assembly = Assembly(spec, buffer, self._shared.metrics, self._settle)
        if own:
            self._own_memory = assembly
        return assembly

    def _settle(self, assembly: Assembly) -> None:
        with self._condition:
            self._settled.add(assembly)
            abandoned = self._closed
            self._condition.notify_all()
        if abandoned:
            self._release(assembly)

    def _release(self, assembly: Assembly) -> None:
        """Give the memory of a settled assembly back, once."""
        with self._condition:
            if assembly not in self._settled:
                return
            self._settled.discard(assembly)
            if assembly.block is not None and self._consumer is not None:
                self._consumer.give(assembly.block)
                return
            if self._own_memory is assembly:
                self._own_memory = None
            else:
                self._account.give(assembly.buffer.nbytes)
        self._shared.buffers.give(assembly.buffer)


def _following(spec: MicrobatchSpec) -> tuple[int, int]:
    step, after = spec.plan.step, spec.view.microbatch + 1
    return (step, after) if after < spec.plan.num_microbatches else (step + 1, 0)
