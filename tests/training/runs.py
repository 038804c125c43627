"""`trainclient train` as its users start it, over a real server."""

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
import yaml
from cli.forked import RANK_NAME, ForkedRun, run_forked
from program.runtime_cases import Degrees, job_data
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

TIMEOUT_S = 400
"""Far above what a run takes; less than tests may."""


@dataclass(frozen=True)
class Run:
    """Where a run reads and writes."""

    servers: str
    folder: Path

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def temporary(self) -> Path:
        """The temporary folder of runs to their end."""
        return self.folder / "temporary"

    def command(self, degrees: Degrees, *options: str, stream: dict[str, Any] | None = None) -> list[str]:
        """The command line of a run in float64 that saves every step."""
        self.folder.mkdir(parents=True, exist_ok=True)
        job = self.folder / "job.yaml"
        data = job_data(degrees, **(stream or {}))
        data["execution"]["end"] = {"steps": 1000}
        job.write_text(yaml.safe_dump(data))
        common = ["--job", str(job), "--servers", self.servers, "--metrics", str(self.folder / "metrics.jsonl")]
        common += ["--dtype", "float64", "--optimizer.lr", "0.01", "--threads", "1"]
        common += ["--checkpoint.directory", str(self.checkpoints), "--checkpoint.every", "1"]
        return [sys.executable, "-m", "trainclient", "train", *common, *options]

    def start(self, command: Sequence[str]) -> subprocess.Popen[str]:
        """Start a run as users do: launcher and ranks are interpreters, which import torch for seconds each."""
        return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=variables())

    def start_forked(self, command: Sequence[str]) -> ForkedRun:
        """Start the same run with a launcher and ranks that are forked."""
        return ForkedRun(command[2:], self.folder, variables())

    def train(self, degrees: Degrees, *options: str, stream: dict[str, Any] | None = None) -> tuple[int, str]:
        """Run to the end; exit code and stderr. Launcher and ranks are forked."""
        words = self.command(degrees, *options, stream=stream)[2:]
        self.temporary.mkdir(exist_ok=True)
        done = run_forked(words, self.folder, variables() | {"TMPDIR": str(self.temporary)}, TIMEOUT_S)
        return done.returncode, done.stderr

    def metrics(self) -> list[dict[str, Any]]:
        """All steps, in the order in which they were run."""
        return steps_of(self.folder / "metrics.jsonl")


def steps_of(metrics: Path) -> list[dict[str, Any]]:
    """The steps of a metrics file, without the times of its runs."""
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [line for line in lines if "run_times" not in line]


def variables() -> dict[str, str]:
    """Of a run, which finds modules of the tests' own."""
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    path = (environment.get("PYTHONPATH", ""), str(Path(__file__).parents[1]))
    return environment | {"PYTHONPATH": os.pathsep.join(part for part in path if part)}


def stored(checkpoint: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint, by their names."""
    entries = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # torch warns of what no_dist asks for
        load(tensors, checkpoint_id=checkpoint, no_dist=True)
    return tensors


def descendants(process: "subprocess.Popen[str] | ForkedRun") -> list[psutil.Process]:
    """The processes of a run besides the launcher: one for each rank, in order."""
    found = psutil.Process(process.pid).children(recursive=True)
    if isinstance(process, ForkedRun):  # also what ranks fork from
        found = [child for child in found if child.name().startswith(RANK_NAME)]
        return sorted(found, key=lambda p: int(p.name().removeprefix(RANK_NAME)))
    return sorted(found, key=lambda p: int(p.environ()["RANK"]))


def kill_tree(process: "subprocess.Popen[str] | ForkedRun") -> None:
    """Leave nothing behind, whatever happened."""
    if process.poll() is None:
        for child in psutil.Process(process.pid).children(recursive=True):
            child.kill()
        process.kill()
    process.wait()


def read_until(process: "subprocess.Popen[str] | ForkedRun", beginning: str) -> None:
    """Wait for a line on stderr."""
    assert process.stderr is not None
    seen = []
    for line in process.stderr:
        seen.append(line)
        if line.startswith(beginning):
            return
    raise AssertionError("".join(seen))
