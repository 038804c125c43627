"""A small data server that speaks the protos and misbehaves on demand. No dataset: contents are made from names.

`FakeServer` runs in this process, `fake_process` runs one as a process of its own.
"""

import ctypes
import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent import futures
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import zstandard
from builders.jobs import compose, module
from cli.preforked import PreforkedProcess
from crc32c import crc32c as crc32c_of
from disttrain.v1 import data_service_pb2 as pb
from disttrain.v1 import microbatch_pb2 as mb
from disttrain.v1 import plan_pb2
from disttrain.v1.data_service_pb2_grpc import DataServiceServicer, add_DataServiceServicer_to_server
from google.protobuf.any_pb2 import Any as AnyMessage
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from dataserver.jobs import Catalog, fill_job
from dataserver.planning.job.identity import parse_job

NUM_STEPS = 4
CHUNK_BYTES = 1 << 16
OPTIONS = (("grpc.so_reuseport", 0), ("grpc.http2.min_ping_interval_without_data_ms", 1000))
"""As real servers have them."""
DIGEST = hashlib.sha256(b"images").hexdigest()
FINGERPRINT = hashlib.sha256(b"dataset").hexdigest()
ACTIONS = {"INTERNAL": "ANOTHER_SERVER", "TENSOR_UNKNOWN": "GIVE_UP", "UNHEARD_OF": "DANCE"}
"""What abort:K:REASON asks the client to do where that is not RETRY."""
TOKENIZER = hashlib.sha256(b"tokenizer").hexdigest()
CATALOG: Any = Catalog(
    datasets={"pairs": SimpleNamespace(fingerprint=FINGERPRINT, quarantine=None)},
    tokenizers={"bytes": SimpleNamespace(name="bytes", digest=TOKENIZER, vocab_size=256)},
)
"""What jobs are filled in from."""


def job_data(**changes: Any) -> dict[str, Any]:
    """A job that FakeServer serves; `changes` replace fields of its stream."""
    fields = {"seq_len": 128, "global_batch": 4, "end": {"steps": NUM_STEPS}, **changes}
    return compose([module("encoder"), module("backbone", dp=2)], **fields)


def num_microbatches(step: int) -> int:
    """Steps differ in it."""
    return 2 + step % 2


def arrays_of(
    job_id: str, module: str, rank: int, step: int, microbatch: int, more_rows: int = 0
) -> dict[str, np.ndarray]:
    """The tensors of a view: the same from every server."""
    key = hashlib.sha256(f"{job_id} {module} {rank} {step} {microbatch}".encode()).digest()
    rng = np.random.Generator(np.random.Philox(int.from_bytes(key[:8], "little")))
    count = 50 + int(rng.integers(0, 200)) + more_rows
    return {
        "patches": rng.integers(0, 256, (count, 588), np.uint8),
        "labels": rng.integers(0, 9, count, np.int32),
        "empty": np.zeros((0, 2), np.int32),
        "half": rng.integers(0, 2**16, (3, 5), np.uint16),
    }


@dataclass
class Answers:
    """How the server behaves; the stream behaviours apply to one stream each, in turn, then everything is fine."""

    streams: list[str] = field(default_factory=list)
    """ok, or after K microbatches cut:K, abort:K:REASON, drain:K, idle:K, part:K, hang:K, crc:K, hash:K, skip:K, end:K,
    huge:K or busy:K; part is an idle end in the middle of a microbatch."""
    info: dict[str, Any] = field(default_factory=dict)
    """Fields of GetServerInfoResponse that differ."""
    forgets_jobs: int = 0
    """How many streams are answered with JOB_UNKNOWN although the job was brought."""
    delay_s: float = 0.0
    """Before each microbatch."""
    busy_s: float = 0.0
    """How long busy:K computes without letting another thread of Python run."""
    more_rows: int = 0
    """Patches beyond the usual ones in each microbatch, 588 bytes each."""
    job_delay_s: float = 0.0
    """Before a job is known."""
    fingerprint: str = FINGERPRINT
    """Of the dataset that jobs must name."""
    content: str = ""
    """Anything else makes other plans."""
    unknown_field: str = ""
    """A field of jobs that its release does not know."""
    refusal: tuple[str, str] = ("JOB_UNSUPPORTED", "ANOTHER_SERVER")
    """Reason and action of its answer to that."""


