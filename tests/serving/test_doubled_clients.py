"""Two clients that claim the same rank: each gets all of its stream, whatever becomes of the other one."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import grpc
import numpy as np
import pytest
from disttrain.v1.admin_service_pb2 import GetMetricsRequest
from disttrain.v1.admin_service_pb2_grpc import AdminServiceStub
from serving.harness import TIMEOUT_S, Running, large_job, receive, running

from trainclient.stream.client import ArrayClient

JOB = large_job(datasets=[{"name": "d"}], global_batch=8, microbatch=4, end={"steps": 3})
CLIENTS = 3


@pytest.fixture
def photos(photographs: Path) -> Iterator[Running]:
    with running({"d": photographs}) as found:
        yield found


def test_streams_of_one_rank_are_two_and_shown_as_one(photos: Running) -> None:
    """One is cancelled and opened anew in the middle of the other one."""
    job_id = photos.create(JOB).job_id
    undisturbed = photos.read(job_id).blob()
    first, second = photos.stream(job_id), photos.stream(job_id)
    begin = receive(first, 1).blob()
    assert begin == receive(second, 2).blob()[:1] == undisturbed[:1]
    found = AdminServiceStub(photos.channel).GetMetrics(GetMetricsRequest(), timeout=TIMEOUT_S)
    assert found.open_streams == 2
    assert [(rank.module, rank.rank) for rank in found.ranks] == [("vit", 0)]
    second.cancel()
    again = photos.read(job_id, start_step=1).blob()
    assert begin + receive(first).blob() == undisturbed
    assert undisturbed[-len(again) :] == again


@pytest.mark.parametrize("shared_memory", [True, False], ids=["memory shared", "data connections"])
def test_clients_of_one_rank_get_the_same_bytes_each(photographs: Path, shared_memory: bool) -> None:
    """At the same time, over whatever payloads come; one leaves in the middle."""
    with running({"d": photographs}, shared_memory=shared_memory) as server:
        together = Barrier(CLIENTS)

        def read(number: int) -> list[dict[str, Any]]:
            with ArrayClient(server.address, JOB, "vit", 0) as client:
                found = []
                for microbatch in client:
                    found.append({name: array.copy() for name, array in microbatch.tensors.items()})
                    if len(found) == 1:
                        together.wait(TIMEOUT_S)
                    if number == 0:
                        break
                return found

        with ThreadPoolExecutor(CLIENTS) as pool:
            left, *found = pool.map(read, range(CLIENTS))
        with ArrayClient(server.address, JOB, "vit", 0) as alone:
            undisturbed = [{name: array.copy() for name, array in one.tensors.items()} for one in alone]
    assert len(left) == 1 < len(undisturbed)
    for arrays in (left, *found):
        assert all(same(*pair) for pair in zip(arrays, undisturbed, strict=arrays is not left))
    assert [len(arrays) for arrays in found] == [len(undisturbed)] * (CLIENTS - 1)


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(array, other[name]) for name, array in one.items())


def test_one_client_too_many_is_refused_and_harms_nobody(photographs: Path) -> None:
    """A client that is started again and again, and never ends, is bounded as all streams are."""
    with running({"d": photographs}, max_streams=2) as server:
        job_id = server.create(JOB).job_id
        undisturbed = server.read(job_id).blob()
        first, second = server.stream(job_id), server.stream(job_id)
        begin = receive(first, 1).blob()
        next(second)
        with pytest.raises(grpc.RpcError, match="2 streams open, as many as it may"):
            next(server.stream(job_id))
        second.cancel()
        assert begin + receive(first).blob() == undisturbed
