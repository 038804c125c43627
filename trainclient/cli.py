"""The command line: `trainclient train | export | checkpoints | orchestrate | profile | memory`.

Torch is loaded where nothing is left to refuse without it.
"""

import argparse
import importlib
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import tyro
from pydantic import ValidationError

from dataserver import process
from dataserver.flags import one_line, parse
from trainclient.report import USER_ERROR, report
from trainclient.stream.errors import ClientError
from trainclient.training.config import Config, TrainConfig, checked, describe, load_config, validated
from trainclient.training.config_base import AS_WRITTEN, options_of
from trainclient.training.jobs import prepare

USAGE = """usage: trainclient train --job JOB.yaml --servers HOST:PORT,... [OPTIONS]
       trainclient export --checkpoint FOLDER --output FOLDER [--module NAME] [OPTIONS]
       trainclient checkpoints FOLDER [--verify]
       trainclient orchestrate --backbone MODEL --gpus N --sizes FILE [OPTIONS]
       trainclient profile --backbone MODEL --output FILE [OPTIONS]
       trainclient memory --memory-gb N --job JOB.yaml --servers HOST:PORT,... [OPTIONS]

train        Train the modules of a job on the data that its servers send.
export       Write a checkpoint, or one module of it, as a folder that transformers loads.
checkpoints  List the checkpoints in a folder, who wrote them, and whether they are complete.
orchestrate  Choose a layout and degrees for a model, a cluster and sizes of samples.
profile      Time the modules of a model on this machine's GPU, for orchestrate.
memory       Print the fields `memory` of a job: what its modules may use of a device.

`trainclient COMMAND --help` lists the options.
"""
DESCRIPTION = """Train a job. Without torchrun, all its processes start on this machine. With torchrun, start as many as
the job needs; another number is refused, and the message says how many. Training resumes from the newest checkpoint in
--checkpoint.directory, or as --resume-from says. --config FILE.yaml gives the same options in a file, and settings of
single modules (docs/training.md); flags override it."""

MEMORY = """Print how much memory of a device is left for the activations of each module of a job, as fields `memory` to
put into the job. It asks the servers for the job. All options of `train` are accepted, so you can give those of a run
as they are; below are the ones that matter here. --config FILE.yaml gives the same options in a file; flags override
it."""
EXPORT = """Write an encoder or a backbone of a checkpoint, or both as the whole model from which they started, as
config.json and safetensors that transformers loads."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; an error is one line on stderr and exit code 2 where the user can fix it, otherwise 1."""
    return process.with_output(
        lambda: _main(list(sys.argv[1:] if arguments is None else arguments)),
        lambda error: report("trainclient", error, USER_ERROR),
    )


def _main(given: list[str]) -> int:
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if not given or given[0] in ("-h", "--help"):
        sys.stdout.write(USAGE)
        return 0 if given else USER_ERROR
    if given[0] not in COMMANDS:
        problem = ValueError(f"there is no command {given[0]!r}; use {', '.join(list(COMMANDS)[:-1])} or memory")
        return report("trainclient", problem, USER_ERROR)
    _do_without_temporary_folder()
    try:
        return COMMANDS[given[0]](given[1:])
    except BrokenPipeError:
        raise
    except (ValueError, OSError, ClientError) as error:
        return report("trainclient", error, USER_ERROR)
    except KeyboardInterrupt as error:
        return process.ended("trainclient", error)


def _do_without_temporary_folder() -> None:
    """Where there is none, name torch another folder for what it compiles, which it looks for as it is loaded.

    Nothing is written there unless blocks are compiled.
    """
    try:
        tempfile.gettempdir()
    except OSError:
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", os.sep)


def _train(arguments: Sequence[str]) -> int:
    config = _parse(arguments, TrainConfig, TrainConfig, "train", DESCRIPTION)
    if "RANK" in os.environ:
        from trainclient.training.worker import run_worker

        process.imports_are_over()
        return run_worker(config)
    jobs, topology = prepare(config)
    from trainclient.training.launch import launch

    process.imports_are_over()
    return launch(config, jobs, topology, ["train", *arguments])


def _memory(arguments: Sequence[str]) -> int:
    from trainclient.training.memory_command_config import SHOWN, MemoryConfig

    config = _parse(arguments, MemoryConfig, SHOWN, "memory", MEMORY)
    memory_bytes = config.memory_bytes
    jobs, topology = prepare(config)
    from trainclient.training.memory_need import as_yaml, needs
    from trainclient.training.models import Models

    process.imports_are_over()
    sys.stdout.write(as_yaml(needs(Models.of(config, jobs.training.spec), topology, memory_bytes)))
    return 0


def _parse(
    arguments: Sequence[str],
    kind: type[Config],
    shown: type[Config],
    command: str,
    about: str,
) -> Config:
    """The configuration of a run from `--config` and the flags; help lists the options of `shown`."""
    files = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    files.add_argument("--config", type=Path)
    found, flags = files.parse_known_args(arguments)
    default = kind() if found.config is None else validated(load_config(found.config), kind)

    def parsed(given: Sequence[str]) -> Config:
        helps = not {"-h", "--help"}.isdisjoint(given)
        return tyro.cli(
            shown if helps else kind,
            prog=f"trainclient {command}",
            description=one_line(about),
            args=given,
            default=shown.model_validate(dict(default)) if helps else default,
            config=AS_WRITTEN,
        )

    try:
        found_config: Config = parse(parsed, flags, f"trainclient {command}")
        return checked(found_config)
    except ValidationError as error:
        raise ValueError(describe(error)) from None


def _export(arguments: Sequence[str]) -> int:
    from trainclient.checkpoint.export import ExportConfig, export

    process.imports_are_over()
    config = options_of(ExportConfig, "export", EXPORT, arguments)
    left = export(config)
    sys.stdout.write(f"{config.module or 'the model'} is in {config.output}\n")
    if left:
        sys.stdout.write(f"left out, since such a model has no parameters for them: {', '.join(left)}\n")
    return 0


def _main_of(module: str, arguments: Sequence[str]) -> int:
    """A command that is the `main` of a module, which is loaded now."""
    command: Callable[[Sequence[str]], int] = importlib.import_module(module).main
    process.imports_are_over()
    return command(arguments)


COMMANDS: Final[Mapping[str, Callable[[Sequence[str]], int]]] = {
    "train": _train,
    "export": _export,
    "checkpoints": partial(_main_of, "trainclient.checkpoint.listing"),
    "orchestrate": partial(_main_of, "trainclient.orchestrate.command"),
    "profile": partial(_main_of, "trainclient.orchestrate.profile_command"),
    "memory": _memory,
}
