"""A server that is lost with its data connection: it is left at once, without a question to it."""

from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from trainclient.stream.direct import DirectError
from trainclient.stream.microbatch import Cursor
from trainclient.stream.payloads import Payloads


class LostError(grpc.RpcError):
    """How a stream ends whose server answers no ping."""


class Over:
    """Such a stream."""

    def is_active(self) -> bool:
        return False

    def __iter__(self) -> "Over":
        return self

    def __next__(self) -> bytes:
        raise LostError


class Waiting:
    """A data connection on which nothing comes any more."""

    token = bytes(16)

    def read(self, *_: object) -> None:
        raise DirectError("the stream has ended")

    def close(self) -> None:
        """Nothing is open."""


def test_a_stream_that_was_lost_is_not_asked_to_begin_again() -> None:
    """Its server would be waited for until the connection to it is given up, for some seconds more."""
    asked: list[object] = []
    endpoint: Any = SimpleNamespace(address="a:1", unary=lambda *given: asked.append(given))
    guard: Any = SimpleNamespace(cause=lambda: None, hold=lambda _: None)
    buffers: Any = SimpleNamespace(take=lambda count: bytearray(count))
    fleet: Any = SimpleNamespace(timeouts=SimpleNamespace(connect=5.0), avoid_direct=set(), direct_fallbacks=0)
    payloads = Payloads(fleet, endpoint, Over(), guard, buffers, None)
    payloads._direct = Waiting()  # type: ignore[assignment]
    table: Any = SimpleNamespace(total_bytes=10, crc32c=0)
    with pytest.raises(LostError):
        payloads.tensors(Cursor(0, 0), table, direct=True)
    assert asked == []
    assert (fleet.direct_fallbacks, fleet.avoid_direct) == (0, set())
