#!/usr/bin/env python
"""What a trainer waits for its images: decoded in its process, one microbatch ahead in a thread, or by a data server.

Data servers share memory with the trainer, or send it everything over data connections, as to another machine; the run
ends where one of these is left.
The accelerator is a sleep of so many times the local decoding time, the same in all of them; data and decoding code are
the same too, and rounds are interleaved. The wait shrinks from the time of decoding to
that of handing over a tensor. Then a trainer that takes 80 % of what each server was just seen to deliver: what it
waits for 2,000 microbatches. --prefetch-mib 48 128 compares such trainers alone, in interleaved rounds of one pace, by
what their clients receive ahead.

--storage s3 measures such trainers alone, over more shards in a store that takes 30 ms for each request. The server's
memory holds 1.25 shuffle windows of them, so that it reads them again in each epoch. What is waited for in the first
step is left out.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.data_connections import require_all_direct, require_none_left
from benchmarks.rows import Row, report
from benchmarks.stored_pairs import URL, in_a_store
from demo_parts.processes import Processes

from dataserver.assembly import prepare_view, total_bytes, view_tensors
from dataserver.jobs import Catalog, JobPlanner, fill_job
from dataserver.planning.job.identity import Job, parse_job
from dataserver.planning.plan.views import view_plan
from dataserver.serving.block_cache_config import needed_bytes, window_bytes
from dataserver.serving.config import load_config
from trainclient.client import DataClient
from trainclient.stream.reader import PREFETCH_BYTES

MODULE = "vision"
IN_PLACE, AHEAD = "in the trainer", "one ahead, in a thread"
SERVER, SENT = "data server, memory shared", "data server, sent"
WAVES = 8
"""Microbatches in a step of the job."""
LOAD = 0.8
"""What a steady trainer takes, of what the server delivers."""
DISK_SHARDS, STORED_SHARDS = 4, 16
"""Of a case, on disk and in a store."""
STORED_WINDOW = 4
"""Shards in a store that are mixed."""
MOST_WAITED, MOST_LATE = 0.01, 0.2
"""Share of its time that a trainer may wait, and the 99th percentile of its waits in median intervals."""


def job_data(microbatch: int, steps: int) -> dict[str, Any]:
    """One encoder rank whose views hold the images of `microbatch` sequences."""
    return {
        "stream": {
            "datasets": [{"name": "pairs"}],
            "seq_len": 2048,
            "global_batch": WAVES * microbatch,
            "packing": {"enabled": False},
        },
        "execution": {
            "modules": [{"name": MODULE, "kind": "encoder"}, {"name": "llm", "kind": "backbone"}],
            "microbatch": microbatch,
            "end": {"steps": steps},
        },
    }


def local(job: Job, catalog: Catalog, count: int) -> Iterator[None]:
    """Decode one microbatch after the other in the calling thread."""
    datasets = catalog.find_datasets(job.stream)
    planner = JobPlanner(job, datasets)
    for number in range(count):
        plan = planner.plan(number // WAVES)
        view = view_plan(job.spec, plan, MODULE, 0, number % WAVES)
        tensors = view_tensors(job.spec, plan, view)
        buffer = np.empty(total_bytes(tensors), np.uint8)
        prepared = prepare_view(job.spec, plan, view, datasets, tensors, buffer)
        for task in prepared.tasks:
            task()
        prepared.finish()
        yield


def ahead(microbatches: Iterator[None]) -> Iterator[None]:
    """`microbatches`, one ahead in a thread of this process."""
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(next, microbatches, False)
        while coming.result() is None:
            coming = pool.submit(next, microbatches, False)
            yield


def waits(microbatches: Iterator[Any], busy_s: float) -> list[float]:
    """Seconds that each microbatch but the first is waited for, with an accelerator that is busy in between.

    As in a loop, each microbatch is let go of when the next one is there.
    """
    found: list[float] = []
    held: Any = None
    while True:
        start = time.perf_counter()
        coming = next(microbatches, microbatches)
        waited = time.perf_counter() - start
        if coming is microbatches:
            return found[1:]
        found.append(waited)
        held = coming  # noqa: F841
        del coming
        time.sleep(busy_s)


@dataclass(frozen=True, slots=True)
class Case:
    """The shards, and the trainer that reads them."""

    samples: int
    microbatch: int
    busy: float
    """The accelerator's time over that of decoding."""
    seed: int
    """Seed that the shards are drawn by."""
    target: float = 0.1
    """Median wait with a data server over that of decoding in the trainer."""


CASES = Case(768, 16, 1.0, 0), Case(512, 8, 1.5, 100)
"""One, and its held-out variant. Samples of a microbatch of 16 vary less than those of one of 8."""


