"""Addresses, the first contact, and what no other server would mend."""

import re
import socket
import threading
from collections.abc import Callable
from concurrent import futures

import grpc
import pytest
from client.fake_server import NUM_STEPS, FakeServer, job_data
from disttrain.v1.data_service_pb2 import GetPlanRequest
from disttrain.v1.errors_pb2 import ERROR_ACTION_ANOTHER_SERVER
from ports import free_ports

from dataserver.planning.job.spec import JobSpec
from trainclient.stream import rotation
from trainclient.stream.endpoint import CallGuard, Endpoint, Timeouts, parse_addresses
from trainclient.stream.errors import (
    AddressError,
    DataServiceError,
    DeadlineError,
    FleetError,
    VersionError,
)
from trainclient.stream.fleet import Fleet, own_release
from trainclient.stream.jobs import resolve_job

Serve = Callable[..., FakeServer]


def filled_in(server: FakeServer, timeouts: Timeouts) -> JobSpec:
    fleet = Fleet(server.address, timeouts=timeouts)
    job = resolve_job(job_data(), fleet)
    fleet.close()
    return job


def test_addresses() -> None:
    assert parse_addresses(" a:1 ,b.c-d_e:65535,[::1]:50051") == ("a:1", "b.c-d_e:65535", "[::1]:50051")
    assert parse_addresses(["127.0.0.1:80"]) == ("127.0.0.1:80",)
    assert parse_addresses("a-1:9-11, [::1]:5-5 ,b:1") == ("a-1:9", "a-1:10", "a-1:11", "[::1]:5", "b:1")
    assert len(parse_addresses("a:1-1023,b:1")) == 1024


WRONG = [
    *("", "host", "host:", "host:0", "host:65536", "host:99999999", "a:1,,b:2", ":1", "http://a:1", "a:1,a:1"),
    *("a b:1", "::1:5", "a:1/x", []),
    *("a:2-1", "a:0-3", "a:65535-65536", "a:1-", "a:-1", "a:1-2-3", "a:1-2,a:2", "::1:5-6", "-:1-2-", ["a:1-2,b:1"]),
]


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_addresses_are_named(wrong: str | list[str]) -> None:
    with pytest.raises(AddressError, match=r"required|once"):
        parse_addresses(wrong)


@pytest.mark.parametrize("many", ["a:1-1024,b:1", "a:1-65535", ["a:1-513", "b:1-513"]])
def test_a_list_of_addresses_is_bounded_before_it_is_expanded(many: str | list[str]) -> None:
    with pytest.raises(AddressError, match="the list of addresses has more than 1024"):
        parse_addresses(many)


def test_wrong_timeouts() -> None:
    with pytest.raises(ValueError, match="stall is 0"):
        Timeouts(stall=0)


@pytest.mark.timeout(20)
def test_no_server_there_is_one_error_within_seconds(quick: Timeouts) -> None:
    fleet = Fleet("127.0.0.1:1,nosuchhost.invalid:5", timeouts=quick)
    with pytest.raises(FleetError) as raised:
        fleet.register(resolve_job(job_data(), fleet))
    assert raised.value.failures.keys() == {"127.0.0.1:1", "nosuchhost.invalid:5"}
    assert "no server could be reached for 3 s" in str(raised.value)
    assert "127.0.0.1:1: failed with UNAVAILABLE" in str(raised.value)
    assert "refused" in str(raised.value)


@pytest.mark.timeout(20)
def test_a_server_that_says_nothing(quick: Timeouts) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        fleet = Fleet(f"127.0.0.1:{silent.getsockname()[1]}", timeouts=quick)
        with pytest.raises(FleetError, match="no server could be reached"):
            resolve_job(job_data(), fleet)


