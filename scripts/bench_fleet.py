#!/usr/bin/env python
"""What planning costs a fleet that runs for long: CPU time of real servers, which are each other's peers.

One server sends a backbone rank's views of some steps, of a job of 1,008 ranks by default: that takes one plan of each
step, made by its owner. Then the others send the views of theirs, for which plans are fetched, and at last all of them
send the same again, with plans that are kept. The differences are what a plan takes that is made, and one that is
fetched; from both follows what a fleet of a hundred spends on planning, held against decoding its share of the step's
images on this machine. --seed 1 --backbone 256 --others 128 --sequences 2048 is its held-out variant. The exit code
is 1 if a target is missed.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc
import numpy as np
import psutil
from bench_preprocessing import CROPS, synthetic
from benchmarks.many_shards import make_dataset
from benchmarks.rows import Row, report, spread
from demo_parts.processes import Processes
from disttrain.v1 import data_service_pb2 as pb
from disttrain.v1.admin_service_pb2 import GetMetricsRequest, PlanSources
from disttrain.v1.admin_service_pb2_grpc import AdminServiceStub
from disttrain.v1.data_service_pb2_grpc import DataServiceStub

from dataserver.images import decode_patches
from dataserver.jobs import Catalog, JobPlanner, fill_job
from dataserver.jobs.cache import CACHE_BYTES
from dataserver.jobs.memory_usage import memory_of
from dataserver.planning.job.fields import Sizing
from dataserver.planning.job.identity import parse_job
from dataserver.serving.config import load_config

SERVER: Final = sys.executable, "-m", "dataserver"
TIMEOUT_S: Final = 600.0
NAME: Final = "pairs"
LARGE_FLEET: Final = 100
RENDEZVOUS_S: Final = 4.0
"""Time for servers to find each other."""
IDLE_S: Final = 10.0
NUM_SHARDS: Final = 1000
"""So many that those of other steps have taken the place of a step's."""
SAMPLES: Final = 10_000
"""Samples that each shard has."""
WINDOW: Final = 100
"""Shards of the windows that fill what is kept."""
WINDOW_BYTES: Final = 40
"""That servers keep of a sample in a window, at least; in a table as many."""
Data = dict[str, Any]


def job(backbone: int, others: int, sequences: int, steps: int, seed: int) -> Data:
    """A job of so many ranks, four of a module's sequences on each backbone rank."""
    modules = [
        {"name": "vit", "kind": "encoder", "dp": others},
        {"name": "llm", "kind": "backbone", "dp": backbone, "pp": 8},
        {"name": "dit", "kind": "generator", "dp": others},
    ]
    stream = {"datasets": [{"name": NAME}], "seq_len": 8192, "global_batch": sequences, "seed": seed}
    execution = {"modules": modules, "microbatch": 1, "end": {"steps": steps}}
    return {"stream": {**stream, "generation": {"ratio": "0.5"}}, "execution": execution}


@dataclass(frozen=True, slots=True)
class Step:
    """What a step of a job takes."""

    images: int
    plans: int
    """Number of plans that a server keeps."""


@dataclass(frozen=True, slots=True)
class Server:
    """A server that runs, and how it is called."""

    address: str
    channel: grpc.Channel
    process: psutil.Process

    @property
    def cpu_s(self) -> float:
        """CPU time that the server has taken so far."""
        times = self.process.cpu_times()
        return float(times.user + times.system)

    def create(self, data: Data) -> str:
        """Make a job known, however long its statistics take."""
        stub, request = DataServiceStub(self.channel), pb.GetOrCreateJobRequest(job_spec_json=json.dumps(data))
        while True:
            try:
                return stub.GetOrCreateJob(request, timeout=TIMEOUT_S).job_id
            except grpc.RpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
                time.sleep(0.2)

    def read(self, job_id: str, rank: int) -> None:
        """Read all views of a backbone rank."""
        stub = DataServiceStub(self.channel)
        request = pb.StreamMicrobatchesRequest(job_id=job_id, module="llm", rank=rank)
        for _ in stub.StreamMicrobatches(request, timeout=TIMEOUT_S):
            pass

    def sources(self) -> PlanSources:
        """Where its plans came from."""
        return AdminServiceStub(self.channel).GetMetrics(GetMetricsRequest(), timeout=TIMEOUT_S).plans_by_source


