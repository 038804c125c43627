"""Trains the preset on images from two data servers of this machine, in one variant after the other.

The first variant is trained for longer: behind its measured steps, waits for the device are counted in one, and
another one is profiled.
"""

import gzip
import json
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import torch
import yaml

from on_gpu.preset import MICROBATCH, SMALL, Size, fitting, flags, job, memory_of_encoder
from on_gpu.processes import Ended, run_bounded
from on_gpu.serving import servers
from on_gpu.telling import Given, Told, given, spread
from on_gpu.traces import read, summary
from on_gpu.variants import Variant, variant
from on_gpu.watched import WATCH

FIRST, OTHERS = (4, 8), (3, 5)
"""Steps to warm up, and measured ones: of the first variant, and of the others."""
SMALL_STEPS = (1, 2)
LEAST_S = 25.0
"""A variant is not begun with less time than that."""
MAX_TRACE_BYTES: Final = 10 * 10**6


@dataclass(frozen=True, slots=True)
class Run:
    """One run of the trainer with a variant."""

    name: str
    variant: Variant
    folder: Path
    warm_up: int
    measured: int
    watched: bool
    """Whether waits are counted, and a step is profiled."""
    saved_bytes: int | None = None
    """Memory for what the encoder keeps."""

    @property
    def steps(self) -> int:
        """All of them; the last one ends what is profiled in the one before."""
        return self.warm_up + self.measured + (3 if self.watched else 0)

    def command(self, size: Size, address: str, *, small: bool) -> list[Any]:
        """The trainer's, for a job that is written down here."""
        self.folder.mkdir(parents=True, exist_ok=True)
        described, v = self.folder / "job.yaml", self.variant
        kept = None if v.whole else self.saved_bytes
        described.write_text(yaml.safe_dump(job(size, 1, self.steps, kept, v.recomputed, v.microbatch or MICROBATCH)))
        options = flags(size, described, address, self.folder / "metrics.jsonl", small=small)
        if self.watched:
            profiled = self.warm_up + self.measured + 1
            options += ["--profile.directory", self.folder, "--profile.first", profiled]
        return [sys.executable, "-m", "on_gpu.watched", "train", *options, *self.variant.flags]

    def environment(self) -> Mapping[str, str]:
        """Variables that the trainer is started with."""
        wanted = {"output": str(self.folder / "watched.json")}
        syncs = {"syncs": self.warm_up + self.measured} if self.watched else {}
        return {**self.variant.environment, WATCH: json.dumps(wanted | syncs)}

    def metrics(self) -> list[dict[str, Any]]:
        """Metrics of the measured steps, as far as they were run."""
        path = self.folder / "metrics.jsonl"
        found = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [m for m in found if self.warm_up <= m.get("step", -1) < self.warm_up + self.measured]

    def noted(self) -> dict[str, Any]:
        """What was noted while the run was watched."""
        path = self.folder / "watched.json"
        return dict(json.loads(path.read_text())) if path.exists() else {}


def train(asked: Given) -> None:
    """All variants, as long as there is time."""
    told, ends = asked.told("training"), time.monotonic() + asked.limit_s
    size, kept = SMALL, None
    if not asked.small:
        room = torch.cuda.mem_get_info(0)[1]
        found = fitting(room, 1)
        if found is None:
            raise SystemExit("no preset fits this device")
        size, kept = found, memory_of_encoder(found, room, 1)
    preset = [size.preset, size.layers, size.encoder]
    told.data |= {"size": str(size), "preset": preset, "saved_bytes": kept, "variants": {}}
    shown = told.table(
        f"Variants of {size} (least / median / largest of the measured steps)",
        "variant", "MFU %", "s a step", "wait %", "tokens/s", "GB used / reserved at most",
        "allocations, retries", "pauses of Python, ms a step", "CPU s a step", "how it ended",
    )  # fmt: skip
    asked.work.joinpath("train").mkdir(exist_ok=True)
    names = asked.words or ("base",)
    with servers(asked.work, asked.shards) as address:
        for number, name in enumerate(names):
            left = ends - time.monotonic() - 10
            if left < LEAST_S:
                shown.rows.append([name, *[""] * 8, "not run: no time was left"])
                told.save()
                continue
            steps = SMALL_STEPS if asked.small else OTHERS if number else FIRST
            run = Run(name, variant(name), asked.work / "train" / name, *steps, watched=number == 0, saved_bytes=kept)
            command = run.command(size, address, small=asked.small)
            ended = run_bounded(command, left, asked.work / f"train-{name}.log", run.environment())
            tell_run(told, run, ended, shown.rows)
            told.save()
            if run.watched:
                tell_watched(told, run, asked.work)
                told.save()


