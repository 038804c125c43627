"""Real servers for the tests of the service, and a plain client made of the generated classes only."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc
import numpy as np
import zstandard
from builders.jobs import compose, module
from crc32c import crc32c as crc32c_of
from disttrain.v1 import data_service_pb2 as pb
from disttrain.v1 import microbatch_pb2
from disttrain.v1.data_service_pb2_grpc import DataServiceStub
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from dataserver.assembly import load_tokenizer
from dataserver.dataset import count_tokens
from dataserver.dataset.index.build import build_index
from dataserver.jobs import Catalog, fill_job
from dataserver.security import NO_CREDENTIALS, Channels, Credentials
from dataserver.serving.config import load_config
from dataserver.serving.server import DataServer

TIMEOUT_S = 60
Options = tuple[tuple[str, int], ...]
FIXED_WINDOW: Options = (("grpc.http2.bdp_probe", 0),)
"""For consumers that do not read: the transport takes 64 KiB off the server's hands, not as much as it thinks fit."""
DTYPES = {
    microbatch_pb2.DATA_TYPE_UINT8: np.dtype("u1"),
    microbatch_pb2.DATA_TYPE_INT32: np.dtype("<i4"),
    microbatch_pb2.DATA_TYPE_FLOAT32: np.dtype("<f4"),
}


def index(folder: Path) -> Path:
    """Index a folder of shards and count its tokens with the byte tokenizer."""
    build_index(folder, workers=1)
    count_tokens(folder, load_tokenizer("bytes"))
    return folder


def job_data(**changes: Any) -> dict[str, Any]:
    """A job over `pairs` and `docs` with all three modules; `changes` replace fields of its stream or execution."""
    fields: dict[str, Any] = {
        "modules": [module("encoder", dp=2), module("backbone", dp=2, pp=2), module("generator", "gen")],
        "datasets": [{"name": "pairs"}, {"name": "docs"}],
        "seq_len": 512,
        "global_batch": 8,
        "generation": {"ratio": "0.3", "query_tokens": 8},
        "sizing": {"max_patches": 256},
        "end": {"steps": 4},
    }
    return compose(**{**fields, **changes})


def large_job(**changes: Any) -> dict[str, Any]:
    """About ten MiB of patches per microbatch."""
    modules = [{"name": "vit", "kind": "encoder"}, {"name": "llm", "kind": "backbone"}]
    fixed: dict[str, Any] = {"datasets": [{"name": "photos"}], "modules": modules, "generation": {"ratio": "0"}}
    sizes = {"global_batch": 32, "microbatch": 16, "seq_len": 1024, "sizing": {"max_patches": 2048}}
    fixed["layout"] = {"kind": "pipelined", "fewest_microbatches": True}
    return job_data(**{**fixed, **sizes, "packing": {"enabled": False}, **changes})


VIEWS = (("vit", 0), ("vit", 1), ("llm", 0), ("llm", 1), ("gen", 0))


@dataclass
class Running:
    """A server of this process and a client with default options."""

    server: DataServer
    catalog: Catalog
    address: str
    channel: grpc.Channel
    stub: DataServiceStub

    @property
    def metrics_address(self) -> str:
        """HOST:PORT of the metrics."""
        assert self.server.metrics_url is not None
        return urlsplit(self.server.metrics_url).netloc

    def create(self, data: dict[str, Any] | None = None) -> pb.GetOrCreateJobResponse:
        """Fill a job from the catalog and make it known."""
        text = json.dumps(fill_job(job_data() if data is None else data, self.catalog))
        return self.stub.GetOrCreateJob(pb.GetOrCreateJobRequest(job_spec_json=text), timeout=TIMEOUT_S)

    def stream(self, job_id: str, module: str = "vit", rank: int = 0, **request: Any) -> Any:
        """Open a stream."""
        return self.stub.StreamMicrobatches(
            pb.StreamMicrobatchesRequest(job_id=job_id, module=module, rank=rank, **request), timeout=TIMEOUT_S
        )

    def read(self, job_id: str, module: str = "vit", rank: int = 0, **request: Any) -> "Received":
        """Read a stream to its end."""
        return receive(self.stream(job_id, module, rank, **request))


