"""Examples of the documentation, run as they stand, in real processes, over a server."""

import os
import re
import runpy
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from adapters import recording
from adapters.recording import Sample, images_in, num_ranks_in, recorded
from cli.forked import forks, run_script
from ports import free_ports
from training.runs import kill_tree

DOCUMENT = Path(__file__).parents[2] / "docs" / "adapters.md"
MAX_LINES = 30
TIMEOUT_S = 400


def example(naming: str) -> str:
    """The script in the documentation that names something; it is short, blank lines aside."""
    (found,) = [e for e in re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL) if naming in e]
    assert sum(bool(line.strip()) for line in found.splitlines()) <= MAX_LINES
    return found


def variables() -> dict[str, str]:
    """Of a process that imports what this one does; packages come first from its own environment."""
    paths = [path for path in sys.path if "site-packages" not in path]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


@dataclass
class ExampleRun:
    """A run of an example, which may be killed and started again.

    Its arguments are the server if it has one, the job, the model if it has one, and where it writes.
    """

    script: str
    server: str | None
    model: Path | None
    folder: Path
    job: Callable[[int], dict[str, Any]]
    """For a number of ranks."""
    python: Path = Path(sys.executable)
    starts: list[Path] = field(default_factory=list)
    """Where the microbatches of each start are recorded."""

    @property
    def out(self) -> Path:
        """What the example writes."""
        return self.folder / "out"

    def start(self, ranks: int, last_step: int = -1) -> "subprocess.Popen[str]":
        """Start it in so many processes, which may stop for ever where they read a step."""
        self.starts.append(self.folder / f"start{len(self.starts)}")
        self.starts[-1].mkdir(parents=True)
        line = [str(self.python), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        line += [recording.__file__, str(self.starts[-1]), str(last_step)]
        return subprocess.Popen(
            [*line, *self._words(ranks)],
            cwd=self.folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=variables(),
        )

    def _words(self, ranks: int) -> list[str]:
        """The script and its arguments."""
        self.folder.mkdir(parents=True, exist_ok=True)
        script, job = self.folder / "train.py", self.folder / "job.yaml"
        script.write_text(self.script)
        job.write_text(yaml.safe_dump(self.job(ranks)))
        given = [script, self.server, job, self.model, self.out]
        return [str(argument) for argument in given if argument is not None]

    def finish_here(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Run it on one rank to its end in this process, which has imported what it needs."""
        words = self._words(1)
        monkeypatch.setattr(sys, "argv", words)
        runpy.run_path(words[0], run_name="__main__")

    def finish_forked(self, ranks: int) -> None:
        """Run it to its end in ranks that are forked from a process which has imported torch, without a launcher."""
        words, (port,) = self._words(ranks), free_ports(1)
        rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
        given = [
            {**variables(), **rendezvous, "LOCAL_WORLD_SIZE": str(ranks), "RANK": str(rank), "LOCAL_RANK": str(rank)}
            for rank in range(ranks)
        ]
        logs = [self.folder / f"rank{rank}.stderr" for rank in range(ranks)]
        processes = [forks().Process(target=run_script, args=(words, *each)) for each in zip(given, logs, strict=True)]
        try:
            for process in processes:
                process.start()
            for process in processes:
                process.join(TIMEOUT_S)
        finally:
            for process in processes:
                process.kill()
                process.join()
        assert [p.exitcode for p in processes] == [0] * ranks, [log.read_text()[-3000:] for log in logs]

    def finish(self, ranks: int) -> None:
        """Run it to its end."""
        code, errors = self._ended(ranks)
        assert code == 0, errors[-3000:]

    def fail(self, ranks: int) -> str:
        """Run it until it fails; what its processes said."""
        code, errors = self._ended(ranks)
        assert code
        return errors

    def _ended(self, ranks: int) -> tuple[int, str]:
        process = self.start(ranks)
        try:
            _, errors = process.communicate(timeout=TIMEOUT_S)
        finally:
            kill_tree(process)
        return process.returncode, errors

    def kill_in(self, step: int, ranks: int) -> None:
        """Start it, and kill all its processes where they read a step."""
        process = self.start(ranks, step)
        try:
            while num_ranks_in(step, self.starts[-1]) < ranks:
                assert process.poll() is None, process.communicate()[1][-3000:]
                time.sleep(0.05)
        finally:
            kill_tree(process)

    @property
    def begins(self) -> list[int]:
        """The first step of each start."""
        return [min(recorded(folder)) for folder in self.starts]

    def trained(self) -> dict[int, Counter[Sample]]:
        """The samples of each step as the last checkpoint sees them: of the latest start that began before it."""
        found = dict[int, Counter[Sample]]()
        for begin, folder in zip(self.begins, self.starts, strict=True):
            found = {step: found[step] for step in range(begin)} | recorded(folder)
        return found

    def waves(self, start: int) -> list[list[bool]]:
        """Which ranks of a start had images in each microbatch."""
        return list(images_in(self.starts[start]).values())

    def total(self) -> Counter[Sample]:
        """How often the last checkpoint has seen each sample."""
        return sum(self.trained().values(), Counter[Sample]())


def calm_and_killed(
    run_in: Callable[[Path], ExampleRun], folder: Path, begins: list[int], samples: int = 90
) -> list[ExampleRun]:
    """Two runs of a pass: one that nobody disturbs, and one killed in steps 3 and 5, between them on one rank.

    In the first no microbatch has images on one rank alone.

    Args:
        run_in: a run that writes to a folder.
        folder: of both.
        begins: the first step of each start of the second, by how often it saves.
        samples: of the first pass.
    """
    calm, killed = (run_in(folder / name) for name in ("calm", "killed"))
    calm.finish(2)
    assert len([sample for sample in calm.total() if sample[1] == 0]) == samples
    assert set(calm.total().values()) == {1}
    assert len(calm.trained()) > 5
    kinds = Counter[bool]()
    for ranks in calm.waves(0):
        assert len(ranks) == 2
        assert len(set(ranks)) == 1, "both ranks have images, or none has"
        kinds[ranks[0]] += 1
    assert min(kinds[True], kinds[False]) > 5
    killed.kill_in(3, ranks=2)
    killed.kill_in(5, ranks=1)
    killed.finish(2)
    assert killed.begins == begins
    assert killed.trained() == calm.trained(), "every sample once, as the last checkpoint sees it"
    return [calm, killed]
