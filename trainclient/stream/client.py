"""A client of one view of a job, whatever its tensors are made of: servers, job, cursor and state."""

import hashlib
import json
import logging
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Self

from disttrain.v1.data_service_pb2 import (
    DescribeSamplesRequest,
    GetPlanRequest,
    ReportStepTimesRequest,
    SampleDescription,
    StepTimes,
)
from disttrain.v1.plan_pb2 import StepPlan
from google.protobuf.duration_pb2 import Duration

from dataserver.planning.job.identity import Job, canonical_json
from dataserver.security import NO_CREDENTIALS, Credentials
from dataserver.tracing import StepTraces, Tracing
from trainclient.stream.buffers import Buffers
from trainclient.stream.continuing import check_stream
from trainclient.stream.endpoint import CallGuard, Timeouts
from trainclient.stream.errors import ClientError, ClosedError, StateError
from trainclient.stream.fleet import Fleet
from trainclient.stream.follower import ViewRequest
from trainclient.stream.jobs import JobSource, load_job_data, resolve_job
from trainclient.stream.microbatch import Array, Cursor, Microbatch, TensorT
from trainclient.stream.reader import MAX_MICROBATCH_BYTES, PREFETCH_BYTES, MicrobatchReader
from trainclient.stream.wait_spans import WaitSpans

STATE_VERSION = 1
SENT_ELSEWHERE: Final = (
    "an open stream was to be copied or sent to another process, as to one that is spawned, and it belongs to the "
    "process that opened it: open one there, or read it here and without a DataLoader's workers (num_workers=0)"
)

_log = logging.getLogger(__name__)


