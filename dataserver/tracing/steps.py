"""Which steps are traced, and by which ids: all ranks of a sampled step, and all servers, are in one trace.

Nobody has to agree on anything: a trace's id is a hash of the job and the step. A stream serves many steps, so its
metadata holds what the ids of all of them are made of: in `tracestate` the run, the reader, and which steps are
sampled. `traceparent` goes with it but is not read: proxies and instrumentation replace it, and leave the other as it
is. The span of a trainer's wait for a microbatch has an id that both sides can make, before it began.
"""

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Self

from dataserver.tracing.collector import Collector
from dataserver.tracing.endpoint import recorder_to
from dataserver.tracing.spans import (
    TRACEPARENT,
    Context,
    Finished,
    Kind,
    Metadata,
    Recorder,
    new_span_id,
    traceparent,
)

TRACESTATE: Final = "tracestate"
_OURS: Final = re.compile(
    r"disttrain=every:([1-9][0-9]{0,9});run:(?!0{32})([0-9a-f]{32});reader:(?!0{16})([0-9a-f]{16})"
)
DEFAULT_EVERY: Final = 100


@dataclass(frozen=True, slots=True)
class Tracing:
    """Which steps a client traces, and which collector gets the spans."""

    endpoint: str
    """Collector of OpenTelemetry that takes OTLP over gRPC: http://HOST:PORT, or https://HOST:PORT with TLS."""
    every: int = DEFAULT_EVERY
    """Steps 0, `every`, 2 `every`, ... are traced; the same for all ranks."""
    insecure: bool = False
    """Whether traces may go to another machine without encryption: the network is trusted."""

    def __post_init__(self) -> None:
        if not 1 <= self.every < 10**10:
            raise ValueError(f"every is {self.every}; 1 (all steps) or more is required")
        Collector.of(self.endpoint, insecure=self.insecure)

    @property
    def recorder(self) -> Recorder:
        """What sends this client's spans.

        Raises:
            TracingError: a package is missing, or variables of OpenTelemetry cannot be used.
        """
        return recorder_to(Collector.of(self.endpoint, insecure=self.insecure), "disttrain-client")

    def of_reader(self, job_id: str) -> "StepTraces":
        """The traces of one reader of a job.

        Raises:
            TracingError: see `recorder`.
        """
        run = _hashed(16, b"run", job_id.encode())
        return StepTraces(self.recorder, run, new_span_id(), self.every)


@dataclass(frozen=True, slots=True)
class StepTraces:
    """The traces of the steps that one reader of a job takes."""

    recorder: Recorder
    run: int
    """128 bits, the same for all ranks of a job."""
    reader: int
    """64 bits, of this reader alone."""
    every: int

    @classmethod
    def read(cls, recorder: Recorder | None, metadata: Iterable[tuple[str, str | bytes]]) -> Self | None:
        """What the client of a stream asks for; None if it asks for nothing, or nobody records."""
        if recorder is None:
            return None
        state = ",".join(value for key, value in metadata if key == TRACESTATE and isinstance(value, str))
        for entry in state.split(","):
            if (ours := _OURS.fullmatch(entry.strip(" \t"))) is not None:
                return cls(recorder, run=int(ours[2], 16), reader=int(ours[3], 16), every=int(ours[1]))
        return None

    @property
    def metadata(self) -> Metadata:
        """What tells a server, with the call of a stream."""
        ours = f"disttrain=every:{self.every};run:{self.run:032x};reader:{self.reader:016x}"
        return ((TRACEPARENT, traceparent(self.run, self.reader)), (TRACESTATE, ours))

    def of_wait(self, step: int, microbatch: int) -> Context | None:
        """The trainer's wait for a microbatch, before, while or after it lasts; None if the step is not sampled."""
        if step % self.every:
            return None
        trace = self._trace(step)
        span = _hashed(8, b"wait", trace.to_bytes(16), self.reader.to_bytes(8), step.to_bytes(8), b"%d" % microbatch)
        return Context(self.recorder, trace, span)

    def waited(self, step: int, microbatch: int, times_ns: tuple[int, int], **attributes: str | int) -> None:
        """Record the trainer's wait for a microbatch, from when to when."""
        if (context := self.of_wait(step, microbatch)) is None:
            return
        known = {"step": step, "microbatch": microbatch, **attributes}
        root = _root_of(context.trace_id)
        self.recorder.record(
            Finished("wait", Kind.CLIENT, context.trace_id, context.span_id, root, *times_ns, known, "")
        )

    def stepped(self, step: int, times_ns: tuple[int, int], **attributes: str | int) -> None:
        """Record the whole step, the root of its trace: one rank does."""
        if step % self.every:
            return
        trace = self._trace(step)
        known = {"step": step, **attributes}
        self.recorder.record(Finished("step", Kind.INTERNAL, trace, _root_of(trace), 0, *times_ns, known, ""))

    def _trace(self, step: int) -> int:
        return _hashed(16, b"step", self.run.to_bytes(16), step.to_bytes(8))


def _root_of(trace: int) -> int:
    return _hashed(8, b"root", trace.to_bytes(16))


def _hashed(num_bytes: int, *parts: bytes) -> int:
    """A number of so many bytes that is not 0."""
    digest = hashlib.sha256(b" ".join(parts)).digest()
    return int.from_bytes(digest[:num_bytes]) or 1
