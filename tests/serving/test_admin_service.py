"""The duration of a drain, to the nanosecond."""

from typing import Any

import pytest
from disttrain.v1 import admin_service_pb2 as pb
from google.protobuf.duration_pb2 import Duration

from dataserver.serving.admin_service import AdminService
from dataserver.serving.errors import DataServiceError


def drained(**fields: Any) -> float:
    """How long streams have, as a drain says it."""
    found: list[float] = []

    def drain(grace_s: float) -> int:
        found.append(grace_s)
        return 7

    unasked: Any = lambda: pytest.fail("nobody asked for it")  # noqa: E731
    service = AdminService(drain, unasked, unasked, unasked)
    context: Any = None
    assert service.Drain(pb.DrainRequest(**fields), context).open_streams == 7
    (grace_s,) = found
    return grace_s


def test_a_grace_is_given_to_the_nanosecond() -> None:
    assert drained() == 30
    assert drained(grace=Duration()) == 0
    assert drained(grace=Duration(seconds=3600)) == 3600
    assert drained(grace=Duration(seconds=2, nanos=250_000_000)) == 2.25
    assert drained(grace=Duration(nanos=1)) == 1e-9


@pytest.mark.parametrize(
    ("grace", "said"),
    [
        (Duration(seconds=3600, nanos=500_000_000), "3600.5"),
        (Duration(nanos=-1), "-1e-09"),
        (Duration(seconds=-1), "-1.0"),
    ],
)
def test_a_grace_out_of_bounds_is_said(grace: Duration, said: str) -> None:
    with pytest.raises(DataServiceError, match=rf"grace is {said} s; a duration from 0 to 3600 s is required"):
        drained(grace=grace)