@dataclass(frozen=True, slots=True)
class Steady:
    """A trainer that takes `LOAD` of what the server delivers."""

    interval_s: float
    """Time between two microbatches as fast as the server delivers them."""
    busy_s: float
    """Time that the trainer takes for each microbatch."""
    waits_s: list[float]


@contextmanager
def reading(address: str, job: Job, prefetch_bytes: int = PREFETCH_BYTES) -> Iterator[DataClient]:
    """A client of a server, which must not leave a data connection for gRPC."""
    with DataClient(address, job.spec, MODULE, 0, prefetch_bytes=prefetch_bytes) as client:
        yield client
        require_none_left(client)


def delivers_s(address: str, job: Job, count: int) -> float:
    """Seconds between two microbatches, of `count` that are read as fast as they come."""
    with reading(address, job) as client:
        microbatches = iter(client)
        for _ in range(WAVES):
            next(microbatches)
        began = time.perf_counter()
        for _ in range(count):
            next(microbatches)
        took_s = time.perf_counter() - began
    return took_s / count


def steady(address: str, job: Job, count: int, interval_s: float, prefetch_bytes: int = PREFETCH_BYTES) -> Steady:
    """Read `count` microbatches at the pace of a trainer, given how fast the server delivers them."""
    busy_s = interval_s / LOAD
    with reading(address, job, prefetch_bytes) as client:
        found = waits(islice(client, count + 1), busy_s)
    return Steady(interval_s, busy_s, found)


def steady_rows(runs: list[Steady], about: str = "") -> Iterator[Row]:
    """Shares of the trainer's own time, which need no scale."""
    found = [wait for run in runs for wait in run.waits_s]
    waited, busy = sum(found), sum(run.busy_s * len(run.waits_s) for run in runs)
    share = waited / (waited + busy)
    late = statistics.quantiles(found, n=100)[-1]
    interval = statistics.median(run.busy_s for run in runs) + statistics.median(found)
    delivers_ms = statistics.median(run.interval_s for run in runs) * 1e3
    title = f"{about}{len(found)} microbatches at {LOAD:.0%} of what the server delivers (one in {delivers_ms:.1f} ms)"
    yield Row(f"{title}: waiting", f"{share:.2%} of the time", f"< {MOST_WAITED:.0%}", share < MOST_WAITED)
    yield Row(
        f"{title}: 99th percentile of a wait",
        f"{late * 1e3:.2f} ms, {late / interval:.1%} of the median interval",
        f"< {MOST_LATE:.0%}",
        late < MOST_LATE * interval,
    )