@contextmanager
def fleet(folder: Path, shards: Path, count: int, known: bool) -> Iterator[list[Server]]:
    """Servers until the block is left; where they are `known` to each other they are peers."""
    addresses = [f"127.0.0.1:{port}" for port in range(47_310, 47_310 + count)]
    with Processes(folder) as processes, ExitStack() as stack:
        children = []
        for number, address in enumerate(addresses):
            line = [*SERVER, "serve", "--dataset", f"{NAME}={shards}", "--listen", address]
            peers = ["--peers", ",".join(addresses)] if known else []
            children.append(processes.start(f"server {number}", [*line, *peers]))
        servers = []
        for child in children:
            address = processes.address(child)
            channel = stack.enter_context(grpc.insecure_channel(address))
            servers.append(Server(address, channel, psutil.Process(child.process.pid)))
        time.sleep(RENDEZVOUS_S)
        yield servers


def spent(servers: Sequence[Server], readers: range, data: Data) -> float:
    """CPU seconds of all servers while some send their ranks' views of a job that all know."""
    job_id = {server.create(data) for server in servers}.pop()
    before = sum(server.cpu_s for server in servers)
    with ThreadPoolExecutor(len(readers)) as pool:
        list(pool.map(lambda rank: servers[rank].read(job_id, rank), readers))
    return sum(server.cpu_s for server in servers) - before


def changed(data: Data, steps: int, **stream: Any) -> Data:
    """The same job over another stream, with so many steps."""
    execution = {**data["execution"], "end": {"steps": steps}}
    return {"stream": {**data["stream"], **stream}, "execution": execution}


