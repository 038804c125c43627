"""The open streams of a server: their number, what they share, and the end of them all."""

import logging
import threading
from collections.abc import Callable
from typing import Final

from disttrain.v1 import errors_pb2

from dataserver.dataset import usable_memory
from dataserver.serving.access import EVERYBODY, ByteRates, Identity
from dataserver.serving.budgets import Budgets, microbatch_bytes
from dataserver.serving.config import ServerConfig
from dataserver.serving.errors import DataServiceError
from dataserver.serving.metrics import Metrics, Progress
from dataserver.serving.stream.fair_pool import FairPool, Threads
from dataserver.serving.stream.preparing import AHEAD_BYTES
from dataserver.serving.stream.shared import Shared
from dataserver.serving.stream.source import ViewSource
from dataserver.serving.stream.stream import NO_OPTIONS, MicrobatchStream, StreamOptions
from dataserver.serving.stream_memory import BufferPool, ByteBudget
from dataserver.serving.transport.direct_listener import DirectListener
from dataserver.serving.transport.grpc import CHUNK_BYTES
from dataserver.serving.transport.shared_memory_listener import SharedMemoryListener

VIEWS_AT_ONCE: Final = 4
"""Streams that read token ids and lay out views at once."""

_log = logging.getLogger(__name__)


