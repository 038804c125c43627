"""What an autoscaler goes by, on a real fleet: one server is starved, and its figure rises; its trainers slow down, and
it falls."""

import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from math import ceil
from pathlib import Path

import pytest
from cli.server_process import run
from faults.processes import Member
from serving.harness import index, job_data
from shards import write_pairs

from dataserver.serving.wanted_cores import FULL, MOST_GROWTH, WINDOW_S
from trainclient.stream.client import ArrayClient

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

CORES = 1
"""Of each server: `--decode-threads`, as the CPU limit of a pod."""
SLOW_S = 2.0
"""Between two microbatches of a trainer that has much to compute."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return index(write_pairs(tmp_path_factory.mktemp("wanted") / "pairs", 128, 32, seed=1, median_size=700))


@contextmanager
def trainer(address: str, pause_s: float, seed: int) -> Iterator[None]:
    """Reads microbatches in a thread until the block ends."""
    over = threading.Event()
    data = job_data(
        datasets=[{"name": "pairs"}], global_batch=32, microbatch=4, seed=seed, sizing={"max_patches": 1024},
        seq_len=2048, end={"epochs": 1000},
    )  # fmt: skip

    def read() -> None:
        with ArrayClient(address, data, "vit", 0, prefetch_bytes=1) as client:
            for _ in client:
                if over.wait(pause_s):
                    return

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


class Server(Member):
    """A member of the fleet, with what Prometheus would see of it."""

    def __init__(self, folder: Path, log: Path) -> None:
        flags = ["--dataset", f"pairs={folder}", "--decode-threads", str(CORES), "--metrics-listen", "127.0.0.1:0"]
        super().__init__([*flags, "--prefetch-bytes", str(64 << 20)], log)
        assert self.process.stdout is not None
        self.metrics = self.process.stdout.readline().split()[-1]

    def figure(self, name: str) -> float:
        """The value of a metric without labels."""
        with urllib.request.urlopen(self.metrics, timeout=20) as answer:
            lines = answer.read().decode().splitlines()
        (value,) = [line.split()[1] for line in lines if line.startswith(f"disttrain_{name} ")]
        return float(value)


def replicas(servers: list[Server]) -> int:
    """As a HorizontalPodAutoscaler computes them: the mean of the figure over what one pod should have, rounded up."""
    return ceil(sum(server.figure("wanted_cores") for server in servers) / CORES)


def test_the_figure_of_a_starved_server_rises_and_falls(folder: Path, tmp_path: Path) -> None:
    with ExitStack() as stack:
        servers = [Server(folder, tmp_path / f"{number}.log") for number in range(2)]
        for server in servers:
            stack.callback(server.close)
        starved, idle = servers
        addresses = [server.address for server in servers]
        assert [server.figure("cores") for server in servers] == [CORES] * 2
        with trainer(idle.address, SLOW_S, 1):
            with trainer(starved.address, 0.0, 2), trainer(starved.address, 0.0, 3), trainer(starved.address, 0.0, 4):
                until(lambda: starved.figure("wanted_cores") > 2 * CORES, servers)
                assert starved.figure("wanted_cores") <= 1.5 * CORES * MOST_GROWTH / FULL
                assert idle.figure("wanted_cores") < CORES
                assert replicas(servers) > 2, "the fleet grows"
                done = run("top", *addresses, "--once", "--interval-s", "0.1")
                assert " are missing" in done.stdout, done.stdout
            with trainer(starved.address, SLOW_S, 5):
                until(lambda: 0 < starved.figure("wanted_cores") < CORES, servers)
                assert replicas(servers) <= 2
                done = run("top", *addresses, "--once", "--interval-s", "0.1")
                assert " are idle" in done.stdout, done.stdout
        until(lambda: replicas(servers) == 0, servers)


def until(holds: Callable[[], bool], servers: list[Server]) -> None:
    """Wait until something holds, for several times the window; the figures are asked for as Prometheus would."""
    end = time.monotonic() + 4 * WINDOW_S
    while not holds():
        assert time.monotonic() < end, [server.figure("wanted_cores") for server in servers]
        time.sleep(5)
