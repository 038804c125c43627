# ruff: noqa: N802 (methods are named by the proto)
"""The methods of DataService. Every field of a request is checked here or where it is used, before memory is taken."""

import json
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Final

import grpc
from disttrain.v1 import data_service_pb2 as pb
from disttrain.v1 import errors_pb2, microbatch_pb2
from google.protobuf.duration_pb2 import Duration

from dataserver.assembly import content_digest, tokenizer_spec
from dataserver.jobs import IsCancelled, fill_job, quarantine_digest
from dataserver.planning.job.fields import (
    SUPPORTED_CONTENT_VERSIONS,
    SUPPORTED_ORDER_VERSIONS,
    ModuleSpec,
    TextError,
    absent_fields,
    json_pointer,
    parse_json,
    value_at,
)
from dataserver.planning.job.identity import JobSpecError, parse_job
from dataserver.planning.job.spec import SUPPORTED_PLAN_VERSIONS
from dataserver.planning.plan.naming import counted
from dataserver.serving.access import Access
from dataserver.serving.config import ServerConfig
from dataserver.serving.errors import DataServiceError, invalid_request
from dataserver.serving.limits import MAX_MESSAGE_BYTES
from dataserver.serving.registry import JobRegistry, ServedJob
from dataserver.serving.sample_descriptions import describe_samples
from dataserver.serving.stream.source import ViewSource
from dataserver.serving.stream.stream import MicrobatchStream, StreamOptions
from dataserver.serving.stream.streams import Streams
from dataserver.tracing import Recorder, StepTraces

CODECS: Final = (microbatch_pb2.CODEC_RAW, microbatch_pb2.CODEC_ZSTD)
MAX_TENSOR_NAMES: Final = 64
MESSAGE_MARGIN_BYTES: Final = 1024
"""Room in a message of the largest size for what wraps a plan."""
MAX_TENSOR_NAME_CHARS: Final = 64
MAX_CAUSE_CHARS: Final = 1024
"""Characters that are logged of a client's reason to leave its data connection."""
MAX_WAITED_S: Final = 10**9
"""Longest wait that a client may report; thirty years."""
MAX_PROGRESS_TOKEN_BYTES: Final = 16
MAX_REPORT_BYTES: Final = 64 << 10
"""Largest report of step times, enough for a few thousand microbatches."""


