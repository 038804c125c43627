"""Point-to-point messages: what is waited for, what a rank sends itself, and the error for a lost rank."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from trainclient.exchange.all_to_all import _GroupCollectiveWork
from trainclient.exchange.communicators import GroupP2P, Message, _GroupSend, _GroupWork
from trainclient.exchange.host_staging import HostStaging
from trainclient.exchange.lost_ranks import RankLostError, translate_rank_errors

CPU = torch.device("cpu")


class Work(dist.Work):
    """A transfer of the test's own that is over, or fails, when it is waited for."""

    def __init__(self, error: Exception | None = None, *, completed: bool = False) -> None:
        super().__init__()
        self._error, self._completed = error, completed

    def wait(self, timeout: object = None) -> bool:
        del timeout
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        return self._completed


def message(rank: int, microbatch_id: list[int], rows: list[list[float]]) -> Message:
    return Message(rank, torch.tensor(microbatch_id, dtype=torch.uint8), torch.tensor(rows).view(-1, 2))


def test_what_fails_names_its_peers() -> None:
    fails, messages = Work(RuntimeError("connection closed by peer")), [message(7, [], []), message(9, [], [])]
    with pytest.raises(RankLostError, match=r"^lost contact to rank 9 \("):
        _GroupWork(messages, [Work(), fails]).wait()
    with pytest.raises(RankLostError, match=r"^lost contact to rank 7 or 9 \("):
        _GroupWork(messages, [fails]).wait()


def test_what_comes_from_all_is_waited_for() -> None:
    received, sent = torch.arange(3, dtype=torch.uint8), torch.zeros(0, dtype=torch.uint8)
    with pytest.raises(RankLostError, match=r"^lost contact to other ranks \(closed by peer\)"):
        _GroupCollectiveWork(received, Work(RuntimeError("closed by peer")), sent, [1, 2]).wait()
    for over in (Work(), None):
        assert [m.tolist() for m in _GroupCollectiveWork(received, over, sent, [1, 2]).wait()] == [[0], [1, 2]]


@pytest.mark.parametrize("failing", ["headers", "rows"])
def test_a_send_is_over_when_headers_and_rows_are(failing: str) -> None:
    messages = [message(7, [], [])]
    works = {"headers": Work(), "rows": Work(), failing: Work(RuntimeError("closed by peer"))}
    with pytest.raises(RankLostError, match=r"^lost contact to rank 7 \("):
        _GroupSend(*(_GroupWork(messages, [works[name]]) for name in ("headers", "rows")), messages).wait()


def test_what_has_left_is_what_the_backend_says_of_rows() -> None:
    messages = [message(7, [], [])]
    headers, none = _GroupWork(messages, [Work()]), _GroupWork(messages, [])

    def left(rows: _GroupWork) -> bool:
        return _GroupSend(headers, rows, messages).is_completed()

    assert left(_GroupWork(messages, [Work(completed=True)]))
    assert not left(_GroupWork(messages, [Work(completed=True), Work()]))
    assert not left(none), "headers alone do not tell"
    assert _GroupSend(none, none, messages).is_completed(), "it stays within the process"


def test_what_a_process_sends_itself_arrives_in_order_without_a_transfer() -> None:
    found = GroupP2P(0, HostStaging(CPU), None, dist.ProcessGroupGloo(dist.HashStore(), 0, 1), 0)
    awaited = [message(0, [0], [[0.0, 0.0]]) for _ in range(2)]
    arrivals = [found.post([m], 0) for m in awaited]
    for value in (3, 4):
        found.send([message(0, [value], [[value, value / 2]])], 0).wait()
    for work in arrivals:
        work.wait_headers()
        work.wait_rows()
    assert [(m.header.tolist(), m.rows.tolist()) for m in awaited] == [([3], [[3.0, 1.5]]), ([4], [[4.0, 2.0]])]


