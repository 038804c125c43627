import json
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import monotonic
from typing import Any

import grpc
import pytest
from disttrain.v1 import admin_service_pb2, data_service_pb2_grpc, microbatch_pb2
from disttrain.v1 import data_service_pb2 as pb
from disttrain.v1.admin_service_pb2_grpc import AdminServiceStub
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.duration_pb2 import Duration
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from serving.harness import FIXED_WINDOW, TIMEOUT_S, Running, index, job_data, large_job, reason_of, running
from shards import write_pairs

from dataserver.dataset.index.build import build_index
from dataserver.jobs import JobPlanner, fill_job
from dataserver.planning import yield_point
from dataserver.planning.job.identity import parse_job
from dataserver.serving import data_service, registry
from dataserver.serving.errors import MAX_TEXT_BYTES

OTHER_DIGEST = "0" * 64
CODE = grpc.StatusCode
GIVEN_UP_S = 20.0
"""By then, work that nobody waits for has ended, also on a busy machine."""


def refusal(server: Running, data: Any) -> tuple[grpc.StatusCode, str, str, str]:
    text = data if isinstance(data, str) else json.dumps(data)
    with pytest.raises(grpc.RpcError) as caught:
        server.stub.GetOrCreateJob(pb.GetOrCreateJobRequest(job_spec_json=text), timeout=TIMEOUT_S)
    return reason_of(caught.value)


def filled(server: Running, **changes: Any) -> dict[str, Any]:
    data: dict[str, Any] = fill_job(job_data(**changes), server.catalog)
    return data


def test_a_job_is_created_once_with_the_identity_that_anyone_can_compute(server: Running) -> None:
    first, second = server.create(), server.create()
    job = parse_job(filled(server))
    assert first == second
    assert (first.job_id, first.stream_id, first.num_steps) == (job.job_id, job.stream_id, 4)
    assert parse_job(json.loads(first.canonical_job_spec_json)) == job


def test_concurrent_calls_share_one_job(server: Running) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: server.create(), range(8)))
    assert all(response == found[0] for response in found)
    server.stub.ListStepTimes(pb.ListStepTimesRequest(job_id=found[0].job_id), timeout=TIMEOUT_S)


@pytest.mark.parametrize("server_ends", [False, True])
def test_a_job_that_nobody_waits_for_is_given_up(
    server: Running, monkeypatch: pytest.MonkeyPatch, server_ends: bool
) -> None:
    sizing, end = threading.Event(), time.monotonic() + GIVEN_UP_S

    def long(*_: Any) -> None:
        sizing.set()
        while time.monotonic() < end:
            yield_point()
            time.sleep(0.01)
        raise AssertionError("sized to the end")

    monkeypatch.setattr(JobPlanner, "_lengths", long)
    request = pb.GetOrCreateJobRequest(job_spec_json=json.dumps(filled(server)))
    calls = [server.stub.GetOrCreateJob.future(request, timeout=TIMEOUT_S) for _ in range(2)]
    assert sizing.wait(TIMEOUT_S)
    if server_ends:
        server.server.stop()
    else:
        for call in calls:
            call.cancel()
    while server.server._calls._calls:
        assert time.monotonic() < end, "a call still holds its thread"
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ('{"stream": 1, "stream": 2}', r"names \['stream'\] twice"),
        ('{"stream": NaN}', "NaN is no JSON number"),
        ("1" * 5000, "not valid JSON"),
        ("3", "the job is not valid"),
        ("{}", "stream: Field required.*execution: Field required"),
    ],
)
def test_what_is_no_job_is_refused(server: Running, text: str, message: str) -> None:
    code, reason, action, details = refusal(server, text)
    assert (code, reason, action) == (CODE.INVALID_ARGUMENT, "JOB_INVALID", "GIVE_UP")
    assert re.search(message, details)


def test_a_specification_over_a_mebibyte_is_refused(server: Running) -> None:
    text = json.dumps(filled(server)).ljust(1 << 20)
    request = pb.GetOrCreateJobRequest(job_spec_json=text)
    assert server.stub.GetOrCreateJob(request, timeout=TIMEOUT_S).job_id == server.create().job_id
    code, reason, _, details = refusal(server, text + " ")
    assert (code, reason) == (CODE.INVALID_ARGUMENT, "JOB_INVALID")
    assert "1048577 bytes" in details


