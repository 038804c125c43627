"""What a server makes of the answers of its peers, without one of them."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest
from disttrain.v1 import peer_service_pb2 as pb
from fleet.lone_peer import JOB, Clock, Failure, clock, peer, said

from dataserver.fleet import compact_message, fetching, integer_arrays
from dataserver.fleet.build import build_id
from dataserver.fleet.fetching import PlanFetcher
from dataserver.fleet.membership import Peers
from dataserver.fleet.peer import Peer
from dataserver.fleet.plan_source import PlanSource
from dataserver.jobs import WorkCancelledError
from dataserver.planning.plan.compact import UnfitPlanError

__all__ = ["clock", "peer"]


class Call:
    """A call that ends as it is told after so many looks."""

    def __init__(self, outcome: Any, looks: int = 0, each: Callable[[], object] = bool) -> None:
        self.outcome, self.looks, self.each = outcome, looks, each
        self.waited: list[float] = []
        self.cancelled = False

    def result(self, seconds: float) -> Any:
        self.waited.append(seconds)
        self.each()
        if len(self.waited) <= self.looks:
            raise grpc.FutureTimeoutError
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome

    def cancel(self) -> None:
        self.cancelled = True


def test_a_call_is_waited_for_until_there_is_a_reason_to_stop(peer: Peer, clock: Clock) -> None:
    peer.hear(said(1))
    call = Call("plan", looks=3)
    assert fetching.awaited(call, peer, 1001.0, lambda: False) == "plan"  # type: ignore[arg-type]
    assert call.waited == [0.05] * 4

    def failed(call: Call, until: float, cancelled: bool = False) -> tuple[PlanSource, str]:
        with pytest.raises(fetching.FailedError) as caught:
            fetching.awaited(call, peer, until, lambda: cancelled)  # type: ignore[arg-type]
        return caught.value.source, str(caught.value)

    def pass_time() -> None:
        clock.now += 0.25

    late = Call("plan", looks=9, each=pass_time)
    assert failed(late, 1001.0) == (PlanSource.LATE, "no answer within 10 s")
    assert len(late.waited) == 4
    assert failed(Call(grpc.FutureCancelledError()), 2000.0) == (PlanSource.UNREACHABLE, "the connection was closed")
    silent = Call("plan", looks=9, each=lambda: peer.hear(None))
    assert failed(silent, 2000.0) == (PlanSource.UNREACHABLE, "it fell silent")
    with pytest.raises(WorkCancelledError):
        fetching.awaited(Call("plan", looks=9), peer, 0.0, lambda: True)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("code", "source", "text"),
    [
        (grpc.StatusCode.DEADLINE_EXCEEDED, PlanSource.LATE, "no answer within 10 s"),
        (grpc.StatusCode.UNAVAILABLE, PlanSource.UNREACHABLE, "UNAVAILABLE: why"),
        (grpc.StatusCode.CANCELLED, PlanSource.UNREACHABLE, "CANCELLED: why"),
        (grpc.StatusCode.FAILED_PRECONDITION, PlanSource.REFUSED, "FAILED_PRECONDITION: why"),
    ],
)
def test_what_the_error_of_a_call_means(code: grpc.StatusCode, source: PlanSource, text: str) -> None:
    found = fetching.failure_of(Failure(code))
    assert (found.source, str(found)) == (source, text)


def test_a_peer_that_says_why_it_cannot_answer_is_not_silent() -> None:
    found = fetching.failure_of(
        Failure(grpc.StatusCode.UNAVAILABLE, "statistics of 12 of 900 shards are computed", answered=True)
    )
    assert (found.source, str(found)) == (
        PlanSource.REFUSED,
        "UNAVAILABLE: statistics of 12 of 900 shards are computed",
    )


def test_a_call_to_an_address_that_left_the_fleet_fails_as_one_that_is_silent(peer: Peer) -> None:
    peer.close()
    with pytest.raises(fetching.FailedError) as caught:
        fetching.begun(peer.greet)
    assert (caught.value.source, str(caught.value)) == (PlanSource.UNREACHABLE, "the connection was closed")


class OnePeer(Peers):
    """Knows one peer, the owner of everything."""

    def __init__(self, peer: Peer, others: list[Peer | None]) -> None:
        self.order, self.told = [peer, *others], []

    def ranked(self, job_id: str, step: int) -> list[Peer | None]:  # noqa: ARG002
        return self.order

    def lost(self, peer: Peer, why: str) -> None:
        self.told.append((peer, why))


def fetcher(
    peer: Peer,
    monkeypatch: pytest.MonkeyPatch,
    plan: Call,
    bring: Call,
    since: float,
    count: Callable[[PlanSource], object] = lambda _: None,
) -> PlanFetcher:
    calls = iter([Call(Failure(grpc.StatusCode.NOT_FOUND)), plan])
    monkeypatch.setattr(peer, "bring", lambda _: (bring, since))
    future = SimpleNamespace(future=lambda request, timeout, metadata: next(calls))  # noqa: ARG005
    monkeypatch.setattr(peer, "plans", SimpleNamespace(FetchPlan=future))
    return PlanFetcher(OnePeer(peer, []), count)


@pytest.mark.parametrize(("since", "looks"), [(985.0, 1), (991.0, 4), (1000.0, 40)])
def test_a_job_that_is_long_on_its_way_is_not_waited_for_anew(
    peer: Peer,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    since: float,
    looks: int,
) -> None:
    """All together wait for it for 10 s since it was sent."""
    peer.hear(said(1))

    def pass_time() -> None:
        clock.now += 0.25

    bring = Call(None, looks=99, each=pass_time)
    found = fetcher(peer, monkeypatch, Call("never"), bring, since)
    planner: Any = SimpleNamespace(job=JOB)
    assert found.fetch(planner, 3, lambda: False) is None
    assert len(bring.waited) == looks
    assert not bring.cancelled, "it goes on for later steps"
    assert caplog.messages == [
        "peer 127.0.0.1:1 gave no plan of step 3 of job abababababab (late): no answer within 10 s; planned here, and "
        "it is asked again in 30 s"
    ]
    assert (peer.serves(JOB.job_id), peer.serves("other")) == (False, False)
    clock.now += 30
    assert peer.serves("other")


@pytest.mark.parametrize(
    ("error", "source", "job", "other"),
    [
        (Failure(grpc.StatusCode.UNAVAILABLE), PlanSource.UNREACHABLE, True, True),
        (Failure(grpc.StatusCode.INTERNAL), PlanSource.REFUSED, False, True),
    ],
)
def test_whom_a_failure_concerns(
    peer: Peer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Failure,
    source: PlanSource,
    job: bool,
    other: bool,
) -> None:
    """One that is lost is told of by who looks for peers; one that refuses serves other jobs."""
    peer.hear(said(1))
    counted = list[PlanSource]()
    found = fetcher(peer, monkeypatch, Call(error), Call(None), 1000.0, counted.append)
    assert found.fetch(SimpleNamespace(job=JOB), 3, lambda: False) is None  # type: ignore[arg-type]
    assert counted == [source]
    assert (peer.serves(JOB.job_id), peer.serves("other")) == (job, other)
    lost = found._peers.told  # type: ignore[attr-defined]
    assert lost == ([(peer, "UNAVAILABLE: why")] if source is PlanSource.UNREACHABLE else [])
    assert len(caplog.messages) == 1 - len(lost)


def test_one_plan_of_64_is_made_again() -> None:
    checked = [step for step in range(1000) if fetching.is_checked("job", step)]
    words = [
        int.from_bytes(hashlib.sha256(f"check job {step}".encode()).digest()[:8], "little") for step in range(1000)
    ]
    assert checked == [step for step, word in enumerate(words) if word % 64 == 0]
    assert 5 < len(checked) < 30


def test_a_build_is_the_release_and_every_module_that_plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And every one that plans depend on."""
    monkeypatch.setattr("dataserver.planning.__path__", [str(tmp_path / "planning")])
    found = [build_id.__wrapped__()]
    for name, content in (
        ("planning/b.py", "x"),
        ("planning/b.py", "y"),
        ("planning/a/b.py", "y"),
        ("planning/a/c.py", ""),
        ("dataset/b.py", "y"),
        ("jobs/b.py", "y"),
        ("planning/b.py", "yx"),
        ("serving/b.py", "y"),
        ("planning/b.txt", "y"),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(content)
        found.append(build_id.__wrapped__())
    monkeypatch.setattr("importlib.metadata.version", lambda _: "0.0.0")
    found.append(build_id.__wrapped__())
    assert found[-2] == found[-3] == found[-4], "a text is no module"
    assert len(set(found)) == len(found) - 2
    assert {len(digest) for digest in found} == {64}


@pytest.mark.parametrize(
    ("values", "width"),
    [([], 1), ([0, 255], 1), ([256], 2), ([7, 65_535], 2), ([65_536], 4), ([(1 << 32) - 1], 4), ([1 << 32], 8)],
)
def test_numbers_of_items_are_as_wide_as_the_largest(values: list[int], width: int) -> None:
    data = integer_arrays.packed(np.array(values, np.int64))
    assert len(data) == width * len(values)
    assert data == b"".join(value.to_bytes(width, "little") for value in values)
    found = integer_arrays.unpacked("ranks", data, len(values))
    assert (found.tolist(), found.dtype) == (values, np.int64)


@pytest.mark.parametrize("size", [3, 9, 0, 12])
def test_bytes_that_are_no_numbers_of_items(size: int) -> None:
    count = 6 if size != 12 else 5
    with pytest.raises(integer_arrays.PackedError) as caught:
        integer_arrays.unpacked("slots", bytes(size), count)
    assert str(caught.value) == f"it has {size} bytes for the slots of {count} items; 1, 2, 4 or 8 each are required"
    with pytest.raises(integer_arrays.PackedError, match="its slots are beyond 63 bits"):
        integer_arrays.unpacked("slots", bytes(7) + b"\x80", 1)


def test_a_plan_of_another_job_or_build_is_refused_by_the_begin_of_its_name() -> None:
    message = pb.FetchPlanResponse(job_id="y" * 70, step=6)
    with pytest.raises(UnfitPlanError, match=f"it is of job '{'y' * 64}', step 6$"):
        compact_message.plan_from_message(JOB, 5, None, "b", message)  # type: ignore[arg-type]
    message = pb.FetchPlanResponse(job_id=JOB.job_id, step=5, build="x" * 70)
    with pytest.raises(UnfitPlanError, match=f"made by build '{'x' * 64}', and this server is b"):
        compact_message.plan_from_message(JOB, 5, None, "b", message)  # type: ignore[arg-type]


@pytest.mark.parametrize(("candidates", "decisions"), [(4096, 0), (0, 4096), (4000, 97), (4097, 0)])
def test_a_plan_has_as_many_texts_as_planning_could_make(
    monkeypatch: pytest.MonkeyPatch, candidates: int, decisions: int
) -> None:
    def expanded(*_: object) -> None:
        raise UnfitPlanError("expanded")

    monkeypatch.setattr(compact_message, "expand", expanded)
    message = pb.FetchPlanResponse(job_id=JOB.job_id, step=5, build="b")
    for _ in range(candidates):
        message.candidates.add(name="n")
    for _ in range(decisions):
        message.decisions.add(subject="s")
    fits = candidates + decisions <= 4096
    expected = "expanded" if fits else f"it has {candidates} candidates and {decisions} decisions"
    with pytest.raises(UnfitPlanError, match=expected):
        compact_message.plan_from_message(JOB, 5, None, "b", message)  # type: ignore[arg-type]
