"""Times steps of jobs by the trainer's interpreter, with modules that sleep what the planner expects of them.

Forks a process for each rank, so that everything is imported once. Each gets the microbatches of its place from the
data servers before the clock runs, and then runs each step through the interpreter, exchange and messages of the
trainer. All jobs have the same modules, so the same processes run them.
"""

import argparse
import json
import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import wait
from pathlib import Path

import torch
import torch.distributed as dist
from sleeping_modules import WIDTH, Listed, sleeping_module

from dataserver.planning.job.fields import parse_json
from dataserver.planning.job.identity import Job, parse_job
from dataserver.planning.simulation import Operation
from trainclient.client import Batch
from trainclient.modules import Site
from trainclient.program.assembly import assemble
from trainclient.program.clock import Stopwatch
from trainclient.program.interpreter import Interpreter
from trainclient.program.runner import LossWeights
from trainclient.topology.process_grid import Topology
from trainclient.topology.process_groups import Groups, process_groups
from trainclient.training.streams import Streams

TIMEOUT_S = 120.0
"""Longest wait for another process."""


class InStep(Stopwatch):
    """A clock of ranks that run every pass in step: modules that sleep gather no parameters, so these wait here
    instead."""

    def __init__(self, groups: Groups) -> None:
        """Measure an operation of a process whose data-parallel ranks wait for each other."""
        super().__init__(groups.device)
        self._group = groups.data_parallel

    @contextmanager
    def running(self, operation: Operation) -> Iterator[None]:
        """Time an operation that all data-parallel ranks begin and end together."""
        dist.barrier(self._group)
        with super().running(operation):
            yield
        dist.barrier(self._group)


def timed_steps(job: Job, groups: Groups, servers: str, steps: int, scale: int) -> Iterator[float]:
    """Seconds of each of the first `steps` steps, from the moment that all processes begin to the end of the last."""
    topology = Topology.of(job.spec)
    groups = replace(groups, process=topology.processes[groups.rank])  # jobs differ in the policies of their modules
    process = groups.process
    sites = [Site(job.spec, chunk.module, WIDTH, chunk.number, chunk.count) for chunk in process.chunks]
    modules = [(site, sleeping_module(site, scale)) for site in sites]
    clock = InStep(groups) if groups.rank in topology.lockstep_ranks else Stopwatch(groups.device)
    machine = assemble(job.spec, topology, process, modules, groups.communicators, LossWeights(), clock)
    for batches in list(_fetch(job, groups, servers, machine.tensors, steps)):
        yield _run(machine.interpreter, batches, groups)


def _fetch(
    job: Job, groups: Groups, servers: str, tensors: Mapping[str, Sequence[str]], steps: int
) -> Iterator[list[list[Batch]]]:
    """The microbatches of each module of this process, step by step."""
    with Streams.open(servers, job, groups.process, tensors) as streams:
        several = streams.batches(groups)
        while streams.step < min(steps, streams.num_steps):
            yield [_step(batches) for batches in several]


def _step(batches: Iterator[Batch]) -> list[Batch]:
    found = [next(batches)]
    while not found[-1].last_of_step:
        found.append(next(batches))
    return found


def _run(interpreter: Interpreter, batches: list[list[Batch]], groups: Groups) -> float:
    dist.barrier(groups.world)
    started = time.perf_counter()
    interpreter.run([Listed(found) for found in batches])
    seconds = torch.tensor(time.perf_counter() - started)
    dist.all_reduce(seconds, dist.ReduceOp.MAX, group=groups.world)
    return float(seconds)


def parse() -> argparse.Namespace:
    """Read the command line of the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", type=Path, nargs="+", help="complete jobs as JSON, with the same modules")
    parser.add_argument("--servers", required=True, help="HOST:PORT of data servers, with commas between")
    parser.add_argument("--steps", type=int, default=3, help="the first so many steps of each job (default 3)")
    parser.add_argument("--scale", type=int, default=1, help="how many times as long everything sleeps (default 1)")
    parser.add_argument("--output", type=Path, required=True, help="file for the seconds of every step of each job")
    return parser.parse_args()


def main() -> None:
    """Measure every job, in as many processes as it needs."""
    arguments = parse()
    torch.set_num_threads(1)
    jobs = {path.stem: parse_job(parse_json(path.read_text())) for path in arguments.jobs}
    world_size = Topology.of(next(iter(jobs.values())).spec).world_size
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "WORLD_SIZE": str(world_size)}
    os.environ.update(shared | {"GLOO_SOCKET_IFNAME": "lo"})
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=run_rank, args=(rank, arguments, jobs), daemon=True) for rank in range(world_size)]
    for process in ranks:
        process.start()
    while running := [process.sentinel for process in ranks if process.is_alive()]:
        wait(running)
        if any(process.exitcode for process in ranks):
            break
    sys.exit(max(abs(process.exitcode or 0) for process in ranks))  # which ends those that are left


def run_rank(rank: int, arguments: argparse.Namespace, jobs: Mapping[str, Job]) -> None:
    """Measure every job as one of the processes."""
    os.environ["RANK"] = str(rank)
    try:
        _time_all(arguments, jobs)
    except (ValueError, OSError, RuntimeError) as error:
        sys.exit(f"{Path(__file__).name}: {error}")


def _time_all(arguments: argparse.Namespace, jobs: Mapping[str, Job]) -> None:
    found: dict[str, list[float]] = {name: [] for name in jobs}
    with process_groups(Topology.of(next(iter(jobs.values())).spec), torch.device("cpu"), TIMEOUT_S) as groups:
        if groups.rank == 0:
            print("fetching microbatches", flush=True)
        list(timed_steps(next(iter(jobs.values())), groups, arguments.servers, 1, 1))  # imports what a first step does
        for name, job in jobs.items():
            for seconds in timed_steps(job, groups, arguments.servers, arguments.steps, arguments.scale):
                found[name].append(seconds)
                if groups.rank == 0:
                    print(f"{name}: step {len(found[name])} of {arguments.steps} took {seconds:.2f} s", flush=True)
        if groups.rank == 0:
            print("ending the processes", flush=True)
            arguments.output.write_text(json.dumps(found) + "\n")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


if __name__ == "__main__":
    main()
