"""What a server knows of its peers, without one of them and without its threads."""

import hashlib
import logging
import threading
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from disttrain.v1.peer_service_pb2 import GreetResponse
from fleet.lone_peer import JOB, OWN, Clock, Failure, clock, peer, said

from dataserver.fleet import membership
from dataserver.fleet.build import build_id
from dataserver.fleet.fetching import FailedError
from dataserver.fleet.membership import Peers
from dataserver.fleet.peer import Peer
from dataserver.fleet.peer_health import MAX_DISTRUSTED, PeerHealth
from dataserver.fleet.plan_source import PlanSource
from dataserver.security import Channels

__all__ = ["clock", "peer"]


def test_a_peer_is_asked_while_it_answers_and_does_not_end(peer: Peer) -> None:
    assert (peer.said, peer.answered, peer.serves("a")) == (None, False, False)
    peer.hear(said(1))
    assert (peer.answered, peer.serves("a")) == (True, True)
    peer.hear(said(1, draining=True))
    assert not peer.serves("a")
    peer.hear(None)
    assert (peer.said, peer.answered, peer.serves("a")) == (None, True, False)


def test_a_peer_is_set_aside_for_a_job_or_for_all(peer: Peer, clock: Clock) -> None:
    peer.hear(said(1))
    peer.set_aside(3.0, "a")
    assert (peer.serves("a"), peer.serves("b")) == (False, True)
    peer.set_aside(5.0)
    clock.now += 2.9
    assert (peer.serves("a"), peer.serves("b")) == (False, False)
    clock.now = 1003.0
    assert (peer.serves("a"), peer.serves("b")) == (False, False)
    clock.now = 1005.0
    assert (peer.serves("a"), peer.serves("b")) == (True, True)
    peer.set_aside(1.0, "c")
    assert peer._health._aside == {(bytes([1]) * 16, "c"): 1006.0}, "what is over is forgotten"
    peer.hear(None)
    peer.set_aside(9.0)
    peer.hear(said(1))
    assert peer.serves("a"), "nobody answered there"


def test_what_a_process_did_counts_at_all_of_its_addresses(clock: Clock) -> None:
    health = PeerHealth()
    one, two = (Peer(f"127.0.0.1:{port}", health, Channels()) for port in (1, 2))
    for address in (one, two):
        address.hear(said(1))
    one.set_aside(3.0, "a")
    assert (two.serves("a"), two.serves("b")) == (False, True)
    clock.now += 3
    assert two.serves("a")
    two.distrust()
    assert not one.serves("b")
    for number in range(MAX_DISTRUSTED):
        assert not one.serves("b")
        health.distrust(number.to_bytes(16, "big"))
    assert one.serves("b"), "so many are remembered"
    for address in (one, two):
        address.close()


def test_a_process_whose_plan_was_wrong_is_asked_no_more_but_the_next_one_is(peer: Peer) -> None:
    peer.hear(said(1))
    peer.distrust()
    assert not peer.serves("a")
    peer.hear(None)
    peer.hear(said(1))
    assert not peer.serves("a")
    peer.hear(said(2))
    assert peer.serves("a")
    peer.hear(None)
    peer.distrust()
    peer.hear(said(3))
    assert peer.serves("a"), "nobody answered there"
    peer.hear(said(1))
    assert not peer.serves("a"), "whoever answered there meanwhile"


def test_a_job_is_brought_by_one_call_until_it_is_over(peer: Peer, clock: Clock) -> None:
    calls: list[Any] = []

    def begin(request: Any, timeout: float) -> Any:
        calls.append(SimpleNamespace(request=request, timeout=timeout, over=False))
        calls[-1].done = lambda call=calls[-1]: call.over
        return calls[-1]

    peer._jobs = SimpleNamespace(GetOrCreateJob=SimpleNamespace(future=begin))  # type: ignore[assignment]
    other: Any = SimpleNamespace(job_id="cd", text="[]")
    first = peer.bring(JOB)
    clock.now += 7
    assert peer.bring(JOB) == first == (calls[0], 1000.0)
    assert peer.bring(other) == (calls[1], 1007.0)
    assert [(c.request.job_spec_json, c.timeout) for c in calls] == [("{}", 1800.0), ("[]", 1800.0)]
    calls[0].over = True
    clock.now += 1
    assert peer.bring(JOB) == (calls[2], 1008.0)
    assert peer.bring(other) == (calls[1], 1007.0), "another job's call goes on"


