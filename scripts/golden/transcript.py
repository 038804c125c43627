"""Requests to a server of the golden datasets, and what it answers: recorded, written, and read again.

scripts/make_golden        writes protos/golden; its README.md says what the files hold
"""

import hashlib
import json
import socket
import struct
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast
from unittest import mock

import grpc
import zstandard
from disttrain.v1 import data_service_pb2 as pb
from disttrain.v1 import microbatch_pb2
from google.protobuf.json_format import MessageToDict, ParseDict
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from dataserver.assembly import load_tokenizer
from dataserver.dataset import count_tokens
from dataserver.dataset.index.build import build_index
from dataserver.jobs import Catalog
from dataserver.serving.config import load_config
from dataserver.serving.server import DataServer
from dataserver.serving.stream import handing_out
from golden.dataset import MAX_PATCHES, MERGE, PATCH, write_golden

FOLDER = Path(__file__).resolve().parents[2] / "protos" / "golden"
SERVICE = pb.DESCRIPTOR.services_by_name["DataService"]
TIMEOUT_S = 120
JOB: dict[str, Any] = {
    "stream": {
        "datasets": [{"name": "pairs", "filter": "width >= 16"}, {"name": "docs"}],
        "tokenizer": {"name": "bytes"},
        "sizing": {"patch": PATCH, "merge": MERGE, "max_patches": MAX_PATCHES},
        "seq_len": 128,
        "global_batch": 4,
        "generation": {"ratio": "0.4", "query_tokens": 4},
    },
    "execution": {
        "modules": [
            {"name": "vit", "kind": "encoder", "dp": 2},
            {"name": "llm", "kind": "backbone", "dp": 2, "pp": 2},
            {"name": "gen", "kind": "generator"},
        ],
        "end": {"steps": 3},
    },
}
MAGIC = b"DTD1"
"""Begins what both sides say on a data connection."""
FRAME_BYTES = 24
"""Bytes before each payload on that connection."""
VIEWS = (("vit", 0), ("vit", 1), ("llm", 0), ("llm", 1), ("gen", 0))
ZSTD = [microbatch_pb2.CODEC_ZSTD]
DRAINING = "draining"


@dataclass
class Exchange:
    """One call: a request, and what came back."""

    name: str
    method: str
    request: Message
    state: str = ""
    """What the server must be in for this answer; empty for no matter what."""
    variable: tuple[str, ...] = ()
    """Fields of the answer that differ between servers."""
    messages: list[bytes] = field(default_factory=list)
    """Messages of the answer, as bytes."""
    code: str = "OK"
    details: bytes = b""
    """The google.rpc.Status of an error, from `grpc-status-details-bin`."""
    frames: bytes = b""
    """What came over the data connection of a stream, behind the server's first bytes."""

    @property
    def answers(self) -> list[Any]:
        """The answer's messages, decoded; without the fields that differ."""
        kind = message_class(self.method, "output_type")
        found = [kind.FromString(message) for message in self.messages]
        for message in found:
            for name in self.variable:
                message.ClearField(name)
        return found

    @property
    def error(self) -> dict[str, str]:
        """Code, reason and action of an error, which never change; the message is for people, and may."""
        if not self.details:
            return {}
        info = error_details_pb2.ErrorInfo()
        status_pb2.Status.FromString(self.details).details[0].Unpack(info)
        return {"code": self.code, "reason": info.reason, "action": info.metadata["action"], "domain": info.domain}

    @property
    def microbatches(self) -> Iterator[tuple[microbatch_pb2.MicrobatchHeader, bytes]]:
        """Header and bytes of each microbatch of a stream."""
        header, body, frames = None, b"", self.frames
        for message in self.answers:
            if not isinstance(message, pb.StreamMicrobatchesResponse):
                return
            if message.WhichOneof("message") == "chunk":
                body += message.chunk
                continue
            if header is not None:
                yield header, body
            header, body = (message.header if message.HasField("header") else None), b""
            if message.direct:
                end = FRAME_BYTES + message.header.total_bytes
                body, frames = frames[FRAME_BYTES:end], frames[end:]

    def hashes(self) -> list[dict[str, str]]:
        """Return, for each microbatch of a stream, the SHA-256 of each decoded tensor."""
        return [
            {entry.name: hashlib.sha256(tensor_bytes(entry, body)).hexdigest() for entry in header.tensors}
            for header, body in self.microbatches
        ]