class ViewClient(Iterator[Microbatch[TensorT]]):
    """Iterates over the microbatches of one (module, rank), to the end of the job.

    The cursor is the step of the next microbatch: as long as a step has microbatches to come, `state_dict` names that
    step, and after its last microbatch was handed out the step after it. Take the state on a step boundary, when the
    optimizer has applied the step; taken in mid-step it repeats the whole step.
    """

    def __init__(
        self,
        addresses: str | Sequence[str],
        job: JobSource,
        module: str,
        rank: int,
        *,
        tensors: Sequence[str] | None = None,
        compress: bool = False,
        share_fetch: bool = False,
        start_step: int | None = None,
        prefetch_bytes: int = PREFETCH_BYTES,
        max_microbatch_bytes: int = MAX_MICROBATCH_BYTES,
        timeouts: Timeouts | None = None,
        credentials: Credentials = NO_CREDENTIALS,
        buffers: Buffers | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        """Find the servers, fill in and register the job. Data flows from the first `next` on.

        Args:
            addresses: `host:port` entries, or one text with commas between.
            job: a YAML or JSON file, JSON text, mapping or JobSpec. Fingerprints, quarantines and the tokenizer may be
                left out; then let one rank open a client first and give its `job.text` to the others, since servers
                with other quarantine lists would fill in other samples.
            module: name of the module in the job.
            rank: data-parallel rank within the module.
            tensors: names of the tensors wanted; all by default.
            compress: let the servers compress tensors; worth it only where the network is the limit.
            share_fetch: of ranks that share sequences, only one of each group gets the tensors of a microbatch, and is
                to hand them on (`SequenceParallelGroup.reader`); the others get it `withheld`.
            start_step: first step; by default the first of the job's stream.
            prefetch_bytes: received and not yet asked for; one microbatch always may be.
            max_microbatch_bytes: a larger one is refused before memory is taken for it.
            timeouts: deadlines of all calls.
            credentials: by what to know the servers, and what to show them.
            buffers: where microbatches are put; by default memory that a server here shares, else a pool of its own.
            tracing: which steps to trace, and where to; none by default.

        Raises:
            ValueError: an address, the job, the module, the rank or the step is wrong; or traces cannot be sent.
            ClientError: no server could be reached, or they refuse the job.
        """
        source = load_job_data(job)
        key, speaks = _spread_key(source, module, rank), _is_first(source, module, rank)
        self.fleet = Fleet(addresses, key=key, timeouts=timeouts, credentials=credentials, speaks=speaks)
        self._reader: MicrobatchReader | None = None
        self._finished_wait_s = 0.0
        self._closed = False
        self._prefetch_bytes = prefetch_bytes
        self._max_microbatch_bytes = max_microbatch_bytes
        self._buffers = buffers
        try:
            self.job = resolve_job(source, self.fleet)
            self._view = _view_request(self.job, module, rank, tensors, compress, share_fetch)
            self.num_steps = self.fleet.register(self.job)
            first = self.job.stream.first_step
            self._cursor = _start_at(self.job, first if start_step is None else start_step, self.num_steps)
            self._traces = None if tracing is None else tracing.of_reader(self.job.job_id)
        except BaseException:
            self.fleet.close()
            raise

    @property
    def step(self) -> int:
        """The step of the next microbatch."""
        return self._cursor.step

    @property
    def wait_s(self) -> float:
        """Seconds that the caller waited for all microbatches so far."""
        return self._finished_wait_s + (self._reader.wait_s if self._reader is not None else 0.0)

    @property
    def ready(self) -> bool:
        """Whether the next microbatch has been received, so that it is had without waiting."""
        return self._reader is not None and self._reader.ready

    @property
    def direct_fallbacks(self) -> int:
        """Streams so far that left their data connection for gRPC; the log says why."""
        return self.fleet.direct_fallbacks

    def __next__(self) -> Microbatch[TensorT]:
        """The next microbatch; StopIteration after the job's last one.

        Raises:
            ClientError: no server can go on, or servers disagree.
        """
        if self._closed:
            raise ClosedError("the client was closed; open another one to go on")
        reader = self._reader  # `close` from another thread sets it to None
        if reader is None:
            self._reader = reader = MicrobatchReader(
                self.fleet,
                self.job,
                self._view,
                num_steps=self.num_steps,
                start=self._cursor,
                prefetch_bytes=self._prefetch_bytes,
                max_microbatch_bytes=self._max_microbatch_bytes,
                buffers=self._buffers,
                shown=self._handed_out,
                spans=_wait_spans(self._traces, self.job, self._view),
            )
        microbatch: Microbatch[TensorT] | None = next(reader, None)
        if microbatch is None and self._cursor.step >= self.num_steps:
            raise StopIteration
        if microbatch is None or microbatch.cursor != self._cursor:  # an interrupt has lost the one that is due
            self._end_reader()
            return next(self)
        self._cursor = reader.cursor
        return microbatch

    def follow(self, microbatch: Microbatch[Any]) -> None:
        """Stand behind a microbatch that another process has read; this client reads none itself."""
        self._cursor = microbatch.cursor.after(microbatch.num_microbatches)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs: {"version", "stream_id", "step", "stream"}, plain values, about a kilobyte.

        `stream` is the canonical JSON that `stream_id` is the hash of, so that a refusal can say what differs.
        """
        return {
            "version": STATE_VERSION,
            "stream_id": self.job.stream_id,
            "step": self._cursor.step,
            "stream": canonical_json(self.job.stream).decode(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state, whatever the layout of the job that it was taken from.

        A job that continues another stream (`stream.continues`) goes on from the state with which that one ended.

        Raises:
            StateError: it is of another version or another stream, or the job has no such step.
        """
        if state.get("version") != STATE_VERSION:
            raise StateError(
                f"the data state has version {state.get('version')!r}, this release reads version {STATE_VERSION}: "
                "resume with the release that wrote the checkpoint"
            )
        check_stream(self.job, state)
        cursor = _start_at(self.job, state.get("step"), self.num_steps)
        self._end_reader()
        self._cursor = cursor

    def get_plan(self, step: int, *, with_timelines: bool = False) -> StepPlan:
        """The plan of a step of this job; if asked for with the simulated times of all its operations."""
        request = GetPlanRequest(job_id=self.job.job_id, step=step, with_timelines=with_timelines)
        return self.fleet.call(lambda stub: stub.GetPlan, request, job=self.job).plan

    def describe_samples(self, dataset: int, samples: Sequence[int]) -> list[SampleDescription]:
        """Shard, key and sidecar columns of samples, in their order.

        Args:
            dataset: position in the job's dataset list, as `Items.dataset` has it.
            samples: numbers of at most 1024 samples, as `Items.sample` has them.

        Raises:
            ClientError: the dataset has no such sample, or no server answers.
        """
        spec = self.job.stream.datasets[dataset]
        request = DescribeSamplesRequest(dataset=spec.name, fingerprint=spec.fingerprint, samples=samples)
        return list(self.fleet.call(lambda stub: stub.DescribeSamples, request).samples)

    def report_step_times(
        self,
        step: int,
        *,
        step_time_s: float,
        data_wait_s: float,
        stage: int = 0,
        forward_ns: Sequence[int] = (),
        backward_ns: Sequence[int] = (),
    ) -> bool:
        """Tell a server what a step took here; whether it took that. Training goes on without: a failure is logged.

        A server that does not know the job does not learn it by this, which could take minutes: the stream brings it.

        Args:
            step: the step.
            step_time_s: wall time of the whole step.
            data_wait_s: part of it spent waiting for data.
            stage: pipeline stage within the module.
            forward_ns: forward time of each microbatch in order.
            backward_ns: backward time of each microbatch in order.
        """
        times = StepTimes(
            job_id=self.job.job_id,
            step=step,
            module=self._view.module,
            rank=self._view.rank,
            stage=stage,
            step_time=_duration(step_time_s),
            data_wait=_duration(data_wait_s),
            forward_ns=forward_ns,
            backward_ns=backward_ns,
        )
        # May run beside the iteration (`StepReporter`): only the thread-safe fleet, and what never changes, is used.
        request, endpoint = ReportStepTimesRequest(times=times), self.fleet.endpoints[self.fleet.current]
        try:
            self.fleet.ask(endpoint, lambda stub: stub.ReportStepTimes, request, CallGuard())
        except ClientError as error:
            _log.warning("the times of step %d were not reported: %s", step, error)
            return False
        return True

    def close(self) -> None:
        """End the stream and all calls; tensors handed out stay valid. Closing again changes nothing."""
        self._closed = True
        self._end_reader()
        self.fleet.close()

    def __reduce__(self) -> Any:
        """Asked for by processes that are spawned, and by copies; refused with ValueError."""
        raise ValueError(SENT_ELSEWHERE)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @staticmethod
    @abstractmethod
    def _handed_out(microbatch: Microbatch[Array]) -> Microbatch[TensorT]:
        """A received microbatch with tensors of the client's kind, over the same memory."""

    def _end_reader(self) -> None:
        if self._reader is not None:
            self._finished_wait_s += self._reader.wait_s
            # Joins its thread, for up to JOIN_S: the next reader takes from the same pool, which is one thread's.
            self._reader.close()
            self._reader = None


class ArrayClient(ViewClient[Array]):
    """A client whose tensors are numpy arrays."""

    @staticmethod
    def _handed_out(microbatch: Microbatch[Array]) -> Microbatch[Array]:
        return microbatch


def _start_at(job: Job, step: Any, num_steps: int) -> Cursor:
    first = job.stream.first_step
    if not isinstance(step, int) or isinstance(step, bool) or not first <= step <= num_steps:
        raise StateError(
            f"found {step!r} as the step to start with; this job has steps {first} to {num_steps - 1} and ends at "
            f"{num_steps}: start at one of them, or raise execution.end"
        )
    return Cursor(step)


def _wait_spans(traces: StepTraces | None, job: Job, view: ViewRequest) -> WaitSpans | None:
    """What a reader records; that of the first rank of a job records whole steps."""
    if traces is None:
        return None
    roots = _is_first(job, view.module, view.rank)
    return WaitSpans(traces, job_id=job.job_id, module=view.module, rank=view.rank, roots=roots)


def _view_request(
    job: Job, module: str, rank: int, tensors: Sequence[str] | None, compress: bool, share_fetch: bool
) -> ViewRequest:
    found = job.spec.execution.module(module)
    if not 0 <= rank < found.dp:
        raise ValueError(
            f"rank {rank} of module {module} does not exist; its dp is {found.dp}: ask for 0 to {found.dp - 1}"
        )
    if tensors is not None and not tensors:
        raise ValueError("found an empty list of tensors; name at least one, or leave `tensors` out to get all")
    return ViewRequest(module, rank, tuple(tensors or ()), compress, share_fetch)


def _spread_key(job: Job | dict[str, Any], module: str, rank: int) -> str:
    """What the first server is chosen by: the job as given, and who asks."""
    text = job.job_id if isinstance(job, Job) else json.dumps(job, sort_keys=True, default=str)
    return f"{hashlib.sha256(text.encode()).hexdigest()}/{module}/{rank}"


def _is_first(job: Job | dict[str, Any], module: str, rank: int) -> bool:
    """Whether this is the first rank of the first module, or of any where the job as given has none."""
    if isinstance(job, Job):
        return rank == 0 and job.spec.execution.modules[0].name == module
    try:
        first = job["execution"]["modules"][0]["name"]
    except (KeyError, IndexError, TypeError):  # it is refused later, with what is wrong
        first = module
    return rank == 0 and bool(first == module)


def _duration(seconds: float) -> Duration:
    duration = Duration()
    duration.FromNanoseconds(round(seconds * 1e9))
    return duration
