"""One peer without its process: a clock that tests set, what it answers, and how its calls fail."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from disttrain.v1.peer_service_pb2 import GreetResponse

from dataserver.fleet import fetching, membership, peer_health
from dataserver.fleet import peer as peer_module
from dataserver.fleet.build import build_id
from dataserver.fleet.peer import Peer
from dataserver.fleet.peer_health import PeerHealth
from dataserver.security import Channels

OWN = bytes(16)
JOB: Any = SimpleNamespace(job_id="ab" * 32, text="{}")


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    for module in (peer_module, membership, fetching, peer_health):
        monkeypatch.setattr(module, "monotonic", found)
    return found


def said(number: int, build: str | None = None, **fields: Any) -> GreetResponse:
    return GreetResponse(instance=bytes([number]) * 16, build=build_id() if build is None else build, **fields)


@pytest.fixture
def peer(clock: Clock) -> Iterator[Peer]:
    found = Peer("127.0.0.1:1", PeerHealth(), Channels())
    yield found
    found.close()


class Failure(grpc.RpcError):
    """As a call raises it."""

    def __init__(self, code: grpc.StatusCode, text: str = "why", answered: bool = False) -> None:
        self._code, self._text, self._answered = code, text, answered

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._text

    def trailing_metadata(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(key="grpc-status-details-bin", value=b"")] if self._answered else []
