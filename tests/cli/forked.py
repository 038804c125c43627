"""Processes that fork from one which has imported what they need, and commands as users run them in such processes.

A fork costs milliseconds, an interpreter with its imports one to four seconds of a core.
"""

import multiprocessing
import os
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from multiprocessing.context import ForkServerContext
from pathlib import Path
from subprocess import CompletedProcess

IMPORTED = [
    *(f"dataserver.cli.{command}" for command in ("index", "lint", "plan", "serve")),
    "trainclient.cli",
    "trainclient.training.control",
    "trainclient.training.launch",
]


def forks() -> ForkServerContext:
    """Processes are made of it; whoever asks first starts the one that they fork from."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    return context


def run_forked(
    words: Sequence[str], folder: Path, environment: Mapping[str, str], timeout_s: float
) -> CompletedProcess[str]:
    """Run `dataserver ...` or `trainclient ...` in a folder, which gets its output, with these variables alone.

    Raises:
        TimeoutError: it did not end in time.
    """
    output = [folder / "stdout", folder / "stderr"]
    process = forks().Process(target=_run, args=(list(words), folder, dict(environment), output))
    process.start()
    try:
        process.join(timeout_s)
        if process.exitcode is None:
            raise TimeoutError(f"{words} has not ended after {timeout_s} s: {[path.read_text() for path in output]}")
    finally:
        process.kill()
        process.join()
    return CompletedProcess(words, process.exitcode, *(path.read_text() for path in output))


def _run(words: list[str], folder: Path, environment: Mapping[str, str], output: Sequence[Path]) -> None:
    for number, path in enumerate(output, 1):
        with path.open("w") as file:
            os.dup2(file.fileno(), number)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = words
    sys.exit(import_module(f"{words[0]}.__main__").main())
