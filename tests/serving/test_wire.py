"""What goes over the wire, byte by byte, and the limits that a server keeps, on both sides of each."""

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from disttrain.v1 import data_service_pb2 as pb
from disttrain.v1 import microbatch_pb2
from google.protobuf.duration_pb2 import Duration

from dataserver.addresses import joined, split_address
from dataserver.assembly import TensorSpec
from dataserver.serving import call_admission, data_service, registry, server, wire
from dataserver.serving.config import ConfigError, ServerConfig, load_config
from dataserver.serving.errors import MAX_TEXT_BYTES, DataServiceError, _cut
from dataserver.serving.registry import StepTimesLog
from dataserver.serving.stream_memory import BufferPool, ByteBudget, size_class
from dataserver.serving.transport.grpc import CHUNK_BYTES, GrpcTransport
from dataserver.serving.transport.interface import EncodedMicrobatch

MIB = 1 << 20
UINT8, INT32 = np.dtype(np.uint8), np.dtype(np.int32)


@pytest.mark.parametrize("size", [0, 1, 127, 128, 16383, 16384, MIB - 1, MIB, MIB + 1, 2 * MIB])
def test_chunks_are_what_protobuf_makes_of_them(size: int) -> None:
    payload = np.arange(size, dtype=np.uint32).astype(np.uint8)
    found, budget = EncodedMicrobatch(b"head", payload), ByteBudget(0)
    transport = GrpcTransport(budget.open(), BufferPool(budget))
    memory = transport.memory(size)
    assert memory is not None
    chunks = [payload[start : start + MIB].tobytes() for start in range(0, size, MIB)]
    assert transport.num_messages(found) == len(chunks)
    expected = [pb.StreamMicrobatchesResponse(chunk=chunk).SerializeToString() for chunk in chunks]
    assert [transport.message(memory, found, i) for i in range(len(chunks))] == expected
    assert CHUNK_BYTES == MIB


@pytest.mark.parametrize(
    ("encoded", "places", "total"),
    [
        (None, [(0, 100, False), (128, 0, False), (128, 12, False), (192, 130, False)], 322),
        ([100, 0, 12, 130], [(0, 100, False), (128, 0, False), (128, 12, False), (192, 130, False)], 322),
        ([99, 0, 13, 129], [(0, 99, True), (128, 0, False), (128, 12, False), (192, 129, True)], 321),
        ([64, 1, 1, 200], [(0, 64, True), (64, 0, False), (64, 1, True), (128, 130, False)], 258),
        ([65, 0, 11, 1], [(0, 65, True), (128, 0, False), (128, 11, True), (192, 1, True)], 193),
        ([1, 0, 0, 0], [(0, 1, True), (64, 0, False), (64, 0, True), (64, 0, True)], 64),
    ],
)
def test_tensors_are_encoded_in_place(
    encoded: list[int] | None, places: list[tuple[int, int, bool]], total: int
) -> None:
    """Those that become smaller are, all move to the front, at multiples of 64 with zeros between."""
    shapes = [(UINT8, (10, 10), 0), (INT32, (0, 4), 128), (INT32, (3,), 128), (UINT8, (130,), 192)]
    specs = [TensorSpec(name, *fields) for name, fields in zip("abcd", shapes, strict=True)]
    raw = np.full(400, 255, np.uint8)
    contents = []
    for value, spec in enumerate(specs, 1):
        raw[spec.offset : spec.offset + spec.num_bytes] = value
        contents.append(bytes([value]) * spec.num_bytes)
    sizes = iter(encoded or ())
    compressor = None if encoded is None else lambda _: b"z" * next(sizes)
    table, found_total = wire._encode_into(specs, raw, compressor)
    assert found_total == total
    assert [(t.offset, t.encoded_bytes, t.codec == microbatch_pb2.CODEC_ZSTD) for t in table] == places
    assert [(t.name, tuple(t.shape), t.raw_bytes) for t in table] == [(s.name, s.shape, s.num_bytes) for s in specs]
    assert {t.codec for t in table} <= {microbatch_pb2.CODEC_ZSTD, microbatch_pb2.CODEC_RAW}
    assert [t.dtype for t in table] == [{UINT8: 1, INT32: 2}[s.dtype] for s in specs]
    expected = bytearray(total)
    for (offset, size, smaller), content in zip(places, contents, strict=True):
        expected[offset : offset + size] = b"z" * size if smaller else content
    assert raw[:total].tobytes() == bytes(expected)


