"""The command line: `trainclient train`."""

import argparse
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import tyro
from pydantic import ValidationError

from trainclient.flags import parse
from trainclient.parallel.transport import PeerLostError
from trainclient.stream.errors import ClientError
from trainclient.training.config import TrainConfig, describe, load_config, validate_config
from trainclient.training.launch import launch
from trainclient.training.loop import TrainingError
from trainclient.training.rank import Process, run_rank
from trainclient.training.signals import StopSignals

_log = logging.getLogger(__name__)

COMMANDS = """usage: trainclient train --job JOB.yaml --servers HOST:PORT,... [OPTIONS]

Runs beside the GPUs: trains the modules of a job on what its data servers send.
`trainclient train --help` lists the options.
"""
DESCRIPTION = """Train a job. Without torchrun, all its processes start on this machine; under torchrun, as many must
be started as the job's modules have ranks and stages in all. Training resumes from the newest checkpoint in
--checkpoint.directory. --config FILE.yaml gives the same options in a file; flags overrule it."""

USER_ERROR = 2
FAILURE = 1
INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; an error is one line on stderr and exit code 2 where the user can fix it, otherwise 1."""
    if callable(signal.getsignal(signal.SIGINT)):
        signal.signal(signal.SIGINT, signal.default_int_handler)  # imports are over: commands clean up
    given = list(sys.argv[1:] if arguments is None else arguments)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if not given or given[0] in ("-h", "--help"):
        sys.stdout.write(COMMANDS)
        return 0 if given else USER_ERROR
    if given[0] != "train":
        return _report("trainclient", ValueError(f"there is no command {given[0]!r}; use train"), USER_ERROR)
    try:
        config = _parse(given[1:])
    except ValueError as error:
        return _report("trainclient", error, USER_ERROR)
    if "RANK" in os.environ:
        return _run_rank(config)
    try:
        return launch(config, given)
    except (ValueError, ClientError) as error:
        return _report("trainclient", error, USER_ERROR)
    except KeyboardInterrupt:
        sys.stderr.write("trainclient: interrupted\n")
        return INTERRUPTED


def _parse(arguments: Sequence[str]) -> TrainConfig:
    """The configuration from `--config` and the flags."""
    files = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    files.add_argument("--config", type=Path)
    found, flags = files.parse_known_args(arguments)
    default = validate_config(load_config(found.config)) if found.config is not None else TrainConfig()
    try:
        found_config: TrainConfig = parse(
            lambda given: tyro.cli(
                TrainConfig,
                prog="trainclient train",
                description=DESCRIPTION,
                args=given,
                default=default,
                config=(tyro.conf.EnumChoicesFromValues, tyro.conf.DisallowNone),
            ),
            flags,
            "trainclient train",
        )
        return found_config
    except ValidationError as error:
        raise ValueError(describe(error)) from None


def _run_rank(config: TrainConfig) -> int:
    """Train as one of torchrun's processes.

    After a failure the process ends at once: an orderly exit may wait for processes that are gone. Signals stay noted
    until then, because torchrun ends the others as soon as the first one is gone.
    """
    with StopSignals(config.stop_grace_s) as stop:
        try:
            run_rank(config, Process.from_environment(os.environ), stop)
        except Exception as error:
            code = _explain(error, os.environ["RANK"], stop)
            sys.stderr.flush()
            os._exit(code)
    return 0


def _explain(error: Exception, rank: str, stop: StopSignals) -> int:
    """Say on stderr why a rank fails, unless another rank or the user has the reason; returns the exit code."""
    name = f"trainclient rank {rank}"
    if isinstance(error, TrainingError):  # all ranks raise it
        return _report("trainclient", error, FAILURE) if rank == "0" else FAILURE
    if isinstance(error, PeerLostError) and stop.requested:
        return FAILURE
    if isinstance(error, ValueError):
        return _report(name, error, USER_ERROR)
    if isinstance(error, RuntimeError | OSError):
        return _report(name, error, FAILURE)
    _log.critical("%s has a defect", name, exc_info=error)
    return FAILURE


def _report(name: str, error: Exception, code: int) -> int:
    _log.debug("failed", exc_info=error)
    sys.stderr.write(f"{name}: {' '.join(str(error).split())}\n")
    return code
