"""The stages of the demo. Each starts processes, says what it waits for, and leaves files in the demo's folder."""

import json
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import ceil
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml
from slept_steps import read_job, slept_steps

from demo_parts.job import DATASETS, MEDIA, job_spec
from demo_parts.processes import Processes, python
from demo_parts.progress import Display
from trainclient.topology.process_grid import Topology

STAGES = ("shards", "index", "plan", "servers", "training", "measuring", "ending")
BIN = Path(sys.executable).parent
NUM_SERVERS = 2
MEASURED_STEPS = 2
MEASURED_MS = 4000
"""Measured steps in canonical order sleep about so long: the trainer's own work is then small beside it."""
COMPARED_DP = 8
"""Simulated ranks of every module where one, two and three modalities are compared."""


class Demo:
    """What the stages share: folders, processes and options."""

    def __init__(
        self,
        output: Path,
        dataset: Path | None,
        steps: int,
        layout: str,
        modalities: Sequence[str],
        processes: Processes,
        display: Display,
    ) -> None:
        """Work below `output`, a folder that exists; on a dataset, or on shards made there for each modality."""
        self.output = output
        self.shards = {DATASETS[m]: output / (f"shards-{m}" if m in MEDIA else "shards") for m in modalities}
        if dataset is not None:
            self.shards["demo"] = dataset
        self.job = output / "job.yaml"
        self.picture = output / "plan.png"
        self.metrics = output / "metrics.jsonl"
        self._makes_shards = dataset is None
        self._steps = steps
        self._layout = layout
        self._modalities = tuple(modalities)
        self._processes = processes
        self._display = display

    @property
    def located(self) -> list[str]:
        """The flags by which `dataserver` finds the dataset."""
        flags = []
        for name, shards in self.shards.items():
            flags += ["--dataset", f"{name}={shards}", "--index-dir", f"{name}={self._index_dir(name)}"]
        return flags

    def _index_dir(self, name: str) -> Path:
        return self.output / "index" / self.shards[name].resolve().name

    def make_shards(self) -> None:
        """The demo's own shards, made unless an earlier run has finished making them."""
        missing = {n: s for n, s in self.shards.items() if self._makes_shards and not s.is_dir()}
        self._display.begin("shards", "making about 600 samples" if "demo" in missing else "looking for shards")
        for name, shards in missing.items():
            unfinished = shards.with_name(f"{shards.name}.unfinished")
            shutil.rmtree(unfinished, ignore_errors=True)
            maker = ["make_demo_media.py", name] if name in MEDIA else ["make_demo_shards.py"]
            self._run(f"making {shards.name}", python(*maker, unfinished), lambda line: line)
            unfinished.rename(shards)
        self._display.done(", ".join(map(str, self.shards.values())))

    def index(self) -> None:
        """Index what is not indexed yet."""
        self._display.begin("index", "reading sizes and counting tokens")
        said = []
        for name, shards in self.shards.items():
            flags = ["--index-dir", self._index_dir(name), "--tokenizer", "bytes"]
            flags += [f"--{name}", "serve"] if name in MEDIA else []
            found: dict[str, str] = {}
            child = "indexing" if name == "demo" else f"indexing {name}"
            self._run(child, [BIN / "dataserver", "index", shards, *flags], partial(_note, found=found))
            said.append(f"{found.get('samples', '?')} samples, {found.get('tokens', '?').split()[0]} tokens")
        self._display.done("; ".join(said))

    def plan(self) -> Mapping[str, Any]:
        """Plan every step; see `demo_parts/plans.py`. Compiles the kernels where this has not been done."""
        self._display.begin("plan", "loading the planner")
        _write_job(self.job, job_spec(self._steps, self._layout, self._modalities))
        flags = [*self.located, "--steps", self._steps, "--output", self.output]
        if len(self._modalities) > 1:
            flags += ["--compare", *self._compared_jobs()]
        self._run("planning", python("demo_parts/plans.py", self.job, *flags), _planning())
        plans: dict[str, Any] = json.loads((self.output / "plans.json").read_text())
        before, after = (plans["steps"][0][side]["step_ms"] for side in ("before", "after"))
        self._display.done(f"step 0: {before:.1f} ms in canonical order, {after:.1f} ms as planned (simulated)")
        return plans

    def _compared_jobs(self) -> list[Path]:
        """Jobs of the first modality, the first two, and so on, on more ranks than train here."""
        found = []
        for count in range(1, len(self._modalities) + 1):
            chosen = self._modalities[:count]
            found.append(self.output / f"compared-{'-'.join(chosen)}.yaml")
            _write_job(found[-1], job_spec(self._steps, self._layout, chosen, dp=COMPARED_DP))
        return found

    def serve(self) -> str:
        """Start the servers; returns their addresses."""
        self._display.begin("servers", f"starting {NUM_SERVERS} data servers")
        command = [BIN / "dataserver", "serve", *self.located, "--listen", "127.0.0.1:0"]
        servers = [self._processes.start(f"server {i}", command) for i in range(NUM_SERVERS)]
        addresses = ",".join(self._processes.address(server) for server in servers)
        self._display.done(f"listening on {addresses.replace(',', ' and ')}")
        return addresses

    def train(self, addresses: str) -> None:
        """Train all steps, and show each one."""
        self._display.begin("training", f"starting {self._processes_of()}: torch, connections, first step")
        self.metrics.unlink(missing_ok=True)
        flags = ["--job", self.job, "--servers", addresses, "--metrics", self.metrics, "--optimizer.lr", "0.001"]
        if self._layout == "grouped":
            flags += ["--backbone.sharding", "zero3"]
        last = ""

        def step(line: str) -> str:
            nonlocal last
            last = line if line.startswith("step ") else last
            return f"{last}, ending the processes" if last.startswith(f"step {self._steps}/") else last

        self._run("training", [BIN / "trainclient", "train", *flags], step)
        self._display.done(last)

    def timed_steps(self, addresses: str, plans: Mapping[str, Any]) -> dict[str, Any]:
        """Time some steps in canonical order and as planned; see `time_steps`."""
        self._display.begin("measuring", f"starting {self._processes_of()} that sleep instead of computing")
        steps = plans["steps"][:MEASURED_STEPS]
        simulated = {side: fmean(step[side]["step_ms"] for step in steps) for side in ("before", "after")}
        scale = max(1, ceil(MEASURED_MS / simulated["before"]))
        jobs = [self.output / "canonical.json", self.output / "planned.json"]
        seconds = slept_steps(
            self._processes,
            jobs,
            servers=addresses,
            steps=len(steps),
            scale=scale,
            output=self.output / "measured.json",
            say=self._display.say,
        )
        found = {
            side: {"simulated_ms": simulated[side] * scale, "measured_ms": fmean(seconds[job.stem]) * 1e3}
            for side, job in zip(("before", "after"), jobs, strict=True)
        }
        self._display.done(f"{len(steps)} steps, {scale} x slowed down")
        return {"steps": len(steps), "slowed_down": scale, **found}

    def _processes_of(self) -> str:
        """How many processes train what, in words."""
        topology = Topology.of(read_job(self.output / "planned.json").spec)
        return f"{topology.world_size} processes ({topology.degrees})"

    def _run(self, name: str, command: Sequence[Any], status: Callable[[str], str]) -> None:
        """Run a command to its end; `status` makes of each line that it writes what to show."""

        def show(line: str) -> None:
            text = status(line)
            if text:
                self._display.say(text)

        self._processes.run([self._processes.start(name, command)], show)


def _write_job(file: Path, job: Mapping[str, Any]) -> None:
    file.write_text(yaml.safe_dump(job, sort_keys=False))


def _planning() -> Callable[[str], str]:
    """What to show of the lines of `demo_parts/plans.py`: compiling takes a while where it has not been done yet."""
    compiled = 0

    def status(line: str) -> str:
        nonlocal compiled
        if line.startswith("compiled "):
            compiled += 1
            return f"compiling the kernels, once on this machine; {compiled} so far"
        return line if line.startswith(("planning ", "drawing ", "comparing ")) else ""

    return status


def _note(line: str, found: dict[str, str]) -> str:
    """Take a `name  value` line of `dataserver index`; it is shown at the end."""
    parts = re.fullmatch(r"\s+(\w+)\s+(.*)", line)
    if parts:
        found[parts[1]] = parts[2]
    return ""
