#!/usr/bin/env python
"""A fleet under many streams: CPU time of an image by streams x servers, and 256 streams on 4 servers.

Each stream is the view of an encoder rank of its own, read as fast as it comes; all ranks are one job's, so that every
server has a share of them. Several servers are peers, which plan every step once. The last shape is read from 4,000
shards as well, which are links to the four of the others. CPU time is that of all servers and of the process that
reads, between a warm-up and the end; rounds are interleaved, and ratios are those of one round.
Fairness is what each of the 256 streams got by the end, over the median, whichever server it is of. Memory is that of
each server (PSS, at several moments), over what it may use: its prefetch budget, messages in gRPC's hands included, a
microbatch for each stream, and what a server without streams takes. Plans in the making are not in that sum, but are
measured.
"""

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc
import psutil
from benchmarks.many_shards import link_shards
from benchmarks.rows import Row, report
from demo_parts.processes import Processes
from disttrain.v1 import data_service_pb2 as pb
from disttrain.v1.data_service_pb2_grpc import DataServiceStub

MODULE: Final = "vision"
MICROBATCH: Final = 4
"""Sequences, with an image each."""
WAVES: Final = 8
"""Microbatches in a step of the job."""
BASE: Final = (2, 1)
SHAPES: Final = (BASE, (32, 1), (32, 4))
"""Number of streams and servers in each run."""
MANY: Final = (256, 4)
SAMPLES: Final = 1500
FEW_SHARDS: Final = 4
MANY_SHARDS: Final = 4000
WITHIN: Final = 0.1
"""CPU time of an image over that of `BASE`, and what any stream gets over the median, at most more."""
FIRST_PORT: Final = 47_410
"""Peers name each other's, so they cannot be any that are free."""
PREFETCH_MB: Final = 256
"""Budget of each server for working ahead."""
LOOKS: Final = 8
"""Moments at which memory is measured."""
TIMEOUT_S: Final = 600.0


def job_data(ranks: int) -> dict[str, Any]:
    """So many encoder ranks, each with a few images a microbatch."""
    modules = [{"name": MODULE, "kind": "encoder", "dp": ranks}, {"name": "llm", "kind": "backbone", "dp": ranks}]
    stream = {
        "datasets": [{"name": "pairs"}],
        "seq_len": 2048,
        "global_batch": ranks * MICROBATCH * WAVES,
        "packing": {"enabled": False},
    }
    return {"stream": stream, "execution": {"modules": modules, "microbatch": MICROBATCH, "end": {"steps": 100_000}}}


class Consumer:
    """Reads one rank's stream in a thread of its own, and counts microbatches."""

    def __init__(self, stub: DataServiceStub, job_id: str, rank: int) -> None:
        self.count = self.largest_bytes = 0
        request = pb.StreamMicrobatchesRequest(job_id=job_id, module=MODULE, rank=rank)
        self._stream = stub.StreamMicrobatches(request, timeout=TIMEOUT_S)
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        left = 0
        try:
            for message in self._stream:
                if message.HasField("header"):
                    left = message.header.total_bytes
                    self.largest_bytes = max(self.largest_bytes, left)
                else:
                    left -= len(message.chunk)
                self.count += left == 0
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.CANCELLED:
                raise

    def close(self) -> None:
        """End the stream, and the thread that reads it."""
        self._stream.cancel()
        self._thread.join()


@dataclass(frozen=True, slots=True)
class Measured:
    """What some streams got from some servers."""

    counts: list[int]
    """Microbatches of each stream between warm-up and end."""
    cpu_s: float
    """CPU time of all servers and the reading process in that time."""
    wall_s: float
    idle_mb: float
    """PSS of the largest server before any stream."""
    busy_mb: list[float]
    """PSS of the largest server while all streams are read, at each look."""
    largest_mb: float
    """Size of the largest microbatch."""

    @property
    def cpu_ms(self) -> float:
        """CPU time for each image."""
        return self.cpu_s / (sum(self.counts) * MICROBATCH) * 1e3


def make_shards(few: Path, many: Path, processes: Processes, drawn: list[object]) -> None:
    """Make and index a few shards, and give them many names. `drawn` are options of their images."""
    processes.indexed_pairs(few, "--samples", SAMPLES, "--shards", FEW_SHARDS, *drawn)
    many.mkdir()
    link_shards(few, many, MANY_SHARDS)
    index = [sys.executable, "-m", "dataserver", "index", many, "--allow-duplicates"]
    processes.run([processes.start("indexing many names", index)], print)