@pytest.fixture
def peers(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Peers:
    """Without the threads that look for them."""
    idle = SimpleNamespace(Lock=threading.Lock, Event=threading.Event, Thread=lambda **_: SimpleNamespace(start=bool))
    monkeypatch.setattr(membership, "threading", idle)
    monkeypatch.setattr(membership, "Peer", Known)
    found = Peers(["a:1", "b:2"], OWN, Channels())
    found.start()
    found._looked.set()
    return found


class Known(Peer):
    """A peer that is never called."""

    def __init__(self, address: str, health: PeerHealth, channels: Channels, server_name: str) -> None:
        super().__init__(address, health, channels)
        self.server_name = server_name
        self.closed = False

    def close(self) -> None:
        self.closed = True
        super().close()


def know(peers: Peers, **answers: GreetResponse | None) -> dict[str, Peer]:
    """Peers at a:1, b:1 and so on that have answered."""
    peers._replace({f"{name}:1": name for name in answers})
    found = {name: peers._peers[f"{name}:1"] for name in answers}
    for name, answer in answers.items():
        if answer is not None:
            found[name].hear(answer)
    return found


def weight(instance: bytes, job_id: str, step: int) -> bytes:
    return hashlib.sha256(instance + job_id.encode() + step.to_bytes(8, "little")).digest()


def test_the_owner_of_a_step_has_the_largest_weight(peers: Peers) -> None:
    found = know(peers, a=said(1), b=said(2), c=said(1), d=said(3, "x"), e=None, f=said(0), g=said(4, draining=True))
    names = {OWN: None, bytes([1]) * 16: found["a"], bytes([2]) * 16: found["b"]}
    owners = set()
    for step in range(40):
        order = sorted(names, key=lambda instance: weight(instance, "job", step), reverse=True)
        assert peers.ranked("job", step) == [names[instance] for instance in order]
        owners.add(order[0])
    assert owners == names.keys()
    found["b"].set_aside(1.0, "job")
    assert set(peers.ranked("job", 0)) == {None, found["a"]}
    assert len(peers.ranked("other", 0)) == 3


def test_addresses_that_are_gone_are_closed_and_the_others_stay(peers: Peers) -> None:
    found = know(peers, a=said(1), b=said(2))
    peers._replace({"c:1": "", "b:1": ""})
    assert [peer.address for peer in peers.peers()] == ["b:1", "c:1"]
    assert peers.peers()[0] is found["b"]
    assert [peer.server_name for peer in peers.peers()] == ["b", ""]  # type: ignore[attr-defined]
    assert [found[name].closed for name in "ab"] == [True, False]  # type: ignore[attr-defined]
    peers.close()
    assert peers.peers() == []
    assert found["b"].closed  # type: ignore[attr-defined]
    peers._replace({"d:1": ""})
    assert peers.peers() == []


def test_a_silent_peer_is_told_of_once_and_not_while_servers_start(
    peers: Peers, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    found = know(peers, a=said(1), b=None, c=said(2, draining=True), d=said(0), e=said(1))
    peers.lost(found["b"], "refused")
    assert not caplog.messages
    peers.lost(found["c"], "gone")
    assert caplog.messages == [
        "peer c:1 does not answer (gone): its steps are planned elsewhere; 1 of 4 other servers are live"
    ]
    assert found["c"].said is None
    clock.now += 14.9
    peers.lost(found["b"], "refused")
    peers.lost(found["c"], "gone")
    assert len(caplog.messages) == 1
    clock.now = 1015.0
    peers.lost(found["b"], "refused")
    peers.lost(found["b"], "refused")
    assert [message.partition(" (")[0] for message in caplog.messages[1:]] == ["peer b:1 does not answer"]


def test_what_peers_answer_is_told_when_it_is_news(peers: Peers, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    found = know(peers, a=None, b=None, c=None)
    for name, answer in (("a", said(1)), ("a", said(1)), ("b", said(0)), ("c", said(3, "x" * 70)), ("c", said(3, "y"))):
        peers._heard(found[name], answer)
    assert caplog.messages == [
        "peer a:1 answers; 1 of 3 other servers are live",
        f"peer c:1 is build {'x' * 64}, and this server is {build_id()}: they share no plans until both are of one "
        "release",
    ]
    caplog.clear()
    peers._heard(found["a"], GreetResponse(instance=bytes(15), build=build_id()))
    assert caplog.messages[0].startswith("peer a:1 does not answer (its instance has 15 bytes, not 16): ")
    assert found["a"].said is None
    peers._heard(found["a"], said(1))
    assert caplog.messages[1:] == ["peer a:1 answers; 2 of 2 other servers are live"]


def test_the_first_look_is_waited_for_once_however_long_a_name_takes(peers: Peers, clock: Clock) -> None:
    waits: list[float] = []
    peers._looked = SimpleNamespace(wait=waits.append)  # type: ignore[assignment]
    for passed in (0, 3, 5, 100):
        clock.now += passed
        peers.ranked("job", 0)
    assert waits == [8.0, 5.0, 0.0, 0.0]


class Turns:
    """An event that is set after so many looks, and knows for how long it was waited for."""

    def __init__(self, turns: int) -> None:
        self.turns = turns
        self.waited: list[float] = []

    def is_set(self) -> bool:
        return len(self.waited) >= self.turns

    def clear(self) -> None:
        pass

    def wait(self, seconds: float) -> None:
        self.waited.append(seconds)


def test_names_are_looked_up_again_and_what_was_found_stays(
    peers: Peers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answers: dict[str, list[Any]] = {
        "a:1": [["10.0.0.1:1"], OSError(2, "unknown host"), OSError(2, "unknown host"), ["10.0.0.3:1"]],
        "b:2": [OSError("odd"), ["10.0.0.2:2"], ["10.0.0.2:2", "10.0.0.4:2"], OSError(2, "unknown host")],
    }

    def addresses(name: str) -> list[str]:
        found = answers[name].pop(0)
        if isinstance(found, OSError):
            raise found
        return found  # type: ignore[no-any-return]

    monkeypatch.setattr(membership, "_addresses", addresses)
    found, known = [], []
    for _ in range(4):
        for name in ("a:1", "b:2"):
            monkeypatch.setattr(peers, "_ended", Turns(1))
            peers._resolve(name)
            assert peers._ended.waited == [10.0]  # type: ignore[attr-defined]
            found.append(list(peers._found))
            known.append((peers._resolved.is_set(), peers._news.is_set()))
            peers._news.clear()
    one, two, both, three = "10.0.0.1:1", "10.0.0.2:2", ["10.0.0.2:2", "10.0.0.4:2"], "10.0.0.3:1"
    assert found == [[one], [one], [one], [one, two], [one, two], [one, *both], [three, *both], [three, *both]]
    changes = [True, True, False, True, False, True, True, False]
    assert known == [(number > 0, news) for number, news in enumerate(changes)], "the second one completes the list"
    again = "; it is tried again"
    assert caplog.messages == [
        f"peer b:2: the name cannot be looked up (odd){again}",
        f"peer a:1: the name cannot be looked up (unknown host){again}",
        f"peer b:2: the name cannot be looked up (unknown host){again}",
    ]


def test_a_name_that_takes_long_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers need no look-up, and each name has its own."""
    slow, asked = threading.Event(), threading.Event()
    look_up = membership._addresses

    def addresses(name: str) -> list[str]:
        if name.startswith("slow"):
            slow.wait(60)
        return look_up(name)

    def greet(peer: Peer) -> Any:
        if peer.address == "127.0.0.9:1":
            asked.set()
        return SimpleNamespace(result=lambda: said(1))

    monkeypatch.setattr(membership, "_addresses", addresses)
    monkeypatch.setattr(Peer, "greet", greet)
    found = Peers(["slow.test:1", "localhost:2", "127.0.0.9:1"], OWN, Channels())
    found.start()
    try:
        assert asked.wait(30)
        assert not found._resolved.is_set()
    finally:
        found.close()
        slow.set()


def test_texts_of_other_programs_are_shown_in_one_line(peers: Peers, caplog: pytest.LogCaptureFixture) -> None:
    found = know(peers, a=None)
    peers._heard(found["a"], said(1, "9\n\x1b[31mforged"))
    failure = Failure(grpc.StatusCode.UNAVAILABLE, "odd\nforged")
    assert membership._why(failure) == r"odd\nforged"
    assert str(FailedError(PlanSource.REFUSED, "a\x1bb")) == r"a\x1bb"
    assert r"is build 9\n\x1b[31mforged, and" in caplog.messages[0]


@pytest.mark.parametrize(("count", "pause"), [(0, 1.0), (5, 1.0), (6, 1.2), (100, 20.0)])
def test_larger_fleets_are_asked_less_often(
    peers: Peers, monkeypatch: pytest.MonkeyPatch, count: int, pause: float
) -> None:
    asked = []

    def greet(peer: Peer) -> Any:
        asked.append(peer.address)
        return SimpleNamespace(result=lambda: said(1))

    monkeypatch.setattr(Known, "greet", greet)
    peers._looked.clear()
    peers._found = {f"h{n}:1": "" for n in range(count)}
    turns = Turns(2)
    turns.wait = lambda seconds: (turns.waited.append(seconds), peers._resolved.set())  # type: ignore[assignment]
    monkeypatch.setattr(peers, "_ended", turns)
    monkeypatch.setattr(peers, "_news", turns)
    looked = []
    monkeypatch.setattr(peers._looked, "set", lambda: looked.append(len(turns.waited)))
    peers._look()
    assert turns.waited == [pytest.approx(pause)] * 2
    assert looked == [1], "everybody was asked after the names had been looked up"
    assert asked == 2 * sorted(peers._found)


def test_peers_that_fail_to_answer_are_lost_with_the_reason(
    peers: Peers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failures = {
        "a:1": Failure(grpc.StatusCode.DEADLINE_EXCEEDED),
        "b:1": Failure(grpc.StatusCode.UNAVAILABLE, "refused"),
        "c:1": Failure(grpc.StatusCode.UNIMPLEMENTED, ""),
    }

    def fail(error: Exception) -> None:
        raise error

    monkeypatch.setattr(Known, "greet", lambda peer: SimpleNamespace(result=lambda: fail(failures[peer.address])))
    for failing in know(peers, a=said(1), b=said(2), c=said(3)).values():
        failing.hear(None)
    peers._found = dict.fromkeys(["a:1", "b:1", "c:1"], "")
    turns = Turns(1)
    monkeypatch.setattr(peers, "_ended", turns)
    monkeypatch.setattr(peers, "_news", turns)
    peers._look()
    assert [message.partition(":1 ")[2].partition(":")[0] for message in caplog.messages] == [
        "does not answer (in time)",
        "does not answer (refused)",
        "does not answer (UNIMPLEMENTED)",
    ]
