"""Starts the processes of `measure_steps`, and gives what they measured."""

import json
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

from demo_processes import Processes, python

from dataserver.planning.identity import Job, parse_job
from dataserver.planning.jobspec import parse_json
from trainclient.topology.places import Topology


def slept_steps(
    processes: Processes,
    jobs: Sequence[Path],
    *,
    servers: str,
    steps: int,
    scale: int,
    output: Path,
    say: Callable[[str], None],
) -> dict[str, list[float]]:
    """Seconds of every step of every job, by the name of its file, run by processes that sleep.

    Arguments are those of `measure_steps`; `say` gets a line for each step.

    Raises:
        FailedError: a process failed.
    """
    world_size = Topology.of(read_job(jobs[0]).spec).world_size
    flags = ["--servers", servers, "--steps", steps, "--scale", scale, "--output", output]
    command = python("measure_steps.py", *jobs, *flags)
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "WORLD_SIZE": str(world_size)}
    shared |= {"GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        processes.start(f"{output.stem} {rank}", command, {**shared, "RANK": str(rank)}) for rank in range(world_size)
    ]
    processes.run(ranks, say)
    found: dict[str, list[float]] = json.loads(output.read_text())
    return found


def read_job(file: Path) -> Job:
    """A complete job, written as JSON."""
    return parse_job(parse_json(file.read_text()))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
