import itertools
import re
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from disttrain.v1 import admin_service_pb2, microbatch_pb2
from disttrain.v1 import data_service_pb2 as pb
from disttrain.v1.admin_service_pb2_grpc import AdminServiceStub
from disttrain.v1.data_service_pb2 import EndOfStream
from serving.harness import (
    FIXED_WINDOW,
    TIMEOUT_S,
    VIEWS,
    Received,
    Running,
    index,
    job_data,
    large_job,
    reason_of,
    receive,
    rest,
    running,
    tensors,
)
from shards import break_images, write_pairs

CODE = grpc.StatusCode
MIB = 1 << 20


def cursors(found: Received) -> list[tuple[int, int]]:
    return [(header.step, header.microbatch) for header, _ in found.microbatches]


def refusal(call: Any) -> tuple[grpc.StatusCode, str, str, str]:
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    return reason_of(caught.value)


def test_a_server_that_has_stopped_has_no_threads_that_prepare_or_decode(tmp_path: Path) -> None:
    with running({"d": index(write_pairs(tmp_path / "d", 4, 4))}) as made:
        shared = made.server.streams.shared
    for pool in (shared.planning, shared.laying_out.queue("job"), shared.decoding.queue("job")):
        with pytest.raises(RuntimeError, match="after shutdown"):
            pool.submit(print)


@pytest.mark.parametrize(("module", "rank"), VIEWS)
def test_a_stream_delivers_every_microbatch_of_every_step_and_says_that_it_ended(
    server: Running, module: str, rank: int
) -> None:
    job = server.create()
    found = server.read(job.job_id, module, rank)
    headers = [header for header, _ in found.microbatches]
    expected = [
        (step, m) for step in range(4) for m in range(next(h.num_microbatches for h in headers if h.step == step))
    ]
    assert cursors(found) == expected
    assert found.end == pb.EndOfStream(reason=EndOfStream.REASON_END_OF_JOB, next_step=4)
    assert {(h.job_id, h.stream_id, h.content_version) for h in headers} == {(job.job_id, job.stream_id, 2)}
    for header, body in found.microbatches:
        views = tensors(header, body)
        count = len(header.items.sample)
        assert len(header.items.validity) == len(header.items.dataset) == len(header.items.epoch) == count
        assert not header.items.part
        known = microbatch_pb2.VALIDITY_UNKNOWN if module == "llm" else microbatch_pb2.VALIDITY_VALID
        assert set(header.items.validity) <= {known}, "every sample of these datasets has images"
        if module == "llm":
            assert len(views["cu_lengths"]) == count + 1
            assert not header.items.image
            assert len(header.sequence_valid) == len(views["cu_sequences"]) - 1
            assert header.sequence_valid == (np.diff(views["cu_sequences"]) > 0).tolist()
        else:
            assert len(header.items.image) == len(views["grid"]) == count
            assert views["cu_patches"][-1] == len(views["patches"]) == views["grid"].prod(axis=1).sum()


def test_the_views_of_a_step_name_the_same_samples_and_plan(server: Running) -> None:
    job_id = server.create().job_id
    found = {(m, r): server.read(job_id, m, r).microbatches for m, r in VIEWS}
    for step in range(4):
        hashes = {h.plan_hash for headers in found.values() for h, _ in headers if h.step == step}
        assert len(hashes) == 1
        names: dict[str, list[tuple[int, int, int]]] = {"vit": [], "llm": [], "gen": []}
        for (module, _), headers in found.items():
            for h, _ in headers:
                if h.step == step:
                    items = h.items
                    names[module] += zip(items.dataset, items.epoch, items.sample, strict=True)
        assert len(names["llm"]) == len(set(names["llm"]))
        assert set(names["vit"]) | set(names["gen"]) == set(names["llm"])


def test_routings_fill_the_places_that_the_views_keep_for_them(server: Running) -> None:
    job_id = server.create().job_id
    found = {(m, r): server.read(job_id, m, r).microbatches for m, r in VIEWS}
    merge = 4
    for (module, rank), microbatches in found.items():
        for header, body in microbatches:
            views = tensors(header, body)
            for routing in header.routings:
                assert module in (routing.source_module, routing.target_module)
                mine = routing.source_rank if module == routing.source_module else routing.target_rank
                assert set(mine) <= {rank}
                rows = sum(routing.rows)
                if module == "vit":
                    assert rows * merge == len(views["patches"])
                elif module == "gen":
                    assert rows == views["condition_offsets"][-1]
                else:
                    slots = "embedding_slots" if routing.target_module == "llm" else "condition_slots"
                    assert rows == len(views[slots])


