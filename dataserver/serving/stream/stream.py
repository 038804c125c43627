"""One open stream: what is prepared for one consumer, handed out over its transports, and given up at the end."""

import threading
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Final

from disttrain.v1 import errors_pb2

from dataserver.jobs import JOB_CHARS
from dataserver.planning.plan.naming import counted
from dataserver.serving.access import ByteRate
from dataserver.serving.errors import DataServiceError
from dataserver.serving.metrics import Progress
from dataserver.serving.stream.handing_out import HandingOut
from dataserver.serving.stream.preparing import Preparation
from dataserver.serving.stream.shared import Shared
from dataserver.serving.stream.source import ViewSource
from dataserver.serving.transport.direct import DirectTransport
from dataserver.serving.transport.transports import Transports
from dataserver.serving.wire import direct_offer, restart
from dataserver.tracing import StepTraces


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """What the client of a stream asks for beside chunks."""

    memory_token: bytes = b""
    """Token of a client that maps memory instead of receiving bytes."""
    progress_token: bytes = b""
    """Token by which the client reports on the stream; empty for one that does not."""
    direct: bool = False
    """Whether it reads payloads from a data connection."""
    client_port: int = 0
    """Its end of the call's connection; 0 where it is not known."""
    traces: StepTraces | None = None
    """Which steps it traces; None for no one."""


NO_OPTIONS: Final = StreamOptions()


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
        options: StreamOptions = NO_OPTIONS,
        rate: ByteRate | None = None,
    ) -> None:
        """Make a stream that has not begun.

        Args:
            shared: what it shares with others.
            source: what it reads.
            step: of the first microbatch.
            microbatch: the first one.
            cancel: ends the call of the stream, whatever its consumer reads.
            on_close: called whenever the stream is closed, without a lock.
            options: what its client asks for beside chunks.
            rate: limits it, with others of the same owner.
        """
        self.cancel = cancel
        self.progress_token = options.progress_token
        self._client_port = options.client_port
        self._step: int | None = None
        """Step of the microbatch that the trainer took last, as its client said; None if it has said nothing."""
        self._waited_s: float | None = None
        """Seconds that the trainer waited so far, likewise."""
        self._rate = rate
        self._traces = options.traces
        self._shared = shared
        self._source = source
        self._on_close = on_close
        self._lock = threading.Lock()
        """Held where the stream is closed or restarted."""
        self._closed = False
        self._restart: tuple[int, int] | None = None
        """Where the stream begins again, as soon as its consumer's thread comes to it."""
        transports = Transports(shared.budget, shared.buffers, shared.shared_memory, options.memory_token)
        self._direct = shared.direct.offer() if options.direct and not transports.shares else None
        self._begin((step, microbatch), transports, self._direct)

    def _begin(self, start: tuple[int, int], transports: Transports, direct: DirectTransport | None) -> None:
        self._preparation = Preparation(self._shared, self._source, start, transports, self._traces)
        num_steps = self._source.num_steps
        self._handing_out = HandingOut(
            self._shared, self._preparation, start, num_steps, direct, self._rate, self._traces
        )

    @property
    def job_id(self) -> str:
        """Id of the job that it reads."""
        return self._source.job_id

    @property
    def direct_token(self) -> bytes | None:
        """Token by which the data connection is known that its client was offered; None without one."""
        return None if self._direct is None else self._direct.token

    def end_direct(self, step: int, microbatch: int) -> bool:
        """Use the data connection no more; whether the stream restarts at that microbatch, since payloads were lost.

        Raises:
            DataServiceError: the job has no such step.
        """
        self._check(step)
        with self._lock:
            if self._closed or self._direct is None:
                return False
            direct, self._direct = self._direct, None
            if not self._shared.direct.withdraw(direct):
                return False
            self._restart = step, microbatch
            self._preparation.close()  # which ends what the consumer's thread waits for
        return True

    def note_progress(self, step: int, waited_s: float | None) -> None:
        """Note the step of the microbatch that the trainer took last, and the seconds that it waited so far.

        Raises:
            DataServiceError: the job has no such step.
        """
        self._check(step)
        self._step = step
        self._waited_s = waited_s

    def _check(self, step: int) -> None:
        if step >= self._source.num_steps:
            raise DataServiceError(
                errors_pb2.ERROR_REASON_STEP_OUT_OF_RANGE,
                f"step {step} was reported; the job has {counted(self._source.num_steps, 'step')}",
            )

    def start(self) -> None:
        """Begin to prepare microbatches ahead of the consumer."""
        self._preparation.more()

    def messages(self) -> Generator[bytes]:
        """The messages of the stream in order; ends early, without a last message, when the stream is cut.

        Raises:
            DataServiceError: the next microbatch cannot be made.
        """
        try:
            if (direct := self._direct) is not None:
                yield from self._handing_out.offered(direct_offer(direct.token, direct.port, self._client_port))
            yield from self._handing_out.messages()
            while (start := self._begun_again()) is not None:
                yield from self._handing_out.offered(restart(*start))
                yield from self._handing_out.messages()
        finally:
            self.close()

    def _begun_again(self) -> tuple[int, int] | None:
        """Begin to prepare anew where the consumer asked for it; from which microbatch on."""
        with self._lock:
            start, self._restart = self._restart, None
            if start is None or self._closed:
                return None
            shared = self._shared
            self._begin(start, Transports(shared.budget, shared.buffers, shared.shared_memory, b""), None)
        self._preparation.more()
        return start

    def end_if_idle(self, timeout_s: float) -> bool:
        """Give up all memory if the consumer has taken nothing for so long; return whether that was so.

        The call stays open, and ends in order if the consumer reads again. May be called from any thread.
        """
        if not self._handing_out.end_if_idle(timeout_s):
            return False
        self._preparation.close()
        with self._lock:
            direct, self._direct = self._direct, None
        if direct is not None:
            self._shared.direct.withdraw(direct)
        return True

    def progress(self) -> Progress:
        """How far this stream is. May be called from any thread."""
        ready, preparing = self._preparation.counts()
        return Progress(
            job_id=self._source.job_id[:JOB_CHARS],
            module=self._source.module,
            rank=self._source.rank,
            sent_step=self._handing_out.sent_step,
            step=self._step,
            ready=ready,
            preparing=preparing,
            unread_s=self._handing_out.unread_s,
            waited_s=self._waited_s,
        )

    def wake(self) -> None:
        """Check again whether the server is draining."""
        self._preparation.wake()

    def close(self) -> None:
        """Give up what is prepared and being prepared. May be called from any thread, and again."""
        with self._lock:
            self._closed = True
            direct, self._direct = self._direct, None
        self._preparation.close()
        if direct is not None:
            self._shared.direct.withdraw(direct)
        self._on_close(self)
