"""Microbatches that a server on this machine shares as memory, against those that it sends."""

import signal
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli.server_process import serving
from fleet.servers import until
from serving.harness import Running, index, large_job, running
from shards import write_pairs

from dataserver.jobs import fill_job
from dataserver.planning.job.identity import parse_job
from trainclient.client import DataClient
from trainclient.stream.fleet import Fleet
from trainclient.stream.follower import ViewRequest
from trainclient.stream.microbatch import Microbatch
from trainclient.stream.reader import MicrobatchReader

STEPS = 6


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return index(write_pairs(tmp_path_factory.mktemp("photographs"), 32, 16, seed=3, median_size=400))


@pytest.fixture(scope="module")
def server(photographs: Path) -> Iterator[Running]:
    with running({"photos": photographs}) as found:
        yield found


@pytest.fixture(scope="module")
def sent(photographs: Path) -> list[dict[str, bytes]]:
    """What a server that shares nothing sends."""
    with running({"photos": photographs}, shared_memory=False) as other, opened(other) as client:
        found = [content(microbatch) for microbatch in client]
        assert other.server.metrics().shared_bytes == 0
    return found


def opened(server: Running, **options: Any) -> DataClient:
    return DataClient(server.address, large_job(end={"steps": STEPS}), "vit", 0, **options)


def content(microbatch: Microbatch[Any]) -> dict[str, bytes]:
    return {name: np.asarray(tensor).tobytes() for name, tensor in microbatch.tensors.items()}


def shared_bytes(server: Running) -> int:
    return server.server.metrics().shared_bytes


def test_shared_microbatches_are_those_that_are_sent(server: Running, sent: list[dict[str, bytes]]) -> None:
    before = shared_bytes(server)
    with opened(server) as client:
        assert [content(microbatch) for microbatch in client] == sent
    padding = 64 * sum(map(len, sent))
    assert 0 <= shared_bytes(server) - before - sum(len(b) for one in sent for b in one.values()) <= padding


def test_a_client_that_keeps_all_that_it_gets_gets_the_rest_as_bytes(
    photographs: Path, sent: list[dict[str, bytes]]
) -> None:
    largest = max(sum(map(len, one.values())) for one in sent)
    with running({"photos": photographs}, prefetch_bytes=3 * largest) as server, opened(server) as client:
        kept = list(client)
        assert [content(microbatch) for microbatch in kept] == sent
        assert 0 < shared_bytes(server) <= 3 * largest


def test_a_client_that_keeps_more_than_it_wanted_gets_everything(server: Running, sent: list[dict[str, bytes]]) -> None:
    before, largest = shared_bytes(server), max(sum(map(len, one.values())) for one in sent)
    with opened(server, prefetch_bytes=2 * largest) as client:
        assert [content(microbatch) for microbatch in list(client)] == sent
    assert shared_bytes(server) > before


def test_a_slow_client_gets_everything_in_shared_memory(server: Running, sent: list[dict[str, bytes]]) -> None:
    until(lambda: not server.server.metrics().ranks)  # of other tests, which have a share of the memory
    until(lambda: server.server.metrics().prefetch_used_bytes == 0)
    before, sizes = shared_bytes(server), [sum(map(len, one.values())) for one in sent]
    found = []
    with opened(server, prefetch_bytes=3 * max(sizes)) as client:
        for microbatch in client:
            until(lambda: all(rank.unread.ToNanoseconds() > 5e7 for rank in server.server.metrics().ranks))
            found.append(content(microbatch))
            del microbatch
    assert found == sent
    assert shared_bytes(server) - before >= sum(sizes)


def test_what_is_kept_outlives_its_server(photographs: Path, sent: list[dict[str, bytes]]) -> None:
    flags = ["--dataset", f"photos={photographs}"]
    with serving(*flags) as one, serving(*flags) as other:
        address = f"{one.address},{other.address}"
        job = large_job(end={"steps": STEPS})
        with DataClient(address, job, "vit", 0, prefetch_bytes=1) as client:
            kept = [next(client)]
            used = client.fleet.endpoints[client.fleet.current].address
            (one if one.address == used else other).end(signal.SIGKILL)
            kept += list(client)
    assert [content(microbatch) for microbatch in kept] == sent


def test_a_stream_that_ends_early_leaves_nothing_in_the_servers_budget(server: Running) -> None:
    with opened(server) as client:
        kept = next(client)
        assert server.server.metrics().prefetch_used_bytes > 0
    assert server.server.streams.wait_until_idle(30)
    assert server.server.metrics().prefetch_used_bytes == 0
    assert kept.tensors["grid"].sum() > 0


class Own:
    """Memory of the caller's."""

    def __init__(self) -> None:
        self.taken: list[np.ndarray] = []

    def take(self, nbytes: int) -> np.ndarray:
        self.taken.append(np.zeros(nbytes, np.uint8))
        return self.taken[-1]


@contextmanager
def reading(server: Running, **options: Any) -> Iterator[MicrobatchReader]:
    job = parse_job(fill_job(large_job(end={"steps": STEPS}), server.catalog))
    with closing(Fleet(server.address)) as fleet:
        steps = fleet.register(job)
        with MicrobatchReader(fleet, job, ViewRequest("vit", 0), num_steps=steps, **options) as reader:
            yield reader


def test_memory_of_ones_own_is_filled_from_what_is_lent(server: Running, sent: list[dict[str, bytes]]) -> None:
    before, own = shared_bytes(server), Own()
    with reading(server, buffers=own) as reader:
        for microbatch, expected in zip(reader, sent, strict=True):
            assert content(microbatch) == expected
            assert any(np.shares_memory(microbatch.tensors["grid"], memory) for memory in own.taken)
    assert shared_bytes(server) > before


def test_what_is_compressed_is_sent(server: Running, sent: list[dict[str, bytes]]) -> None:
    before = shared_bytes(server)
    with opened(server, compress=True) as client:
        assert [content(microbatch) for microbatch in client] == sent
    assert shared_bytes(server) == before


def test_a_stream_that_was_idle_leaves_its_client_what_it_has(photographs: Path, sent: list[dict[str, bytes]]) -> None:
    with (
        running({"photos": photographs}, idle_timeout_s=1) as server,
        reading(server, prefetch_bytes=16 << 20) as reader,
    ):
        kept = [next(reader)]
        assert server.server.streams.wait_until_idle(30)
        assert server.server.metrics().prefetch_used_bytes == 0
        kept += list(reader)
        assert shared_bytes(server) > 0
    assert [content(microbatch) for microbatch in kept] == sent