class FakeServer(DataServiceServicer):
    """One server on a free port of the loopback, or of another address of this machine."""

    def __init__(self, answers: Answers | None = None, port: int = 0, host: str = "127.0.0.1") -> None:
        self.answers = answers or Answers()
        self.jobs: set[str] = set()
        self._stream_ids: dict[str, str] = {}
        self.requests: list[pb.StreamMicrobatchesRequest] = []
        self.reports: list[pb.StepTimes] = []
        self.sent: list[tuple[int, int]] = []
        self.registrations = 0
        self.asked = 0
        """How often it said what it is."""
        self.ended = threading.Semaphore(0)
        self._closing = threading.Event()
        self._server = grpc.server(futures.ThreadPoolExecutor(16), options=OPTIONS)
        add_DataServiceServicer_to_server(self, self._server)
        self.address = f"{host}:{self._server.add_insecure_port(f'{host}:{port}')}"
        self._server.start()

    def close(self) -> None:
        self._closing.set()
        self._server.stop(0).wait()

    def __enter__(self) -> "FakeServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def GetServerInfo(self, request, context):  # noqa: ARG002, N802
        self.asked += 1
        versions = {"order_versions": [1, 2], "content_versions": [2], "plan_versions": [5, 6, 7, 8]}
        fields = {**versions, "content_digest": DIGEST}
        return pb.GetServerInfoResponse(**{"release": "fake", **fields, **self.answers.info})

    def GetOrCreateJob(self, request, context):  # noqa: N802
        try:
            job = parse_job(fill_job(json.loads(request.job_spec_json), CATALOG))
        except ValueError as error:
            fail(context, grpc.StatusCode.INVALID_ARGUMENT, "JOB_INVALID", "GIVE_UP", str(error))
        if (name := self.answers.unknown_field) and f'"{name}"' in request.job_spec_json:
            said = f"the job is not valid: {name}: this key is unknown"
            fail(context, grpc.StatusCode.FAILED_PRECONDITION, *self.answers.refusal, said)
        if job.spec.stream.datasets[0].fingerprint != self.answers.fingerprint:
            fail(context, grpc.StatusCode.FAILED_PRECONDITION, "DATASET_MISMATCH", "ANOTHER_SERVER")
        if job.spec.execution.plan_version not in self.answers.info.get("plan_versions", [5, 6, 7, 8]):
            fail(context, grpc.StatusCode.FAILED_PRECONDITION, "VERSION_UNSUPPORTED", "ANOTHER_SERVER")
        self._closing.wait(self.answers.job_delay_s)
        self.jobs.add(job.job_id)
        self._stream_ids[job.job_id] = job.stream_id
        self.registrations += 1
        return pb.GetOrCreateJobResponse(
            job_id=job.job_id,
            stream_id=job.stream_id,
            canonical_job_spec_json=job.text,
            num_steps=NUM_STEPS,
        )

    def GetPlan(self, request, context):  # noqa: N802
        self._require_job(request.job_id, context)
        return pb.GetPlanResponse(plan=plan_pb2.StepPlan(job_id=request.job_id, step=request.step))

    def ReportStepTimes(self, request, context):  # noqa: N802
        self._require_job(request.times.job_id, context)
        self.reports.append(request.times)
        return pb.ReportStepTimesResponse()

    def ReportProgress(self, request, context):  # noqa: ARG002, N802
        context.abort(grpc.StatusCode.UNIMPLEMENTED, "as a server of an older release answers")

    def StreamMicrobatches(self, request, context):  # noqa: N802
        self._require_job(request.job_id, context)
        if self.answers.forgets_jobs:
            self.answers.forgets_jobs -= 1
            self.jobs.clear()
            self._require_job(request.job_id, context)
        self.requests.append(request)
        behaviour = self.answers.streams.pop(0) if self.answers.streams else "ok"
        context.add_callback(self.ended.release)
        yield from self._stream(request, context, *behaviour.split(":"))

    def _require_job(self, job_id: str, context) -> None:
        if job_id not in self.jobs:
            fail(context, grpc.StatusCode.NOT_FOUND, "JOB_UNKNOWN", "CREATE_JOB")

    def _stream(self, request, context, kind: str, after: str = "0", reason: str = "") -> Iterator[Any]:
        left = int(after)
        for step in range(request.start_step, NUM_STEPS):
            first = request.start_microbatch if step == request.start_step else 0
            for microbatch in range(first, num_microbatches(step)):
                if self.answers.delay_s:
                    self._closing.wait(self.answers.delay_s)
                if kind == "busy" and left == 0:
                    ctypes.PyDLL(None).usleep(int(self.answers.busy_s * 1e6))  # PyDLL keeps the interpreter's lock
                elif kind != "ok" and left == 0:
                    yield from self._misbehave(request, context, kind, reason, step, microbatch)
                    return
                left -= 1
                yield from self._microbatch(request, step, microbatch)
                self.sent.append((step, microbatch))
        yield end(pb.EndOfStream.REASON_END_OF_JOB, NUM_STEPS, 0)

    def _misbehave(self, request, context, kind: str, reason: str, step: int, microbatch: int) -> Iterator[Any]:
        messages = list(self._microbatch(request, step, microbatch))
        header = messages[0].header
        match kind:
            case "cut":
                yield from messages[:-1]  # the microbatch is never complete
            case "abort":
                fail(context, grpc.StatusCode.UNAVAILABLE, reason, ACTIONS.get(reason, "RETRY"))
            case "drain" | "idle" | "part":
                yield from messages[:-1] if kind == "part" else []
                reason = pb.EndOfStream.REASON_DRAINING if kind == "drain" else pb.EndOfStream.REASON_IDLE
                yield end(reason, step, microbatch)
            case "hang":
                yield messages[0]
                self._closing.wait(60)
            case "crc":
                header.crc32c ^= 1
            case "hash":
                header.plan_hash = b"x" * 32
            case "skip":
                messages = list(self._microbatch(request, step + 1, 0))
            case "end":
                yield end(pb.EndOfStream.REASON_END_OF_JOB, step, microbatch)
            case "huge":
                header.total_bytes = header.tensors[0].encoded_bytes = header.tensors[0].raw_bytes = 1 << 40
        if kind in ("crc", "hash", "skip", "huge"):
            yield from messages

    def _microbatch(self, request, step: int, microbatch: int) -> Iterator[pb.StreamMicrobatchesResponse]:
        place = (request.job_id, request.module, request.rank, step, microbatch)
        arrays = arrays_of(*place, self.answers.more_rows)
        wanted = {n: a for n, a in arrays.items() if not request.tensors or n in request.tensors}
        header = mb.MicrobatchHeader(
            job_id=request.job_id,
            stream_id=self._stream_ids[request.job_id],
            plan_hash=hashlib.sha256(f"{self.answers.content}{request.job_id} {step}".encode()).digest(),
            content_version=2,
            step=step,
            microbatch=microbatch,
            num_microbatches=num_microbatches(step),
            denominators=mb.Denominators(text_tokens=100 + step, target_patches=7),
            items=mb.Items(
                dataset=[0, 0],
                sample=[step, 1 << 40],
                validity=[mb.VALIDITY_VALID, mb.VALIDITY_INVALID],
                epoch=[0, 1],
            ),
            sequence_valid=[True],
            schedules=[mb.ModuleSchedule(module=m, in_flight=[n], chunks=1) for m, n in (("vit", 2), ("llm", 1))],
            routings=[
                mb.Routing(
                    source_module="vit",
                    target_module="llm",
                    source_microbatch=[microbatch],
                    source_rank=[0],
                    source_start=[0],
                    target_microbatch=[microbatch],
                    target_rank=[request.rank],
                    target_start=[4],
                    rows=[3],
                )
            ],
        )
        payload = pack(header, wanted, compress=mb.CODEC_ZSTD in request.accepted_codecs)
        yield pb.StreamMicrobatchesResponse(header=header)
        for first in range(0, len(payload), CHUNK_BYTES):
            yield pb.StreamMicrobatchesResponse(chunk=payload[first : first + CHUNK_BYTES])