def test_buffers_and_shares_to_the_byte() -> None:
    for size in [
        *range(1, 1 << 17, 977),
        65535,
        65536,
        65537,
        *(x for i in range(17, 30) for x in (1 << i, (1 << i) + 1)),
    ]:
        classes = sorted({1 << 16, *(quarters << i for i in range(14, 31) for quarters in (4, 5, 6, 7))})
        assert size_class(size) == next(c for c in classes if c >= size), size
    pool = BufferPool(ByteBudget(3 << 16))
    small = [pool.take(1) for _ in range(4)]
    for buffer in small:
        pool.give(buffer)
    assert pool.free_bytes == 3 << 16
    assert pool.take(1) is small[3]
    assert [pool.take(1) is b for b in (small[2], small[1])] == [True, True]
    assert (pool.free_bytes, pool.take(1) is small[0]) == (0, False)
    many = BufferPool(ByteBudget(1 << 40))
    buffer = np.zeros(1 << 16, np.uint8)
    for _ in range(257):
        many.give(buffer)
    assert many.free_bytes == 256 << 16
    other = np.zeros(1 << 17, np.uint8)
    many.give(other)
    assert many.take(1 << 16) is buffer
    assert many.take(1 << 17) is other
    budget = ByteBudget(100)
    first, second = budget.open(), budget.open()
    assert (budget.total, first.take(30), first.take(21), first.take(20), first.take(1)) == (
        100,
        True,
        False,
        True,
        False,
    )
    assert (second.take(51), second.take(50), budget.used, second.take(0)) == (False, True, 100, True)
    second.give(50)
    second.close()
    assert (budget.used, first.take(50), first.take(1), budget.used) == (50, True, False, 100)


def test_every_key_of_a_server_has_its_default_and_its_bounds() -> None:
    bounds = {
        "max_streams": (64, 1, 4096),
        "idle_timeout_s": (600, 1, 86400),
        "stream_bytes": (256 * MIB, MIB, 1 << 40),
        "prefetch_bytes": (1024 * MIB, 0, 1 << 44),
        "decode_threads": (None, 1, 1024),
        "job_bytes": (1024 * MIB, 64 * MIB, 1 << 44),
        "block_memory_bytes": (None, 0, 1 << 44),
        "block_cache_bytes": (64 << 30, 0, 1 << 50),
        "zstd_level": (1, -7, 19),
        "drain_grace_s": (30, 0, 3600),
        "transform_timeout_s": (30, 1, 3600),
    }
    given: dict[str, Any] = {"datasets": {"d": "/d"}}
    defaults = load_config(None, given)
    names = {"datasets", "index_dirs", "quarantines", "tokenizers"}
    names |= {"shared_memory", "direct", "transforms"}
    others = {"listen", "data_listen", "insecure", "metrics_listen", "log_format", "peers", "cache_dir"}
    others |= {"block_cache_dir", "health_listen", "tls_cert", "tls_key", "tls_ca", "client_ca", "token_file", "policy"}
    others |= {"otlp_endpoint", "web_listen", "web_hosts"}
    assert bounds.keys() | names | others == set(ServerConfig.model_fields)
    assert (defaults.listen, defaults.insecure, defaults.tokenizers) == ("127.0.0.1:50051", False, {})
    assert (defaults.metrics_listen, defaults.log_format) == (None, "text")
    assert defaults.cache_dir is not None
    assert defaults.cache_dir.name == "disttrain"
    for key, (default, least, most) in bounds.items():
        assert default is None or getattr(defaults, key) == default
        for value in (least, most):
            assert getattr(load_config(None, {**given, key: value}), key) == value
        for value in (least - 1, most + 1):
            with pytest.raises(ConfigError, match=f"configuration key '{key}' is {value}: "):
                load_config(None, {**given, key: value})
    with pytest.raises(ConfigError, match=r"index_dirs names \['x'\], which is not among the datasets \['d'\]"):
        load_config(None, {**given, "index_dirs": {"x": "/i", "d": "/i"}})
    with pytest.raises(ConfigError) as caught:
        load_config(None, {"datasets": {"x" * 200: "/d"}})
    assert f"holds the name {'x' * 128!r}: a name" in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        load_config(None, {**given, "max_streams": "y" * 200})
    assert f"'max_streams' is {'y' * 128}: " in str(caught.value)
    assert [split_address(a) for a in ("h:65535", "[::]:1", "::1:2")] == [("h", 65535), ("::", 1), ("::1", 2)]
    for wrong in ("h:65536", ":1", "h", "h:", "h:\u0663", "h:-1", "[]:1"):
        with pytest.raises(ValueError, match="HOST:PORT with a port from 0 to 65535 is required"):
            split_address(wrong)


def test_the_newest_step_times_are_kept_in_number_and_bytes() -> None:
    log = StepTimesLog()
    for step in range(1025):
        log.add(pb.StepTimes(step=step))
    assert [times.step for times in log.newest()] == list(range(1, 1025))
    size = sum(times.ByteSize() for times in log.newest())
    assert log.num_bytes == size + 64 * 1024
    log, large = StepTimesLog(), pb.StepTimes(job_id="x" * ((1 << 20) - 5))
    assert large.ByteSize() == (1 << 20) - 1
    large.job_id += "x"
    for kept in (1, 2, 3, 3):
        log.add(large)
        assert (len(log.newest()), log.num_bytes) == (kept, kept * ((1 << 20) + 64))
    log.add(pb.StepTimes(step=1))
    assert [times.step for times in log.newest()] == [0, 0, 1]
    assert (registry.MAX_STEP_TIMES, registry.MAX_STEP_TIMES_BYTES) == (1024, 3 << 20)
    assert (registry.REPORT_OVERHEAD_BYTES, registry.JOBS_SHARE) == (64, 0.25)