class DataService:
    """Serves planned microbatches; see data_service.proto."""

    def __init__(
        self, access: Access, streams: Streams, jobs: JobRegistry, config: ServerConfig, recorder: Recorder | None
    ) -> None:
        self._access = access
        self._streams = streams
        self._config = config
        self._jobs = jobs
        self._recorder = recorder
        self._content_digest = content_digest()

    def GetOrCreateJob(
        self, request: pb.GetOrCreateJobRequest, context: grpc.ServicerContext
    ) -> pb.GetOrCreateJobResponse:
        """Make a job known, filling in what it leaves out."""
        try:
            stated = parse_json(request.job_spec_json)
        except TextError as error:
            raise JobSpecError(f"job_spec_json: {error}") from None
        visible = self._access.catalog(context)
        complete = fill_job(stated, visible)
        served = self._jobs.get_or_create(parse_job(complete), visible, _left(context))
        return pb.GetOrCreateJobResponse(
            job_id=served.job.job_id,
            stream_id=served.job.stream_id,
            canonical_job_spec_json=served.job.text,
            num_steps=served.planner.num_steps,
            filled=[
                pb.FilledField(path=json_pointer(path), value_json=json.dumps(value_at(complete, path)))
                for path in absent_fields(stated)
            ],
            notes=served.planner.notes,
            first_step=served.planner.first_step,
        )

    def StreamMicrobatches(
        self, request: pb.StreamMicrobatchesRequest, context: grpc.ServicerContext
    ) -> Iterator[bytes]:
        """Stream the microbatches of one rank, as messages that are bytes already."""
        version = self._access.version
        stream = self._opened(request, context)
        if not context.add_callback(stream.close):
            stream.close()
        with closing(stream.messages()) as messages:
            for message in messages:
                if version != self._access.version:  # its datasets may have been taken from its caller
                    version = self._access.version
                    self._known(request.job_id, context)
                yield message

    def _opened(self, request: pb.StreamMicrobatchesRequest, context: grpc.ServicerContext) -> MicrobatchStream:
        served = self._known(request.job_id, context)
        _check_rank(served, request.module, request.rank)
        _check_start(served, request.start_step, request.start_microbatch)
        source = ViewSource(
            served=served,
            module=request.module,
            rank=request.rank,
            tensors=_checked_names(tuple(request.tensors)),
            zstd_level=self._zstd_level(request.accepted_codecs),
            share_fetch=request.share_fetch,
        )
        # What is compressed is made for a network.
        token = request.memory_token if source.zstd_level is None else b""
        options = StreamOptions(
            memory_token=token,
            progress_token=_checked_token(request.progress_token),
            direct=request.direct,
            client_port=_port(context.peer()),
            traces=StepTraces.read(self._recorder, context.invocation_metadata()),
        )
        start, caller = (request.start_step, request.start_microbatch), self._access.caller(context)
        try:
            return self._streams.open(source, *start, context.cancel, options, caller.identity)
        except DataServiceError as error:
            if error.reason == errors_pb2.ERROR_REASON_IDENTITY_LIMIT:
                self._access.audit.write("StreamMicrobatches", str(caller), error.message)
            raise

    def GetPlan(self, request: pb.GetPlanRequest, context: grpc.ServicerContext) -> pb.GetPlanResponse:
        """Plan one step and say what the plan gains."""
        from dataserver.planning.planner import explain
        from dataserver.serving.plan_message import plan_message

        served, cancelled = self._known(request.job_id, context), _left(context)
        plan = served.planner.plan(request.step, cancelled)
        message = served.planner.scheduled(
            lambda: plan_message(served.job, plan, explain(served.job, plan), with_timelines=request.with_timelines),
            cancelled,
        )
        if message.ByteSize() > MAX_MESSAGE_BYTES - MESSAGE_MARGIN_BYTES:
            raise invalid_request(
                f"the plan of step {plan.step} names {len(plan.samples)} samples, more than a message of "
                f"{MAX_MESSAGE_BYTES} bytes holds; look at it where the data is, with dataserver plan",
            )
        return pb.GetPlanResponse(plan=message)

    def ReportStepTimes(
        self, request: pb.ReportStepTimesRequest, context: grpc.ServicerContext
    ) -> pb.ReportStepTimesResponse:
        """Take the times that a rank measured in a step."""
        times = request.times
        served = self._known(times.job_id, context)
        module = _check_rank(served, times.module, times.rank)
        _check_times(served, module, times)
        self._jobs.report(served, times)
        return pb.ReportStepTimesResponse()

    def ReportProgress(self, request: pb.ReportProgressRequest, _: grpc.ServicerContext) -> pb.ReportProgressResponse:
        """Note which step a trainer has reached."""
        waited_s = _checked_wait(request.waited) if request.HasField("waited") else None
        if token := _checked_token(request.progress_token):
            self._streams.note_progress(token, request.step, waited_s)
        return pb.ReportProgressResponse()

    def EndDirect(self, request: pb.EndDirectRequest, _: grpc.ServicerContext) -> pb.EndDirectResponse:
        """Have a stream send chunks from now on."""
        cause = request.cause[:MAX_CAUSE_CHARS].encode("unicode_escape").decode()
        restarted = self._streams.end_direct(request.token, request.step, request.microbatch, cause)
        return pb.EndDirectResponse(restarted=restarted)

    def ListStepTimes(
        self, request: pb.ListStepTimesRequest, context: grpc.ServicerContext
    ) -> pb.ListStepTimesResponse:
        """List the newest measured times."""
        times = self._known(request.job_id, context).times
        return pb.ListStepTimesResponse(times=times.newest(request.step if request.HasField("step") else None))

    def GetServerInfo(self, _: pb.GetServerInfoRequest, context: grpc.ServicerContext) -> pb.GetServerInfoResponse:
        """Say what this server supports."""
        from importlib.metadata import version  # loads a parser of mail

        return pb.GetServerInfoResponse(
            release=version("disttrain"),
            order_versions=sorted(SUPPORTED_ORDER_VERSIONS),
            content_versions=sorted(SUPPORTED_CONTENT_VERSIONS),
            plan_versions=sorted(SUPPORTED_PLAN_VERSIONS),
            content_digest=self._content_digest,
            max_streams=self._config.max_streams,
            draining=self._streams.draining,
            codecs=CODECS,
            max_message_bytes=MAX_MESSAGE_BYTES,
            stream_bytes=self._config.stream_bytes,
            memory_socket=self._streams.shared.shared_memory.name,
            audio_digest=self._access.catalog(context).audio_digest(),
            transforms=[
                pb.TransformInfo(name=one.name, version=one.version)
                for _, one in sorted(self._access.catalog(context).transforms.installed.items())
            ],
            video_digest=self._access.catalog(context).video_digest(),
            sound_digest=self._access.catalog(context).sound_digest(),
        )

    def GetDatasetInfo(
        self, _request: pb.GetDatasetInfoRequest, context: grpc.ServicerContext
    ) -> pb.GetDatasetInfoResponse:
        """Say what datasets and tokenizers there are."""
        visible = self._access.catalog(context)
        return pb.GetDatasetInfoResponse(
            datasets=[
                pb.DatasetInfo(
                    name=name,
                    fingerprint=dataset.fingerprint,
                    num_shards=len(dataset.shards),
                    num_samples=sum(shard.num_samples for shard in dataset.shards),
                    quarantine=quarantine_digest(dataset),
                )
                for name, dataset in sorted(visible.datasets.items())
            ],
            tokenizers=[
                pb.TokenizerInfo(text_vocab_size=tokenizer.vocab_size, **tokenizer_spec(tokenizer).model_dump())
                for _, tokenizer in sorted(visible.tokenizers.items())
            ],
        )

    def DescribeSamples(
        self, request: pb.DescribeSamplesRequest, context: grpc.ServicerContext
    ) -> pb.DescribeSamplesResponse:
        """Say which samples the numbers stand for."""
        newest = self._access.catalog(context).named_dataset(request.dataset)
        dataset = newest.as_it_was(request.fingerprint or newest.fingerprint)
        if dataset is None:
            raise DataServiceError(
                errors_pb2.ERROR_REASON_DATASET_MISMATCH,
                f"dataset {request.dataset!r} was asked for with fingerprint {request.fingerprint[:64]!r}, the "
                f"server's has {newest.fingerprint}, in which the numbers mean other samples: ask another server",
            )
        return describe_samples(dataset, request.samples)

    def _known(self, job_id: str, context: grpc.ServicerContext) -> ServedJob:
        """A job that this server knows, and that exists for the caller."""
        return self._jobs.get(job_id, self._access.catalog(context))

    def _zstd_level(self, accepted: Sequence[microbatch_pb2.Codec.ValueType]) -> int | None:
        """Level to compress with; None for raw tensors."""
        if accepted and not set(accepted) & set(CODECS):
            raise invalid_request(
                f"accepted_codecs is {list(accepted)[:16]}, and this server has none of them; name one or more of "
                f"{', '.join(f'{microbatch_pb2.Codec.Name(c)} ({c})' for c in CODECS)}, or none for raw tensors"
            )
        return self._config.zstd_level if microbatch_pb2.CODEC_ZSTD in accepted else None