def pack(header: mb.MicrobatchHeader, arrays: dict[str, np.ndarray], *, compress: bool) -> bytes:
    """Fill in a header's tensor table; returns the bytes that follow it."""
    payload = bytearray()
    types = {"uint8": mb.DATA_TYPE_UINT8, "int32": mb.DATA_TYPE_INT32, "uint16": mb.DATA_TYPE_BFLOAT16}
    for name, array in arrays.items():
        payload += bytes(-len(payload) % 64)
        raw = array.tobytes()
        encoded = zstandard.ZstdCompressor().compress(raw) if compress else raw
        smaller = len(encoded) < len(raw)
        encoded = encoded if smaller else raw
        header.tensors.add(
            name=name,
            dtype=types[str(array.dtype)],
            shape=array.shape,
            offset=len(payload),
            encoded_bytes=len(encoded),
            raw_bytes=len(raw),
            codec=mb.CODEC_ZSTD if smaller else mb.CODEC_RAW,
        )
        payload += encoded
    header.total_bytes = len(payload)
    header.crc32c = crc32c_of(bytes(payload))
    return bytes(payload)


def end(reason: Any, step: int, microbatch: int) -> pb.StreamMicrobatchesResponse:
    return pb.StreamMicrobatchesResponse(end=pb.EndOfStream(reason=reason, next_step=step, next_microbatch=microbatch))


def fail(context: Any, code: grpc.StatusCode, reason: str, action: str, message: str = "") -> None:
    info = error_details_pb2.ErrorInfo(reason=reason, domain="disttrain", metadata={"action": action})
    detail = AnyMessage()
    detail.Pack(info)
    status = status_pb2.Status(code=code.value[0], message=message or f"scripted {reason}", details=[detail])
    context.abort_with_status(rpc_status.to_status(status))


@contextmanager
def fake_process(
    *, host: str = "127.0.0.1", prefix: Sequence[str] = (), **answers: Any
) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """A server in a process of its own, and its address; `prefix` stands before its command line."""
    path = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*path, os.environ.get("PYTHONPATH", "")])}
    words, streams = [host, json.dumps(asdict(Answers(**answers)))], {"stdout": subprocess.PIPE, "text": True}
    started = (
        subprocess.Popen([*prefix, sys.executable, __file__, *words], env=environment, **streams)
        if prefix
        else PreforkedProcess(["client.fake_server", *words], **streams)
    )
    with started as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


def main() -> None:
    server = FakeServer(Answers(**json.loads(sys.argv[2])), host=sys.argv[1])
    sys.stdout.write(server.address + "\n")
    sys.stdout.flush()
    threading.Event().wait()


if __name__ == "__main__":
    main()
