#!/usr/bin/env python
"""A dataset of 100 million samples: what a server takes to start, to create jobs, to seek, and how much memory.

The dataset is made of a few hundred distinct indexes under 10,000 names (`benchmarks/many_shards.py`). Everything else
is real: servers are processes of their own, jobs come over gRPC. Its files are in the page cache, since there are fewer
of them than names; on cold storage each shard that is read costs one or two requests more. A billion samples are
extrapolated from what was measured, and said to be. --seed 1 --median 256 --samples 16000 is its held-out variant. The
exit code is 1 if a target is missed.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc
import psutil
from benchmarks.calibration import slowdown
from benchmarks.many_shards import MEDIAN_WIDTH, make_dataset
from benchmarks.rows import Row, report
from demo_parts.processes import Processes
from disttrain.v1 import data_service_pb2 as pb
from disttrain.v1.data_service_pb2_grpc import DataServiceStub

SERVER: Final = sys.executable, "-m", "dataserver"
TIMEOUT_S: Final = 1800.0
BILLION: Final = 10**9
NAME: Final = "many"
FILTER: Final = "punsafe < 0.5 and width >= 256"
Data = dict[str, Any]


def job(**stream: Any) -> Data:
    """A packed job of understanding and generation, eight passes long."""
    modules: list[Data] = [
        {"name": "vit", "kind": "encoder"},
        {"name": "llm", "kind": "backbone", "dp": 2, "pp": 2},
        {"name": "dit", "kind": "generator"},
    ]
    dataset = {"name": NAME, **stream.pop("dataset", {})}
    generation = {"ratio": "0.3"}
    return {
        "stream": {"datasets": [dataset], "seq_len": 8192, "global_batch": 64, "generation": generation, **stream},
        "execution": {"modules": modules, "microbatch": 1, "end": {"epochs": 8}},
    }


@dataclass(frozen=True, slots=True)
class Took:
    """Time that something took, on the clock and on the cores."""

    wall_s: float
    cpu_s: float
    """CPU time of all processes of the server."""

    def seconds(self) -> float:
        """What it would be without others that use the cores: then the CPU time says so."""
        return min(self.wall_s, self.cpu_s / slowdown())

    def row(self, name: str, target_s: float) -> Row:
        """Return the row that compares the time with its target."""
        seconds = self.seconds()
        return Row(name, f"{self.wall_s:.2f} s, {self.cpu_s:.2f} CPU-s", f"< {target_s:g} s", seconds < target_s)


@dataclass(slots=True)
class Server:
    """A server that runs, and what it took."""

    stub: DataServiceStub
    process: psutil.Process
    started: Took
    """Time until the server listened."""

    def create(self, data: Data) -> tuple[Took, pb.GetOrCreateJobResponse]:
        """What it takes until a job is known, and the answer; asks again while statistics are computed."""
        request = pb.GetOrCreateJobRequest(job_spec_json=json.dumps(data))
        began, cpu = time.perf_counter(), self.cpu_s
        while True:
            try:
                answer = self.stub.GetOrCreateJob(request, timeout=TIMEOUT_S)
            except grpc.RpcError as error:
                if "shards are computed" not in (text := str(error.details())):
                    raise
                print(f"\r{text}", end="\033[K", file=sys.stderr, flush=True)
            else:
                return Took(time.perf_counter() - began, self.cpu_s - cpu), answer

    def seek(self, job_id: str, step: int) -> Took:
        """What it takes until the first bytes of a step that nothing was planned near of."""
        began, cpu = time.perf_counter(), self.cpu_s
        request = pb.StreamMicrobatchesRequest(job_id=job_id, module="llm", rank=0, start_step=step)
        stream = self.stub.StreamMicrobatches(request, timeout=TIMEOUT_S)
        next(stream)
        took = Took(time.perf_counter() - began, self.cpu_s - cpu)
        stream.cancel()
        return took

    @property
    def pss_mb(self) -> float:
        """Memory of all its processes, pages that they share counted once."""
        tree = [self.process, *self.process.children(recursive=True)]
        return sum(float(p.memory_full_info().pss) for p in tree) / 1e6

    @property
    def cpu_s(self) -> float:
        """CPU time of all its processes so far, those that ended included."""
        times = [self.process.cpu_times(), *(p.cpu_times() for p in self.process.children(recursive=True))]
        return sum(t.user + t.system for t in times) + times[0].children_user + times[0].children_system


@contextmanager
def server(folder: Path, shards: Path) -> Iterator[Server]:
    """A server over the dataset, with a cache below a folder of its own, until the block is left."""
    folder.mkdir(exist_ok=True)
    serve = [*SERVER, "serve", "--dataset", f"{NAME}={shards}", "--listen", "127.0.0.1:0"]
    serve += ["--cache-dir", str(folder / "cache")]
    with Processes(folder) as processes:
        began = time.perf_counter()
        child = processes.start("server", serve)
        address = processes.address(child)
        wall_s, process = time.perf_counter() - began, psutil.Process(child.process.pid)
        times = process.cpu_times()
        with grpc.insecure_channel(address) as channel:
            yield Server(DataServiceStub(channel), process, Took(wall_s, times.user + times.system))


def scale_rows(folder: Path, shards: Path, seeks: int, seed: int) -> list[Row]:
    """All rows of one dataset."""
    rows = list[Row]()
    began = time.perf_counter()
    subprocess.run([*SERVER, "index", str(shards), "--allow-duplicates"], check=True, stdout=subprocess.DEVNULL)
    took = time.perf_counter() - began
    rows.append(Row("`dataserver index`, where at most statistics are missing", f"{took:.1f} s", "", None))
    plain, filtered = job(seed=seed), job(seed=seed, dataset={"filter": FILTER})
    with server(folder / "one", shards) as first:
        rows.append(first.started.row("server start", 2.0))
        rows.append(first.create(plain)[0].row("job creation on the first server", 3.0))
        measured = first.create(filtered)[0]
        rows.append(Row("a new filter", f"{measured.wall_s:.1f} s, {measured.cpu_s:.1f} CPU-s", "once", None))
    with server(folder / "one", shards) as again:
        rows.append(again.started.row("server start, again", 2.0))
        created, answer = again.create(plain)
        rows.append(created.row("job creation after a restart, or on another server", 1.0))
        rows.append(again.create(filtered)[0].row("the same with a filter", 1.0))
        steps = [answer.num_steps * (i + 1) // (seeks + 1) for i in range(seeks)]
        middle = sorted((again.seek(answer.job_id, step) for step in steps), key=lambda took: took.wall_s)[seeks // 2]
        rows.append(middle.row(f"seeking within {answer.num_steps:,} steps of a packed job, median of {seeks}", 0.5))
        rows.append(Row("memory (PSS)", f"{again.pss_mb:.0f} MB", "< 500 MB", again.pss_mb < 500))
        samples = again.stub.GetDatasetInfo(pb.GetDatasetInfoRequest(), timeout=TIMEOUT_S).datasets[0].num_samples
        billion = (again.started.seconds() + created.seconds()) * BILLION / samples
        name = "a billion samples: start and job creation, extrapolated as if all of both grew with them"
        rows.append(Row(name, f"{billion:.1f} s", "< 30 s", billion < 30))
    return rows


def main() -> int:
    """Measure a large dataset, and print the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, default=10_000, help="names (default 10,000)")
    parser.add_argument("--samples", type=int, default=10_000, help="samples of a shard (default 10,000)")
    parser.add_argument("--distinct", type=int, default=200, help="indexes that are made (default 200)")
    parser.add_argument("--seeks", type=int, default=5, help="steps that are sought (default 5)")
    parser.add_argument("--seed", type=int, default=0, help="of all that is drawn")
    parser.add_argument("--median", type=int, default=MEDIAN_WIDTH, help="width of an image in pixels (default 512)")
    parser.add_argument("--folder", type=Path, help="keep the dataset here, and use it if it is there")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        shards = (arguments.folder or Path(temporary)) / "shards"
        if not shards.exists():
            make_dataset(
                shards,
                arguments.shards,
                arguments.samples,
                min(arguments.distinct, arguments.shards),
                lambda what: print(f"\rmaking: {what}", end="\033[K", file=sys.stderr, flush=True),
                seed=arguments.seed,
                median=arguments.median,
            )
            print(file=sys.stderr)
        subprocess.run([*SERVER, "warm"], check=True, stdout=subprocess.DEVNULL)
        return report(scale_rows(Path(temporary), shards, arguments.seeks, arguments.seed))


if __name__ == "__main__":
    sys.exit(main())