def _left(context: grpc.ServicerContext) -> IsCancelled:
    """Whether a call has ended: its client gave it up, or the server ends."""
    return lambda: not context.is_active()


def _port(peer: str) -> int:
    """The port in gRPC's name of a peer, such as ipv4:127.0.0.1:40000; 0 where there is none."""
    port = peer.rpartition(":")[2]
    return int(port) if port.isascii() and port.isdecimal() and int(port) < 1 << 16 else 0


def _check_rank(served: ServedJob, name: str, rank: int) -> ModuleSpec:
    modules = {module.name: module for module in served.job.spec.execution.modules}
    module = modules.get(name)
    if module is None:
        raise DataServiceError(
            errors_pb2.ERROR_REASON_MODULE_UNKNOWN,
            f"module {name[:128]!r} is not in the job; it has {sorted(modules)}",
        )
    if rank >= module.dp:
        raise DataServiceError(
            errors_pb2.ERROR_REASON_RANK_OUT_OF_RANGE,
            f"rank {rank} of module {name} was asked for; its data-parallel degree is {module.dp}, so ranks are 0 to "
            f"{module.dp - 1}",
        )
    return module


def _check_start(served: ServedJob, step: int, microbatch: int) -> None:
    """A stream may start where the job ends, which a finished checkpoint asks for; not beyond."""
    num_steps, first_step = served.planner.num_steps, served.planner.first_step
    if step < first_step:
        raise DataServiceError(
            errors_pb2.ERROR_REASON_STEP_OUT_OF_RANGE,
            f"step {step} was asked for; the job continues another stream and begins with step {first_step}",
        )
    if (step, microbatch) > (num_steps, 0):
        raise DataServiceError(
            errors_pb2.ERROR_REASON_STEP_OUT_OF_RANGE,
            f"step {step}, microbatch {microbatch} was asked for; the job has {counted(num_steps, 'step')}",
        )


