"""Times steps of jobs by the trainer's executor, with modules that sleep what the planner expects of them.

This is one process of the run. It joins the others through torchrun's environment variables, gets the microbatches of
its place from the data servers before the clock runs, and then runs each step through the executor, roles and messages
of the trainer. All jobs have the same modules, so the same processes run them.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import torch
import torch.distributed as dist
from sleeping_modules import sleeping_module

from dataserver.planning.identity import Job, parse_job
from dataserver.planning.jobspec import parse_json
from trainclient.client import Batch, DataClient
from trainclient.parallel.assembly import build_executor, build_role
from trainclient.parallel.executor import StepExecutor
from trainclient.parallel.groups import Groups, process_groups
from trainclient.parallel.roles import LossWeights
from trainclient.parallel.topology import Topology

TIMEOUT_S = 120.0
"""Longest wait for another process."""


def measure(job: Job, groups: Groups, servers: str, steps: int, scale: int) -> Iterator[float]:
    """Seconds of each of the first `steps` steps, from the moment that all processes begin to the end of the last."""
    topology = Topology.of(job.spec)
    groups = replace(groups, place=topology.places[groups.rank])  # jobs differ in the policies of their modules
    module = sleeping_module(groups.place, job.stream.sizing.merge, scale)
    role = build_role(job.spec, topology, groups, module, LossWeights())
    executor = build_executor(job.spec, topology, groups, role)
    for batches in list(_fetch(job, groups, servers, role.tensors, steps)):
        yield _run(executor, batches, groups)


def _fetch(job: Job, groups: Groups, servers: str, tensors: Sequence[str], steps: int) -> Iterator[list[Batch]]:
    """The microbatches of this process, step by step."""
    batches: list[Batch] = []
    with DataClient(servers, job, groups.place.module.name, groups.place.rank, tensors=tensors) as client:
        while client.step < min(steps, client.num_steps):
            batches.append(next(client))
            if batches[-1].last_of_step:
                yield batches
                batches = []


def _run(executor: StepExecutor, batches: list[Batch], groups: Groups) -> float:
    dist.barrier(groups.world)
    started = time.perf_counter()
    executor.run(iter(batches))
    seconds = torch.tensor(time.perf_counter() - started)
    dist.all_reduce(seconds, dist.ReduceOp.MAX, group=groups.world)
    return float(seconds)


def parse() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", type=Path, nargs="+", help="complete jobs as JSON, with the same modules")
    parser.add_argument("--servers", required=True, help="HOST:PORT of data servers, with commas between")
    parser.add_argument("--steps", type=int, default=3, help="the first so many steps of each job (default 3)")
    parser.add_argument("--scale", type=int, default=1, help="how many times as long everything sleeps (default 1)")
    parser.add_argument("--output", type=Path, required=True, help="file for the mean seconds of a step of each job")
    return parser.parse_args()


def main() -> None:
    """Measure every job."""
    arguments = parse()
    torch.set_num_threads(1)
    jobs = {path.stem: parse_job(parse_json(path.read_text())) for path in arguments.jobs}
    means: dict[str, float] = {}
    with process_groups(Topology.of(next(iter(jobs.values())).spec), torch.device("cpu"), TIMEOUT_S) as groups:
        if groups.rank == 0:
            print("fetching microbatches", flush=True)
        list(measure(next(iter(jobs.values())), groups, arguments.servers, 1, 1))  # imports what a first step does
        for name, job in jobs.items():
            found = []
            for seconds in measure(job, groups, arguments.servers, arguments.steps, arguments.scale):
                found.append(seconds)
                if groups.rank == 0:
                    print(f"{name}: step {len(found)} of {arguments.steps} took {seconds:.2f} s", flush=True)
            means[name] = fmean(found)
        if groups.rank == 0:
            print("ending the processes", flush=True)
            arguments.output.write_text(json.dumps(means) + "\n")


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError, RuntimeError) as error:
        sys.exit(f"{Path(__file__).name}: {error}")
