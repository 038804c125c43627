"""The time of a step as it is planned from a profile of this device, beside the time that was measured.

`trainclient profile` measures the modules of the preset, `trainclient orchestrate` chooses a layout by it, and the
steps that were trained are planned and simulated with it. Simulated are the modules alone, without
sums, norm and update.
"""

import json
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import yaml

from dataserver.assembly.tokens import ByteTokenizer, tokenizer_spec
from dataserver.cli.jobs import DataFlags, open_job
from dataserver.planning.job.fields import MODELS
from dataserver.planning.planner import timeline
from on_gpu.preset import SMALL, Size, job
from on_gpu.processes import run_bounded
from on_gpu.serving import dataserver
from on_gpu.telling import Given, Told, given

SIZES: Final = (1024, 2048, 4096, 8192, 16384)
"""Rows, up to what microbatches of the preset have: with fewer, all of them take as long as launching does."""
SMALL_SIZES: Final = (64, 128, 256)
REPEATS: Final = 4
BASE: Final = "base"


def plan(asked: Given) -> None:
    """Profile, orchestrate, simulate; as far as there is time."""
    told, ends = asked.told("planned"), time.monotonic() + asked.limit_s - 5
    training = asked.told("training").data
    preset = training.get("preset")
    size = SMALL if asked.small else Size(*preset) if preset else None
    if size is None:
        raise SystemExit("the training found no preset that fits; run both stages in one call")
    folder = asked.work / "planned"
    folder.mkdir(exist_ok=True)
    backbone = folder / "backbone.yaml"
    backbone.write_text(yaml.safe_dump(sizes_of(size)))
    models = ["--encoder", size.encoder, "--backbone", backbone]
    profile = folder / "profile.yaml"
    options = ["--sizes", *(SMALL_SIZES if asked.small else SIZES), "--tp", 1, "--repeats", REPEATS]
    options += ["--device", "cpu", "--dtype", "float32"] if asked.small else ["--compile"]
    _run("profile", ["profile", *models, "--output", profile, *options], ends, asked.work)
    measured = yaml.safe_load(profile.read_text())
    told.data["profile"] = measured
    tell_profile(told, measured)
    told.save()
    tell_steps(told, training, simulated(asked, size, folder, training))
    told.save()
    tell_choice(told, asked, size, profile, models, ends)
    told.save()


def sizes_of(size: Size) -> dict[str, int]:
    """Return the sizes of the backbone, as `trainclient profile` reads them."""
    found = {k: v for k, v in asdict(MODELS["backbone"][size.preset]).items() if k != "causal"}
    return found | {"layers": size.layers, "vocab_size": tokenizer_spec(ByteTokenizer()).vocab_size}


def simulated(asked: Given, size: Size, folder: Path, training: Mapping[str, Any]) -> dict[int, float]:
    """Seconds of each step that was measured, by the simulator with the profile's costs."""
    steps = [m["step"] for m in _metrics_of(training)]
    described = job(size, 1, max(steps, default=0) + 1, training.get("saved_bytes"))
    for module in described["execution"]["modules"]:
        module["cost"] = {"profile": "profile.yaml"}
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(described))
    planner = open_job(path, DataFlags((f"pairs={asked.shards}",)))
    return {step: timeline(planner.job.spec, planner.plan(step)).makespan_ns / 1e9 for step in steps}


def tell_profile(told: Told, measured: Mapping[str, Any]) -> None:
    """A row for each module."""
    table = told.table("Costs of modules", "module", "ms", "us a row", "backward %", "off its own times by %")
    for module in measured["modules"]:
        for degree in module["degrees"]:
            cost = degree["cost"]
            table.rows.append(
                [module["name"], f"{cost['microbatch_ns'] / 1e6:.2f}", f"{cost['linear_ps'] / 1e6:.3f}",
                 str(cost["backward_percent"]), f"{degree['error_percent']:.1f}"]
            )  # fmt: skip


def tell_steps(told: Told, training: Mapping[str, Any], planned: Mapping[int, float]) -> None:
    """Measured beside simulated steps, and their ratio."""
    table = told.table("Steps of `base`", "step", "measured s", "simulated s", "measured / simulated")
    ratios = []
    for metrics in _metrics_of(training):
        seconds, expected = metrics["seconds"], planned[metrics["step"]]
        ratios.append(seconds / expected)
        table.rows.append([str(metrics["step"]), f"{seconds:.3f}", f"{expected:.3f}", f"{ratios[-1]:.3f}"])
    if ratios:
        told.data["ratio"] = statistics.median(ratios)
        table.rows.append(["median", "", "", f"{told.data['ratio']:.3f}"])


def tell_choice(told: Told, asked: Given, size: Size, profile: Path, models: list[Any], ends: float) -> None:
    """What `orchestrate` makes of it."""
    sizes = profile.with_name("sizes.json")
    counted = dataserver("sizes", asked.shards, "--output", sizes, "--max-patches", size.max_patches)
    run_bounded(counted, max(1.0, ends - time.monotonic()), asked.work / "planned-sizes.log", {})
    kind = yaml.safe_load(profile.read_text())["gpu"]
    if asked.small:  # clusters are of GPUs
        profile.write_text(profile.read_text().replace(f"gpu: {kind}", "gpu: h100"))
        kind = "h100"
    options = ["--gpu", kind, "--gpus", 1, "--sizes", sizes, "--profile", profile, "--seq-len", size.seq_len]
    options += ["--global-batch", size.sequences, "--as-json"]
    text = _run("orchestrate", ["orchestrate", *models, *options], ends, asked.work)
    choices = json.loads(text[text.index("{") :])["choices"]  # behind what the command says of itself
    told.data["choices"] = choices
    table = told.table("Layouts by `trainclient orchestrate` on one GPU", "layout", "s", "simulated s", "recompute")
    for choice in choices:
        ns = choice["simulated_ns"]
        again = ", ".join(name for name, module in choice["modules"].items() if module["recompute"]) or "none"
        shown = "" if ns is None else f"{ns / 1e9:.3f}"
        table.rows.append([choice["layout"], f"{choice['step_ns'] / 1e9:.3f}", shown, again])


def _metrics_of(training: Mapping[str, Any]) -> list[dict[str, Any]]:
    return list(training.get("variants", {}).get(BASE, {}).get("steps", []))


def _run(name: str, words: list[Any], ends: float, work: Path) -> str:
    """What a command of the trainer prints; SystemExit if it failed."""
    command = [sys.executable, "-m", "trainclient", *words]
    ended = run_bounded(command, max(1.0, ends - time.monotonic()), work / f"planned-{name}.log", {})
    if ended.code != 0:
        raise SystemExit(f"trainclient {name}: {ended.how}: {ended.tail(5)}")
    return ended.log.read_text()


if __name__ == "__main__":
    plan(given(__doc__))
