#!/usr/bin/env python
"""What one client waits while others do their worst: odd jobs as large as a server takes, created, opened, cancelled.

A neighbour opens streams of an ordinary job at steps that nobody planned yet, and reads them; alone, and then beside
clients that each bring one odd job after the other, open streams of it and cancel them. Printed is how much longer the
neighbour waits for a microbatch: the first of a stream, which takes a plan, and any other. Crowds are one client each,
with 52 streams of one job that it never reads, or opens anew every 4 s. All clients are sent chunks over gRPC;
turns are taken at planning, laying out and decoding, before it matters how payloads go.

Before, each odd job is planned here, without a server: the longest stretch without a yield point, in CPU time, which
others on the machine change less than waits. While it lasts nobody else has a turn.

--held-out takes other shards, another neighbour, and odd jobs that are half as large.
"""

import argparse
import gc
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
from benchmarks import calibration
from benchmarks.rows import Row
from demo_parts.processes import Processes
from disttrain.v1 import data_service_pb2 as pb
from disttrain.v1.data_service_pb2_grpc import DataServiceStub

from dataserver.cli.jobs import DataFlags, open_job
from dataserver.planning import yielding_to
from dataserver.planning.planner import plan_step

GROWTH = 3.0
"""The neighbour's 99th percentile beside odd jobs, over the one when it is alone, at most."""
STRETCH_MS = 60.0
"""CPU time between two yield points, at most: three times that after which others begin beside it."""
TIMEOUT_S = 600.0
ODD_STREAMS = 5
ODD_S = 1.5
"""Time after which an odd client cancels its streams."""
CROWD = 52
CROWDS = {"52 unread streams": TIMEOUT_S, "52 streams opened anew": 4.0}
"""Seconds after which a client with so many streams of one job cancels them all and opens others, by name."""
Data = dict[str, Any]


def job(modules: list[Data], layout: Data | None = None, microbatch: int = 1, **stream: Any) -> Data:
    """A job of endless steps over `pairs`."""
    execution: Data = {"modules": modules, "microbatch": microbatch, "end": {"steps": 1_000_000}}
    if layout is not None:
        execution["layout"] = layout
    return {"stream": {"datasets": [{"name": "pairs"}], "seq_len": 512, **stream}, "execution": execution}


def neighbour(held_out: bool) -> Data:
    """An ordinary job: a step of a few dozen samples."""
    modules: list[Data] = [{"name": "vit", "kind": "encoder"}, {"name": "llm", "kind": "backbone", "dp": 2, "pp": 2}]
    return job(modules, global_batch=24, seed=1) if held_out else job(modules, global_batch=16)


