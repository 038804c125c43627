"""A step is planned once in a fleet, and no peer can make anybody wait for long, or deliver other bytes."""

import logging
import re
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from disttrain.v1 import peer_service_pb2 as pb
from disttrain.v1.peer_service_pb2_grpc import PeerServiceStub
from fleet.servers import fleet, live, lying, made, read_all, sources, until
from ports import free_addresses
from serving.harness import TIMEOUT_S, Running, job_data, reason_of, running

from dataserver.fleet import fetching
from dataserver.fleet.build import build_id
from dataserver.fleet.compact_message import compact_message
from dataserver.fleet.plan_source import PlanSource
from dataserver.jobs import IsCancelled, JobPlanner
from dataserver.planning.job.identity import Job
from dataserver.planning.plan.plan import StepPlan, plan_hash
from dataserver.planning.planner import baseline_plan
from dataserver.serving import peer_service

STEPS = 12
JOB = job_data(end={"steps": STEPS}, global_batch=4)


@pytest.fixture
def undisturbed(datasets: dict[str, Path]) -> list[tuple[bytes, bytes]]:
    """What a server without peers delivers."""
    with running(datasets) as server:
        return server.read(server.create(JOB).job_id, "llm", 0).blob()


def warnings(caplog: pytest.LogCaptureFixture, about: str = "") -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelno >= logging.WARNING
        and record.name.startswith("dataserver.fleet.")
        and about in record.getMessage()
    ]


def test_every_step_is_planned_once(datasets: dict[str, Path], undisturbed: object) -> None:
    with fleet(datasets, 3) as servers:
        job_id = {server.create(JOB).job_id for server in servers}.pop()
        for received in read_all(servers, job_id):
            assert received.blob() == undisturbed
        found = [sources(server) for server in servers]
        assert sum(map(made, servers)) == STEPS + sum(fetching.is_checked(job_id, step) for step in range(STEPS))
        assert sum(f.get(PlanSource.FETCHED, 0) for f in found) == 2 * STEPS
        assert all(set(f) <= {PlanSource.OWN, PlanSource.FETCHED} for f in found)
        assert sum(made(server) > 0 for server in servers) > 1, "one server owns all steps"  # as ports fall


def test_a_job_is_brought_to_the_owner(datasets: dict[str, Path], undisturbed: object) -> None:
    with fleet(datasets, 2) as (one, other):
        job_id = one.create(JOB).job_id
        assert one.read(job_id, "llm", 0).blob() == undisturbed
        assert sources(one)[PlanSource.FETCHED] + sources(one)[PlanSource.OWN] == STEPS
        assert made(other) == sources(one)[PlanSource.FETCHED]
        assert other.server.metrics().known_jobs == 1


def test_a_list_may_hold_the_server_itself_and_a_peer_twice(
    datasets: dict[str, Path], caplog: pytest.LogCaptureFixture, undisturbed: object
) -> None:
    (dead,) = free_addresses(1)
    (one, other) = free_addresses(2)
    names = [one, one.replace("127.0.0.1", "localhost"), other, other, dead, "no-such-host.invalid:50051"]
    with running(datasets, listen=one, peers=names) as first, running(datasets, listen=other, peers=names) as second:
        until(lambda: len(live(first)) == len(live(second)) == 1)
        job_id = {server.create(JOB).job_id for server in (first, second)}.pop()
        assert [r.blob() for r in read_all([first, second], job_id)] == [undisturbed] * 2
        assert made(first) + made(second) in (STEPS, STEPS + 1)
        until(lambda: len(warnings(caplog, dead)) == len(warnings(caplog, "no-such-host.invalid")) == 2)