def test_ranks_have_a_job_filled_in_by_the_same_server(serve: Serve, patient: Timeouts) -> None:
    servers = [serve() for _ in range(3)]
    begun = set()
    for rank in range(12):
        fleet = Fleet([s.address for s in servers], key=f"job/llm/{rank}", timeouts=patient)
        begun.add(fleet.current)
        before = fleet.current
        resolve_job(job_data(), fleet)
        assert fleet.current == before, "streams are spread all the same"
        fleet.close()
    assert begun == {0, 1, 2}
    assert [s.registrations for s in servers] == [12, 0, 0]


def test_a_job_may_take_longer_than_other_calls(serve: Serve) -> None:
    server = serve(job_delay_s=1.5)
    fleet = Fleet(server.address, timeouts=Timeouts(call=1.0, give_up=0.1))
    job = resolve_job(job_data(), fleet)
    assert server.registrations == 1, "filling a job in is not repeated either"
    assert fleet.register(job) == NUM_STEPS
    assert server.registrations == 2
    fleet.close()


def test_another_api_is_said_to_be_one(patient: Timeouts) -> None:
    other = grpc.server(futures.ThreadPoolExecutor(1))
    port = other.add_insecure_port("127.0.0.1:0")
    other.start()
    fleet = Fleet(f"127.0.0.1:{port}", timeouts=patient)
    with pytest.raises(DataServiceError, match=r"does not speak this client's API, disttrain\.v1"):
        resolve_job(job_data(), fleet)
    fleet.close()
    other.stop(0)


def test_one_dead_server_among_others_is_passed_over(serve: Serve, patient: Timeouts) -> None:
    server = serve()
    for key in "abcdef":  # whichever is asked first
        fleet = Fleet(["127.0.0.1:1", server.address], key=key, timeouts=patient)
        assert fleet.register(resolve_job(job_data(), fleet)) == NUM_STEPS
        assert fleet.endpoints[fleet.current].address == server.address
        fleet.close()


def test_ranks_begin_at_a_server_of_their_own_machine() -> None:
    addresses = ["cpu1:1", "127.0.0.1:1", "cpu2:1", "[::1]:1", "127.0.0.1.example.com:1", "localhost:1"]
    assert {Fleet(addresses, key=f"job/vit/{rank}").current for rank in range(64)} == {1, 3, 5}


def test_ranks_spread_over_the_servers() -> None:
    addresses = [f"h{i}:1" for i in range(4)]
    first = [Fleet(addresses, key=f"job/vit/{rank}").current for rank in range(64)]
    assert first == [Fleet(addresses, key=f"job/vit/{rank}").current for rank in range(64)]
    assert all(first.count(i) >= 6 for i in range(4))