@dataclass(frozen=True, slots=True)
class Served:
    """A server of the images of a case."""

    addresses: dict[str, str]
    """Address of the server by how payloads come."""
    catalog: Catalog
    stream: Mapping[str, Any]
    """Further fields of jobs."""

    @property
    def address(self) -> str:
        """Address at which memory is shared."""
        return self.addresses[SERVER]

    def job(self, case: Case, steps: int) -> Job:
        """A job of so many steps."""
        data = job_data(case.microbatch, steps)
        data["stream"].update(self.stream)
        return parse_job(fill_job(data, self.catalog))

    def long_job(self, case: Case, microbatches: int) -> Job:
        """A job that lasts for a steady trainer."""
        return self.job(case, microbatches * 2 // WAVES + 2)


def serve(shards: Path | str, processes: Processes, case: Case) -> Served:
    """Serve the shards of a case, from a folder or from a store."""
    datasets = {"pairs": Path(shards)}
    catalog = Catalog.open(load_config(None, {"datasets": datasets}))
    flags, stream = list[Any](), dict[str, Any]()
    if isinstance(shards, str):
        flags = ["--block-memory-bytes", needed_bytes(window_bytes(catalog.datasets["pairs"], STORED_WINDOW), 1)]
        stream = {"order_version": 2, "shuffle_window": STORED_WINDOW}
    addresses = {
        name: processes.serve_pairs(shards, *flags, *more, name=f"{name} {case.seed}")
        for name, more in ((SERVER, ()), (SENT, ("--no-shared-memory",)))
    }
    return Served(addresses, catalog, stream)


def made(folder: Path, processes: Processes, num_shards: int) -> list[Path]:
    """Make the shards of each case."""
    folders = [folder / f"shards-{case.seed}" for case in CASES]
    for shards, case in zip(folders, CASES, strict=True):
        processes.make_pairs(shards, "--samples", case.samples, "--shards", num_shards, "--seed", case.seed)
    return folders


def stored_rows(folder: Path, processes: Processes, microbatches: int) -> Iterator[Row]:
    """Steady trainers over shards in a store."""
    folders = made(folder, processes, STORED_SHARDS)
    with in_a_store(folder):
        for shards, case in zip(folders, CASES, strict=True):
            url = f"{URL}/{shards.name}"
            processes.index(url)
            served = serve(url, processes, case)
            job = served.long_job(case, microbatches)
            for name, address in served.addresses.items():
                run = steady(address, job, microbatches, delivers_s(address, job, microbatches // 4))
                behind = replace(run, waits_s=run.waits_s[WAVES - 1 :])
                yield from steady_rows([behind], f"shards in a store, {name}: ")


def compared(served: Served, case: Case, prefetch_mib: list[int], rounds: int, microbatches: int) -> Iterator[Row]:
    """Steady trainers by what their clients receive ahead, each round in another order."""
    job = served.long_job(case, microbatches)
    found: dict[int, list[Steady]] = {mib: [] for mib in prefetch_mib}
    for number in range(rounds):
        interval_s = delivers_s(served.address, job, microbatches // 2)  # one pace for all of a round
        for mib in prefetch_mib[:: -1 if number % 2 else 1]:
            found[mib].append(steady(served.address, job, microbatches, interval_s, mib << 20))
    for mib, runs in found.items():
        yield from steady_rows(runs, f"{mib} MiB ahead: ")


def run_case(
    served: Served, case: Case, rounds: int, microbatches: int
) -> tuple[dict[str, list[float]], dict[str, Steady]]:
    """Waits of every microbatch by where it was decoded, and those of a steady trainer by how payloads come."""
    steps = case.samples // (WAVES * case.microbatch)
    job = served.job(case, steps)
    count = steps * WAVES
    busy_s = case.busy * statistics.median(waits(local(job, served.catalog, count), 0))
    found: dict[str, list[float]] = {name: [] for name in (IN_PLACE, AHEAD, *served.addresses)}
    for _ in range(rounds):
        found[IN_PLACE] += waits(local(job, served.catalog, count), busy_s)
        found[AHEAD] += waits(ahead(local(job, served.catalog, count)), busy_s)
        for name, address in served.addresses.items():
            with reading(address, job) as client:
                found[name] += waits(iter(client), busy_s)
    long = served.long_job(case, microbatches)
    at_pace = {
        name: steady(address, long, microbatches, delivers_s(address, long, microbatches // 4))
        for name, address in served.addresses.items()
    }
    require_all_direct(served.addresses[SENT])
    return found, at_pace


def rows(case: Case, found: dict[str, list[float]]) -> Iterator[Row]:
    """Waits are shown as measured, and judged by their ratio, which needs no scale."""
    base = statistics.median(found[IN_PLACE])
    title = f"microbatches of {case.microbatch}, accelerator busy {case.busy} x the time of decoding"
    for name, values in found.items():
        middle, late = statistics.median(values), statistics.quantiles(values, n=20)[-1]
        times = f"median {middle * 1e3:.2f} ms, 95th percentile {late * 1e3:.2f} ms"
        judged = name in (SERVER, SENT)
        yield Row(
            f"{title}: {name}",
            f"{times}; median / {IN_PLACE} {middle / base:.4f}",
            f"<= {case.target} x {IN_PLACE}" if judged else "",
            middle <= case.target * base if judged else None,
        )


def main() -> int:
    """Measure waits, and print the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="interleaved rounds (default 3)")
    parser.add_argument("--microbatches", type=int, default=2000, help="of the steady trainer (default 2000)")
    parser.add_argument(
        "--prefetch-mib", type=int, nargs="+", default=[], metavar="MIB", help="compare steady trainers alone"
    )
    parser.add_argument("--storage", choices=("disk", "s3"), default="disk", help="where the shards lie (default disk)")
    given = parser.parse_args()
    rows_: list[Row] = []
    with tempfile.TemporaryDirectory() as root, Processes(Path(root)) as processes:
        folder = Path(root) / "all"
        if given.storage == "s3":
            return report(stored_rows(folder, processes, given.microbatches))
        for shards, case in zip(made(folder, processes, DISK_SHARDS), CASES, strict=True):
            processes.index(shards)
            served = serve(shards, processes, case)
            if given.prefetch_mib:
                rows_ += compared(served, case, given.prefetch_mib, given.rounds, given.microbatches)
                continue
            found, at_pace = run_case(served, case, given.rounds, given.microbatches)
            rows_ += rows(case, found)
            for name, run in at_pace.items():
                rows_ += steady_rows([run], f"{name}: ")
    return report(rows_)


if __name__ == "__main__":
    sys.exit(main())