def test_a_stream_of_more_tensors_or_longer_names_than_allowed_is_refused(server: Running) -> None:
    job_id = server.create().job_id
    for names in (["patches", *("t" * 64 for _ in range(63))], ["patches", *("t" * 64 for _ in range(64))], ["t" * 65]):
        with pytest.raises(grpc.RpcError) as caught:
            server.read(job_id, tensors=names)
        refused = "at most 64 names of at most 64 characters are allowed" in reason_of(caught.value)[3]
        assert refused == (len(names) != 64), f"{len(names)} names; the first 64 are refused for what they name"


def test_a_hostile_specification_gives_a_bounded_message(server: Running) -> None:
    data = filled(server)
    data["stream"].update({f"\u00e9{i}" * 40: i for i in range(1000)})
    code, reason, _, details = refusal(server, data)
    assert (code, reason) == (CODE.FAILED_PRECONDITION, "JOB_UNSUPPORTED")
    assert len(details.encode()) <= MAX_TEXT_BYTES


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"global_batch": 7}, "multiple of 2"),
        ({"modules": [{"name": "vit", "kind": "encoder"}]}, "one backbone"),
        ({"modules": [{"name": "llm", "kind": "backbone", "dp": 0}]}, "modules.0.dp"),
        ({"modules": [{"name": "llm", "kind": "backbone"}], "generation": {"ratio": "0"}}, "no module of kind encoder"),
        ({"colour": 3, "seq_len": "512"}, "stream.colour: this key is unknown"),
    ],
)
def test_impossible_jobs_name_what_to_change(server: Running, changes: dict[str, Any], message: str) -> None:
    code, reason, _, details = refusal(server, filled(server, **changes))
    assert (code, reason) == (CODE.INVALID_ARGUMENT, "JOB_INVALID")
    assert message in details


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"colour": 3}, "stream.colour: this key is unknown"),
        ({"sizing": {"patch": 8, "merge": 2, "max_patches": 36, "rule": "waves"}}, 'sizing.rule: found "waves"'),
        ({"layout": {"kind": "ring"}}, 'execution.layout: kind is "ring"; one of'),
    ],
)
def test_what_a_newer_release_may_know_is_left_to_another_server(
    server: Running, changes: dict[str, Any], message: str
) -> None:
    code, reason, action, details = refusal(server, filled(server, **changes))
    assert (code, reason, action) == (CODE.FAILED_PRECONDITION, "JOB_UNSUPPORTED", "ANOTHER_SERVER")
    assert message in details


def test_other_versions_are_refused(server: Running) -> None:
    for changes in ({"order_version": 99}, {"content_version": 99}, {"plan_version": 99}):
        code, reason, _, details = refusal(server, filled(server, **changes))
        assert (code, reason) == (CODE.FAILED_PRECONDITION, "VERSION_UNSUPPORTED")
        assert "99" in details


@pytest.mark.parametrize(
    ("entry", "code", "reason", "message"),
    [
        ({"name": "nothing"}, CODE.NOT_FOUND, "DATASET_UNKNOWN", "'docs', 'pairs'"),
        ({"fingerprint": OTHER_DIGEST}, CODE.FAILED_PRECONDITION, "DATASET_MISMATCH", OTHER_DIGEST),
        ({"quarantine": OTHER_DIGEST}, CODE.FAILED_PRECONDITION, "DATASET_MISMATCH", "--quarantine"),
        ({"filter": "colour > 3"}, CODE.INVALID_ARGUMENT, "JOB_INVALID", "punsafe"),
        ({"filter": "__import__('os')"}, CODE.INVALID_ARGUMENT, "JOB_INVALID", ""),
        ({"filter": "punsafe > 2"}, CODE.FAILED_PRECONDITION, "DATASET_EMPTY", "pairs"),
    ],
)
def test_a_dataset_that_does_not_fit(
    server: Running, entry: dict[str, str], code: grpc.StatusCode, reason: str, message: str
) -> None:
    data = filled(server)
    data["stream"]["datasets"][0].update(entry)
    found = refusal(server, data)
    assert found[:2] == (code, reason)
    assert message in found[3]


@pytest.mark.parametrize(
    ("entry", "code", "reason"),
    [
        ({"name": "llama"}, CODE.NOT_FOUND, "TOKENIZER_UNKNOWN"),
        ({"digest": OTHER_DIGEST}, CODE.FAILED_PRECONDITION, "TOKENIZER_MISMATCH"),
    ],
)
def test_a_tokenizer_that_does_not_fit(
    server: Running, entry: dict[str, str], code: grpc.StatusCode, reason: str
) -> None:
    data = filled(server)
    data["stream"]["tokenizer"].update(entry)
    assert refusal(server, data)[:2] == (code, reason)


