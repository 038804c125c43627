"""Examples of the documentation, run as they stand, in real processes, over a server."""

import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from adapters import recording
from adapters.recording import Sample, recorded
from adapters.whole_jobs import whole_job
from training.runs import kill_tree

DOCUMENT = Path(__file__).parents[2] / "docs" / "adapters.md"
MAX_LINES = 30
TIMEOUT_S = 150


def example(naming: str) -> str:
    """The script in the documentation that names something; it is short."""
    (found,) = [e for e in re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL) if naming in e]
    assert found.count("\n") <= MAX_LINES
    return found


@dataclass
class ExampleRun:
    """A run of an example, which may be killed and started again; its arguments are server, job, model and output."""

    naming: str
    """What only this example of the documentation names."""
    server: str
    model: Path
    folder: Path
    end: dict[str, int]
    stream: dict[str, Any] = field(default_factory=dict)
    python: Path = Path(sys.executable)
    starts: list[Path] = field(default_factory=list)
    """Where the microbatches of each start are recorded."""

    @property
    def out(self) -> Path:
        """What the example writes."""
        return self.folder / "out"

    def start(self, ranks: int) -> "subprocess.Popen[str]":
        """Start it in so many processes."""
        self.starts.append(self.folder / f"start{len(self.starts)}")
        self.starts[-1].mkdir(parents=True)
        script, job = self.folder / "train.py", self.folder / "job.yaml"
        script.write_text(example(self.naming))
        job.write_text(yaml.safe_dump(whole_job(ranks, self.end, **self.stream)))
        line = [str(self.python), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        line += [recording.__file__, str(self.starts[-1]), str(script)]
        return subprocess.Popen(
            [*line, self.server, str(job), str(self.model), str(self.out)],
            cwd=self.folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        )

    def finish(self, ranks: int) -> None:
        """Run it to its end."""
        process = self.start(ranks)
        try:
            _, errors = process.communicate(timeout=TIMEOUT_S)
        finally:
            kill_tree(process)
        assert process.returncode == 0, errors[-3000:]

    def kill_in(self, step: int, ranks: int) -> None:
        """Start it, and kill all its processes when one of them reads a step."""
        process = self.start(ranks)
        try:
            while step not in recorded(self.starts[-1]):
                assert process.poll() is None, process.communicate()[1][-3000:]
                time.sleep(0.05)
        finally:
            kill_tree(process)

    def trained(self, begins: Sequence[int] = (0,)) -> dict[int, Counter[Sample]]:
        """The samples of each step as the last checkpoint sees them: of the latest start that began before it.

        Args:
            begins: the first step of each start.
        """
        found = dict[int, Counter[Sample]]()
        for begin, folder in zip(begins, self.starts, strict=True):
            steps = recorded(folder)
            assert min(steps) == begin
            found = {step: found[step] for step in range(begin)} | steps
        return found