def tell_run(told: Told, run: Run, ended: Ended, rows: list[list[str]]) -> None:
    """One row of the table of variants."""
    steps, noted = run.metrics(), run.noted().get("steps", [])[run.warm_up : run.warm_up + run.measured + 1]
    data = {"why": run.variant.why, "ended": ended.how, "steps": steps, "noted": noted, "seconds": ended.seconds}
    if ended.code != 0:
        data["log"] = ended.tail(30)
    told.data["variants"][run.name] = data
    if not steps:
        rows.append([run.name, *[""] * 8, f"{ended.how}: {ended.tail(3)}"])
        return
    mfu = [m["mfu_percent"] for m in steps if m["mfu_percent"] is not None]
    rows.append(
        [
            f"{run.name}: {run.variant.why}",
            spread(mfu, ".1f"),
            spread([m["seconds"] for m in steps], ".3f"),
            spread([m["data_wait_percent"] for m in steps], ".2f"),
            f"{statistics.median(m['tokens_per_second'] for m in steps):,.0f}",
            *_memory(noted),
            spread([n["pauses_ms"] for n in noted[1:]], ".0f"),
            spread([b["cpu_s"] - a["cpu_s"] for a, b in pairwise(noted)], ".2f"),
            ended.how,
        ]
    )


def _memory(noted: Sequence[dict[str, Any]]) -> tuple[str, str]:
    """What the allocator holds, and how often it asked the driver for more in the measured steps."""
    if not noted or "num_device_alloc" not in noted[0]:
        return "", ""
    used, reserved = (max(n[f"{what}_bytes.all.peak"] for n in noted) / 1e9 for what in ("allocated", "reserved"))
    first, last = noted[0], noted[-1]
    asked = last["num_device_alloc"] - first["num_device_alloc"]
    return f"{used:.1f} / {reserved:.1f}", f"{asked}, {last['num_alloc_retries'] - first['num_alloc_retries']}"


def tell_watched(told: Told, run: Run, work: Path) -> None:
    """Tables of waits, kernels and gaps; the trace goes to the work folder if it is small enough."""
    table = told.table("What waits for the device in one step, by the code that asks for it", "times", "where")
    syncs = run.noted().get("syncs")
    table.rows += [[str(n), where] for where, n in list((syncs or {}).items())[:25]]
    told.data["syncs"] = syncs
    trace = run.folder / "rank-00000.json"
    if not trace.exists():
        return
    found = summary(read(trace))
    told.data["profile"] = found
    told.save()
    if found["kernels"]:
        tell_profile(told, found)
    packed = work / "trace.json.gz"
    packed.write_bytes(gzip.compress(trace.read_bytes(), 5))
    if packed.stat().st_size > MAX_TRACE_BYTES:
        packed.unlink()
    os.unlink(trace)  # noqa: PTH108 - it is large


def tell_profile(told: Told, found: Mapping[str, Any]) -> None:
    """Tables of the profiled step."""
    table = told.table("One profiled step", "what", "found")
    table.rows += [
        ["length", f"{found['window_ms']:.0f} ms"],
        ["device busy", f"{found['busy_percent']:.1f} %"],
        ["kernels, launch calls, host operations",
         f"{found['kernels']}, {found['launches']}, {found['host_operations']}"],
    ]  # fmt: skip
    for title, key in (("Kernels by kind", "by_kind"), ("Kernels by name", "by_name"), ("Calls that wait", "waits")):
        table = told.table(title, "name", "number", "ms", "%")
        table.rows += [[e["name"], str(e["count"]), f"{e['ms']:.1f}", f"{e['percent']:.1f}"] for e in found[key]]
    table = told.table("Gaps of the device", "from, us", "number", "ms in all")
    table.rows += [[f"{g['from_us']:g}", str(g["count"]), f"{g['ms']:.1f}"] for g in found["idle_by_length"]]
    table = told.table("The largest gaps", "at ms", "ms", "in", "host operations", "calls of the driver")
    for gap in found["largest_gaps"]:
        did = ["\n".join(gap[key]) for key in ("in", "operations", "calls")]
        table.rows.append([f"{gap['at_ms']:.1f}", f"{gap['ms']:.2f}", *did])
    table = told.table("The longest waits", "at ms", "ms", "call", "in")
    table.rows += [[f"{w['at_ms']:.1f}", f"{w['ms']:.2f}", w["name"], w["in"]] for w in found["longest_waits"]]
    table = told.table("Operations of the step", "operation", "host ms", "device ms", "kernels", "waits", "ms waited")
    table.rows += [
        [o["name"], f"{o['host_ms']:.1f}", f"{o['device_ms']:.1f}", str(o["kernels"]), str(o["waits"]),
         f"{o['waits_ms']:.1f}"]
        for o in found["by_operation"]
    ]  # fmt: skip


if __name__ == "__main__":
    train(given(__doc__))