def test_a_hundred_names_of_which_one_is_dead(
    datasets: dict[str, Path], caplog: pytest.LogCaptureFixture, undisturbed: object
) -> None:
    """The names of 99 servers lead to three, which are told apart; one is told of, by its name, and nobody waits."""
    with ExitStack() as stack:
        ports = [address.partition(":")[2] for address in free_addresses(3)]
        for port in ports:
            stack.enter_context(running(datasets, listen=f"0.0.0.0:{port}", insecure=True))
        (dead,) = free_addresses(1)
        names = [f"127.0.1.{i}:{port}" for i in range(1, 34) for port in ports]
        last = stack.enter_context(running(datasets, peers=[*names, dead]))
        until(lambda: len(live(last)) == 3)
        job_id = last.create(JOB).job_id
        began = time.monotonic()
        assert last.read(job_id, "llm", 0).blob() == undisturbed
        assert time.monotonic() - began < 2 * fetching.FETCH_S
        # Who owns a step is drawn with the servers: that this one owns none of them happens.
        assert {PlanSource.FETCHED} <= set(sources(last)) <= {PlanSource.OWN, PlanSource.FETCHED}
        until(lambda: bool(warnings(caplog)))
        (said,) = warnings(caplog)
        assert f"peer {dead} does not answer" in said


def test_servers_join_and_leave_without_a_restart(
    datasets: dict[str, Path], caplog: pytest.LogCaptureFixture, undisturbed: object
) -> None:
    addresses = free_addresses(2)
    with running(datasets, listen=addresses[0], peers=addresses) as stays:
        job_id = stays.create(JOB).job_id
        assert stays.read(job_id, "llm", 0).blob() == undisturbed
        assert sources(stays) == {PlanSource.OWN: STEPS}
        with running(datasets, listen=addresses[1], peers=addresses) as joins:
            until(lambda: len(live(stays)) == len(live(joins)) == 1)
            # what is kept is not asked for again, so another job
            second = stays.create(job_data(end={"steps": STEPS}, global_batch=4, seed=1)).job_id
            stays.read(second, "llm", 0)
            assert made(joins) == sources(stays)[PlanSource.FETCHED] > 0
        alone = "0 of 1 other servers are live"
        until(lambda: any(alone in said for said in warnings(caplog, addresses[1])))
        assert not live(stays)
        assert all("does not answer" in said for said in warnings(caplog, addresses[1]) if alone in said)
        before = sources(stays)[PlanSource.FETCHED]
        third = stays.create(job_data(end={"steps": STEPS}, global_batch=4, seed=2)).job_id
        stays.read(third, "llm", 0)
        assert sources(stays)[PlanSource.FETCHED] == before


def another_rank(answer: pb.FetchPlanResponse) -> pb.FetchPlanResponse:
    """Every item of the second module on rank 0, with the hash of the right plan."""
    answer.arrangements[1].rank = bytes(len(answer.arrangements[1].rank))
    return answer


def changed(**fields: Any) -> Callable[[pb.FetchPlanResponse], pb.FetchPlanResponse]:
    def change(answer: pb.FetchPlanResponse) -> pb.FetchPlanResponse:
        for name, value in fields.items():
            setattr(answer, name, value)
        return answer

    return change


def without_arrangements(answer: pb.FetchPlanResponse) -> pb.FetchPlanResponse:
    del answer.arrangements[:]
    return answer


def cut_short(answer: pb.FetchPlanResponse) -> pb.FetchPlanResponse:
    answer.arrangements[0].rank = answer.arrangements[0].rank[:-1]
    return answer


def many_texts(answer: pb.FetchPlanResponse) -> pb.FetchPlanResponse:
    for _ in range(5000):
        answer.decisions.add(subject="step", chosen="all", reason="none")
    return answer


LIES: dict[str, tuple[Callable[[pb.FetchPlanResponse], pb.FetchPlanResponse], str]] = {
    "another build": (changed(build="0" * 64), "it was made by build '0000"),
    "another hash": (changed(plan_hash=bytes(32)), "and says 0000"),
    "no hash": (changed(plan_hash=b""), "it has hash"),
    "other ranks": (another_rank, "it has hash|a sequence has"),
    "another step": (changed(step=7777), "it is of job .*, step 7777"),
    "another job": (changed(job_id="x" * 64), "it is of job 'xxx"),
    "many microbatches": (changed(num_microbatches=1 << 31), "microbatches; 1 to"),
    "many slots": (changed(sequences_per_microbatch=1 << 31), "sequence slots; 0 to"),
    "no arrangements": (without_arrangements, "positions for 0 modules"),
    "arrangements cut short": (cut_short, "bytes for the ranks of"),
    "many texts": (many_texts, "5000 decisions|decisions"),
    "nothing": (lambda _: pb.FetchPlanResponse(), "it is of job ''"),
}