class Streams:
    """All open streams of a server, and what they share."""

    def __init__(self, config: ServerConfig, metrics: Metrics) -> None:
        own = Budgets(config.prefetch_bytes, config.job_bytes)
        budget = ByteBudget(
            config.prefetch_bytes,
            beside=2 * CHUNK_BYTES,  # a message in gRPC's hands, and its copy
            for_microbatches=microbatch_bytes(usable_memory().num_bytes, own),
        )
        self.shared = Shared(
            stream_bytes=config.stream_bytes,
            ahead_bytes=AHEAD_BYTES * config.decode_threads,
            budget=budget,
            buffers=BufferPool(budget),
            # Twice as many: the thread of a closed stream may still compute a plan that others wait for.
            planning=Threads(2 * config.max_streams, "plan"),
            laying_out=FairPool(VIEWS_AT_ONCE, "layout"),
            decoding=FairPool(config.decode_threads, "decode"),
            shared_memory=SharedMemoryListener(config.shared_memory),
            direct=DirectListener(),
            draining=threading.Event(),
            metrics=metrics,
        )
        self._max_streams = config.max_streams
        self._idle_timeout_s = config.idle_timeout_s
        self._changed = threading.Condition()
        self._rates = ByteRates()
        self._open: dict[MicrobatchStream, str] = {}
        """With the names of their owners. Guarded by `_changed`, as is setting `draining`: a stream is either refused
        or seen by `drain`."""
        self._resting: dict[MicrobatchStream, None] = {}
        """Idle streams, which are not open, oldest first: their calls wait for their consumers to read."""
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="idle", daemon=True).start()

    @property
    def draining(self) -> bool:
        """Whether streams are to end."""
        return self.shared.draining.is_set()

    def progress(self) -> tuple[Progress, ...]:
        """How far each open stream is."""
        with self._changed:
            streams = tuple(self._open)
        return tuple(stream.progress() for stream in streams)  # without the lock: a stream takes its own

    def open(
        self,
        source: ViewSource,
        step: int,
        microbatch: int,
        cancel: Callable[[], object],
        options: StreamOptions = NO_OPTIONS,
        owner: Identity = EVERYBODY,
    ) -> MicrobatchStream:
        """Open a stream that starts at (step, microbatch), and let it begin to prepare.

        Args:
            source: what it reads.
            step: of the first microbatch.
            microbatch: the first one.
            cancel: ends the call of the stream, whatever its consumer reads.
            options: what its client asks for beside chunks.
            owner: who asks for it.

        Raises:
            DataServiceError: DRAINING, TOO_MANY_STREAMS or IDENTITY_LIMIT, at once.
        """
        with self._changed:
            if self.draining:
                raise DataServiceError(errors_pb2.ERROR_REASON_DRAINING, "this server is draining; go to another one")
            if len(self._open) >= self._max_streams:
                raise DataServiceError(
                    errors_pb2.ERROR_REASON_TOO_MANY_STREAMS,
                    f"this server has {self._max_streams} streams open, as many as it may; go to another one, or raise "
                    "max_streams",
                )
            self._check_owner(owner, source.job_id)
            rate = self._rates.of(owner.name, owner.bytes_per_s)
            stream = MicrobatchStream(self.shared, source, step, microbatch, cancel, self._forget, options, rate)
            self._open[stream] = owner.name
        try:
            stream.start()  # does nothing if the stream was closed since the lock was released
        except BaseException:  # such as no thread to be had
            stream.close()
            raise
        return stream

    def note_progress(self, progress_token: bytes, step: int, waited_s: float | None) -> None:
        """Note which step the trainer has reached that reads an open stream; after the stream's end this does nothing.

        Args:
            progress_token: of the stream.
            step: of the microbatch that the trainer took last.
            waited_s: seconds that it waited so far; None where that is not known.

        Raises:
            DataServiceError: the job has no such step.
        """
        with self._changed:
            for stream in self._open:
                if stream.progress_token == progress_token:
                    stream.note_progress(step, waited_s)

    def end_direct(self, token: bytes, step: int, microbatch: int, cause: str) -> bool:
        """Have an open stream use its data connection no more; whether it restarts at that microbatch.

        Raises:
            DataServiceError: the job has no such step.
        """
        with self._changed:
            stream = next((stream for stream in self._open if stream.direct_token == token), None)
        if stream is None:
            return False
        restarted = stream.end_direct(step, microbatch)
        self.shared.metrics.direct_ended()
        who = stream.progress()
        _log.warning(
            "rank %d of module %s of job %s gets chunks over gRPC instead of payloads over its data connection: %s",
            who.rank, who.module, who.job_id, cause,
        )  # fmt: skip
        return restarted

    def drain(self) -> int:
        """Let every stream end after the microbatch in hand, and refuse new ones; the number that were open."""
        with self._changed:
            self.shared.draining.set()
            streams = tuple(self._open)
        for stream in streams:
            stream.wake()
        return len(streams)

    def wait_until_idle(self, timeout_s: float) -> bool:
        """Wait until no stream is open; False if some still were after the timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._open, timeout_s)

    def cut(self) -> None:
        """Close all streams; their consumers see them end without a last message."""
        self._closed.set()
        with self._changed:
            streams = tuple(self._open)
        for stream in streams:  # without the lock: closing calls back into `_forget`, and cancels tasks
            stream.close()

    def close(self) -> None:
        """Close all streams and end the threads."""
        self.cut()
        self.shared.shared_memory.close()
        self.shared.direct.close()
        # Closed streams begin nothing; what runs in one pool may still submit to the next, so the first one ends first.
        self.shared.planning.shutdown(cancel_futures=True)
        self.shared.laying_out.shutdown()
        self.shared.decoding.shutdown()

    def _check_owner(self, owner: Identity, job_id: str) -> None:
        """Refuse a stream beyond what its owner may have; with the lock held."""
        jobs = [stream.job_id for stream, name in self._open.items() if name == owner.name]
        for what, number, limit in (
            ("streams open", len(jobs) + 1, owner.streams),
            ("jobs with open streams", len({*jobs, job_id}), owner.jobs),
        ):
            if limit is not None and number > limit:
                raise DataServiceError(
                    errors_pb2.ERROR_REASON_IDENTITY_LIMIT,
                    f"{owner.name} has {limit} {what} at this server, as many as its policy permits: end one, go to "
                    "another server, or raise the limit in --policy",
                )

    def _watch(self) -> None:
        """End streams soon after they have been idle for so long."""
        while not self._closed.wait(self._idle_timeout_s / 8):
            with self._changed:
                streams = tuple(self._open)
            for stream in streams:  # without the lock: a stream takes its own
                if stream.end_if_idle(self._idle_timeout_s):
                    self._rest(stream)

    def _rest(self, stream: MicrobatchStream) -> None:
        """Count an idle stream as open no more, and let its call wait; of too many calls the oldest is cancelled."""
        with self._changed:
            if stream in self._open:  # else its call has ended meanwhile
                del self._open[stream]
                self._resting[stream] = None
            if len(self._resting) > self._max_streams:
                cancelled = next(iter(self._resting))
                del self._resting[cancelled]
                cancelled.cancel()  # before anybody sees that one more may be opened
            self._changed.notify_all()

    def _forget(self, stream: MicrobatchStream) -> None:
        with self._changed:
            self._open.pop(stream, None)
            self._resting.pop(stream, None)
            self._changed.notify_all()
