"""One open stream: what is prepared for one consumer, handed out over its transports, and given up at the end."""

from collections.abc import Callable, Iterator

from disttrain.v1 import errors_pb2

from dataserver.jobs import JOB_CHARS
from dataserver.planning.plan.naming import counted
from dataserver.serving.errors import DataServiceError
from dataserver.serving.metrics import Progress
from dataserver.serving.stream.handing_out import HandingOut
from dataserver.serving.stream.preparing import Preparation
from dataserver.serving.stream.shared import Shared
from dataserver.serving.stream.source import ViewSource
from dataserver.serving.transport.transports import Transports


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
        progress_token: bytes = b"",
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
            progress_token: by which its client reports on it; empty for one that does not.
        """
        self.cancel = cancel
        self.progress_token = progress_token
        self._step: int | None = None
        """Step of the microbatch that the trainer took last, as its client said; None if it has said nothing."""
        self._source = source
        self._on_close = on_close
        start = (step, microbatch)
        transports = Transports(shared.budget, shared.buffers, shared.shared_memory, memory_token)
        self._preparation = Preparation(shared, source, start, transports)
        self._handing_out = HandingOut(shared, self._preparation, start, source.num_steps)

    def note_progress(self, step: int) -> None:
        """Note the step of the microbatch that the trainer took last.

        Raises:
            DataServiceError: the job has no such step.
        """
        if step >= self._source.num_steps:
            raise DataServiceError(
                errors_pb2.ERROR_REASON_STEP_OUT_OF_RANGE,
                f"step {step} was reported; the job has {counted(self._source.num_steps, 'step')}",
            )
        self._step = step

    def start(self) -> None:
        """Begin to prepare."""
        self._preparation.more()

    def messages(self) -> Iterator[bytes]:
        """The messages of the stream in order; ends early, without a last message, when the stream is cut.

        Raises:
            DataServiceError: the next microbatch cannot be made.
        """
        try:
            yield from self._handing_out.messages()
        finally:
            self.close()

    def end_if_idle(self, timeout_s: float) -> bool:
        """Give up all memory if the consumer has taken nothing for so long; whether it was so.

        The call stays open, and ends in order if the consumer reads again. May be called from any thread.
        """
        if not self._handing_out.end_if_idle(timeout_s):
            return False
        self._preparation.close()
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
        )

    def wake(self) -> None:
        """Check again whether the server is draining."""
        self._preparation.wake()

    def close(self) -> None:
        """Give up what is prepared and being prepared. May be called from any thread, and again."""
        self._preparation.close()
        self._on_close(self)