@pytest.mark.parametrize(("module", "rank"), VIEWS)
def test_resuming_anywhere_gives_identical_bytes(server: Running, module: str, rank: int) -> None:
    job_id = server.create().job_id
    whole = server.read(job_id, module, rank)
    for i in (1, len(whole.microbatches) // 2, len(whole.microbatches) - 1):
        step, microbatch = cursors(whole)[i]
        rest = server.read(job_id, module, rank, start_step=step, start_microbatch=microbatch)
        assert rest.blob() == whole.blob()[i:]
        assert rest.end == whole.end


def test_servers_of_copies_elsewhere_serve_identical_bytes(datasets: dict[str, Path], tmp_path: Path) -> None:
    copies = {name: Path(shutil.copytree(path, tmp_path / name)) for name, path in datasets.items()}
    with running(datasets) as one, running(copies, decode_threads=5, prefetch_bytes=0) as other:
        job_id = one.create().job_id
        assert other.create().job_id == job_id
        for module, rank in VIEWS:
            assert one.read(job_id, module, rank).blob() == other.read(job_id, module, rank).blob()


def test_zstd_changes_nothing_but_the_encoding(server: Running) -> None:
    job_id = server.create().job_id
    for module, rank in VIEWS:
        raw = server.read(job_id, module, rank)
        packed = server.read(job_id, module, rank, accepted_codecs=[microbatch_pb2.CODEC_ZSTD])
        assert sum(h.total_bytes for h, _ in packed.microbatches) < sum(h.total_bytes for h, _ in raw.microbatches)
        codecs = set()
        for (raw_header, raw_body), (header, body) in zip(raw.microbatches, packed.microbatches, strict=True):
            assert header.plan_hash == raw_header.plan_hash
            expected, found = tensors(raw_header, raw_body), tensors(header, body)
            assert list(expected) == list(found)
            assert all(np.array_equal(expected[name], found[name]) for name in expected)
            codecs |= {entry.codec for entry in header.tensors}
        assert codecs == {microbatch_pb2.CODEC_ZSTD, microbatch_pb2.CODEC_RAW}


def test_only_the_tensors_that_are_wanted_travel(server: Running) -> None:
    job_id = server.create().job_id
    whole = server.read(job_id, "llm", 0)
    part = server.read(job_id, "llm", 0, tensors=["cu_lengths", "token_ids"])
    for (header, body), (whole_header, whole_body) in zip(part.microbatches, whole.microbatches, strict=True):
        found, expected = tensors(header, body), tensors(whole_header, whole_body)
        assert list(found) == ["token_ids", "cu_lengths"]
        assert all(np.array_equal(found[name], expected[name]) for name in found)
        assert header.total_bytes < whole_header.total_bytes
        assert header.items == whole_header.items


@pytest.mark.parametrize(
    ("request_fields", "code", "reason", "message"),
    [
        ({"job_id": "f" * 64}, CODE.NOT_FOUND, "JOB_UNKNOWN", "GetOrCreateJob"),
        ({"job_id": ""}, CODE.NOT_FOUND, "JOB_UNKNOWN", ""),
        ({"module": "audio"}, CODE.INVALID_ARGUMENT, "MODULE_UNKNOWN", "'gen', 'llm', 'vit'"),
        ({"rank": 2}, CODE.OUT_OF_RANGE, "RANK_OUT_OF_RANGE", "0 to 1"),
        ({"start_step": 5}, CODE.OUT_OF_RANGE, "STEP_OUT_OF_RANGE", "4 steps"),
        ({"start_step": 4, "start_microbatch": 1}, CODE.OUT_OF_RANGE, "STEP_OUT_OF_RANGE", "4 steps"),
        ({"start_step": 2**64 - 1}, CODE.OUT_OF_RANGE, "STEP_OUT_OF_RANGE", "4 steps"),
        ({"start_microbatch": 2**32 - 1}, CODE.OUT_OF_RANGE, "STEP_OUT_OF_RANGE", "the step has"),
        ({"tensors": ["labels"]}, CODE.INVALID_ARGUMENT, "TENSOR_UNKNOWN", "patches, grid"),
        ({"tensors": ["x" * 65]}, CODE.INVALID_ARGUMENT, "REQUEST_INVALID", "64"),
        ({"tensors": ["grid"] * 65}, CODE.INVALID_ARGUMENT, "REQUEST_INVALID", "64"),
        ({"accepted_codecs": [7]}, CODE.INVALID_ARGUMENT, "REQUEST_INVALID", "CODEC_RAW (1), CODEC_ZSTD (2)"),
        ({"accepted_codecs": [0]}, CODE.INVALID_ARGUMENT, "REQUEST_INVALID", "accepted_codecs is [0]"),
    ],
)
def test_wrong_requests(
    server: Running, request_fields: dict[str, Any], code: grpc.StatusCode, reason: str, message: str
) -> None:
    fields = {"job_id": server.create().job_id, **request_fields}
    found = refusal(server.stream(**fields))
    assert found[:2] == (code, reason)
    assert message in found[3]


def test_a_finished_checkpoint_finds_the_end_of_the_job(server: Running) -> None:
    found = server.read(server.create().job_id, start_step=4)
    assert not found.microbatches
    assert found.end == pb.EndOfStream(reason=EndOfStream.REASON_END_OF_JOB, next_step=4)


def test_one_stream_too_many_is_refused_at_once_and_a_place_is_free_again(datasets: dict[str, Path]) -> None:
    with running(datasets, max_streams=2) as server:
        job_id = server.create().job_id
        open_streams = [server.stream(job_id), server.stream(job_id)]
        for stream in open_streams:
            next(stream)
        assert refusal(server.stream(job_id))[:3] == (CODE.RESOURCE_EXHAUSTED, "TOO_MANY_STREAMS", "RETRY")
        assert server.stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=TIMEOUT_S).max_streams == 2
        for stream in open_streams:
            stream.cancel()
        assert server.server.streams.wait_until_idle(TIMEOUT_S)
        assert server.read(job_id).end is not None


