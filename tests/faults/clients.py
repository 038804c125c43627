"""Clients that servers must bear beside the good ones: they hold what they were sent, or waste what was prepared."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
from disttrain.v1.data_service_pb2 import GetOrCreateJobRequest, StreamMicrobatchesRequest
from disttrain.v1.data_service_pb2_grpc import DataServiceStub

TIMEOUT_S = 30


class Client:
    """One connection, made of the generated classes only."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address)
        self._stub = DataServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._streams: list[Any] = []

    def open(self, job: dict[str, Any] | str) -> list[Any]:
        """Bring a job and open a stream for every rank of it, without reading any."""
        text = job if isinstance(job, str) else json.dumps(job)
        answer = self._stub.GetOrCreateJob(GetOrCreateJobRequest(job_spec_json=text), timeout=TIMEOUT_S)
        modules = json.loads(answer.canonical_job_spec_json)["execution"]["modules"]
        views = [(module["name"], rank) for module in modules for rank in range(module["dp"])]
        requests = [StreamMicrobatchesRequest(job_id=answer.job_id, module=m, rank=r) for m, r in views]
        self._streams += [self._stub.StreamMicrobatches(request) for request in requests]
        return self._streams

    def close(self) -> None:
        """Cancel everything."""
        for stream in self._streams:
            stream.cancel()
        self._channel.close()


@contextmanager
def slow_reader(address: str, job: dict[str, Any] | str) -> Iterator[None]:
    """Holds a stream of every rank of a job, and reads nothing but the first message."""
    client = Client(address)
    try:
        for stream in client.open(job):
            next(stream)
        yield
    finally:
        client.close()


def hostile_neighbour(address: str, job: dict[str, Any], times: int = 3) -> None:
    """Opens all streams of a job and cancels them, again and again."""
    for _ in range(times):
        client = Client(address)
        try:
            client.open(job)
        finally:
            client.close()
