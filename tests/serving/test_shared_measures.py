"""A shard is measured once in a fleet, and no peer can make anybody wait for long, or lay axes out otherwise."""

import logging
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from disttrain.v1 import peer_service_pb2 as pb
from disttrain.v1.peer_service_pb2_grpc import PeerServiceStub
from serving.harness import TIMEOUT_S, Running, index, job_data, reason_of, running
from serving.peers import fleet, live, lying, read_all, until
from shards import write_pairs

from dataserver.dataset import Dataset, Shard
from dataserver.jobs import MeasuredRun, Rules, measuring, runs
from dataserver.jobs.measures import Measures
from dataserver.planning.jobspec import Sizing
from dataserver.planning.measure import Measure, equal_measures
from dataserver.preprocessing import load_tokenizer
from dataserver.serving.peers import fetching, measure_fetching
from dataserver.serving.peers.build import build_id
from dataserver.serving.peers.measure_message import (
    UnfitMeasureError,
    measure_from_message,
    measures_message,
    measures_request,
)
from dataserver.serving.peers.membership import Peers
from dataserver.serving.peers.packed import packed

SHARDS = 12
FILTER = "width >= 80"
JOB = job_data(datasets=[{"name": "pairs", "filter": FILTER}], end={"steps": 2}, global_batch=2)
RULES = Rules(load_tokenizer("bytes").digest, Sizing(max_patches=256), FILTER)
OWN, CHECKS = "measuring runs", "measuring"
"""Threads in which a server measures what it owns, and the shards by which it checks what others say."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return index(write_pairs(tmp_path_factory.mktemp("pairs"), num_samples=5 * SHARDS, shard_size=5))


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[str, str]]:
    """How often each shard was measured in which thread, by (thread, shard); a run is one shard."""
    found, lock = Counter[tuple[str, str]](), threading.Lock()
    original = measuring._measure

    def noted(shard: Shard, *arguments: Any) -> Measure:
        with lock:
            found[threading.current_thread().name, shard.name] += 1
        return original(shard, *arguments)

    monkeypatch.setattr(measuring, "_measure", noted)
    monkeypatch.setattr(runs, "RUN", 1)
    return found


@pytest.fixture
def expected(folder: Path, measured: Counter[tuple[str, str]]) -> Iterator[Measure]:
    """What one server finds that has no peers."""
    yield Measures().get(Dataset.open(folder), RULES)
    measured.clear()


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def measure_of(server: Running) -> Measure:
    """What a server that knows the job measured."""
    kept = server.server.jobs._kept.measures
    (dataset,) = server.catalog.datasets.values()
    return kept.get(dataset, RULES)


def in_thread(measured: Counter[tuple[str, str]], thread: str) -> Counter[str]:
    return Counter({shard: n for (name, shard), n in measured.items() if name == thread})


def test_each_shard_is_measured_by_its_owner_alone(
    folder: Path, expected: Measure, measured: Counter[tuple[str, str]], caplog: pytest.LogCaptureFixture
) -> None:
    measured.clear()
    with running({"pairs": folder}) as alone:
        blob = alone.read(alone.create(JOB).job_id, "llm", 0).blob()
    measured.clear()
    with fleet({"pairs": folder}, 3) as servers, ThreadPoolExecutor(3) as pool:
        job_id = {answer.job_id for answer in pool.map(lambda server: server.create(JOB), servers)}.pop()
        own = in_thread(measured, OWN)
        assert (len(own), set(own.values())) == (SHARDS, {1})
        assert in_thread(measured, CHECKS).total() == 2 * SHARDS, "one shard of what each fetched"
        assert all(equal_measures(measure_of(server), expected) for server in servers)
        assert [received.blob() for received in read_all(servers, job_id)] == [blob] * 3
        assert not warnings(caplog)


def test_who_comes_later_gets_what_is_known(
    folder: Path, expected: Measure, measured: Counter[tuple[str, str]]
) -> None:
    """A rank that fails over to a server without the job waits for no measure."""
    with fleet({"pairs": folder}, 2) as (one, other):
        one.create(JOB)
        own = in_thread(measured, OWN)
        assert (len(own), set(own.values())) == (SHARDS, {1}), "each measured what it owns for the first that asked"
        other.create(JOB)
        assert in_thread(measured, OWN) == own
        assert equal_measures(measure_of(other), expected)


def changed(**fields: bytes) -> Callable[[pb.FetchMeasuresResponse], pb.FetchMeasuresResponse]:
    """Puts bytes for arrays of the one shard of each answer."""

    def change(answer: pb.FetchMeasuresResponse) -> pb.FetchMeasuresResponse:
        for name, value in fields.items():
            message, (*path, last) = answer, name.split("__")
            for part in path:
                message = getattr(message, part)
            setattr(message, last, value)
        return answer

    return change


def more_text(answer: pb.FetchMeasuresResponse) -> pb.FetchMeasuresResponse:
    """One token more than there is, in an answer that fits itself."""
    there = np.frombuffer(answer.measured.pair_text, f"<u{len(answer.measured.pair_text)}").astype(np.int64)
    answer.measured.pair_text = packed(there + 1)
    return answer


def backwards(answer: pb.FetchMeasuresResponse) -> pb.FetchMeasuresResponse:
    lists = answer.measured.long_texts
    lists.values = packed(np.arange(int(lists.counts[0])))
    return answer


LIES: dict[str, tuple[Callable[[pb.FetchMeasuresResponse], pb.FetchMeasuresResponse], str]] = {
    "another build": (lambda a: pb.FetchMeasuresResponse(build="0" * 64, id=a.id), "it was made by build '0000"),
    "another measure": (lambda a: pb.FetchMeasuresResponse(build=a.build, id="f" * 64), "it is of measure 'ffff"),
    "other shards": (changed(shards=bytes(32)), "its 1 shards have other content than here"),
    "no shards": (changed(shards=b""), "its 0 shards have other content"),
    "too many samples": (changed(measured__samples=b"\x06"), "more samples than there are"),
    "cut short": (changed(measured__images=b""), "0 bytes for the images of 1 items"),
    "beyond 63 bits": (changed(measured__other_tokens=b"\xff" * 8), "other_tokens are beyond 63 bits"),
    "beyond any sum": (changed(measured__other_tokens=b"\xff" * 7 + b"\x0f"), "add up to more than"),
    "lists without end": (changed(measured__pair_images__counts=b"\xff" * 4), "bytes for the pair_images of"),
    "texts in another order": (backwards, "its lists are not in order|do not list|longer than all"),
    "another text": (more_text, "has another measure here"),
    "nothing": (lambda _: pb.FetchMeasuresResponse(), "it was made by build ''"),
}


@pytest.mark.parametrize("lie", LIES)
def test_what_cannot_be_the_measure_is_not_taken(folder: Path, lie: str) -> None:
    change, said = LIES[lie]
    (shard, *_), name = Dataset.open(folder).shards, "a" * 64
    (measure,) = measuring.measure_shards([shard], RULES)
    run = MeasuredRun(name, [bytes(31) + b"x"], measure)

    def taken(message: pb.FetchMeasuresResponse) -> Measure:
        return measure_from_message(name, run.identities, np.array([shard.num_samples]), build_id(), message)

    assert equal_measures(taken(measures_message(run, build_id())), measure)
    if lie == "another text":  # which only who measures can know
        assert not equal_measures(taken(change(measures_message(run, build_id()))), measure)
        return
    with pytest.raises(UnfitMeasureError, match=said):
        taken(change(measures_message(run, build_id())))


@pytest.mark.parametrize("lie", ["other shards", "cut short", "another text"])
def test_a_lie_is_told_of_once_and_changes_nothing(
    folder: Path, expected: Measure, measured: Counter[tuple[str, str]], caplog: pytest.LogCaptureFixture, lie: str
) -> None:
    change, said = LIES[lie]
    with (
        running({"pairs": folder}) as truth,
        lying(truth, lambda plan: plan, measured=change) as (address, liar),
        running({"pairs": folder}, peers=[address]) as server,
    ):
        until(lambda: len(live(server)) == 1)
        assert server.create(JOB).num_steps == 2
        assert equal_measures(measure_of(server), expected)
        assert len(liar.runs) == 1, "a peer that lied is asked no more"
        (warning,) = warnings(caplog)
        number = liar.runs[0]
        assert warning.startswith(f"peer {address} gave no measure of shards {number} to {number} of {folder} (wrong)")
        assert "what it owns is measured here" in warning
        assert re.search(said, warning), warning


def test_a_peer_that_leaves_the_fleet_meanwhile_costs_only_its_share(
    folder: Path, expected: Measure, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its channel is closed then, while one of its shards is looked at."""
    with fleet({"pairs": folder}, 2) as (one, _):
        check = measure_fetching.measure_shards

        def checked(*arguments: Any) -> list[Measure]:
            one.server.peers._replace([])
            return check(*arguments)

        monkeypatch.setattr(measure_fetching, "measure_shards", checked)
        one.create(JOB)
        assert equal_measures(measure_of(one), expected)
    assert "Traceback" not in caplog.text