def test_a_client_with_default_limits_receives_a_large_microbatch(photographs: Path) -> None:
    with running({"photos": photographs}) as server:
        job_id = server.create(large_job(end={"steps": 1})).job_id
        header, body = server.read(job_id).microbatches[0]
        assert header.total_bytes > 8 * MIB
        assert tensors(header, body)["patches"].nbytes > 8 * MIB


def test_a_microbatch_over_the_limit_is_an_error_that_says_so(photographs: Path) -> None:
    with running({"photos": photographs}, stream_bytes=2 * MIB) as server:
        job_id = server.create(large_job()).job_id
        found = refusal(server.stream(job_id))
        assert found[:3] == (CODE.RESOURCE_EXHAUSTED, "SERVER_LIMIT", "ANOTHER_SERVER")
        assert "stream_bytes" in found[3]


@pytest.mark.parametrize("budget", [0, 24 * MIB, 64 * MIB])
def test_a_consumer_that_does_not_read_holds_its_room_and_the_budget_at_most(photographs: Path, budget: int) -> None:
    with running({"photos": photographs}, FIXED_WINDOW, prefetch_bytes=budget) as server:
        job_id = server.create(large_job(end={"steps": 20})).job_id
        stream = server.stream(job_id)
        next(stream)
        rest(server)
        (opened,) = server.server.streams._open
        held = sum(assembly.memory.buffer.nbytes for assembly in opened._preparation._queue)
        assert server.server.streams.shared.budget.used <= budget
        assert held <= budget + 16 * MIB
        assert opened._handing_out._position == (0, 0), "nothing was sent that was not asked for"
        assert (len(opened._preparation._queue) > 0) == (budget > 0)
        stream.cancel()
        assert server.server.streams.wait_until_idle(TIMEOUT_S)
        rest(server)
        assert server.server.streams.shared.budget.used == 0


def test_streams_do_not_wait_for_each_others_memory(photographs: Path) -> None:
    with running({"photos": photographs}, FIXED_WINDOW, prefetch_bytes=16 * MIB) as server:
        job_id = server.create(large_job(end={"steps": 3})).job_id
        greedy = server.stream(job_id)
        next(greedy)
        found = [server.read(job_id) for _ in range(2)]
        assert found[0].blob() == found[1].blob()
        greedy.cancel()


