#!/usr/bin/env python
"""How much of a slow link between server and client carries payloads: `bench_link.py`, as root on Linux.

The server runs in a network namespace whose link is shaped to so many Mbit/s (tc, tbf), the client outside. Patches of
photographs are not compressible, so tensor bytes over time is what of the link is used; TCP, IP and Ethernet take 5.5 %
of it. Printed for data connections and for chunks over gRPC, with the CPU time of a gigabyte on both sides.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
from benchmarks.data_connections import require_all_direct, require_none_left
from benchmarks.rows import Row, report
from loaders.service import MODULE, job_data

from trainclient.client import DataClient

HERE = Path(__file__).parent
NAMESPACE, NEAR, FAR = "bench-link", "10.213.7.1", "10.213.7.2"
PORT = 18051
WARM_BYTES = 100_000_000
LEAST = 0.9
"""Share of the link that payloads have to fill."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What one run over the link took."""

    share: float
    """Share of the link's bits that were tensor bytes."""
    server_s: float
    """CPU time of the server for a gigabyte of tensors, decoding included."""
    client_s: float
    """CPU time of the client for a gigabyte."""


def ip(*arguments: str) -> None:
    """Run the command `ip` of iproute2."""
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@contextmanager
def link(mbits: int) -> Iterator[None]:
    """A namespace joined by a link of that rate."""
    ip("netns", "add", NAMESPACE)
    try:
        ip("link", "add", NAMESPACE, "type", "veth", "peer", "name", "far", "netns", NAMESPACE)
        ip("address", "add", f"{NEAR}/24", "dev", NAMESPACE)
        ip("link", "set", "dev", NAMESPACE, "up")
        ip("-n", NAMESPACE, "address", "add", f"{FAR}/24", "dev", "far")
        ip("-n", NAMESPACE, "link", "set", "dev", "far", "up")
        shape = ["tc", "qdisc", "add", "dev", "far", "root", "tbf", "rate", f"{mbits}mbit"]
        command = ["ip", "netns", "exec", NAMESPACE, *shape, "burst", "256kb", "latency", "20ms"]
        subprocess.run(command, check=True)
        yield
    finally:
        ip("netns", "delete", NAMESPACE)


def run(shards: Path, mbits: int, seconds: float, flags: list[str]) -> Measured:
    """Read from a server behind the link for so long."""
    tool = str(Path(sys.executable).parent / "dataserver")
    line = ["ip", "netns", "exec", NAMESPACE, tool, "serve", "--listen", f"{FAR}:{PORT}", "--insecure", *flags]
    server = subprocess.Popen([*line, "--dataset", f"pairs={shards}"], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        server.stdout.readline()
        with DataClient(f"{FAR}:{PORT}", job_data("encoder"), MODULE, 0) as client:
            done = 0
            while done < WARM_BYTES:
                done += next(client).nbytes
            began, server_s, client_s, done = time.perf_counter(), cpu_s(server.pid), time.process_time(), 0
            while time.perf_counter() < began + seconds:
                done += next(client).nbytes
            took_s = time.perf_counter() - began
            server_s, client_s = cpu_s(server.pid) - server_s, time.process_time() - client_s
            require_none_left(client)
            if not flags:
                require_all_direct(f"{FAR}:{PORT}")
        return Measured(8 * done / took_s / (mbits * 1e6), server_s / done * 1e9, client_s / done * 1e9)
    finally:
        server.kill()
        server.wait()


def cpu_s(pid: int) -> float:
    """CPU time of a process and of its children."""
    processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def main() -> int:
    """Measure both transports, and print the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbits", type=int, default=1000, help="rate of the link (default 1000)")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each run (default 10)")
    parser.add_argument("--images", type=int, default=600, help="in the shards (default 600)")
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder, link(arguments.mbits):
        shards = Path(folder) / "shards"
        maker = HERE / "fixtures" / "make_demo_shards.py"
        make = [sys.executable, str(maker), str(shards), "--samples", str(arguments.images)]
        subprocess.run(make, check=True, stdout=subprocess.DEVNULL)
        index = [sys.executable, "-m", "dataserver", "index", str(shards)]
        subprocess.run(index, check=True, stdout=subprocess.DEVNULL)
        for name, flags in (("data connections", []), ("chunks over gRPC", ["--no-direct"])):
            found = run(shards, arguments.mbits, arguments.seconds, flags)
            target = flags == []
            rows.append(
                Row(
                    f"{name}, a link of {arguments.mbits} Mbit/s",
                    f"{found.share:.1%} of the link; CPU of a gigabyte: server {found.server_s:.2f} s, client "
                    f"{found.client_s:.2f} s",
                    f">= {LEAST:.0%}" if target else "",
                    found.share >= LEAST if target else None,
                )
            )
    return report(rows)


if __name__ == "__main__":
    sys.exit(main())
