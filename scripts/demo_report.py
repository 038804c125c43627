"""Figures of a demo run, and the table of them."""

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

from rich.console import Console
from rich.table import Table

from dataserver.planning.expectation import imbalance
from dataserver.planning.planner import PlanSummary

SETTLED = 2
"""Steps left out of speed figures: the first ones open streams and warm caches."""


def collect(metrics_file: Path, summaries: Sequence[PlanSummary]) -> dict[str, Any]:
    """All figures of a run, from the trainer's metrics and the plans of its steps."""
    steps = [json.loads(line) for line in metrics_file.read_text().splitlines()]
    left_out = SETTLED if len(steps) > SETTLED else 0
    settled = steps[left_out:]
    seconds = sum(s["seconds"] for s in settled)
    modules = list(summaries[0].loads_after)
    return {
        "steps": len(steps),
        "steps_left_out_of_speed": left_out,
        "text_loss": {"first": steps[0]["text_loss"], "last": steps[-1]["text_loss"]},
        "image_loss": {"first": steps[0]["image_loss"], "last": steps[-1]["image_loss"]},
        "samples_per_s": sum(s["samples"] for s in settled) / seconds,
        "step_s_median": median(s["seconds"] for s in settled),
        "data_wait_percent": sum(s["data_wait_percent"] * s["seconds"] for s in settled) / seconds,
        "imbalance": {
            module: {
                "before": mean(imbalance(s.loads_before[module].tolist()) for s in summaries),
                "after": mean(imbalance(s.loads_after[module].tolist()) for s in summaries),
            }
            for module in modules
        },
        "bubble_percent": {
            "before": mean(s.before.timeline.bubble_ppm for s in summaries) / 1e4,
            "after": mean(s.after.timeline.bubble_ppm for s in summaries) / 1e4,
        },
        "simulated_step_ms": {
            "before": mean(s.before.makespan_ns for s in summaries) / 1e6,
            "after": mean(s.after.makespan_ns for s in summaries) / 1e6,
        },
        "in_flight": {s.module: s.in_flight.tolist() for s in summaries[0].plan.schedules},
        "per_step": steps,
    }


def print_table(figures: dict[str, Any]) -> None:
    """The short table."""
    first = figures["steps_left_out_of_speed"] + 1
    table = Table(title=f"{figures['steps']} steps; speed and wait from step {first} on", title_justify="left")
    table.add_column("figure", no_wrap=True)
    table.add_column("value", justify="right", no_wrap=True)
    for name, key in (("text loss (backbone)", "text_loss"), ("image loss (generator)", "image_loss")):
        loss = figures[key]
        table.add_row(f"{name}, first -> last step", f"{loss['first']:.3f} -> {loss['last']:.3f}")
    table.add_row("samples per second", f"{figures['samples_per_s']:.1f}")
    table.add_row("trainer's wait for data, share of the step", f"{figures['data_wait_percent']:.1f} %")
    for module, found in figures["imbalance"].items():
        table.add_row(
            f"{module}: DP imbalance (max / mean), before -> after",
            f"{found['before']:.3f} -> {found['after']:.3f}",
        )
    for module, stages in figures["in_flight"].items():
        table.add_row(f"{module}: microbatches in flight, by stage", " ".join(map(str, stages)))
    bubble, step = figures["bubble_percent"], figures["simulated_step_ms"]
    table.add_row("simulated pipeline bubble, before -> after", f"{bubble['before']:.1f} % -> {bubble['after']:.1f} %")
    table.add_row("simulated step, before -> after", f"{step['before']:.1f} ms -> {step['after']:.1f} ms")
    Console().print(table)