def message_class(method: str, side: str) -> Any:
    """The request (`input_type`) or response (`output_type`) class of a method."""
    return getattr(pb, getattr(SERVICE.methods_by_name[method], side).name)


def tensor_bytes(entry: microbatch_pb2.Tensor, body: bytes) -> bytes:
    """Return the bytes of one tensor, decompressed."""
    data = body[entry.offset : entry.offset + entry.encoded_bytes]
    return zstandard.decompress(data) if entry.codec == microbatch_pb2.CODEC_ZSTD else data


def record() -> list[Exchange]:
    """Ask a server of this code everything that is in the transcript."""
    with _server() as (server, channel):
        found: list[Exchange] = []
        for exchange in _exchanges(found):
            if exchange.state == DRAINING:
                server.streams.drain()
            found.append(_ask(channel, exchange))
        return found


def save(exchanges: Iterable[Exchange], folder: Path = FOLDER) -> None:
    """Replace the transcript by these exchanges."""
    for old in (*folder.glob("*.json"), *folder.glob("*.bin"), *folder.glob("*.frames")):
        old.unlink()
    for number, exchange in enumerate(exchanges):
        path = folder / f"{number:02d}_{exchange.name}"
        path.with_suffix(".json").write_text(_text(_readable(exchange)))
        framed = b"".join(struct.pack(">BI", 0, len(message)) + message for message in exchange.messages)
        path.with_suffix(".bin").write_bytes(exchange.details or framed)
        if exchange.frames:
            path.with_suffix(".frames").write_bytes(exchange.frames)


def load(folder: Path = FOLDER) -> list[Exchange]:
    """Read the transcript that is stored."""
    return [_load(path) for path in sorted(folder.glob("*.json"))]


def _exchanges(done: list[Exchange]) -> Iterator[Exchange]:
    """The calls, in order; later ones use what earlier ones answered."""
    yield Exchange(
        "server_info",
        "GetServerInfo",
        pb.GetServerInfoRequest(),
        variable=("release", "content_digest", "max_streams", "stream_bytes", "memory_socket"),
    )
    yield Exchange("dataset_info", "GetDatasetInfo", pb.GetDatasetInfoRequest())
    yield _create("create_incomplete", json.dumps(JOB))
    (created,) = done[-1].answers
    yield _create("create_complete", created.canonical_job_spec_json)
    for module, rank in VIEWS:
        yield _stream(f"stream_{module}_{rank}", created.job_id, module, rank)
    for module in ("vit", "llm"):
        yield _stream(f"stream_{module}_0_zstd", created.job_id, module, 0, accepted_codecs=ZSTD)
    yield _stream(
        "stream_from_the_middle", created.job_id, "llm", 1, tensors=["token_ids"], start_step=1, start_microbatch=1
    )
    yield _stream("stream_from_the_end", created.job_id, "vit", 0, start_step=created.num_steps)
    numbers = [1 << 32 | 2, 0]
    yield Exchange("describe_samples", "DescribeSamples", pb.DescribeSamplesRequest(dataset="pairs", samples=numbers))
    yield _stream("error_create_job", "0" * 64, "vit", 0)
    yield _create("error_give_up_job", json.dumps({**JOB, "stream": {**JOB["stream"], "seq_len": "128"}}))
    yield _stream("error_give_up_rank", created.job_id, "vit", 2)
    misfit = json.loads(created.canonical_job_spec_json)
    misfit["stream"]["datasets"][0]["fingerprint"] = "0" * 64
    yield _create("error_another_server", json.dumps(misfit))
    # Token and ports are others each time.
    yield _stream("stream_vit_0_direct", created.job_id, "vit", 0, direct=True, variable=("offer",))
    yield _stream("error_retry", created.job_id, "vit", 0, state=DRAINING)


def _create(name: str, text: str) -> Exchange:
    return Exchange(name, "GetOrCreateJob", pb.GetOrCreateJobRequest(job_spec_json=text))


def _stream(
    name: str, job_id: str, module: str, rank: int, *, state: str = "", variable: tuple[str, ...] = (), **request: Any
) -> Exchange:
    message = pb.StreamMicrobatchesRequest(job_id=job_id, module=module, rank=rank, **request)
    return Exchange(name, "StreamMicrobatches", message, state=state, variable=variable)