def test_a_sample_that_cannot_fit_is_named(server: Running) -> None:
    code, reason, _, details = refusal(server, filled(server, seq_len=24))
    assert (code, reason) == (CODE.INVALID_ARGUMENT, "SAMPLE_TOO_LARGE")
    assert "shard" in details


def test_tokens_that_were_not_counted_are_refused_with_the_command(tmp_path: Path) -> None:
    folder = write_pairs(tmp_path / "d", 4, 4)
    build_index(folder, workers=1)
    with running({"d": folder}) as server:
        code, reason, _, details = refusal(server, filled(server, datasets=[{"name": "d"}]))
        assert (code, reason) == (CODE.FAILED_PRECONDITION, "TOKENS_NOT_COUNTED")
        assert f"dataserver index {folder}" in details


def test_a_refused_job_may_be_created_when_the_reason_is_gone(tmp_path: Path) -> None:
    folder = write_pairs(tmp_path / "d", 12, 4)
    build_index(folder, workers=1)
    with running({"d": folder}) as server:
        data = filled(server, datasets=[{"name": "d"}])
        assert refusal(server, data)[1] == "TOKENS_NOT_COUNTED"
        index(folder)
        server.create(data)


@pytest.fixture
def one_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers that have no memory for jobs but the one used last."""
    monkeypatch.setattr(registry, "JOBS_SHARE", 0)


@pytest.mark.usefixtures("one_job")
def test_jobs_in_memory_are_bounded_and_the_oldest_is_forgotten(datasets: dict[str, Path]) -> None:
    with running(datasets) as server:
        ids = [server.create(job_data(seed=seed)).job_id for seed in range(3)]
        with pytest.raises(grpc.RpcError) as caught:
            server.stub.GetPlan(pb.GetPlanRequest(job_id=ids[0]), timeout=TIMEOUT_S)
        assert reason_of(caught.value)[:3] == (CODE.NOT_FOUND, "JOB_UNKNOWN", "CREATE_JOB")
        server.stub.GetPlan(pb.GetPlanRequest(job_id=ids[2]), timeout=TIMEOUT_S)


def knows(server: Running, job_id: str) -> bool:
    try:
        server.stub.ListStepTimes(pb.ListStepTimesRequest(job_id=job_id), timeout=TIMEOUT_S)
    except grpc.RpcError as error:
        if reason_of(error)[1] != "JOB_UNKNOWN":
            raise
        return False
    return True


@pytest.mark.usefixtures("one_job")
def test_a_job_with_an_open_stream_stays_known_whatever_comes(photographs: Path) -> None:
    with running({"photos": photographs}, FIXED_WINDOW) as server:
        job_id = server.create(large_job(end={"steps": 20})).job_id
        held = server.stream(job_id)
        next(held)
        others = [server.create(large_job(seed=seed)).job_id for seed in range(1, 4)]
        give_up = monotonic() + TIMEOUT_S
        assert knows(server, job_id)
        # The thread of a call may still be on its way out, and what it holds is known; who asks for it keeps it again.
        while any(knows(server, other) for other in others):
            assert monotonic() < give_up, "the job that was asked for last is kept, and no other"
            assert knows(server, job_id)
        held.cancel()
        assert server.server.streams.wait_until_idle(TIMEOUT_S)
        for seed in range(10, 30):  # the thread of the call may still be on its way out
            server.create(large_job(seed=seed))
            if not knows(server, job_id):
                break
        else:
            pytest.fail("the job is kept for ever")


def test_what_clients_report_is_bounded_over_all_jobs(datasets: dict[str, Path]) -> None:
    """Each job may have 3 MiB of reports, however many jobs are known; not so where memory holds 16 MiB."""
    with running(datasets, job_bytes=64 << 20) as server:
        ids = [server.create(job_data(seed=seed)).job_id for seed in range(8)]
        assert all(knows(server, job_id) for job_id in ids)
        for seed, job_id in enumerate(ids):
            server.create(job_data(seed=seed))
            report = pb.StepTimes(job_id=job_id, module="vit", forward_ns=[2**62] * 6_667)  # of nine bytes each
            for _ in range(50):
                server.stub.ReportStepTimes(pb.ReportStepTimesRequest(times=report), timeout=TIMEOUT_S)
        assert [knows(server, job_id) for job_id in ids] == [False] * 3 + [True] * 5


def test_a_plan_names_every_sample_once_and_agrees_with_the_stream(server: Running) -> None:
    """With the number of microbatches that the baseline has: each takes time, and loads then add up to the same."""
    job = server.create(job_data(layout={"kind": "pipelined", "fewest_microbatches": True}))
    plan = server.stub.GetPlan(pb.GetPlanRequest(job_id=job.job_id, step=1), timeout=TIMEOUT_S).plan
    assert (plan.job_id, plan.stream_id, plan.step) == (job.job_id, job.stream_id, 1)
    placed: dict[tuple[int, int, int], tuple[int, int]] = {}
    for rank in range(2):
        for header, _ in server.read(job.job_id, "llm", rank, start_step=1).microbatches:
            if header.step == 1:
                assert header.plan_hash == plan.plan_hash
                assert header.num_microbatches == plan.num_microbatches
                assert header.denominators == plan.denominators
                names = zip(header.items.dataset, header.items.epoch, header.items.sample, strict=True)
                placed.update(dict.fromkeys(names, (rank, header.microbatch)))
    s = plan.samples
    placed_by_plan = next(a for a in plan.arrangements if a.module == "llm")
    names = list(zip(s.dataset, s.epoch, s.sample, strict=True))
    places = zip(placed_by_plan.item, placed_by_plan.rank, placed_by_plan.microbatch, strict=True)
    planned = [(*names[item], rank, microbatch) for item, rank, microbatch in places]
    assert placed == {(d, p, n): (r, m) for d, p, n, r, m in planned}
    assert [load.module for load in plan.loads] == ["vit", "llm", "gen"]
    for load in plan.loads:
        assert sum(load.before_ns) == sum(load.after_ns)
    assert 0 < plan.makespan_after_ns <= plan.makespan_before_ns


def test_a_step_beyond_the_end_has_no_plan(server: Running) -> None:
    job = server.create()
    for step in (4, 2**64 - 1):
        with pytest.raises(grpc.RpcError) as caught:
            server.stub.GetPlan(pb.GetPlanRequest(job_id=job.job_id, step=step), timeout=TIMEOUT_S)
        assert reason_of(caught.value)[:2] == (CODE.OUT_OF_RANGE, "STEP_OUT_OF_RANGE")


def report(server: Running, **fields: Any) -> None:
    times = pb.StepTimes(**{"module": "llm", **fields})
    server.stub.ReportStepTimes(pb.ReportStepTimesRequest(times=times), timeout=TIMEOUT_S)


def listed(server: Running, job_id: str) -> list[pb.StepTimes]:
    return list(server.stub.ListStepTimes(pb.ListStepTimesRequest(job_id=job_id), timeout=TIMEOUT_S).times)


def test_step_times_are_kept_oldest_first_and_change_no_plan(server: Running) -> None:
    job_id = server.create().job_id
    before = server.stub.GetPlan(pb.GetPlanRequest(job_id=job_id), timeout=TIMEOUT_S)
    for step in range(3):
        report(server, job_id=job_id, step=step, rank=1, stage=1, step_time=Duration(seconds=2), forward_ns=[5, 6])
    found = listed(server, job_id)
    assert [times.step for times in found] == [0, 1, 2]
    assert list(found[0].forward_ns) == [5, 6]
    assert server.stub.GetPlan(pb.GetPlanRequest(job_id=job_id), timeout=TIMEOUT_S) == before


def test_step_times_of_one_step_are_listed_alone(server: Running) -> None:
    job_id = server.create().job_id
    for step in (0, 1, 0):
        report(server, job_id=job_id, step=step, rank=1)
    for step, count in ((0, 2), (1, 1), (2, 0)):
        request = pb.ListStepTimesRequest(job_id=job_id, step=step)
        found = server.stub.ListStepTimes(request, timeout=TIMEOUT_S).times
        assert [times.step for times in found] == [step] * count


def test_step_times_are_bounded_in_number_and_bytes(server: Running) -> None:
    job_id = server.create().job_id
    for rank in range(1100):
        report(server, job_id=job_id, rank=rank % 2)
    assert len(listed(server, job_id)) == 1024
    for _ in range(60):
        report(server, job_id=job_id, forward_ns=[2**62] * 7000)
    assert 0 < len(listed(server, job_id)) < 60, "one message must hold them all"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"job_id": "x"}, "JOB_UNKNOWN"),
        ({"module": "ghost"}, "MODULE_UNKNOWN"),
        ({"rank": 2}, "RANK_OUT_OF_RANGE"),
        ({"stage": 2}, "REQUEST_INVALID"),
        ({"step": 4}, "STEP_OUT_OF_RANGE"),
        ({"forward_ns": [-1]}, "REQUEST_INVALID"),
        ({"data_wait": Duration(seconds=-1)}, "REQUEST_INVALID"),
        ({"forward_ns": [2**62] * 20_000}, "REQUEST_INVALID"),
    ],
)
def test_step_times_that_make_no_sense_are_refused(server: Running, fields: dict[str, Any], reason: str) -> None:
    job_id = server.create().job_id
    with pytest.raises(grpc.RpcError) as caught:
        report(server, **{"job_id": job_id, **fields})
    assert reason_of(caught.value)[1] == reason
    assert not listed(server, job_id)


def test_server_and_dataset_info(server: Running) -> None:
    info = server.stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=TIMEOUT_S)
    assert (list(info.order_versions), list(info.content_versions)) == ([1, 2], [2])
    assert list(info.plan_versions) == [5, 6, 7, 8]
    assert len(info.content_digest) == 64
    assert list(info.codecs) == [microbatch_pb2.CODEC_RAW, microbatch_pb2.CODEC_ZSTD]
    assert (info.max_streams, info.max_message_bytes, info.stream_bytes) == (64, 4 << 20, 256 << 20)
    assert not info.draining
    found = server.stub.GetDatasetInfo(pb.GetDatasetInfoRequest(), timeout=TIMEOUT_S)
    assert [(d.name, d.num_shards, d.num_samples, d.quarantine) for d in found.datasets] == [
        ("docs", 3, 24, ""),
        ("pairs", 3, 40, ""),
    ]
    assert found.datasets[1].fingerprint == server.catalog.datasets["pairs"].fingerprint
    (block,) = found.tokenizers
    assert block.text_vocab_size == 256
    names = [field.name for field in block.DESCRIPTOR.fields if field.name != "text_vocab_size"]
    assert {name: getattr(block, name) for name in names} == filled(server)["stream"]["tokenizer"]


def test_health_follows_the_drain(server: Running) -> None:
    health = health_pb2_grpc.HealthStub(server.channel)
    for name in ("", "disttrain.v1.DataService"):
        request = health_pb2.HealthCheckRequest(service=name)
        assert health.Check(request, timeout=TIMEOUT_S).status == health_pb2.HealthCheckResponse.SERVING
    watch = health.Watch(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
    assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
    AdminServiceStub(server.channel).Drain(admin_service_pb2.DrainRequest(), timeout=TIMEOUT_S)
    assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING


def test_reflection_describes_both_services(server: Running) -> None:
    database = ProtoReflectionDescriptorDatabase(server.channel)
    assert {"disttrain.v1.DataService", "disttrain.v1.AdminService"} <= set(database.get_services())
    found = database.FindFileContainingSymbol("disttrain.v1.DataService")
    assert isinstance(found, FileDescriptorProto)
    names = {method.name for service in found.service for method in service.method}
    assert names == {m for m in vars(data_service_pb2_grpc.DataServiceServicer) if not m.startswith("_")}


@pytest.mark.parametrize("seconds", [-1, 3601])
def test_a_grace_out_of_bounds_is_refused(server: Running, seconds: int) -> None:
    request = admin_service_pb2.DrainRequest(grace=Duration(seconds=seconds))
    with pytest.raises(grpc.RpcError) as caught:
        AdminServiceStub(server.channel).Drain(request, timeout=TIMEOUT_S)
    assert reason_of(caught.value)[1] == "REQUEST_INVALID"
    assert not server.server.streams.draining


@pytest.mark.parametrize(
    ("peer", "port"),
    [("ipv4:10.0.0.1:65535", 65535), ("ipv6:[::1]:65536", 0), ("unix:/tmp/disttrain", 0), ("unix:/tmp/a:131071", 0)],
)
def test_a_peer_without_a_port_has_port_0(peer: str, port: int) -> None:
    assert data_service._port(peer) == port
