"""Processes of one attempt find each other in a store that earlier attempts have used."""

import random
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from trainclient.training.attempt_rendezvous import join_attempt

WORLD = 4
TIMEOUT_S = 30


@pytest.fixture
def server() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def client(server: TCPStore) -> TCPStore:
    return TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=TIMEOUT_S))


def attempt(server: TCPStore, number: int) -> set[str]:
    """What each process reads of what the first one has written in this attempt; they come in any order."""
    delays = random.Random(number).sample([0, 0.05, 0.2, 0.4], WORLD)

    def process(rank: int) -> str:
        time.sleep(delays[rank])
        store = join_attempt(client(server), rank, WORLD, TIMEOUT_S)
        if rank == 0:
            store.set("job", f"attempt {number}")
        return store.get("job").decode()

    with ThreadPoolExecutor(WORLD) as threads:
        return set(threads.map(process, range(WORLD)))


def test_every_attempt_has_a_store_of_its_own(server: TCPStore) -> None:
    for number in range(3):
        assert attempt(server, number) == {f"attempt {number}"}


def test_processes_that_never_met_leave_nothing_that_disturbs(server: TCPStore) -> None:
    with ThreadPoolExecutor(1) as threads:
        lost = threads.submit(join_attempt, client(server), 2, WORLD, 0.3)
        with pytest.raises(RuntimeError):
            lost.result()
    with pytest.raises(RuntimeError, match=r"only 0 of 3 other processes came within 0\.5 s; see what they report"):
        join_attempt(client(server), 0, WORLD, 0.5)
    assert attempt(server, 5) == {"attempt 5"}
    assert join_attempt(client(server), 0, 1, TIMEOUT_S) is not None