@contextmanager
def _server() -> Iterator[tuple[DataServer, grpc.Channel]]:
    """A server of the golden datasets."""
    # However busy the machine is, all payloads come over a data connection that was asked for.
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(handing_out, "CONNECT_S", TIMEOUT_S):
        datasets = write_golden(Path(folder))
        for path in datasets.values():
            build_index(path, workers=1)
            count_tokens(path, load_tokenizer("bytes"))
        settings = load_config(None, {"datasets": datasets, "listen": "127.0.0.1:0"})
        server = DataServer(settings, Catalog.open(settings))
        try:
            with grpc.insecure_channel(server.start()) as channel:
                yield server, channel
        finally:
            server.stop()


def _ask(channel: grpc.Channel, exchange: Exchange) -> Exchange:
    path = f"/{SERVICE.full_name}/{exchange.method}"
    streams = SERVICE.methods_by_name[exchange.method].server_streaming
    call: Any = channel.unary_stream(path) if streams else channel.unary_unary(path)
    try:
        answer = call(exchange.request.SerializeToString(), timeout=TIMEOUT_S)
        if isinstance(exchange.request, pb.StreamMicrobatchesRequest) and exchange.request.direct:
            exchange.messages, exchange.frames = _with_data_connection(answer)
        else:
            exchange.messages = [*answer] if streams else [answer]
    except grpc.RpcError as error:
        exchange.code = error.code().name
        exchange.details = dict(cast(Any, error).trailing_metadata())["grpc-status-details-bin"]
    return exchange


def _with_data_connection(answer: Any) -> tuple[list[bytes], bytes]:
    """The messages of a stream, and what came over the data connection that it offers."""
    first = next(answer)
    offer = pb.StreamMicrobatchesResponse.FromString(first).offer
    frames = b""
    with socket.create_connection(("127.0.0.1", offer.port), TIMEOUT_S) as connection:
        connection.sendall(MAGIC + offer.token)
        while len(frames) < len(MAGIC):
            frames += connection.recv(len(MAGIC) - len(frames))
        assert frames == MAGIC
        frames = b""
        messages = [first, *answer]  # as small as it is, all of it fits the buffers of the connection
        while piece := connection.recv(1 << 16):
            frames += piece
    return messages, frames


def _readable(exchange: Exchange) -> dict[str, Any]:
    """The form of an exchange that people and tests read."""
    found: dict[str, Any] = {"method": exchange.method, "request": _json(exchange.request)}
    if exchange.state:
        found["state"] = exchange.state
    if exchange.variable:
        found["variable"] = list(exchange.variable)
    if exchange.error:
        return {**found, "error": exchange.error}
    kind = message_class(exchange.method, "output_type")
    answer = [_json(kind.FromString(message)) for message in exchange.messages]
    found["answer"] = [message for message in answer if "chunk" not in message]
    if exchange.method == "StreamMicrobatches":
        found["sha256"] = exchange.hashes()
    return found


def _text(readable: dict[str, Any]) -> str:
    """JSON with a line for each message, so that differences are small."""
    fields = []
    for name, value in readable.items():
        text = json.dumps(value, ensure_ascii=False)
        if isinstance(value, list) and value:
            text = "[\n  " + ",\n  ".join(json.dumps(one, ensure_ascii=False) for one in value) + "\n ]"
        fields.append(f" {json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(fields) + "\n}\n"


def _json(message: Message) -> dict[str, Any]:
    found: dict[str, Any] = MessageToDict(message, preserving_proto_field_name=True)
    return found


def _load(path: Path) -> Exchange:
    found = json.loads(path.read_text())
    frames = path.with_suffix(".frames")
    request = ParseDict(found["request"], message_class(found["method"], "input_type")())
    exchange = Exchange(
        path.stem.partition("_")[2],
        found["method"],
        request,
        found.get("state", ""),
        tuple(found.get("variable", ())),
        frames=frames.read_bytes() if frames.exists() else b"",
    )
    data = path.with_suffix(".bin").read_bytes()
    if "error" in found:
        exchange.code, exchange.details = found["error"]["code"], data
        return exchange
    while data:
        end = 5 + struct.unpack(">BI", data[:5])[1]
        exchange.messages.append(data[5:end])
        data = data[end:]
    return exchange
