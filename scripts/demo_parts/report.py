"""Figures of a demo run, and the tables of them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from rich.console import Console
from rich.table import Table

SETTLED = 2
"""Steps left out of speed figures: the first ones open streams and warm caches."""
FOOTNOTE = (
    "* by the trainer's executor and messages, in processes that sleep the simulated times: there are more processes\n"
    "  than cores, so models that compute would measure the cores. A machine that is busy otherwise takes longer."
)
LOSSES = {
    "text_loss": "text loss (backbone)",
    "image_loss": "image loss (generator)",
    "contrastive_loss": "contrastive loss (towers)",
}
SIDES = ("before", "after")


def collect(metrics_file: Path, plans: Mapping[str, Any], measured: Mapping[str, Any]) -> dict[str, Any]:
    """All figures of a run, from the trainer's metrics, the plans of its steps, and the steps that were measured."""
    steps = [line for line in map(json.loads, metrics_file.read_text().splitlines()) if "step" in line]
    left_out = SETTLED if len(steps) > SETTLED else 0
    settled = steps[left_out:]
    seconds = sum(s["seconds"] for s in settled)
    planned = plans["steps"]
    return {
        "steps": len(steps),
        "steps_left_out_of_speed": left_out,
        **{key: {"first": steps[0][key], "last": steps[-1][key]} for key in LOSSES if steps[0][key] is not None},
        "samples_per_s": sum(s["samples"] for s in settled) / seconds,
        "step_s_median": median(s["seconds"] for s in settled),
        "data_wait_percent": sum(s["data_wait_percent"] * s["seconds"] for s in settled) / seconds,
        "imbalance": {module: _sides(planned, "imbalance", module) for module in planned[0]["after"]["imbalance"]},
        "bubble_percent": _sides(planned, "bubble_percent"),
        "simulated_step_ms": _sides(planned, "step_ms"),
        "simulated_ablation": plans["ablation"],
        "simulated_modalities": plans["comparison"],
        "in_flight": {
            module: {side: planned[0][side]["in_flight"][module] for side in SIDES}
            for module in planned[0]["after"]["in_flight"]
        },
        "measured": {
            **measured,
            **{s: {**measured[s], "ratio": measured[s]["measured_ms"] / measured[s]["simulated_ms"]} for s in SIDES},
        },
        "per_step": steps,
    }


def _sides(planned: Sequence[Mapping[str, Any]], *path: str) -> dict[str, float]:
    """The mean of a figure over all steps, before and after planning."""

    def follow(found: Any) -> float:
        for key in path:
            found = found[key]
        return float(found)

    return {side: fmean(follow(step[side]) for step in planned) for side in SIDES}


def print_report(figures: Mapping[str, Any]) -> None:
    """Print the short tables of training and planning."""
    console = Console()
    console.print(_training_table(figures))
    console.print(_planning_table(figures))
    print(FOOTNOTE)
    console.print(_ablation_table(figures["simulated_ablation"]))
    if figures["simulated_modalities"]:
        console.print(_modalities_table(figures["simulated_modalities"]))


def _training_table(figures: Mapping[str, Any]) -> Table:
    table = _table(
        f"Training, {figures['steps']} steps (speed and wait from step {figures['steps_left_out_of_speed'] + 1} on)"
    )
    table.add_column("measured", justify="right", no_wrap=True)
    for key, name in LOSSES.items():
        if key not in figures:
            continue
        loss = figures[key]
        table.add_row(f"{name}, first -> last step", f"{loss['first']:.3f} -> {loss['last']:.3f}")
    table.add_row("samples per second", f"{figures['samples_per_s']:.1f}")
    table.add_row("trainer's wait for data, share of the step", f"{figures['data_wait_percent']:.1f} %")
    return table


def _planning_table(figures: Mapping[str, Any]) -> Table:
    """Simulated figures in all steps, and measured ones beside them in those that were measured."""
    measured = figures["measured"]
    table = _table("Planning, before (canonical order) and after: simulated, but where measured * is said")
    for side in SIDES:
        table.add_column(side, justify="right", no_wrap=True)

    def row(name: str, found: Mapping[str, float], form: str) -> None:
        table.add_row(name, *(form.format(found[side]) for side in SIDES))

    def measured_row(name: str, key: str, form: str) -> None:
        row(name, {side: measured[side][key] for side in SIDES}, form)

    for module, found in figures["imbalance"].items():
        row(f"{module}: DP imbalance (max / mean)", found, "{:.3f}")
    for module, stages in figures["in_flight"].items():
        table.add_row(f"{module}: microbatches in flight, by stage", *(" ".join(map(str, stages[s])) for s in SIDES))
    row("pipeline bubble, simulated", figures["bubble_percent"], "{:.1f} %")
    row("step, simulated", figures["simulated_step_ms"], "{:.1f} ms")
    table.add_section()
    about = f"the first {measured['steps']} steps, {measured['slowed_down']} x slower"
    measured_row(f"{about}: simulated", "simulated_ms", "{:,.0f} ms")
    measured_row("... measured *", "measured_ms", "{:,.0f} ms")
    measured_row("... measured / simulated", "ratio", "{:.3f}")
    return table


def _ablation_table(ablation: Sequence[Mapping[str, Any]]) -> Table:
    """What brings how much of that, as simulated."""
    table = _table("From canonical order to the plan, one change at a time", "change")
    for column in ("step, simulated", "of the one before"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in ablation:
        step, ratio = row["step_ns"], row["of_the_one_before"]
        table.add_row(row["name"], *("-", "-") if step is None else (f"{step / 1e6:.1f} ms", f"{ratio:.3f}"))
    return table


def _modalities_table(compared: Sequence[Mapping[str, Any]]) -> Table:
    """What balance gains as modalities are added, as simulated."""
    table = _table("Canonical order and plan, on 8 ranks of each module: simulated", "encoders of")
    for column in ("canonical", "planned", "ratio", "imbalance"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in compared:
        before, after = (row[side] for side in SIDES)
        times = [f"{side['step_ms']:.1f} ms" for side in (before, after)]
        worst = " -> ".join(f"{max(side['imbalance'].values()):.3f}" for side in (before, after))
        table.add_row(", ".join(row["modalities"]), *times, f"{after['step_ms'] / before['step_ms']:.3f}", worst)
    return table


def _table(title: str, first: str = "figure") -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column(first, no_wrap=True)
    return table
