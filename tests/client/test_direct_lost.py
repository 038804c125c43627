"""A server that is lost with its data connection: it is left at once, without a question to it or a warning."""

import logging
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from trainclient.stream.direct import DirectError
from trainclient.stream.errors import CutStreamError
from trainclient.stream.microbatch import Cursor
from trainclient.stream.payloads import Payloads


class LostError(grpc.RpcError):
    """How a stream ends whose server answers no ping."""


class Over:
    """A stream that is over: lost so, or in order."""

    def __init__(self, status: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE) -> None:
        self._status = status

    def is_active(self) -> bool:
        return False

    def code(self) -> grpc.StatusCode:
        return self._status

    def cancel(self) -> None:
        """Nothing goes on."""

    def __iter__(self) -> "Over":
        return self

    def __next__(self) -> bytes:
        raise StopIteration if self._status is grpc.StatusCode.OK else LostError


class Waiting:
    """A data connection on which nothing comes any more, or that could not be opened."""

    token = bytes(16)

    def __init__(self, error: DirectError | None = None) -> None:
        self.error = error

    def read(self, *_: object) -> None:
        raise DirectError("the stream has ended")

    def close(self) -> None:
        """Nothing is open."""


def payloads_of(call: Over, connection: Waiting) -> tuple[Payloads, Any]:
    """Payloads of a stream that is over, and the fleet; its server is asked nothing."""
    endpoint: Any = SimpleNamespace(address="a:1", unary=lambda *_: pytest.fail("the server was asked"))
    guard: Any = SimpleNamespace(cause=lambda: None, hold=lambda _: None)
    buffers: Any = SimpleNamespace(take=lambda count: bytearray(count))
    fleet: Any = SimpleNamespace(timeouts=SimpleNamespace(connect=5.0), avoid_direct=set(), direct_fallbacks=0)
    payloads = Payloads(fleet, endpoint, call, guard, buffers, None)
    payloads._direct = connection  # type: ignore[assignment]
    return payloads, fleet


def test_a_stream_that_was_lost_is_not_asked_to_begin_again() -> None:
    """Its server would be waited for until the connection to it is given up, for some seconds more."""
    payloads, fleet = payloads_of(Over(), Waiting())
    table: Any = SimpleNamespace(total_bytes=10, crc32c=0)
    with pytest.raises(LostError):
        payloads.tensors(Cursor(0, 0), table, direct=True)
    assert (fleet.direct_fallbacks, fleet.avoid_direct) == (0, set())


@pytest.mark.parametrize("status", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.OK])
@pytest.mark.parametrize("direct", [False, True])
def test_payloads_of_a_lost_stream_are_not_said_to_come_over_grpc(
    direct: bool, status: grpc.StatusCode, caplog: pytest.LogCaptureFixture
) -> None:
    """Its reader goes on with another server. A stream that has ended in order is read to its end, or opened again."""
    caplog.set_level(logging.WARNING, "trainclient.stream")
    is_lost = status is grpc.StatusCode.UNAVAILABLE
    payloads, fleet = payloads_of(Over(status), Waiting(DirectError("it cannot be opened: refused")))
    if direct:
        with pytest.raises(LostError if is_lost else CutStreamError):
            payloads.began_again(Cursor(0, 0), direct=True)
    else:
        assert not payloads.began_again(Cursor(0, 0), direct=False)
    said = [] if is_lost else ["payloads come over gRPC"]
    assert [text for text in caplog.messages if "payloads come over gRPC" in text] == [
        f"server a:1: {words}, since the data connection is of no use: it cannot be opened: refused" for words in said
    ]
    assert (fleet.direct_fallbacks, fleet.avoid_direct) == (len(said), {"a:1"} if direct and said else set())
