"""A channel's sends: which it waits for, and which it keeps."""

import pytest
import torch
import torch.distributed as dist

from trainclient.parallel.transport import Channel, PeerLostError


class Work:
    """A send of the test's own that is over when it is waited for."""

    def __init__(self, name: str, waited: list[str]) -> None:
        self._name, self._waited = name, waited

    def wait(self) -> None:
        self._waited.append(self._name)
        if self._name == "lost":
            raise RuntimeError("connection closed by peer")


def sending(monkeypatch: pytest.MonkeyPatch, names: list[str]) -> tuple[Channel, list[str]]:
    """A channel whose sends have names, and those that were waited for."""
    waited: list[str] = []
    works = iter([Work(name, waited) for name in names])
    monkeypatch.setattr(dist, "isend", lambda *_, **__: next(works))
    return Channel(dist.ProcessGroupGloo(dist.HashStore(), 0, 1), 0, torch.device("cpu")), waited


def test_sends_are_released_up_to_a_microbatch(monkeypatch: pytest.MonkeyPatch) -> None:
    channel, waited = sending(monkeypatch, ["a", "b", "c", "d"])
    for peer, (microbatch, size) in enumerate([(0, 3), (1, 4), (1, 5), (2, 6)]):
        channel.send(peer, torch.zeros(size, dtype=torch.uint8), microbatch)
    channel.release(0)
    assert waited == ["a"]
    channel.release(0)
    assert waited == ["a"]
    channel.release(1)
    assert waited == ["a", "b", "c"]
    channel.release()
    assert waited == ["a", "b", "c", "d"]
    channel.release()
    assert waited == ["a", "b", "c", "d"]


def test_a_send_that_fails_names_its_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    channel, _ = sending(monkeypatch, ["fine", "lost"])
    channel.send(5, torch.zeros(1, dtype=torch.uint8), 0)
    channel.send(7, torch.zeros(1, dtype=torch.uint8), 1)
    with pytest.raises(PeerLostError, match="rank 7"):
        channel.release()


def test_a_group_without_the_rank_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    channel, _ = sending(monkeypatch, [])
    monkeypatch.setattr(dist, "isend", lambda *_, **__: None)
    with pytest.raises(ValueError, match="rank 0 cannot send in a group that it is no member of"):
        channel.send(1, torch.zeros(1, dtype=torch.uint8), 0)
