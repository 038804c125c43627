"""What a channel waits for, what it sends itself, and the words for a peer that is gone."""

import pytest
import torch
import torch.distributed as dist

from trainclient.exchange.all_to_all import _Arrival
from trainclient.exchange.transport import GroupChannel, Message, PeerLostError, _Departure, _Works, contact

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


def message(peer: int, stamp: list[int], rows: list[list[float]]) -> Message:
    return Message(peer, torch.tensor(stamp, dtype=torch.uint8), torch.tensor(rows).view(-1, 2))


def test_what_fails_names_its_peers() -> None:
    fails, messages = Work(RuntimeError("connection closed by peer")), [message(7, [], []), message(9, [], [])]
    with pytest.raises(PeerLostError, match=r"^lost contact to rank 9 \("):
        _Works(messages, [Work(), fails]).wait()
    with pytest.raises(PeerLostError, match=r"^lost contact to rank 7 or 9 \("):
        _Works(messages, [fails]).wait()


def test_what_comes_from_all_is_waited_for() -> None:
    received, sent = torch.arange(3, dtype=torch.uint8), torch.zeros(0, dtype=torch.uint8)
    with pytest.raises(PeerLostError, match=r"^lost contact to other ranks \(closed by peer\)"):
        _Arrival(received, Work(RuntimeError("closed by peer")), sent, [1, 2]).wait()
    for over in (Work(), None):
        assert [m.tolist() for m in _Arrival(received, over, sent, [1, 2]).wait()] == [[0], [1, 2]]


def test_what_has_left_is_what_the_backend_says_of_rows() -> None:
    messages = [message(7, [], [])]
    stamps, none = _Works(messages, [Work()]), _Works(messages, [])

    def left(rows: _Works) -> bool:
        return _Departure(stamps, rows, messages).has_left()

    assert left(_Works(messages, [Work(completed=True)]))
    assert not left(_Works(messages, [Work(completed=True), Work()]))
    assert not left(none), "stamps alone do not tell"
    assert _Departure(none, none, messages).has_left(), "it stays within the process"


def test_what_a_process_sends_itself_arrives_in_order_without_a_transfer() -> None:
    found = GroupChannel(0, CPU, None, dist.ProcessGroupGloo(dist.HashStore(), 0, 1), 0)
    awaited = [message(0, [0], [[0.0, 0.0]]) for _ in range(2)]
    arrivals = [found.post([m], 0) for m in awaited]
    for value in (3, 4):
        found.send([message(0, [value], [[value, value / 2]])], 0).wait()
    for arrival in arrivals:
        arrival.wait_stamps()
        arrival.wait_rows()
    assert [(m.stamp.tolist(), m.rows.tolist()) for m in awaited] == [([3], [[3.0, 1.5]]), ([4], [[4.0, 2.0]])]


def test_a_lost_peer_is_named_with_the_first_sentence_of_the_backend() -> None:
    see = "; see what the process that ended first has reported"
    for text, reason in (
        ("[a/pair.cc:1] Closed by peer [x]. This may be", "Closed by peer [x]"),
        ("Timed out\nsecond line", "Timed out"),
        ("waits [b] still", "waits [b] still"),
        ("", "RuntimeError"),
    ):
        with pytest.raises(PeerLostError) as caught, contact("rank 3"):
            raise RuntimeError(text)
        assert str(caught.value) == f"lost contact to rank 3 ({reason}){see}"
        assert isinstance(caught.value.__cause__, RuntimeError)
    with contact("rank 3"):
        pass
    with pytest.raises(ValueError, match="other"), contact("rank 3"):
        raise ValueError("other")