@contextmanager
def running(
    datasets: dict[str, Path], options: Options = (), credentials: Credentials = NO_CREDENTIALS, **config: Any
) -> Iterator[Running]:
    """A server on a free port; nothing may be open in it when the test has left.

    Args:
        datasets: folders by name.
        options: of the client's channel.
        credentials: of the client.
        config: other keys of the server's configuration.
    """
    fixed = {"datasets": datasets, "listen": "127.0.0.1:0", "decode_threads": 2, "cache_dir": None}
    settings = load_config(None, {**fixed, **config})
    catalog = Catalog.open(settings)
    server = DataServer(settings, catalog)
    address = server.start()
    try:
        with Channels(credentials).open(address, options) as channel:
            yield Running(server, catalog, address, channel, DataServiceStub(channel))
        assert server.streams.wait_until_idle(TIMEOUT_S)
    finally:
        server.stop()


def rest(server: Running) -> None:
    """Wait until the server has nothing left to do for its open streams, through the pools' own queues."""
    shared = server.server.streams.shared
    for _ in range(50):
        for pool in (shared.planning, shared.laying_out._threads, shared.decoding._threads):
            barrier = threading.Barrier(pool._max_workers)
            for future in [pool.submit(barrier.wait, TIMEOUT_S) for _ in range(pool._max_workers)]:
                future.result(TIMEOUT_S)


@dataclass
class Received:
    """What a stream delivered."""

    microbatches: list[tuple[microbatch_pb2.MicrobatchHeader, bytes]] = field(default_factory=list)
    end: pb.EndOfStream | None = None

    def blob(self) -> list[tuple[bytes, bytes]]:
        """Everything, for comparison."""
        return [(header.SerializeToString(deterministic=True), body) for header, body in self.microbatches]


def receive(messages: Any, count: int | None = None) -> Received:
    """Read a stream to its end, or `count` microbatches of it, and check its framing."""
    found = Received()
    header, body = None, bytearray()
    for message in messages:
        kind = message.WhichOneof("message")
        assert found.end is None, "a message after the end"
        if kind == "end":
            idle = message.end.reason == pb.EndOfStream.REASON_IDLE
            assert idle or header is None, "the end within a microbatch"
            header, found.end = None, message.end
            continue
        if kind == "header":
            assert header is None, "a header within a microbatch"
            header, body = message.header, bytearray()
        else:
            assert header is not None
            assert 0 < len(message.chunk) <= 1 << 20
            body += message.chunk
        if len(body) == (0 if header.withheld else header.total_bytes):
            assert crc32c_of(bytes(body)) == header.crc32c
            found.microbatches.append((header, bytes(body)))
            header = None
            if len(found.microbatches) == count:
                break
    assert header is None or count is not None, "the stream was cut"
    return found


def tensors(header: microbatch_pb2.MicrobatchHeader, body: bytes) -> dict[str, np.ndarray]:
    """Decode the tensors of a microbatch."""
    found, end = {}, 0
    for entry in header.tensors:
        assert entry.offset % 64 == 0
        assert entry.offset >= end
        assert not any(body[end : entry.offset]), "padding is not zero"
        end = entry.offset + entry.encoded_bytes
        data = body[entry.offset : end]
        if entry.codec == microbatch_pb2.CODEC_ZSTD:
            assert zstandard.frame_content_size(data) == entry.raw_bytes
            data = zstandard.decompress(data)
        assert len(data) == entry.raw_bytes
        found[entry.name] = np.frombuffer(data, DTYPES[entry.dtype]).reshape(entry.shape)
    assert end == header.total_bytes
    return found


def reason_of(error: grpc.RpcError) -> tuple[grpc.StatusCode, str, str, str]:
    """Code, reason, action and text of an error of the service."""
    status = rpc_status.from_call(error)
    assert status is not None, f"no rich status: {error}"
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    assert info.domain == "disttrain"
    return error.code(), info.reason, info.metadata["action"], error.details()