def odd_jobs(held_out: bool) -> dict[str, Data]:
    """The most that a job of each layout may ask for, or near it: many ranks, many microbatches, little memory."""
    part = 2 if held_out else 1
    encoder: Data = {"name": "vit", "kind": "encoder"}
    backbone: Data = {"name": "llm", "kind": "backbone"}
    memory: Data = {"memory": {"budget_bytes": 2048, "unit_bytes": 1}}
    tower: Data = {"kind": "tower", "dp": 64}
    towers = [{"name": "vision", "modality": "image", **tower}, {"name": "text", "modality": "text", **tower}]
    exchange = [{"degree": 1 << p, "unit_ps": 1000} for p in range(1, 5)]
    return {
        "many ranks": job([encoder, {**backbone, "dp": 16384 // part}], global_batch=65_536 // part),
        "many microbatches": job([encoder, {**backbone, "dp": 8 * part, "pp": 4}], global_batch=32_768),
        "little memory": job(
            [{**encoder, **memory, "dp": 16}, {**backbone, **memory, "dp": 64 // part}], global_batch=32_768 // part
        ),
        "colocated": job(
            [{**encoder, "dp": 2048 // part}, {**backbone, "dp": 2048 // part}],
            {"kind": "colocated", "ranks_per_node": 8},
            global_batch=32_768 // part,
        ),
        "grouped": job(
            [{**encoder, "dp": 8}, {**backbone, "dp": 64 // part, **memory}],
            {"kind": "grouped", "max_degree": 16, "exchange": exchange},
            global_batch=8192 // part,
        ),
        "contrastive": job(
            towers,
            {"kind": "contrastive", "microbatches": 64 // part},
            global_batch=65_536 // part,
            contrastive_batch=32_768 // part,
            packing={"enabled": False},
        ),
    }


def create(stub: DataServiceStub, data: Data) -> str:
    """Bring a job to the server, and return its id."""
    request = pb.GetOrCreateJobRequest(job_spec_json=json.dumps(data))
    return stub.GetOrCreateJob(request, timeout=TIMEOUT_S).job_id


def request_of(job_id: str, data: Data, step: int) -> pb.StreamMicrobatchesRequest:
    """A stream of the job's first module."""
    module = data["execution"]["modules"][0]["name"]
    return pb.StreamMicrobatchesRequest(job_id=job_id, module=module, rank=0, start_step=step)


def be_odd(address: str, name: str, number: int, held_out: bool) -> None:
    """Bring one job after the other, open streams at several steps and cancel them, for ever."""
    data = odd_jobs(held_out)[name]
    with grpc.insecure_channel(address) as channel:
        stub = DataServiceStub(channel)
        for seed in itertools.count(number << 20):
            data["stream"]["seed"] = seed
            try:
                job_id = create(stub, data)
                streams = [stub.StreamMicrobatches(request_of(job_id, data, step)) for step in range(ODD_STREAMS)]
                plan = stub.GetPlan.future(pb.GetPlanRequest(job_id=job_id, step=ODD_STREAMS), timeout=ODD_S)
            except grpc.RpcError as error:
                print(f"odd job {name}: {error.code()} {error.details()}", flush=True)
                if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
                    return
                continue
            time.sleep(ODD_S)
            for stream in (*streams, plan):
                stream.cancel()


def crowd(address: str, again_s: float) -> None:
    """Open a stream for each rank of a job and read none, again and again, for ever."""
    modules: list[Data] = [{"name": "vit", "kind": "encoder", "dp": CROWD}, {"name": "llm", "kind": "backbone"}]
    with grpc.insecure_channel(address) as channel:
        stub = DataServiceStub(channel)
        job_id = create(stub, job(modules, microbatch=CROWD, global_batch=2 * CROWD, seed=2))
        for step in itertools.count():
            requests = [
                pb.StreamMicrobatchesRequest(job_id=job_id, module="vit", rank=rank, start_step=step)
                for rank in range(CROWD)
            ]
            streams = [stub.StreamMicrobatches(request) for request in requests]
            time.sleep(again_s)
            for stream in streams:
                stream.cancel()


def waits(stub: DataServiceStub, job_id: str, steps: Iterator[int], count: int) -> tuple[list[float], list[float]]:
    """Seconds until the first microbatch of `count` new streams, and between those that follow in the step."""
    first, others = list[float](), list[float]()
    data = neighbour(held_out=False)  # its modules are those of the held-out variant
    for step in itertools.islice(steps, count):
        before = time.perf_counter()
        stream, found = stub.StreamMicrobatches(request_of(job_id, data, step), timeout=TIMEOUT_S), first
        for message in stream:
            if message.HasField("header"):
                if message.header.step != step:
                    stream.cancel()
                    break
                left = message.header.total_bytes
            else:
                left -= len(message.chunk)
            if not left:
                now = time.perf_counter()
                found.append(now - before)
                before, found = now, others
    return first, others


def fairness_rows(folder: Path, processes: Processes, arguments: argparse.Namespace) -> list[Row]:
    """Measure a neighbour's waits, and yield the rows."""
    shards = folder / "shards"
    processes.indexed_pairs(shards, "--samples", 512, "--shards", 4, "--seed", int(arguments.held_out))
    address = processes.serve_pairs(shards)
    odd = [name for name in arguments.odd if name not in CROWDS]
    rows, steps = list(stretches(shards, odd, arguments.held_out)), itertools.count()
    with grpc.insecure_channel(address) as channel:
        stub = DataServiceStub(channel)
        job_id = create(stub, neighbour(arguments.held_out))
        waits(stub, job_id, steps, 3)
        alone = waits(stub, job_id, steps, arguments.streams)
        rows.append(Row("alone, as all here sent chunks over gRPC", shown(*alone), "", None))
        for name in arguments.odd:
            with ExitStack() as stack:
                clients = 1 if name in CROWDS else arguments.clients
                for number in range(clients):
                    start_odd(stack, address, name, number, arguments.held_out)
                time.sleep(ODD_S)
                beside = waits(stub, job_id, steps, arguments.streams)
            ratio = p99(beside) / p99(alone)
            text = f"{shown(*beside)}; {ratio:.2f} x"
            rows.append(Row(f"beside {clients} clients: {name}", text, f"<= {GROWTH} x", ratio <= GROWTH))
    return rows


def stretches(shards: Path, names: Sequence[str], held_out: bool) -> Iterator[Row]:
    """Rows of the longest stretch that planning a step of each odd job keeps its turn for."""
    gc.freeze()  # as a server does: what imports made is not looked through for garbage
    for name in names:
        file = shards.parent / "odd.json"
        file.write_text(json.dumps(odd_jobs(held_out)[name]))
        planner = open_job(file, DataFlags((f"pairs={shards}",)))
        plan_step(planner.job, 0, planner.samples(0))  # loads the loops
        ended: list[float] = []
        with yielding_to(lambda: ended.append(time.thread_time())):  # noqa: B023
            before = calibration.slowdown()
            ended.append(time.thread_time())
            plan_step(planner.job, 1, planner.samples(1))
            ended.append(time.thread_time())
        slower = statistics.fmean((before, calibration.slowdown()))
        longest = max(b - a for a, b in pairwise(ended)) * 1e3 / slower
        text = f"{longest:.0f} ms of {(ended[-1] - ended[0]) / slower:.1f} CPU-s, {len(ended) - 1:,} stretches"
        yield Row(f"longest stretch: {name}", text, f"<= {STRETCH_MS:.0f} ms", longest <= STRETCH_MS)


def start_odd(stack: ExitStack, address: str, name: str, number: int, held_out: bool) -> None:
    """An odd client in a process of its own, until the stack ends."""
    command = [sys.executable, __file__, "--be-odd", address, name, str(number), *["--held-out"] * held_out]
    process = stack.enter_context(subprocess.Popen(command))
    stack.callback(process.kill)


def p99(found: tuple[list[float], list[float]]) -> float:
    """99th percentile of all waits."""
    return statistics.quantiles([*found[0], *found[1]], n=100)[-1]


def shown(first: list[float], others: list[float]) -> str:
    """Show waits in words."""
    both = p99((first, others))
    parts = [
        f"{name} {statistics.median(w) * 1e3:.0f} (worst {max(w) * 1e3:.0f}) ms"
        for name, w in (("first", first), ("next", others))
    ]
    return f"{', '.join(parts)}, 99th percentile {both * 1e3:.0f} ms"


def main() -> int:
    """Measure waits and stretches, and print the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--streams", type=int, default=60, help="streams that the neighbour opens in each round (default 60)"
    )
    parser.add_argument("--clients", type=int, default=3, help="odd clients at once (default 3)")
    names = [*odd_jobs(held_out=False), *CROWDS]
    parser.add_argument("--odd", nargs="+", choices=names, default=names, help="odd jobs (default all)")
    parser.add_argument("--held-out", action="store_true", help="other shards and jobs of other sizes")
    parser.add_argument("--be-odd", nargs=3, metavar=("ADDRESS", "JOB", "NUMBER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.be_odd:
        address, name, number = arguments.be_odd
        if name in CROWDS:
            crowd(address, CROWDS[name])
        be_odd(address, name, int(number), arguments.held_out)
        return 0
    with tempfile.TemporaryDirectory() as folder, Processes(Path(folder)) as processes:
        rows = fairness_rows(Path(folder), processes, arguments)
    for row in rows:
        verdict = "" if row.reached is None else "reached" if row.reached else "MISSED"
        print(f"{row.name:40} {row.measured}; target {row.target} {verdict}")
    return int(any(row.reached is False for row in rows))


if __name__ == "__main__":
    sys.exit(main())