def test_many_streams_at_once_deliver_what_one_does(datasets: dict[str, Path]) -> None:
    with running(datasets, prefetch_bytes=MIB) as server:
        job_id = server.create().job_id
        alone = {view: server.read(job_id, *view).blob() for view in VIEWS}
        found: list[tuple[tuple[str, int], list[tuple[bytes, bytes]]]] = []
        readers = [
            threading.Thread(target=lambda view=view: found.append((view, server.read(job_id, *view).blob())))
            for view in VIEWS * 4
        ]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join(TIMEOUT_S)
        assert len(found) == len(readers)
        assert all(blob == alone[view] for view, blob in found)


def test_a_consumer_that_leaves_frees_budget_streams_and_threads(photographs: Path) -> None:
    with running({"photos": photographs}, FIXED_WINDOW) as server:
        job_id = server.create(large_job(end={"steps": 20})).job_id
        server.read(job_id, "llm")
        before = threading.active_count()
        for _ in range(5):
            stream = server.stream(job_id)
            next(stream)
            stream.cancel()
        assert server.server.streams.wait_until_idle(TIMEOUT_S)
        rest(server)
        assert server.server.streams.shared.budget.used == 0
        shared = server.server.streams.shared
        pools = shared.planning, shared.laying_out._threads, shared.decoding._threads
        assert threading.active_count() <= before + sum(pool._max_workers for pool in pools) + 5


def test_a_drain_ends_streams_in_order_with_the_next_cursor(server: Running) -> None:
    job_id = server.create(job_data(end={"steps": 2000})).job_id
    whole = server.stream(job_id, "vit", 1)
    first = receive(whole, 3)
    drained = AdminServiceStub(server.channel).Drain(admin_service_pb2.DrainRequest(), timeout=TIMEOUT_S)
    assert drained.open_streams == 1
    found = receive(whole)
    assert found.end is not None
    assert found.end.reason == EndOfStream.REASON_DRAINING
    after = cursors(first) + cursors(found)
    header = (first.microbatches + found.microbatches)[-1][0]
    step, microbatch = after[-1]
    expected = (step, microbatch + 1) if microbatch + 1 < header.num_microbatches else (step + 1, 0)
    assert (found.end.next_step, found.end.next_microbatch) == expected
    server.server.wait()


def test_a_draining_server_refuses_new_streams_and_ends_when_the_last_is_done(photographs: Path) -> None:
    with running({"photos": photographs}, FIXED_WINDOW) as server:
        job_id = server.create(large_job(end={"steps": 20})).job_id
        held = server.stream(job_id)
        first = next(held)
        admin = AdminServiceStub(server.channel)
        assert admin.Drain(admin_service_pb2.DrainRequest(), timeout=TIMEOUT_S).open_streams == 1
        assert refusal(server.stream(job_id))[:3] == (CODE.UNAVAILABLE, "DRAINING", "RETRY")
        assert server.stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=TIMEOUT_S).draining
        assert admin.Drain(admin_service_pb2.DrainRequest(), timeout=TIMEOUT_S).open_streams == 1
        found = receive(itertools.chain([first], held))
        assert cursors(found) == [(0, 0)]
        assert found.end == pb.EndOfStream(reason=EndOfStream.REASON_DRAINING, next_step=0, next_microbatch=1)
        server.server.wait()


@pytest.mark.parametrize("cut", [False, True], ids=["beyond its grace", "that is cut"])
def test_a_consumer_that_does_not_read_cannot_hold_a_drain(photographs: Path, cut: bool) -> None:
    with running({"photos": photographs}, FIXED_WINDOW) as server:
        job_id = server.create(large_job(end={"steps": 20})).job_id
        held = server.stream(job_id)
        next(held)
        server.server.drain(3600.0 if cut else 0.2)
        if cut:
            server.server.cut()
            assert server.server.streams.wait_until_idle(TIMEOUT_S)
        server.server.wait()
        with pytest.raises(grpc.RpcError) as caught:
            list(held)
        assert caught.value.code() in (CODE.UNAVAILABLE, CODE.CANCELLED)


@pytest.mark.parametrize("moment", ["indexed", "served"])
def test_a_shard_that_is_cut_ends_as_a_stale_index_at_once(tmp_path: Path, moment: str) -> None:
    folder = index(write_pairs(tmp_path / "d", 32, 8, seed=5))
    with running({"d": folder}) as server:
        job_id = server.create(job_data(datasets=[{"name": "d"}], end={"steps": 1})).job_id
        if moment == "served":
            server.read(job_id)
        for shard in folder.glob("*.tar"):
            with shard.open("r+b") as file:
                file.truncate(1024)
        *rest, text = refusal(server.stream(job_id))
        assert rest == [CODE.FAILED_PRECONDITION, "INDEX_STALE", "ANOTHER_SERVER"]
        assert re.search(r"\.tar has 1024 bytes, its index describes \d+; run dataserver index", text)
        assert server.server.metrics().storage_errors == 0, "nothing is tried again"