def test_what_came_before_a_lie_does_not_count(
    folder: Path, expected: Measure, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who is wrong about one shard may be so about others, of which one in 64 is looked at."""
    ranked, looks = Peers.ranked, list[bool]()

    def unseen_at_first(found: Measure, made: Measure) -> bool:
        looks.append(equal_measures(found, made))
        return looks[-1] or len(looks) < 3

    monkeypatch.setattr(Peers, "ranked", lambda *of: sorted(ranked(*of), key=lambda owner: owner is None))
    monkeypatch.setattr(measure_fetching, "equal_measures", unseen_at_first)
    with (
        running({"pairs": folder}) as truth,
        lying(truth, lambda plan: plan, measured=more_text) as (address, liar),
        running({"pairs": folder}, peers=[address]) as server,
    ):
        until(lambda: len(live(server)) == 1)
        server.create(JOB)
        assert looks == [False] * 3, "two lies were taken until the third was seen"
        assert equal_measures(measure_of(server), expected)
        assert liar.runs == [0, 1, 2]
        assert len(warnings(caplog)) == 1


@pytest.mark.parametrize("end", ["stalls", "dies"])
def test_a_peer_that_does_not_answer_is_waited_for_no_longer_than_the_deadline(
    folder: Path, expected: Measure, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    monkeypatch.setattr(fetching, "FETCH_S", 1.0)
    over, dead = threading.Event(), threading.Event()

    def ends(answer: pb.FetchMeasuresResponse) -> pb.FetchMeasuresResponse:
        if end == "dies":
            dead.set()
        over.wait(TIMEOUT_S)
        return answer

    with running({"pairs": folder}) as truth, ExitStack() as stack:
        peer = ExitStack()
        stack.callback(peer.close)
        stack.callback(over.set)
        address, liar = peer.enter_context(lying(truth, lambda plan: plan, measured=ends))
        server = stack.enter_context(running({"pairs": folder}, peers=[address]))
        until(lambda: len(live(server)) == 1)
        killer = threading.Thread(target=lambda: dead.wait(TIMEOUT_S) and peer.close())
        killer.start()
        assert server.create(JOB).num_steps == 2
        assert equal_measures(measure_of(server), expected)
        assert len(liar.runs) == 1
        (warning,) = warnings(caplog)
        assert f"peer {address}" in warning
        assert {"stalls": "(late): no answer within 1 s", "dies": "does not answer"}[end] in warning
        dead.set()
        over.set()
        killer.join(TIMEOUT_S)


def test_a_peer_with_other_data_is_asked_once(
    folder: Path, expected: Measure, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    others = index(write_pairs(tmp_path / "pairs", num_samples=2, shard_size=2, seed=9))
    with running({"pairs": others}) as peer, running({"pairs": folder}, peers=[peer.address]) as server:
        until(lambda: len(live(server)) == 1)
        server.create(JOB)
        assert equal_measures(measure_of(server), expected)
        (warning,) = warnings(caplog)
        assert f"peer {peer.address} gave no measure" in warning
        assert "(refused): NOT_FOUND: no dataset here has fingerprint" in warning


def test_a_lie_that_nobody_looked_at_ends_the_stream_that_comes_to_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps would begin elsewhere on the axis than on other servers."""
    monkeypatch.setattr(measure_fetching, "equal_measures", lambda *_: True)
    with (
        running({"pairs": folder}) as truth,
        lying(truth, lambda plan: plan, measured=more_text) as (address, liar),
        running({"pairs": folder}, peers=[address]) as server,
    ):
        until(lambda: len(live(server)) == 1)
        job = {**JOB, "execution": {**JOB["execution"], "end": {"passes": 1}}}
        job_id = server.create(job).job_id
        assert liar.runs
        with pytest.raises(grpc.RpcError) as error:
            server.read(job_id, "llm", 0)
        _, reason, action, text = reason_of(error.value)
        assert (reason, action) == ("INDEX_STALE", "ANOTHER_SERVER")
        assert re.search(r"dataset pairs, shard \d+.tar: its samples take \d+ units of the axis", text)


def test_who_asks_is_refused_with_reasons(folder: Path) -> None:
    with running({"pairs": folder}) as server:
        (dataset,) = server.catalog.datasets.values()
        stub = PeerServiceStub(server.channel)

        def refusal(build: str = build_id(), **changes: Any) -> tuple[str, str]:
            request = measures_request(dataset.fingerprint, RULES, 0, build)
            for name, value in changes.items():
                setattr(request, name, value)
            with pytest.raises(grpc.RpcError) as error:
                stub.FetchMeasures(request, timeout=TIMEOUT_S)
            _, reason, _, text = reason_of(error.value)
            return reason, text

        assert refusal("x")[0] == "VERSION_UNSUPPORTED"
        assert refusal(fingerprint="x") == ("DATASET_UNKNOWN", "no dataset here has fingerprint 'x'")
        assert refusal(quarantine="y")[0] == "DATASET_UNKNOWN"
        assert refusal(tokenizer="../x") == ("TOKENIZER_UNKNOWN", "no tokenizer here has digest '../x'")
        assert refusal(run=SHARDS) == ("REQUEST_INVALID", f"run {SHARDS} does not exist; the dataset has 12 shards")
        assert refusal(run=(1 << 64) - 1)[0] == "REQUEST_INVALID"
        assert refusal(patch=0)[0] == "REQUEST_INVALID"
        assert refusal(filter="nonsense > 1")[0] == "JOB_INVALID"
        found = stub.FetchMeasures(measures_request(dataset.fingerprint, RULES, 3, build_id()), timeout=TIMEOUT_S)
        assert found.shards == bytes.fromhex(dataset.shards[3].header.columns_digest)