def test_the_first_answer_is_waited_for_with_a_line_every_few_seconds(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Trainers may start before their servers."""
    monkeypatch.setattr(rotation, "REPORT_EVERY_S", 0.5)
    (port,) = free_ports(1)
    started: list[FakeServer] = []
    timer = threading.Timer(3.0, lambda: started.append(FakeServer(port=port)))
    timer.start()
    fleet = Fleet(f"127.0.0.1:{port}", timeouts=Timeouts(connect=10.0, give_up=0.1))
    try:
        assert fleet.register(resolve_job(job_data(), fleet)) == NUM_STEPS
    finally:
        timer.join()
        started[0].close()
        fleet.close()
    assert len(caplog.messages) > 1
    for message in caplog.messages:
        assert re.match(r"no server could be reached for \d+ s of 120 s: 127\.0\.0\.1:\d+: failed with UNAV", message)


def test_names_may_appear_with_their_servers(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """In many clusters a server's name is made when it starts: it is waited for, and the line says which is missing."""
    monkeypatch.setattr(rotation, "REPORT_EVERY_S", 0.5)
    addresses = ["one.invalid:5", "two.invalid:5"]
    with pytest.raises(FleetError, match="could be reached for 4 s; check the addresses") as raised:
        resolve_job(job_data(), Fleet(addresses, timeouts=Timeouts(first_answer=4.0)))
    assert raised.value.failures.keys() == set(addresses)
    line = re.compile(r"no server could be reached for \d s of 4 s: one\.invalid:5: ")
    assert any(map(line.match, caplog.messages))


@pytest.mark.timeout(20)
def test_servers_that_all_refuse_are_not_waited_for(serve: Serve) -> None:
    """Where a server answered, `give_up` is what counts, and where all refuse not even that."""
    servers = [serve(info={"plan_versions": [9]}), serve(fingerprint="1" * 64)]
    fleet = Fleet([s.address for s in servers])
    with pytest.raises(FleetError, match="no server can do this"):
        fleet.register(filled_in(serve(), Timeouts()))
    fleet.close()


def test_an_odd_server_is_named_once_and_asked_last(
    serve: Serve, patient: Timeouts, caplog: pytest.LogCaptureFixture
) -> None:
    odd, first, second = serve(fingerprint="1" * 64), serve(), serve()
    fleet = Fleet([first.address, odd.address, second.address], timeouts=patient)
    job = resolve_job(job_data(), fleet)
    guard = CallGuard()
    asked: list[str] = []

    def lose(endpoint: Endpoint) -> int:
        """The first servers that are asked fail each time, in a way that another server avoids."""
        asked.append(endpoint.address)
        if endpoint.address == odd.address:
            return fleet.bring(endpoint, job, guard)
        if len(asked) < 3:
            raise DeadlineError(f"server {endpoint.address}: scripted")
        return NUM_STEPS

    for _ in range(4):
        asked.clear()
        fleet.current = 0
        fleet.attempt(lose, guard)
    assert asked == [first.address, second.address, odd.address, second.address]
    (named,) = [message for message in caplog.messages if odd.address in message]
    assert "scripted DATASET_MISMATCH" in named
    fleet.close()


@pytest.mark.parametrize(("field", "pinned"), [("order_versions", 1), ("content_versions", 2), ("plan_versions", 8)])
def test_unsupported_versions_are_named(serve: Serve, patient: Timeouts, field: str, pinned: int) -> None:
    job = filled_in(serve(), patient)
    fleet = Fleet(serve(info={field: [98, 99]}).address, timeouts=patient)
    with pytest.raises(VersionError, match=rf"{field.removesuffix('s')} \[98, 99\], the job is pinned to {pinned}"):
        fleet.register(job)
    fleet.close()


MISMATCHED = job_data(datasets=[{"name": "pairs", "fingerprint": "0" * 64}])


def test_the_refusal_of_the_only_server_is_raised_with_its_reason(serve: Serve) -> None:
    fleet = Fleet(serve().address)
    with pytest.raises(DataServiceError, match="scripted DATASET_MISMATCH") as raised:
        fleet.register(resolve_job(MISMATCHED, fleet))
    assert raised.value.reason == "DATASET_MISMATCH"
    assert raised.value.code is grpc.StatusCode.FAILED_PRECONDITION
    assert raised.value.action == ERROR_ACTION_ANOTHER_SERVER
    fleet.close()


def test_refusals_of_all_servers_are_raised_at_once_with_the_message_of_each(serve: Serve) -> None:
    servers = [serve(), serve()]
    fleet = Fleet([s.address for s in servers])
    with pytest.raises(FleetError, match="no server can do this") as raised:
        fleet.register(resolve_job(MISMATCHED, fleet))
    assert raised.value.failures.keys() == {s.address for s in servers}
    assert str(raised.value).count("scripted DATASET_MISMATCH") == 2
    fleet.close()


def test_a_server_with_another_dataset_is_passed_over(serve: Serve, patient: Timeouts) -> None:
    odd, right = serve(fingerprint="1" * 64), serve()
    for key in "abcdef":  # whichever is asked first
        fleet = Fleet([odd.address, right.address], key=key, timeouts=patient)
        assert fleet.register(resolve_job(job_data(), fleet)) == NUM_STEPS
        assert fleet.endpoints[fleet.current].address == right.address
        fleet.close()


def test_a_server_that_lacks_the_versions_is_passed_over(serve: Serve, patient: Timeouts) -> None:
    old, right = serve(info={"plan_versions": [9]}), serve()
    job = filled_in(right, patient)
    for key in "abcdef":
        fleet = Fleet([old.address, right.address], key=key, timeouts=patient)
        assert fleet.register(job) == NUM_STEPS
        fleet.close()
    assert not old.registrations


REFUSALS = [("JOB_UNSUPPORTED", "ANOTHER_SERVER"), ("JOB_INVALID", "GIVE_UP")]


@pytest.mark.parametrize("refusal", REFUSALS)
def test_a_server_of_another_release_that_refuses_a_new_field_is_passed_over(
    serve: Serve, patient: Timeouts, refusal: tuple[str, str]
) -> None:
    old, right = serve(info={"release": "0.0.9"}, unknown_field="seq_len", refusal=refusal), serve()
    job = filled_in(right, patient)
    for key in "abcdef":
        fleet = Fleet([old.address, right.address], key=key, timeouts=patient)
        assert fleet.register(job) == NUM_STEPS
        fleet.close()
    fleet = Fleet(old.address, timeouts=patient)
    with pytest.raises(VersionError, match=r"release 0\.0\.9\) refuses the job, .*seq_len: this key is unknown; run"):
        fleet.register(job)
    fleet.close()
    assert not old.registrations


@pytest.mark.parametrize("refusal", REFUSALS)
def test_a_refusal_by_a_server_of_the_same_release_ends_it(
    serve: Serve, patient: Timeouts, refusal: tuple[str, str]
) -> None:
    same = serve(info={"release": own_release()}, unknown_field="seq_len", refusal=refusal)
    right = serve()
    job = filled_in(right, patient)
    before = right.registrations
    fleet = Fleet([same.address, right.address], timeouts=patient)
    fleet.current = 0
    with pytest.raises(DataServiceError, match="seq_len: this key is unknown") as raised:
        fleet.register(job)
    assert (raised.value.reason, right.registrations) == (refusal[0], before)
    fleet.close()


def test_an_unknown_job_is_brought(serve: Serve, patient: Timeouts) -> None:
    server = serve()
    fleet = Fleet(server.address, timeouts=patient)
    job = resolve_job(job_data(), fleet)
    assert server.registrations == 1
    server.jobs.clear()
    plan = fleet.call(lambda stub: stub.GetPlan, GetPlanRequest(job_id=job.job_id, step=3), job=job).plan
    assert (plan.job_id, plan.step) == (job.job_id, 3)
    assert server.registrations == 2
    assert server.asked == 2, "another one may listen there by now"
    fleet.close()


def test_unknown_job_without_a_specification_to_bring_gives_up(serve: Serve, quick: Timeouts) -> None:
    fleet = Fleet(serve().address, timeouts=quick)
    with pytest.raises(FleetError, match="JOB_UNKNOWN"):
        fleet.call(lambda stub: stub.GetPlan, GetPlanRequest(job_id="f" * 64))
    fleet.close()


@pytest.mark.parametrize("details", [b"\xff\xff", b"\x08\x05", b""])
def test_details_that_cannot_be_read_leave_the_code(patient: Timeouts, details: bytes) -> None:
    def answer(_: bytes, context: grpc.ServicerContext) -> bytes:
        context.set_trailing_metadata([("grpc-status-details-bin", details)])
        context.abort(grpc.StatusCode.PERMISSION_DENIED, "go away")

    handler = grpc.method_handlers_generic_handler(
        "disttrain.v1.DataService", {"GetServerInfo": grpc.unary_unary_rpc_method_handler(answer)}
    )
    other = grpc.server(futures.ThreadPoolExecutor(1), handlers=[handler])
    port = other.add_insecure_port("127.0.0.1:0")
    other.start()
    fleet = Fleet(f"127.0.0.1:{port}", timeouts=patient)
    with pytest.raises(DataServiceError, match="failed with PERMISSION_DENIED: go away") as raised:
        resolve_job(job_data(), fleet)
    assert raised.value.reason == ""
    fleet.close()
    other.stop(0)