def test_a_shard_that_disappears_ends_as_unavailable_after_what_was_ready(tmp_path: Path) -> None:
    folder = index(write_pairs(tmp_path / "d", 32, 8, seed=5))
    with running({"d": folder}) as server:
        job_id = server.create(job_data(datasets=[{"name": "d"}], end={"steps": 1})).job_id
        for shard in folder.glob("*.tar"):
            shard.unlink()
        assert refusal(server.stream(job_id))[:3] == (CODE.UNAVAILABLE, "STORAGE_UNAVAILABLE", "RETRY")
        assert server.read(job_id, "llm").end is not None, "texts lie in the index"


def test_a_shard_that_is_replaced_while_it_is_served_ends_as_a_stale_index(tmp_path: Path) -> None:
    folder = index(write_pairs(tmp_path / "d", 32, 32, seed=5))
    shard = folder / "00000.tar"
    with running({"d": folder}) as server:
        job_id = server.create(job_data(datasets=[{"name": "d"}], end={"steps": 1})).job_id
        server.read(job_id)
        content = shard.read_bytes()
        (folder / "other").write_bytes(content.replace(b"bigdata", b"bigDATA"))
        (folder / "other").replace(shard)
        *rest, text = refusal(server.stream(job_id))
        assert rest == [CODE.FAILED_PRECONDITION, "INDEX_STALE", "ANOTHER_SERVER"]
        assert f"dataserver index {folder}" in text
        shard.write_bytes(content)
        assert server.read(job_id).end is not None, "the content is what the index describes"


def test_nothing_is_served_by_a_stale_index_that_is_younger_than_its_shard(tmp_path: Path) -> None:
    """As a copy makes it, or whoever changes the rights of both in this order."""
    folder = index(write_pairs(tmp_path / "d", 32, 32, seed=5))
    shard = folder / "00000.tar"
    content = shard.read_bytes()
    shard.write_bytes(content.replace(b"bigdata", b"bigDATA"))
    time.sleep(0.05)
    (folder / "00000.tar.index").chmod(0o664)
    with running({"d": folder}) as server:
        job_id = server.create(job_data(datasets=[{"name": "d"}], end={"steps": 1})).job_id
        for module in ("vit", "llm"):
            *rest, text = refusal(server.stream(job_id, module))
            assert rest == [CODE.FAILED_PRECONDITION, "INDEX_STALE", "ANOTHER_SERVER"]
            assert f"dataserver index {folder}" in text
        shard.write_bytes(content)
        assert server.read(job_id).end is not None, "the content is what the index describes"


def test_a_sample_that_does_not_decode_keeps_its_slot(tmp_path: Path) -> None:
    folder = index(write_pairs(tmp_path / "d", 16, 16, seed=6))
    break_images(folder, (3, 0))
    with running({"d": folder}) as server:
        fields = {"datasets": [{"name": "d"}], "packing": {"enabled": False}, "end": {"epochs": 1}}
        job = server.create(job_data(**fields, generation={"ratio": "0"}))
        seen = {}
        for rank in range(2):
            for header, body in server.read(job.job_id, "vit", rank).microbatches:
                views = tensors(header, body)
                for i, (number, validity) in enumerate(zip(header.items.sample, header.items.validity, strict=True)):
                    first, last = views["cu_patches"][i : i + 2]
                    seen[number] = valid = validity == microbatch_pb2.VALIDITY_VALID
                    assert last - first == views["grid"][i].prod()
                    assert valid or not views["patches"][first:last].any()
        assert seen == {row: row != 3 for row in range(16)}


def test_the_bytes_of_a_stream_are_those_of_the_generated_classes(server: Running) -> None:
    job_id = server.create().job_id
    call = server.channel.unary_stream("/disttrain.v1.DataService/StreamMicrobatches")
    request = pb.StreamMicrobatchesRequest(job_id=job_id, module="vit")
    for raw in call(request.SerializeToString(), timeout=TIMEOUT_S):
        assert pb.StreamMicrobatchesResponse.FromString(raw).SerializeToString() == raw
