"""Starts `time_steps`, and gives what it measured."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from demo_parts.processes import Processes, python

from dataserver.planning.job.fields import parse_json
from dataserver.planning.job.identity import Job, parse_job


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
    """Seconds of every step of every job, by the name of its file, run in processes that sleep.

    Arguments are those of `time_steps`; `say` gets a line for each step.

    Raises:
        FailedError: it failed.
    """
    flags = ["--servers", servers, "--steps", steps, "--scale", scale, "--output", output]
    processes.run([processes.start(output.stem, python("time_steps.py", *jobs, *flags))], say)
    found: dict[str, list[float]] = json.loads(output.read_text())
    return found


def read_job(file: Path) -> Job:
    """A complete job, written as JSON."""
    return parse_job(parse_json(file.read_text()))