def fill(servers: Sequence[Server], data: Data, step: Step) -> None:
    """Bring servers to where a long run has them: all that they keep is full, of other steps, and in used memory.

    In the first steps of a server most of what a plan takes is the system handing out memory, 5 to 10 microseconds for
    each 4 KiB in a virtual machine. Only the token ids of the steps that are measured are open already, which serving
    needs anyway: another sizing has its samples in the same order.
    """
    everyone = range(len(servers))
    spent(servers, everyone, changed(data, data["execution"]["end"]["steps"], sizing={"patch": 16}))
    small = job(len(servers), len(servers), len(servers), 1, 0)
    for number in range(1, CACHE_BYTES // 3 // (WINDOW_BYTES * WINDOW * SAMPLES) + 2):
        spent(servers, everyone, changed(small, 1, seed=number << 20, shuffle_window=WINDOW))
    spent(servers, everyone, changed(data, 2 * step.plans, seed=1 << 30))


def planning_s(folder: Path, shards: Path, data: Data, step: Step, count: int) -> tuple[float, float]:
    """CPU seconds that a plan takes which is made, and one that is fetched."""
    with fleet(folder, shards, count, known=True) as servers:
        fill(servers, data, step)
        before = fetched_so_far(servers)
        first = spent(servers, range(1), data)
        between = fetched_so_far(servers)
        others = spent(servers, range(1, count), data)
        after = fetched_so_far(servers)
        again = spent(servers, range(count), data) / count
    fetched = (others - (count - 1) * again) / (after - between)
    return (first - again - (between - before) * fetched) / data["execution"]["end"]["steps"], fetched


def fetched_so_far(servers: Sequence[Server]) -> int:
    """Plans that any of them had from another."""
    return sum(server.sources().fetched for server in servers)


def idle_cores(folder: Path, shards: Path, count: int) -> float:
    """CPU seconds a second that a server spends on knowing its peers."""
    found = []
    for known in (True, False):
        with fleet(folder, shards, count, known) as servers:
            before = sum(server.cpu_s for server in servers)
            time.sleep(IDLE_S)
            found.append((sum(server.cpu_s for server in servers) - before) / IDLE_S / count)
    return found[0] - found[1]


def decoding_s(num_images: int) -> float:
    """CPU seconds for decoding an image of LAION-like sizes, on one thread."""
    sizing = Sizing(patch=14, merge=2, max_patches=1024)
    pictures, buffer = synthetic(CROPS[0], num_images, sizing), np.zeros((1024, 14 * 14 * 3), np.uint8)
    found = []
    for _ in range(4):
        began = time.process_time()
        for data, shape in pictures:
            decode_patches(data, shape, sizing, buffer[: shape.rows * shape.columns])
        found.append((time.process_time() - began) / num_images)
    return statistics.median(found[1:])


def look(shards: Path, data: Data) -> Step:
    """Plan the first step of a job here."""
    catalog = Catalog.open(load_config(None, {"datasets": {NAME: shards}}))
    whole = parse_job(fill_job(data, catalog))
    plan = JobPlanner(whole, catalog.find_datasets(whole.stream)).plan(0)
    return Step(len(plan.samples.image_rows), CACHE_BYTES // 3 // memory_of(plan))


def fleet_rows(folder: Path, shards: Path, arguments: argparse.Namespace) -> list[Row]:
    """Return the rows of all fleets."""
    count = arguments.servers
    shape = arguments.backbone, arguments.others, arguments.sequences, arguments.steps
    step, decoding = look(shards, job(*shape, 0)), decoding_s(300)
    all_decoding = step.images * decoding
    made, fetched = list[float](), list[float]()
    for number in range(arguments.rounds):
        data = job(*shape, arguments.seed * arguments.rounds + number)
        for times, found in zip((made, fetched), planning_s(folder, shards, data, step, count), strict=True):
            times.append(found)
    peers = [1 + (count - 1) * f / m for m, f in zip(made, fetched, strict=True)]
    shares = [100 * (m + (LARGE_FLEET - 1) * f) / all_decoding for m, f in zip(made, fetched, strict=True)]
    alone = 100 * LARGE_FLEET * statistics.median(made) / all_decoding
    ranks = arguments.backbone + 2 * arguments.others
    return [
        Row(f"a plan of {ranks:,} ranks, {step.images:,} images", f"{spread(made, '.2f')} CPU-s", "", None),
        Row("a plan that is fetched, and handed out", f"{spread([1e3 * f for f in fetched], '.0f')} CPU-ms", "", None),
        Row(f"{count} peers, over one", f"{spread(peers, '.2f')} x", "<= 1.3 x", statistics.median(peers) <= 1.3),
        Row("decoding an image", f"{1e3 * decoding:.2f} CPU-ms", "", None),
        Row(
            f"{LARGE_FLEET} servers, extrapolated: planning over decoding",
            f"{spread(shares, '.1f')} %, if each planned every step {alone:.0f} %",
            "<= 5 %",
            statistics.median(shares) <= 5,
        ),
        Row(
            f"greeting {count - 1} peers, and being greeted",
            f"{100 * idle_cores(folder, shards, count):.2f} % of a core",
            "",
            None,
        ),
    ]


def main() -> int:
    """Measure planning in a fleet, and print the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", type=int, default=4, help="servers of the fleet (default 4)")
    parser.add_argument("--steps", type=int, default=8, help="steps that are planned (default 8)")
    parser.add_argument("--backbone", type=int, default=504, help="backbone ranks (default 504)")
    parser.add_argument("--others", type=int, default=252, help="ranks of encoder and generator each (default 252)")
    parser.add_argument("--sequences", type=int, default=2016, help="sequences of a step (default 2,016)")
    parser.add_argument("--rounds", type=int, default=3, help="default 3")
    parser.add_argument("--seed", type=int, default=0, help="of all that is drawn")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        shards = make_dataset(Path(temporary) / "shards", NUM_SHARDS, SAMPLES, 4, seed=arguments.seed)
        subprocess.run([*SERVER, "index", str(shards), "--allow-duplicates"], check=True, stdout=subprocess.DEVNULL)
        return report(fleet_rows(Path(temporary), shards, arguments))


if __name__ == "__main__":
    sys.exit(main())
