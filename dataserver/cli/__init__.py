"""The command line of servers: `dataserver index`, `lint`, `describe` and what else `COMMANDS` lists."""

import gc
import logging
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple

from dataserver import process
from dataserver.cli import logs

_log = logging.getLogger(__name__)

DESCRIPTION = "The CPU side of multimodal training: it reads shards, plans steps, and serves them over gRPC."
USER_ERROR = 2


class Command(NamedTuple):
    """A subcommand; its module is imported when it is called."""

    function: str
    about: str
    begins: str
    """What it does first, said at once: its imports alone take a second."""
    plans: bool = False
    """Whether it waits for compiled kernels."""


COMMANDS = {
    "index": Command("index", "Index datasets and count their tokens.", "reading the shards"),
    "lint": Command("lint", "List the findings of a dataset.", "checking the shards against their index"),
    "convert": Command("convert", "Rewrite a dataset of another format as tars.", "looking for files to convert"),
    "plan": Command("plan", "Show how one step is planned.", "reading the job and its datasets' indexes", True),
    "simulate": Command("simulate", "Compare ways to plan a job.", "reading the job and its datasets' indexes", True),
    "fit": Command("fit_costs", "Fit a job's costs to measured times.", "reading the job and its step times", True),
    "towers": Command("towers", "Choose degrees for contrastive towers.", "reading the job", True),
    "describe": Command("describe", "Show what a dataset holds.", "reading the dataset's index"),
    "sizes": Command("sizes", "Count samples by size, for orchestrate.", "reading the dataset's index"),
    "serve": Command("serve", "Serve microbatches over gRPC.", "opening the datasets, then listening"),
    "ray": Command("ray", "Run a fleet on a Ray cluster.", "looking for the cluster"),
    "top": Command("top", "Watch a fleet of servers.", "asking the servers"),
    "web": Command("web", "Show a fleet, samples and plans in a browser.", "asking the servers"),
    "doctor": Command("doctor", "Find what is wrong with a fleet, and how to mend it.", "asking the servers"),
    "bench": Command("bench", "Measure how many cores serving a dataset needs.", "opening the dataset"),
    "warm": Command("warm", "Compile the kernels ahead of time.", "looking for compiled kernels"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; what the user can put right is one line on stderr and exit code 2."""
    return process.with_output(lambda: _main(arguments), _report)


def _main(arguments: Sequence[str] | None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    logs.start(given)
    if not given or given[0] in ("-h", "--help"):
        print(_usage(), file=sys.stdout if given else sys.stderr)
        return 0 if given else USER_ERROR
    command = COMMANDS.get(given[0])
    if command is None:
        from dataserver.flags import nearest

        hint = nearest(given[0], list(COMMANDS))
        return _report(ValueError(f"there is no command {given[0]!r}{hint}; `dataserver --help` lists all"))
    if "-h" not in given and "--help" not in given:
        _say(given[0], command.begins)
    try:
        return _run(given[0], command, given[1:])
    except KeyboardInterrupt as error:
        return process.ended("dataserver", error)


def _run(name: str, command: Command, arguments: list[str]) -> int:
    from dataserver.cli.parsing import parse
    from dataserver.serving.errors import DataServiceError

    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")  # else it reads what every installed package offers
    gc.disable()  # what imports make stays: to look for garbage in it, again and again, took a seventh of their time
    try:
        function = getattr(import_module(f"dataserver.cli.{name}"), command.function)
    finally:
        gc.freeze()
        gc.enable()
    process.imports_are_over()
    try:
        ready = parse(function, f"dataserver {name}", arguments)
        if command.plans:
            _about_compiling(name)
        code: int | None = ready()
    except BrokenPipeError:
        raise
    except MemoryError as error:
        return _report(
            MemoryError(f"not enough memory ({error}): use a machine with more, or fewer --workers or threads")
        )
    except (ValueError, OSError, DataServiceError) as error:
        return _report(error)
    return code or 0


def _about_compiling(name: str) -> None:
    """On a new machine, say why planning takes long."""
    from dataserver.planning.kernels import cache

    if not cache.is_complete():
        _say(name, cache.COMPILING)


def _say(name: str, what: str) -> None:
    if logs.writes_json():
        _log.info("%s: %s", name, what)
    else:
        print(f"{name}: {what}", file=sys.stderr, flush=True)


def _usage() -> str:
    lines = [f"  {name:10}{command.about}" for name, command in COMMANDS.items()]
    about = ["usage: dataserver COMMAND [OPTIONS]", "", DESCRIPTION, ""]
    return "\n".join([*about, *lines, "", "`dataserver COMMAND --help` says more."])


def _report(error: Exception) -> int:
    _log.debug("failed", exc_info=error)
    message = process.in_one_line(error)
    if logs.writes_json():
        _log.error("%s", message)
    else:
        print(f"dataserver: {message}", file=sys.stderr)
    return USER_ERROR
