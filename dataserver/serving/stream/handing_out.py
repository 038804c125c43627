"""Handing out: the messages of one stream, taken by its consumer.

gRPC takes a message off this stream's hands when the consumer's window has room, and cannot be asked for it back. So
a stream whose consumer has stopped reading gives up all else that it has (`end_if_idle`). Its call, which is one
message and a waiting thread, stays for the end message that comes behind; `Streams` bounds the number of such calls.
"""

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Final

from disttrain.v1.data_service_pb2 import EndOfStream

from dataserver.serving.access import ByteRate
from dataserver.serving.errors import service_error
from dataserver.serving.metrics import Stage, Wait
from dataserver.serving.stream.assembly import Assembly
from dataserver.serving.stream.preparing import Preparation
from dataserver.serving.stream.shared import Shared
from dataserver.serving.stream.source import following
from dataserver.serving.transport.direct import FIELD, DirectTransport
from dataserver.serving.wire import end_of_stream
from dataserver.tracing import StepTraces, opened

LOOK_S: Final = 0.1
"""Time between two looks at whether a stream is to end, while its consumer wants no more memory."""
CONNECT_S: Final = 0.5
"""What a first microbatch waits for the data connection that its consumer was offered. It is there by then, unless
something is wrong."""


class HandingOut:
    """What the consumer of one stream is given, and how long it has not taken it."""

    def __init__(
        self,
        shared: Shared,
        preparation: Preparation,
        start: tuple[int, int],
        num_steps: int,
        direct: DirectTransport | None,
        rate: ByteRate | None = None,
        traces: StepTraces | None = None,
    ) -> None:
        """Hand out nothing yet.

        Args:
            shared: by all streams.
            preparation: makes the microbatches.
            start: step and microbatch of the first one.
            num_steps: of the job.
            direct: where payloads go, as soon as the consumer has connected; None for chunks, and where the consumer
                shares memory.
            rate: limits how fast; None where nothing does.
            traces: which steps are traced; None for no one.
        """
        self._rate = rate
        self._shared = shared
        self._preparation = preparation
        self._num_steps = num_steps
        self._direct = direct
        self._awaited = False
        """Whether the data connection was waited for."""
        self._position = start
        """First microbatch that the consumer was not given whole."""
        self._in_hand: Assembly | None = None
        """The assembly whose messages the consumer is given: out of the queue, closing leaves it and its memory alone.
        It belongs to the consumer's thread, and to `end_if_idle` while gRPC has that."""
        self._sending: Wait | None = None
        """For the consumer that has a microbatch in hand."""
        self._traces = traces
        self._span = opened(None, "send")
        """The same for who traces it."""
        self._sent_step: int | None = None
        self._lock = threading.Lock()
        """Guards the attributes below it."""
        self._offered_at: float | None = None
        """Since when the consumer is waited for, on the monotonic clock: gRPC has a message that it has not sent, or
        what is in hand is more than the consumer wants to have; None if it is not."""
        self._idle = False
        """Whether the stream ended because of its consumer."""
        self._writing = False
        """Whether what is in hand is being written from where it lies."""

    @property
    def sent_step(self) -> int | None:
        """Step of the microbatch that was sent last; None before the first."""
        return self._sent_step

    @property
    def unread_s(self) -> float:
        """Seconds for which the consumer has not taken what it is offered."""
        offered_at = self._offered_at
        return 0.0 if offered_at is None else monotonic() - offered_at

    def messages(self) -> Iterator[bytes]:
        """The messages of the stream in order; ends early, without a last message, when the stream is cut.

        Raises:
            DataServiceError: the next microbatch cannot be made.
        """
        while not self._idle and self._take():
            try:
                yield from self._given()
            finally:
                self._put_down()
            self._preparation.more()
        # Without a lock: an end message sent while the stream is cut is true all the same.
        if self._idle or not self._preparation.closed:
            yield from self.offered(self._end())

    def end_if_idle(self, timeout_s: float) -> bool:
        """Take away what is in hand if the consumer has taken nothing for so long; whether it was so.

        May be called from any thread. The end message follows if the consumer reads again.
        """
        with self._lock:
            offered_at = self._offered_at
            if self._preparation.closed or offered_at is None or monotonic() < offered_at + timeout_s:
                return False
            self._idle = True
            writing = self._writing
        if not writing:  # else the thread that writes puts it down
            self._put_down()
        return True

    def _await_rate(self) -> None:
        """Wait until what the owner was sent before is within its rate, or the stream ends."""
        while self._rate is not None and (delay_s := self._rate.delay_s()) > 0:
            if self._preparation.closed or self._shared.draining.wait(min(delay_s, LOOK_S)):
                return

    def _take(self) -> bool:
        """Take the next microbatch in hand when it is settled; False at the end of the stream."""
        self._await_rate()
        self._in_hand = self._preparation.take()
        if self._in_hand is None:
            return False
        self._sending = self._shared.metrics.begin(Stage.CONSUMER)
        if self._traces is not None:
            spec = self._in_hand.spec
            self._span = opened(self._traces.of_wait(spec.plan.step, spec.view.microbatch), "send")
        return True

    def _put_down(self) -> None:
        in_hand, self._in_hand = self._in_hand, None
        self._shared.metrics.end(self._sending)
        self._span.end()
        if in_hand is not None:
            self._preparation.release(in_hand)

    def _given(self) -> Iterator[bytes]:
        """The messages of the microbatch in hand; ends early if that was taken away."""
        self._await_consumer()
        direct = self._direct_now()
        for i in itertools.count():
            if (message := self._message(i)) is None:
                return
            if direct is not None:
                yield from self.offered(message + FIELD)
                self._write(direct)
                return
            yield from self.offered(message)

    def _direct_now(self) -> DirectTransport | None:
        """The data connection that takes the payload in hand; None for chunks."""
        if self._direct is None or (assembly := self._in_hand) is None or assembly.encoded is None:
            return None
        wait_s, self._awaited = 0.0 if self._awaited else CONNECT_S, True
        connected = self._direct.await_connection(wait_s)
        return self._direct if connected and assembly.encoded.payload.nbytes > 0 else None

    def _write(self, direct: DirectTransport) -> None:
        """Write the payload in hand; where that cannot be done, wait until the consumer says how to go on."""
        with self._lock:  # with `end_if_idle`, which takes nothing away from here on
            assembly = None if self._idle else self._in_hand
            self._writing = assembly is not None
        try:
            with self._offering():
                if assembly is None or (encoded := assembly.encoded) is None:
                    return
                cursor = assembly.spec.plan.step, assembly.spec.view.microbatch
                if direct.write(cursor, encoded, self._progressed, self._is_over):
                    self._position = following(assembly.spec)
                    self._sent_step = assembly.spec.plan.step
                    if self._rate is not None:
                        self._rate.spend(encoded.num_bytes)
                    self._shared.metrics.sent(encoded.num_bytes, direct_bytes=encoded.payload.nbytes)
                    self._span.note(transport="direct", bytes=encoded.num_bytes)
                    return
                while not self._is_over() and not self._shared.draining.is_set():
                    self._preparation.await_end(LOOK_S)
        finally:
            self._writing = False

    def _is_over(self) -> bool:
        return self._idle or self._preparation.closed

    def _progressed(self) -> None:
        with self._lock:
            if self._offered_at is not None:
                self._offered_at = monotonic()

    def _message(self, i: int) -> bytes | None:
        """A message of the microbatch in hand; None behind the last one. Apart, so that no waiting frame holds it."""
        if self._idle or (assembly := self._in_hand) is None:
            return None
        if assembly.error is not None:
            raise service_error(assembly.error)
        if (encoded := assembly.encoded) is None:
            return None
        transport = assembly.memory.transport
        count = transport.num_messages(encoded)
        if i == 1 + count:  # the consumer has taken the last one
            self._sent_step = assembly.spec.plan.step
            if self._rate is not None:
                self._rate.spend(encoded.num_bytes)
            shared_bytes = 0 if transport.sends_payload else encoded.payload.nbytes
            self._shared.metrics.sent(encoded.num_bytes, shared_bytes=shared_bytes)
            self._span.note(transport="grpc" if transport.sends_payload else "shared memory", bytes=encoded.num_bytes)
            return None
        if i == count:
            self._position = following(assembly.spec)
        return encoded.header if i == 0 else transport.message(assembly.memory, encoded, i - 1)

    def _await_consumer(self) -> None:
        """Wait until a consumer that shares memory wants more of it.

        Messages without bytes leave gRPC however little is read. Unlike one that keeps what it has for good, a
        consumer that is slow soon returns some, and need not be sent the next ones.
        """
        with self._offering():
            while not self._is_wanted():
                pass

    def _is_wanted(self) -> bool:
        """Whether the consumer wants what is in hand, or the stream ends; waits for that for a while."""
        if self._preparation.closed or self._idle or self._shared.draining.is_set():
            return True
        if (assembly := self._in_hand) is None:
            return True
        return assembly.memory.transport.wait_until_wanted(assembly.memory, LOOK_S)

    def offered(self, message: bytes) -> Iterator[bytes]:
        """A message that counts as not read until the consumer has taken it."""
        with self._offering():
            yield message

    @contextmanager
    def _offering(self) -> Iterator[None]:
        """While it is the consumer who is waited for."""
        with self._lock:
            self._offered_at = monotonic()
        yield
        with self._lock:  # so that `end_if_idle` comes before, and `_idle` is seen, or after, and finds no message
            self._offered_at = None

    def _end(self) -> bytes:
        if self._position == (self._num_steps, 0):
            reason = EndOfStream.REASON_END_OF_JOB
        else:
            reason = EndOfStream.REASON_IDLE if self._idle else EndOfStream.REASON_DRAINING
        return end_of_stream(reason, *self._position)