def test_texts_of_errors_are_cut_between_characters() -> None:
    assert MAX_TEXT_BYTES == 1500
    assert _cut("x" * 1500) == "x" * 1500
    assert _cut("x" * 1501) == "x" * 1496 + " ..."
    assert _cut("\u00e4" * 750) == "\u00e4" * 750
    assert _cut("x" + "\u00e4" * 750) == "x" + "\u00e4" * 747 + " ..."
    assert _cut("\ud800") == "\\ud800"


SERVED: Any = SimpleNamespace(
    planner=SimpleNamespace(first_step=0, num_steps=4),
    job=SimpleNamespace(
        spec=SimpleNamespace(execution=SimpleNamespace(modules=[SimpleNamespace(name="m", dp=2, pp=3)]))
    ),
)
MODULE: Any = SERVED.job.spec.execution.modules[0]


def times(step: int = 3, stage: int = 2, **fields: Any) -> Callable[[], object]:
    return lambda: data_service._check_times(SERVED, MODULE, pb.StepTimes(step=step, stage=stage, **fields))


def test_requests_are_refused_right_beyond_what_there_is() -> None:
    assert data_service._check_rank(SERVED, "m", 1) is MODULE
    for step, microbatch in ((0, 99), (3, 99), (4, 0)):
        data_service._check_start(SERVED, step, microbatch)
    names = ("x" * 64,) * 64
    assert data_service._checked_names(names) == names
    longest = "x" * ((64 << 10) - 4 - 4)
    accepted = [
        times(),
        times(0, 0),
        times(forward_ns=[0], backward_ns=[0], step_time=Duration(), data_wait=Duration()),
    ]
    accepted.append(times(job_id=longest))
    for accept in accepted:
        accept()
    assert pb.StepTimes(step=3, stage=2, job_id=longest).ByteSize() == 64 << 10
    negative = "a reported time is negative; times must be 0 or more"
    tensors = "tensors are named; at most 64 names of at most 64 characters are allowed"
    for refuse, text in (
        (
            lambda: data_service._check_rank(SERVED, "x" * 200, 0),
            f"module {'x' * 128!r} is not in the job; it has ['m']",
        ),
        (
            lambda: data_service._check_rank(SERVED, "m", 2),
            "rank 2 of module m was asked for; its data-parallel degree is 2, so ranks are 0 to 1",
        ),
        (
            lambda: data_service._check_start(SERVED, 4, 1),
            "step 4, microbatch 1 was asked for; the job has 4 steps",
        ),
        (lambda: data_service._check_start(SERVED, 5, 0), "step 5, microbatch 0 was asked for; the job has 4 steps"),
        (lambda: data_service._checked_names((*names, "x")), f"65 {tensors}"),
        (lambda: data_service._checked_names(("x", "x" * 65)), f"2 {tensors}"),
        (times(step=4), "times of step 4 were reported; the job has 4 steps"),
        (times(stage=3), "times of stage 3 were reported; module m has 3 stages"),
        (times(job_id=longest + "x"), "the report has 65537 bytes; at most 65536 are allowed"),
        (times(forward_ns=[1, -1]), negative),
        (times(backward_ns=[-1]), negative),
        (times(step_time=Duration(seconds=-1)), negative),
        (times(step_time=Duration(nanos=-1)), negative),
        (times(data_wait=Duration(seconds=-1)), negative),
        (times(data_wait=Duration(nanos=-1)), negative),
    ):
        with pytest.raises(DataServiceError) as caught:
            refuse()
        assert str(caught.value) == text
    assert (data_service.MAX_TENSOR_NAMES, data_service.MAX_TENSOR_NAME_CHARS) == (64, 64)
    assert (data_service.MAX_REPORT_BYTES, data_service.MESSAGE_MARGIN_BYTES) == (64 << 10, 1024)


def test_a_pool_is_full_with_as_many_calls_as_it_may_have() -> None:
    pool = call_admission.CallPool(2, "calls", "wait")
    assert pool.refusal == "this server has 2 calls in hand, as many as it may; wait"
    with pool:
        event = threading.Event()
        first = pool.submit(event.wait, 10)
        assert not pool.full
        second = pool.submit(event.wait, 10)
        assert pool.full
        event.set()
        assert (first.result(), second.result()) == (True, True)
    assert not pool.full
    assert (server.UNARY_THREADS, server.WATCH_THREADS, server.STOP_GRACE_S) == (32, 64, 1.0)
    assert [joined(host, 5) for host in ("h", "::1")] == ["h:5", "[::1]:5"]
