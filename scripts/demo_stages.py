"""The stages of the demo. Each starts processes, says what it waits for, and leaves files in the demo's folder."""

import json
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from math import ceil
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml
from demo_processes import Processes, python
from demo_progress import Display
from slept_steps import read_job, slept_steps

from trainclient.topology.process_grid import Topology

STAGES = ("shards", "index", "plan", "servers", "training", "measuring", "ending")
BIN = Path(sys.executable).parent
NUM_SERVERS = 2
MEASURED_STEPS = 2
MEASURED_MS = 4000
"""Measured steps in canonical order sleep about so long: the trainer's own work is then small beside it."""

# Measured with the tiny models on one core of a CPU; the planner needs the ratios only.
COSTS = {
    "encoder": {"microbatch_ns": 350_000, "linear_ps": 6_600_000, "quadratic_fs": 6_300_000, "backward_percent": 160},
    "backbone": {
        "microbatch_ns": 600_000,
        "linear_ps": 10_000_000,
        "quadratic_fs": 10_000_000,
        "backward_percent": 180,
    },
    "generator": {
        "microbatch_ns": 700_000,
        "linear_ps": 10_000_000,
        "quadratic_fs": 8_300_000,
        "backward_percent": 150,
    },
}
GROUPS: Mapping[str, Any] = {
    "max_degree": 2,
    "exchange": [{"degree": 2, "unit_ps": 3_000_000}],
}
"""Of the grouped layout: the tiny backbone has two heads of keys and values."""
ROOM: Mapping[str, int] = {"budget_bytes": 320_000, "unit_bytes": 1_000}
"""For tokens of a rank: the longest samples need a group of two."""
LAYOUTS: Mapping[str, Mapping[str, Mapping[str, int]]] = {
    "pipelined": {"encoder": {}, "backbone": {"dp": 2, "pp": 2}, "generator": {}},
    "colocated": {"encoder": {"dp": 2}, "backbone": {"dp": 2}, "generator": {"dp": 2}},
    "contrastive": {"image": {"dp": 2}, "text": {"dp": 2, "pp": 2}},
    "grouped": {"encoder": {}, "backbone": {"dp": 4}, "generator": {}},
}
"""Degrees of each module."""
TOWERS: Mapping[str, Mapping[str, int]] = {"image": COSTS["encoder"], "text": COSTS["backbone"]}
"""Costs of towers, which are the blocks of these."""


def job_spec(steps: int, layout: str = "pipelined") -> dict[str, Any]:
    """The demo's job: image-text pairs, most of them understood, 40 % generated. Servers fill in the rest.

    Towers instead compare the pairs, in two contrastive batches a step.
    """
    degrees = LAYOUTS[layout]
    if layout == "contrastive":
        of_layout: dict[str, Any] = {"contrastive_batch": 16}
        modules = [{"name": m, "kind": "tower", "modality": m, **degrees[m], "cost": TOWERS[m]} for m in degrees]
        options = {"kind": layout, "microbatches": 2}
    else:
        of_layout = {"generation": {"ratio": "0.4", "query_tokens": 16}}
        modules = [{"name": kind, "kind": kind, **degrees[kind], "cost": COSTS[kind]} for kind in degrees]
        options = {"kind": layout}
        if layout == "grouped":
            options |= GROUPS
            modules[1]["memory"] = ROOM
    return {
        "stream": {
            "datasets": [{"name": "demo"}],
            "tokenizer": {"name": "bytes"},
            "sizing": {"patch": 14, "merge": 2, "max_patches": 144},
            "seq_len": 512,
            "packing": {"enabled": False},
            "global_batch": 32,
            **of_layout,
            "shuffle_window": 4,
        },
        "execution": {"modules": modules, "layout": options, "microbatch": 1, "end": {"steps": steps}},
    }


class Demo:
    """What the stages share."""

    def __init__(
        self, output: Path, dataset: Path | None, steps: int, layout: str, processes: Processes, display: Display
    ) -> None:
        """Work below `output`, a folder that exists; on a dataset, or on shards made there."""
        self.output = output
        self.shards = output / "shards" if dataset is None else dataset
        self.index_dir = output / "index" / self.shards.resolve().name
        self.job = output / "job.yaml"
        self.picture = output / "plan.png"
        self.metrics = output / "metrics.jsonl"
        self._makes_shards = dataset is None
        self._steps = steps
        self._layout = layout
        self._processes = processes
        self._display = display

    @property
    def located(self) -> list[str]:
        """The flags by which `dataserver` finds the dataset."""
        return ["--dataset", f"demo={self.shards}", "--index-dir", f"demo={self.index_dir}"]

    def make_shards(self) -> None:
        """The demo's own shards, made unless an earlier run has finished making them."""
        made = self._makes_shards and not self.shards.is_dir()
        self._display.begin("shards", "making about 600 samples" if made else "looking for shards")
        if made:
            unfinished = self.output / "shards.unfinished"
            shutil.rmtree(unfinished, ignore_errors=True)
            self._run("making shards", python("make_demo_shards.py", unfinished), lambda line: line)
            unfinished.rename(self.shards)
        self._display.done(str(self.shards))

    def index(self) -> None:
        """Index what is not indexed yet."""
        self._display.begin("index", "reading sizes and counting tokens")
        flags = ["--index-dir", self.index_dir, "--tokenizer", "bytes"]
        found: dict[str, str] = {}
        self._run("indexing", [BIN / "dataserver", "index", self.shards, *flags], lambda line: _note(line, found))
        self._display.done(f"{found.get('samples', '?')} samples, {found.get('tokens', '?').split()[0]} tokens")

    def plan(self) -> Mapping[str, Any]:
        """Plan every step; see `demo_plans`. Compiles the kernels where this has not been done."""
        self._display.begin("plan", "loading the planner")
        self.job.write_text(yaml.safe_dump(job_spec(self._steps, self._layout), sort_keys=False))
        flags = [*self.located, "--steps", self._steps, "--output", self.output]
        self._run("planning", python("demo_plans.py", self.job, *flags), _planning())
        plans: dict[str, Any] = json.loads((self.output / "plans.json").read_text())
        before, after = (plans["steps"][0][side]["step_ms"] for side in ("before", "after"))
        self._display.done(f"step 0: {before:.1f} ms in canonical order, {after:.1f} ms as planned (simulated)")
        return plans

    def serve(self) -> str:
        """Start the servers; returns their addresses."""
        self._display.begin("servers", f"starting {NUM_SERVERS} data servers")
        command = [BIN / "dataserver", "serve", *self.located, "--listen", "127.0.0.1:0"]
        servers = [self._processes.start(f"server {i}", command) for i in range(NUM_SERVERS)]
        addresses = ",".join(self._processes.address(server) for server in servers)
        self._display.done(f"listening on {addresses.replace(',', ' and ')}")
        return addresses

    def train(self, addresses: str) -> None:
        """Train all steps."""
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


def _planning() -> Callable[[str], str]:
    """What to show of the lines of `demo_plans`: compiling takes a while where it has not been done yet."""
    compiled = 0

    def status(line: str) -> str:
        nonlocal compiled
        if line.startswith("compiled "):
            compiled += 1
            return f"compiling the kernels, once on this machine; {compiled} so far"
        return line if line.startswith(("planning ", "drawing ")) else ""

    return status


def _note(line: str, found: dict[str, str]) -> str:
    """Take a `name  value` line of `dataserver index`; it is shown at the end."""
    parts = re.fullmatch(r"\s+(\w+)\s+(.*)", line)
    if parts:
        found[parts[1]] = parts[2]
    return ""
