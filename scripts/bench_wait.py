#!/usr/bin/env python
"""What a trainer waits for its images: decoded in its process, one microbatch ahead in a thread, or by a data server.

The accelerator is a sleep of --busy times the local decoding time, the same in all three; the data is the same too, and
so is the code that decodes it. Rounds are interleaved. Check 24 of docs/evidence.md: the wait shrinks from the time of
decoding to that of handing over a tensor.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from demo_processes import Processes

from dataserver.jobs import Catalog, JobPlanner, fill_job
from dataserver.planning.identity import Job, parse_job
from dataserver.planning.views import view_plan
from dataserver.preprocessing import prepare_view, total_bytes, view_tensors
from dataserver.serving.config import load_config
from trainclient.client import DataClient

HERE, BIN = Path(__file__).parent, Path(sys.executable).parent
MODULE = "vision"
IN_PLACE = "in the trainer"
WAVES = 8
"""Microbatches of a step."""


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
    planner, tokenizer = JobPlanner(job, datasets), catalog.find_tokenizer(job.stream.tokenizer)
    for number in range(count):
        plan = planner.plan(number // WAVES)
        view = view_plan(job.spec, plan, MODULE, 0, number % WAVES)
        tensors = view_tensors(job.spec, plan, view)
        buffer = np.empty(total_bytes(tensors), np.uint8)
        prepared = prepare_view(job.spec, plan, view, datasets, tokenizer, tensors, buffer)
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
    """Seconds that each microbatch but the first is waited for, with an accelerator that is busy in between."""
    found: list[float] = []
    while True:
        start = time.perf_counter()
        if next(microbatches, microbatches) is microbatches:
            return found[1:]
        found.append(time.perf_counter() - start)
        time.sleep(busy_s)


def measure(folder: Path, processes: Processes, arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Waits of every microbatch by where it was decoded."""
    shards = folder / "shards"
    make = [sys.executable, HERE / "make_demo_shards.py", shards, "--samples", arguments.samples, "--shards", 4]
    processes.run("making shards", make)
    processes.run("indexing", [BIN / "dataserver", "index", shards])
    serve = [BIN / "dataserver", "serve", "--listen", "127.0.0.1:0", "--dataset", f"pairs={shards}"]
    address = processes.serve(serve, folder / "server.log")
    catalog = Catalog.open(load_config(None, {"datasets": {"pairs": shards}}))
    steps = arguments.samples // (WAVES * arguments.microbatch)
    job = parse_job(fill_job(job_data(arguments.microbatch, steps), catalog))
    count = steps * WAVES
    busy_s = arguments.busy * statistics.median(waits(local(job, catalog, count), 0))
    print(f"{count} microbatches of {arguments.microbatch} images, accelerator busy {busy_s:.3f} s for each")
    found: dict[str, list[float]] = {name: [] for name in (IN_PLACE, "one ahead, in a thread", "data server")}
    for _ in range(arguments.rounds):
        found[IN_PLACE] += waits(local(job, catalog, count), busy_s)
        found["one ahead, in a thread"] += waits(ahead(local(job, catalog, count)), busy_s)
        with DataClient(address, job.spec, MODULE, 0) as client:
            found["data server"] += waits(iter(client), busy_s)
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=768, help="demo samples to make (default 768)")
    parser.add_argument("--microbatch", type=int, default=16, help="samples of a microbatch (default 16)")
    parser.add_argument("--busy", type=float, default=1.0, help="accelerator time over decoding time (default 1)")
    parser.add_argument("--rounds", type=int, default=3, help="interleaved rounds (default 3)")
    with tempfile.TemporaryDirectory() as folder, Processes() as processes:
        found = measure(Path(folder), processes, parser.parse_args())
    base = statistics.median(found[IN_PLACE])
    for name, values in found.items():
        middle, late = statistics.median(values), statistics.quantiles(values, n=20)[-1]
        times = f"median {middle * 1e3:8.2f} ms, 95th percentile {late * 1e3:8.2f} ms"
        print(f"{name:>24}: {times}; median / {IN_PLACE} {middle / base:.4f}")


if __name__ == "__main__":
    main()