def run_streams(shards: Path, streams: int, servers: int, images: int) -> Measured:
    """Read so many images from servers that are started for it."""
    folder = shards.parent
    with Processes(folder) as processes, ExitStack() as stack:
        addresses = [f"127.0.0.1:{FIRST_PORT + n}" for n in range(servers)]
        serve = [sys.executable, "-m", "dataserver", "serve", "--dataset", f"pairs={shards}"]
        options = ["--max-streams", max(64, streams), "--prefetch-bytes", PREFETCH_MB << 20]
        peers = ["--peers", ",".join(addresses)] if servers > 1 else []
        children = [processes.start(address, [*serve, *options, *peers, "--listen", address]) for address in addresses]
        channels = [stack.enter_context(grpc.insecure_channel(processes.address(child))) for child in children]
        running = [psutil.Process(child.process.pid) for child in children]
        stubs = [DataServiceStub(channel) for channel in channels]
        create = pb.GetOrCreateJobRequest(job_spec_json=json.dumps(job_data(streams)))
        (job_id,) = {stub.GetOrCreateJob(create, timeout=TIMEOUT_S).job_id for stub in stubs}
        idle_mb = _largest_pss_mb(running)
        consumers = [Consumer(stubs[rank % servers], job_id, rank) for rank in range(streams)]
        for consumer in consumers:
            stack.callback(consumer.close)
        _wait_for(consumers, max(streams, images // MICROBATCH // 4))
        before, cpu_s, began = [c.count for c in consumers], _cpu_s(running), time.perf_counter()
        busy_mb = []
        for look in range(1, LOOKS + 1):
            _wait_for(consumers, sum(before) + images // MICROBATCH * look // LOOKS)
            busy_mb.append(_largest_pss_mb(running))
        counts = [c.count - b for c, b in zip(consumers, before, strict=True)]
        cpu_s, wall_s = _cpu_s(running) - cpu_s, time.perf_counter() - began
        largest_mb = max(consumer.largest_bytes for consumer in consumers) / 1e6
        return Measured(counts, cpu_s, wall_s, idle_mb, busy_mb, largest_mb)


def _wait_for(consumers: list[Consumer], count: int) -> None:
    give_up = time.monotonic() + TIMEOUT_S
    while sum(consumer.count for consumer in consumers) < count:
        if time.monotonic() > give_up:
            raise SystemExit(f"{count} microbatches did not come in {TIMEOUT_S} s; take fewer images")
        time.sleep(0.02)


def _cpu_s(servers: list[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in (*servers, psutil.Process()))


def _largest_pss_mb(servers: list[psutil.Process]) -> float:
    return max(process.memory_full_info().pss for process in servers) / 1e6


def rows(found: dict[tuple[int, int], list[Measured]]) -> Iterator[Row]:
    """Yield the CPU time of each shape over that of `BASE`."""
    for shape in SHAPES:
        streams, servers = shape
        ratio = statistics.median(own.cpu_ms / base.cpu_ms for own, base in zip(found[shape], found[BASE], strict=True))
        cpu_ms = statistics.median(one.cpu_ms for one in found[shape])
        yield Row(
            f"{streams} streams x {servers} servers",
            f"{cpu_ms:.2f} ms CPU an image, {ratio:.2f} x {BASE[0]} x {BASE[1]}",
            "" if shape == BASE else f"<= {1 + WITHIN} x",
            None if shape == BASE else ratio <= 1 + WITHIN,
        )


def row_of_shards(few: list[Measured], many: list[Measured]) -> Row:
    """CPU time of an image from many shards over that from few."""
    ratio = statistics.median(a.cpu_ms / b.cpu_ms for a, b in zip(many, few, strict=True))
    title = f"{SHAPES[-1][0]} streams x {SHAPES[-1][1]} servers: {MANY_SHARDS:,} shards, over {FEW_SHARDS}"
    return Row(title, f"{ratio:.2f} x", f"<= {1 + WITHIN} x", ratio <= 1 + WITHIN)


def rows_of_many(found: Measured) -> Iterator[Row]:
    """Fairness and memory under very many streams."""
    streams, servers = MANY
    middle = statistics.median(found.counts)
    low, high = min(found.counts) / middle, max(found.counts) / middle
    fair = low >= 1 - WITHIN and high <= 1 + WITHIN
    title = f"{streams} streams x {servers} servers"
    yield Row(
        f"{title}: least and most of a stream",
        f"{low:.2f} and {high:.2f} x the median of {middle:.0f} microbatches",
        f"within {WITHIN:.0%}",
        fair,
    )
    middle_mb, busy_mb = statistics.median(found.busy_mb), max(found.busy_mb)
    most = found.idle_mb + PREFETCH_MB * 1.048576 + found.largest_mb * streams / servers
    yield Row(
        f"{title}: memory of the largest server",
        f"{middle_mb:.0f} MB, at most {busy_mb:.0f}; {found.idle_mb:.0f} MB without streams",
        f"<= {most:.0f} MB",
        busy_mb <= most,
    )


def main() -> int:
    """Measure all shapes, and print the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=6000, help="of a run (default 6000)")
    parser.add_argument("--many-images", type=int, default=40_000, help="of the run with 256 streams (default 40000)")
    parser.add_argument("--rounds", type=int, default=3, help="interleaved rounds (default 3)")
    parser.add_argument("--seed", type=int, default=0, help="of the images")
    parser.add_argument("--median", type=int, default=512, help="their width in pixels (default 512)")
    given = parser.parse_args()
    found: dict[tuple[int, int], list[Measured]] = {shape: [] for shape in SHAPES}
    linked: list[Measured] = []
    with tempfile.TemporaryDirectory() as place:
        few, many = Path(place) / "shards", Path(place) / "many"
        with Processes(Path(place)) as processes:
            make_shards(few, many, processes, ["--seed", given.seed, "--median", given.median])
        for number in range(given.rounds):
            for shape in SHAPES if number % 2 == 0 else SHAPES[::-1]:
                found[shape].append(run_streams(few, *shape, given.images))
                print(f"round {number + 1}: {shape}: {found[shape][-1].cpu_ms:.2f} ms", flush=True)
            linked.append(run_streams(many, *SHAPES[-1], given.images))
        streams = run_streams(few, *MANY, given.many_images)
    return report([*rows(found), row_of_shards(found[SHAPES[-1]], linked), *rows_of_many(streams)])


if __name__ == "__main__":
    sys.exit(main())