def _checked_token(token: bytes) -> bytes:
    if len(token) > MAX_PROGRESS_TOKEN_BYTES:
        raise invalid_request(f"progress_token has {len(token)} bytes; at most {MAX_PROGRESS_TOKEN_BYTES} are allowed")
    return token


def _checked_wait(waited: Duration) -> float:
    """The seconds of a duration, which may be anything."""
    if _is_negative(waited) or waited.seconds > MAX_WAITED_S:
        raise invalid_request(f"waited is {waited.seconds} s; 0 to {MAX_WAITED_S} s are allowed")
    return waited.seconds + waited.nanos / 1e9


def _checked_names(names: tuple[str, ...]) -> tuple[str, ...]:
    if len(names) > MAX_TENSOR_NAMES or any(len(name) > MAX_TENSOR_NAME_CHARS for name in names):
        raise invalid_request(
            f"{len(names)} tensors are named; at most {MAX_TENSOR_NAMES} names of at most {MAX_TENSOR_NAME_CHARS} "
            "characters are allowed"
        )
    return names


def _check_times(served: ServedJob, module: ModuleSpec, times: pb.StepTimes) -> None:
    first_step, num_steps = served.planner.first_step, served.planner.num_steps
    if not first_step <= times.step < num_steps:
        begins = f", begins with step {first_step}" if first_step else ""
        raise DataServiceError(
            errors_pb2.ERROR_REASON_STEP_OUT_OF_RANGE,
            f"times of step {times.step} were reported; the job has {counted(num_steps, 'step')}{begins}",
        )
    if times.stage >= module.pp:
        raise invalid_request(
            f"times of stage {times.stage} were reported; module {module.name} has {counted(module.pp, 'stage')}"
        )
    if times.ByteSize() > MAX_REPORT_BYTES:
        raise invalid_request(f"the report has {times.ByteSize()} bytes; at most {MAX_REPORT_BYTES} are allowed")
    if any(ns < 0 for ns in (*times.forward_ns, *times.backward_ns)) or any(
        map(_is_negative, (times.step_time, times.data_wait))
    ):
        raise invalid_request("a reported time is negative; times must be 0 or more")


def _is_negative(duration: Duration) -> bool:
    return duration.seconds < 0 or duration.nanos < 0
