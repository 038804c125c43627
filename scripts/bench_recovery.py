#!/usr/bin/env python
"""How long readers wait when their server is killed, or stopped: until the next microbatch comes from another one.

Three servers of the same shards, on disk and then in a store that takes 30 ms for each request; eight readers, the
ranks of an encoder and of a backbone. Each asks for a microbatch a tenth of a second after it got the one before, and
receives none ahead. What happens, happens to the server that most of them read from; the recovery is the
longest wait of one of these for a microbatch, until each has one of another server. Seconds are not scaled: a stopped
server is known by pings that it does not answer for some.
"""

import argparse
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.rows import Row, report, spread
from benchmarks.stored_pairs import URL, in_a_store
from demo_parts.processes import Child, Processes

from trainclient.stream.client import ArrayClient

SERVERS = 3
RANKS = 4
"""Of the encoder, and of the backbone."""
PAUSE_S = 0.1
"""What each reader does with a microbatch."""
SETTLED = 3
"""Microbatches that each reader gets before anything happens."""
LONGEST_S = 120.0
KILL, STOP = "kill -9", "SIGSTOP"
GOALS_S = {KILL: 3.0, STOP: 8.0}
SHARDS, SAMPLES = 16, 256


def job_data() -> dict[str, Any]:
    """Eight ranks, and more steps than are read."""
    stream = {
        "datasets": [{"name": "pairs"}],
        "seq_len": 2048,
        "global_batch": 32,
        "packing": {"enabled": False},
        "order_version": 2,
        "shuffle_window": 4,
    }
    modules = [{"name": "vision", "kind": "encoder", "dp": RANKS}, {"name": "llm", "kind": "backbone", "dp": RANKS}]
    return {"stream": stream, "execution": {"modules": modules, "end": {"steps": 1_000_000}}}


class Reader:
    """One rank, in a thread."""

    def __init__(self, addresses: list[str], job: Any, module: str, rank: int) -> None:
        self._client = ArrayClient(addresses, job, module, rank, prefetch_bytes=0)
        self.job = self._client.job
        self.count, self.longest_s = 0, 0.0
        """Microbatches so far, and the longest wait for one since it was set to 0."""
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """The server that it reads from."""
        return self._client.fleet.endpoints[self._client.fleet.current].address

    def _run(self) -> None:
        while not self._ending.wait(PAUSE_S):
            began = time.monotonic()
            next(self._client)
            self.longest_s = max(self.longest_s, time.monotonic() - began)
            self.count += 1

    def take(self, count: int) -> None:
        """Wait until it has got so many more."""
        wanted = self.count + count
        self._until(lambda: self.count >= wanted)

    def leave(self, address: str) -> None:
        """Wait until it has got something of another server."""
        self._until(lambda: self.address != address)
        self.take(1)

    def _until(self, done: Callable[[], bool]) -> None:
        until = time.monotonic() + LONGEST_S
        while not done():
            if not self._thread.is_alive() or time.monotonic() > until:
                raise SystemExit(f"a reader got nothing for {LONGEST_S:.0f} s; see its error above")
            time.sleep(0.01)

    def end(self) -> None:
        """Read no more."""
        self._ending.set()
        self._thread.join()
        self._client.close()


class Servers:
    """Servers that are started again where they were."""

    def __init__(self, processes: Processes, shards: Path | str) -> None:
        self._processes, self._shards = processes, shards
        self._started = 0
        self.children: dict[str, Child] = {}
        """By address."""
        for port in _free_ports(SERVERS):
            self.start(f"127.0.0.1:{port}")

    def start(self, address: str) -> None:
        """Start a server, and wait until it listens."""
        self._started += 1
        line = [sys.executable, "-m", "dataserver", "serve", "--listen", address, "--dataset", f"pairs={self._shards}"]
        child = self._processes.start(f"server {self._started}", [*line, "--no-shared-memory", "--prefetch-bytes", 0])
        self._processes.address(child)
        self.children[address] = child


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        found = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in found]


def recovery_s(readers: list[Reader], servers: Servers, what: str) -> float:
    """Let something happen to the server that most read from, and heal it; the longest wait of its readers."""
    for reader in readers:
        reader.take(SETTLED)
    lost, _ = Counter(reader.address for reader in readers).most_common(1)[0]
    process = servers.children[lost].process
    left = [reader for reader in readers if reader.address == lost]
    for reader in left:
        reader.longest_s = 0.0
    process.send_signal(signal.SIGKILL if what == KILL else signal.SIGSTOP)
    for reader in left:
        reader.leave(lost)
    found = max(reader.longest_s for reader in left)
    if what == KILL:
        process.wait()
        servers.start(lost)
    else:
        process.send_signal(signal.SIGCONT)
    return found


def rows_of(processes: Processes, shards: Path | str, where: str, rounds: int) -> Iterator[Row]:
    """A row for each thing that happens, in turn."""
    servers = Servers(processes, shards)
    addresses, readers = [*servers.children], list[Reader]()
    try:
        for module in ("vision", "llm"):
            for rank in range(RANKS):
                job = readers[0].job if readers else job_data()
                readers.append(Reader(addresses, job, module, rank))
        found: dict[str, list[float]] = {what: [] for what in GOALS_S}
        for number in range(rounds):
            for what, waits in found.items():
                waits.append(recovery_s(readers, servers, what))
                print(f"{where}, round {number + 1}: {what}: {waits[-1]:.2f} s", flush=True)
    finally:
        for reader in readers:
            reader.end()
    for what, waits in found.items():
        goal = GOALS_S[what]
        name = f"recovery after {what}, shards {where}, {SERVERS} servers, {len(readers)} readers, {rounds} times"
        yield Row(name, f"{spread(waits, '.2f')} s", f"< {goal:.0f} s", max(waits) < goal)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="times that each thing happens (default 5)")
    given = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as root, Processes(Path(root)) as processes:
        folder = Path(root) / "all"
        processes.indexed_pairs(folder / "pairs", "--samples", SAMPLES, "--shards", SHARDS)
        rows += rows_of(processes, folder / "pairs", "on disk", given.rounds)
        with in_a_store(folder):
            processes.index(f"{URL}/pairs")
            rows += rows_of(processes, f"{URL}/pairs", "in a store", given.rounds)
    return report(rows)


if __name__ == "__main__":
    sys.exit(main())
