"""Fleets of real servers that know each other, and a server that does not tell its peers the truth."""

import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
from disttrain.v1 import data_service_pb2
from disttrain.v1 import peer_service_pb2 as pb
from disttrain.v1.data_service_pb2_grpc import DataServiceServicer, add_DataServiceServicer_to_server
from disttrain.v1.peer_service_pb2_grpc import PeerServiceServicer, PeerServiceStub, add_PeerServiceServicer_to_server
from ports import free_addresses
from serving.harness import TIMEOUT_S, Received, Running, running

from dataserver.fleet.build import build_id
from dataserver.fleet.plan_source import PlanSource


@contextmanager
def fleet(datasets: dict[str, Path], count: int, others: Sequence[str] = (), **config: Any) -> Iterator[list[Running]]:
    """Servers of one fleet that know each other when the block begins.

    Args:
        datasets: folders by name.
        count: servers.
        others: addresses that stand in the list of all of them besides their own.
        config: other keys of the servers' configuration.
    """
    addresses = free_addresses(count)
    with ExitStack() as stack:
        servers = [
            stack.enter_context(running(datasets, listen=address, peers=[*addresses, *others], **config))
            for address in addresses
        ]
        for server in servers:
            until(lambda server=server: len(live(server)) >= count - 1)
        yield servers


def live(server: Running) -> set[bytes]:
    """The instances of the other servers that a server takes for live."""
    peers = server.server.peers
    assert peers is not None
    return {peer.said.instance for peer in peers.peers() if peer.said is not None} - {peers.instance}


def until(holds: Callable[[], bool]) -> None:
    """Wait until something holds."""
    pause = threading.Event()
    for _ in range(int(TIMEOUT_S / 0.05)):
        if holds():
            return
        pause.wait(0.05)
    raise AssertionError("it never came to hold")


def sources(server: Running) -> dict[PlanSource, int]:
    """Where a server's plans came from, without those sources that have none."""
    found = server.server.metrics().plans_by_source
    return {source: n for source in PlanSource if (n := getattr(found, source.value))}


def made(server: Running) -> int:
    """Plans that a server made."""
    return sum(times.plans for times in server.server.metrics().plan_times)


def read_all(servers: Sequence[Running], job_id: str, view: tuple[str, int] = ("llm", 0)) -> list[Received]:
    """Read one view of a job from all servers at once."""
    with ThreadPoolExecutor(len(servers)) as pool:
        return list(pool.map(lambda server: server.read(job_id, *view), servers))


Answer = Callable[[pb.FetchPlanResponse], pb.FetchPlanResponse]


class Liar(PeerServiceServicer, DataServiceServicer):
    """A peer that asks a real server for each plan, and changes what that says."""

    def __init__(self, truth: str, change: Answer, build: str) -> None:
        self._channel = grpc.insecure_channel(truth)
        self._truth = PeerServiceStub(self._channel)
        self._change = change
        self._instance = secrets.token_bytes(16)
        self._build = build
        self.asked: list[int] = []
        """Steps."""

    def Greet(self, _request: pb.GreetRequest, _: grpc.ServicerContext) -> pb.GreetResponse:  # noqa: N802
        return pb.GreetResponse(instance=self._instance, build=self._build)

    def FetchPlan(self, request: pb.FetchPlanRequest, _: grpc.ServicerContext) -> pb.FetchPlanResponse:  # noqa: N802
        self.asked.append(request.step)
        return self._change(self._truth.FetchPlan(request, timeout=TIMEOUT_S))

    def GetOrCreateJob(  # noqa: N802
        self, _request: data_service_pb2.GetOrCreateJobRequest, _: grpc.ServicerContext
    ) -> data_service_pb2.GetOrCreateJobResponse:
        return data_service_pb2.GetOrCreateJobResponse()

    def close(self) -> None:
        self._channel.close()


@contextmanager
def lying(truth: Running, change: Answer, build: str = "") -> Iterator[tuple[str, Liar]]:
    """A liar and its address; `truth` has to know the jobs that it is asked for."""
    liar = Liar(truth.address, change, build or build_id())
    server = grpc.server(ThreadPoolExecutor(8))
    add_PeerServiceServicer_to_server(liar, server)  # type: ignore[no-untyped-call]
    add_DataServiceServicer_to_server(liar, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}", liar
    finally:
        server.stop(0).wait()
        liar.close()