FEW_LIES = ("another hash", "other ranks", "another job", "many slots", "nothing")
"""Of these, for continuous integration: `tests/planning/plan` tries more of each kind, without servers."""


@pytest.mark.parametrize("lie", [lie if lie in FEW_LIES else pytest.param(lie, marks=pytest.mark.long) for lie in LIES])
def test_a_lie_is_told_of_once_and_changes_nothing(
    datasets: dict[str, Path], caplog: pytest.LogCaptureFixture, undisturbed: object, lie: str
) -> None:
    change, said = LIES[lie]
    with running(datasets) as truth, lying(truth, change) as (address, liar):
        truth.create(JOB)
        with running(datasets, peers=[address]) as server:
            assert server.read(server.create(JOB).job_id, "llm", 0).blob() == undisturbed
            assert len(liar.asked) == 1, "a peer that lied is asked no more"
            assert sources(server) == {PlanSource.OWN: STEPS - 1, PlanSource.WRONG: 1}
            (warning,) = warnings(caplog)
            assert warning.startswith(f"peer {address} gave no plan of step {liar.asked[0]} ")
            assert re.search(said, warning), warning


def test_a_lie_that_is_consistent_is_found_by_planning_again(
    datasets: dict[str, Path], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, undisturbed: object
) -> None:
    """Whoever computes a hash to its lie is found as soon as the step is one of those that are made again."""
    monkeypatch.setattr(fetching, "CHECK_ONE_IN", 1)
    with running(datasets) as truth, ExitStack() as stack:
        served = truth.server.jobs.get(truth.create(JOB).job_id, truth.catalog)

        def baseline(answer: pb.FetchPlanResponse) -> pb.FetchPlanResponse:
            plan = baseline_plan(served.job, answer.step, served.planner.samples(answer.step))
            plan = _named(plan, served.job)
            return compact_message(served.job, plan, build_id())

        address, liar = stack.enter_context(lying(truth, baseline))
        with running(datasets, peers=[address]) as server:
            assert server.read(server.create(JOB).job_id, "llm", 0).blob() == undisturbed
            assert sources(server)[PlanSource.WRONG] == 1
            (warning,) = warnings(caplog)
            assert f"peer {address} gave no plan of step {liar.asked[-1]}" in warning
            assert "and this server makes" in warning


def _named(plan: StepPlan, job: Job) -> StepPlan:
    """A plan as that of a job, with the hash that it then has."""
    version = job.spec.execution.plan_version
    return replace(plan, job_id=job.job_id, hash=plan_hash(version, job.job_id, plan.step, plan))


def test_a_peer_of_another_build_is_asked_for_nothing(
    datasets: dict[str, Path], caplog: pytest.LogCaptureFixture, undisturbed: object
) -> None:
    with (
        running(datasets) as truth,
        lying(truth, lambda answer: answer, "0" * 64) as (address, liar),
        running(datasets, peers=[address]) as server,
    ):
        assert server.read(server.create(JOB).job_id, "llm", 0).blob() == undisturbed
        assert not liar.asked
        assert sources(server) == {PlanSource.OWN: STEPS}
        (warning,) = warnings(caplog)
        assert f"peer {address} is build 0000" in warning


def test_an_owner_that_stalls_is_waited_for_no_longer_than_the_deadline(
    datasets: dict[str, Path], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, undisturbed: object
) -> None:
    monkeypatch.setattr(fetching, "FETCH_S", 1.0)
    over = threading.Event()

    def stall(answer: pb.FetchPlanResponse) -> pb.FetchPlanResponse:
        over.wait(TIMEOUT_S)
        return answer

    with running(datasets) as truth, lying(truth, stall) as (address, liar):
        truth.create(JOB)
        with running(datasets, peers=[address]) as server:
            assert server.read(server.create(JOB).job_id, "llm", 0).blob() == undisturbed
            assert len(liar.asked) == 1, "it is left alone for a while"
            assert sources(server) == {PlanSource.OWN: STEPS - 1, PlanSource.LATE: 1}
            (warning,) = warnings(caplog)
            assert "(late): no answer within 1 s; planned here, and it is asked again in 30 s" in warning
        over.set()