@pytest.mark.parametrize(("device", "ahead"), [("cpu", True), ("cuda", False)])
def test_on_cuda_alone_a_receive_begins_behind_its_headers(
    monkeypatch: pytest.MonkeyPatch, device: str, *, ahead: bool
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: object())
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())

    def begin(name: str) -> Callable[..., Work]:
        def begun(*_: object, **__: object) -> Work:
            calls.append(name)
            return Work()

        return begun

    def rows(operations: list[dist.P2POp]) -> list[Work]:
        calls.append(f"{operations[0].op} rows")
        return [Work()]

    for name in ("isend", "irecv"):
        monkeypatch.setattr(dist, name, begin(name))
    monkeypatch.setattr(dist, "P2POp", lambda op, *_: SimpleNamespace(op="send" if op is dist.isend else "receive"))
    monkeypatch.setattr(dist, "batch_isend_irecv", rows)
    found = GroupP2P(0, HostStaging(torch.device(device)), None, dist.ProcessGroupGloo(dist.HashStore(), 0, 1), 0)
    found.send([message(1, [1], [[1.0, 2.0]])], 0)
    assert calls == ["send rows", "isend"], "headers say that the rows are on their way"
    calls.clear()
    work = found.post([message(1, [1], [[1.0, 2.0]])], 0)
    assert calls == (["irecv", "receive rows"] if ahead else ["irecv"])
    work.wait_headers()
    assert calls == ["irecv", "receive rows"]
    work.wait_rows()


def exchanged(rank: int, store: dist.Store, rows: torch.Tensor, *, by_host: bool) -> torch.Tensor:
    """What one of two processes gets of the other one, over a group for headers alone if by host."""
    headers = dist.ProcessGroupGloo(dist.PrefixStore("headers", store), rank, 2)
    staging = HostStaging(CPU)
    staging.loads_kernels = True
    found = GroupP2P(rank, staging, None, headers, 3)
    with staging.through_hosts(wanted=by_host):
        assert staging.by_host == by_host
        arriving = [Message(1 - rank, torch.zeros(1, dtype=torch.uint8), torch.empty_like(rows))]
        none = [Message(1 - rank, torch.zeros(1, dtype=torch.uint8), rows[:0].clone())]
        works = [found.post(none, 0), found.post(arriving, 1)]
        last = Message(1 - rank, torch.ones(1, dtype=torch.uint8), rows)
        sends = [found.send([message(1 - rank, [7], [])], 0), found.send([last], 1)]
        for work in works:
            work.wait_headers()
            work.wait_rows()
        for send in sends:
            send.wait()
    assert not staging.by_host
    assert (int(none[0].header), int(arriving[0].header)) == (7, 1)
    return arriving[0].rows


def test_rows_go_from_host_to_host_while_devices_are_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks as threads, over a gloo that torch need not know; there is no group for rows."""
    monkeypatch.setattr(dist, "isend", lambda tensor, rank, *, group, tag: group.send([tensor], rank, tag))
    monkeypatch.setattr(dist, "irecv", lambda tensor, rank, *, group, tag: group.recv([tensor], rank, tag))
    store, rows = dist.HashStore(), [torch.full((2, 2), rank + 0.5, dtype=torch.bfloat16) for rank in range(2)]
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(lambda rank: exchanged(rank, store, rows[rank], by_host=True), range(2)))
    assert torch.equal(found[0], rows[1])
    assert torch.equal(found[1], rows[0])


def test_a_device_that_needs_it_not_keeps_its_way() -> None:
    staging = HostStaging(CPU)
    with staging.through_hosts(wanted=True):
        assert not staging.by_host


def test_a_lost_peer_is_named_with_the_first_sentence_of_the_backend() -> None:
    see = "; see what the process that ended first has reported"
    for text, reason in (
        ("[a/pair.cc:1] Closed by peer [x]. This may be", "Closed by peer [x]"),
        ("Timed out\nsecond line", "Timed out"),
        ("waits [b] still", "waits [b] still"),
        ("", "RuntimeError"),
    ):
        with pytest.raises(RankLostError) as caught, translate_rank_errors("rank 3"):
            raise RuntimeError(text)
        assert str(caught.value) == f"lost contact to rank 3 ({reason}){see}"
        assert isinstance(caught.value.__cause__, RuntimeError)
    with translate_rank_errors("rank 3"):
        pass
    with pytest.raises(ValueError, match="other"), translate_rank_errors("rank 3"):
        raise ValueError("other")