def test_a_peer_that_cannot_serve_the_job(
    datasets: dict[str, Path], caplog: pytest.LogCaptureFixture, undisturbed: object
) -> None:
    with running({"docs": datasets["docs"]}) as other, running(datasets, peers=[other.address]) as server:
        assert server.read(server.create(JOB).job_id, "llm", 0).blob() == undisturbed
        assert sources(server) == {PlanSource.OWN: STEPS - 1, PlanSource.REFUSED: 1}
        (warning,) = warnings(caplog)
        assert f"peer {other.address} gave no plan" in warning
        assert "no dataset is named 'pairs'" in warning


def test_who_asks_is_refused_with_reasons(server: Running) -> None:
    stub = PeerServiceStub(server.channel)
    with pytest.raises(grpc.RpcError) as error:
        stub.FetchPlan(pb.FetchPlanRequest(job_id="x", build=build_id()), timeout=TIMEOUT_S)
    assert reason_of(error.value)[1] == "JOB_UNKNOWN"
    job_id = server.create(JOB).job_id
    with pytest.raises(grpc.RpcError) as error:
        stub.FetchPlan(pb.FetchPlanRequest(job_id=job_id, build="x"), timeout=TIMEOUT_S)
    assert reason_of(error.value)[1] == "VERSION_UNSUPPORTED"
    with pytest.raises(grpc.RpcError) as error:
        stub.FetchPlan(pb.FetchPlanRequest(job_id=job_id, step=STEPS, build=build_id()), timeout=TIMEOUT_S)
    assert reason_of(error.value)[1] == "STEP_OUT_OF_RANGE"
    greeting = stub.Greet(pb.GreetRequest(), timeout=TIMEOUT_S)
    assert (len(greeting.instance), greeting.build, greeting.draining) == (16, build_id(), False)


def test_two_servers_that_take_each_other_for_the_owner_do_not_wait_for_each_other(server: Running) -> None:
    """While a plan is being fetched from somewhere, a server that asks for it here gets one that is made here."""
    served = server.server.jobs.get(server.create(JOB).job_id, server.catalog)
    asking, over = threading.Event(), threading.Event()

    def fetch(_: JobPlanner, __: int, ___: IsCancelled) -> None:
        asking.set()
        assert over.wait(TIMEOUT_S)

    planner = JobPlanner(served.job, served.datasets, fetch=fetch)
    own = threading.Thread(target=planner.plan, args=(0,))
    own.start()
    assert asking.wait(TIMEOUT_S)
    assert planner.plan_here(0).hash == served.planner.plan(0).hash
    over.set()
    own.join(TIMEOUT_S)


def test_what_is_planned_here_is_made_once(server: Running) -> None:
    """For those that ask this server, and for its own streams."""
    served = server.server.jobs.get(server.create(JOB).job_id, server.catalog)
    times: list[float] = []
    planner = JobPlanner(served.job, served.datasets, planned=times.append)
    plans = [planner.plan_here(0), planner.plan(0), planner.plan_here(0)]
    assert len(times) == 1
    assert all(plan is plans[0] for plan in plans)
    for step in (1, 2, 1):  # nobody holds a plan of them
        planner.plan_here(step)
    assert len(times) == 3


def test_a_plan_that_is_too_large_for_a_message_is_refused(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    stub, job_id = PeerServiceStub(server.channel), server.create(JOB).job_id
    request = pb.FetchPlanRequest(job_id=job_id, step=1, build=build_id())
    size = stub.FetchPlan(request, timeout=TIMEOUT_S).ByteSize()
    monkeypatch.setattr(peer_service, "MAX_PLAN_BYTES", size)
    assert stub.FetchPlan(request, timeout=TIMEOUT_S).ByteSize() == size
    monkeypatch.setattr(peer_service, "MAX_PLAN_BYTES", size - 1)
    with pytest.raises(grpc.RpcError) as error:
        stub.FetchPlan(request, timeout=TIMEOUT_S)
    _, reason, _, text = reason_of(error.value)
    assert reason == "SERVER_LIMIT"
    assert f"the plan of step 1 takes {size} bytes, more than the {size - 1} that" in text
