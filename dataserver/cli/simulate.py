"""`dataserver simulate`: compares the policies of a job."""

import json as json_format
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from dataserver.cli.arguments import MaybeInt, Switch
from dataserver.cli.comparison_table import beyond, comparison_table, notes, verdict
from dataserver.cli.jobs import NO_DATA, Data, open_job
from dataserver.cli.progress import progress_bar
from dataserver.cli.tables import ablation_table, console_for_tables
from dataserver.jobs import JobPlanner
from dataserver.planning.job.identity import Job
from dataserver.planning.layouts.interface import layout_of
from dataserver.reporting.ablation import AblationRow, ablation_rows
from dataserver.reporting.alternatives import Alternative, alternatives_of, changes
from dataserver.reporting.comparison import Outcome, compare


def simulate(
    job: Path,
    steps: int = 20,
    first_step: MaybeInt = None,
    data: Data = NO_DATA,
    json: Switch = False,
) -> None:
    """Plan some steps of a job in every way that its layout offers, and compare what the simulator expects of them.

    For the same samples it compares all combinations of the main policies, the job with one change at a time, and each
    change on the way from the baseline to the job. The last lines say what to change in the job. A last step that is
    much shorter than the others is shown separately. Times are those of the job's cost model, so run `dataserver fit`
    first. It needs no server and reads no image.

    Args:
        job: YAML or JSON file of the job.
        steps: Steps to plan; fewer if the job ends earlier.
        first_step: The first of them; by default the first of the job.
        data: Datasets and tokenizers.
        json: Print the comparison as JSON.
    """
    if (first_step or 0) < 0 or steps < 1:
        raise ValueError(f"--first-step is {first_step}, --steps is {steps}; at least 0 and 1 are required")
    planner = open_job(job, data)
    first = planner.first_step if first_step is None else first_step
    taken = range(first, max(first + 1, min(first + steps, planner.num_steps)))
    short = _short_last(planner, taken)
    full = taken if short is None else taken[:-1]
    about = _about(planner, full)
    with progress_bar("planning") as progress:
        outcomes = compare(planner, alternatives_of(planner.job), full, progress)
    ablation = _ablation(planner.job, outcomes)
    about["short_last_step"] = None if short is None else _short_step(planner, short)
    if json:
        rows = [_row(outcome, outcomes[0]) for outcome in outcomes]
        print(json_format.dumps({**about, "rows": rows, "ablation": [asdict(row) for row in ablation]}, indent=1))
        return
    _show(console_for_tables(), planner.job.job_id, about, outcomes, ablation)


def _short_last(planner: JobPlanner, steps: range) -> int | None:
    """The job's last step, if it has less than nine tenths of the tokens of the others; None if it is the only one.

    Raises:
        StepOutOfRangeError: the job ends before the first of the steps.
    """
    *others, last = (int(planner.samples(step).tokens.sum()) for step in steps)
    short = bool(others) and steps[-1] == planner.num_steps - 1 and 10 * len(others) * last < 9 * sum(others)
    return steps[-1] if short else None


def _short_step(planner: JobPlanner, step: int) -> dict[str, Any]:
    """A step by itself: as the job runs it, and as its baseline does."""
    own, baseline = planner.job.spec.execution, layout_of(planner.job.spec.execution).ablation(planner.job)[0]
    compared = [Alternative("", "as it is", own), Alternative("", baseline.name, baseline.execution)]
    times = [o.figures.step_ns if o.figures else None for o in compare(planner, compared, [step], lambda *_: None)]
    samples = planner.samples(step)
    return {
        "step": step,
        "samples": len(samples),
        "tokens": int(samples.tokens.sum()),
        "step_ns": times[0],
        "baseline_ns": times[1],
    }


def _about(planner: JobPlanner, steps: range) -> dict[str, Any]:
    """What the steps hold, whatever the policies.

    Raises:
        StepOutOfRangeError: the job ends before the first of them.
    """
    samples = [planner.samples(step) for step in steps]
    return {
        "job_id": planner.job.job_id,
        "first_step": steps.start,
        "steps": len(steps),
        "steps_of_job": planner.num_steps,
        "samples": sum(len(s) for s in samples),
        "images": sum(len(s.image_rows) for s in samples),
        "tokens": sum(int(s.tokens.sum()) for s in samples),
        "truncated_tokens": sum(int(s.truncated_tokens.sum()) for s in samples),
        "datasets": {
            spec.name: sum(int((s.dataset == number).sum()) for s in samples)
            for number, spec in enumerate(planner.job.stream.datasets)
        },
    }


def _ablation(job: Job, outcomes: Sequence[Outcome]) -> list[AblationRow]:
    """From the baseline to the job; all were compared."""
    figures = {o.alternative.execution: o.figures for o in outcomes}
    found = [(entry.name, figures[entry.execution]) for entry in layout_of(job.spec.execution).ablation(job)]
    return ablation_rows((name, made.step_ns if made else None) for name, made in found)


def _row(outcome: Outcome, own: Outcome) -> dict[str, Any]:
    alternative, figures = outcome.alternative, outcome.figures
    about = {
        "dimension": alternative.heading,
        "name": alternative.name,
        "own": outcome is own,
        "changes": changes(own.alternative.execution, alternative.execution),
    }
    if figures is None or own.figures is None:
        return {**about, "refusal": outcome.refusal}
    return {
        **about,
        "step_ns": round(figures.step_ns),
        "slower_than_own_percent": beyond(figures.step_ns, own.figures.step_ns),
        "lower_bound_ns": round(figures.bound_ns),
        "above_bound_percent": beyond(figures.step_ns, figures.bound_ns),
        "bubble_percent": figures.bubble_percent,
        "imbalance": figures.imbalance,
        "padding_percent": figures.padding_percent,
        "in_flight": figures.in_flight,
        "microbatches": figures.microbatches,
        **figures.of_layout,
        "planning_ns": round(figures.planning_ns),
    }


def _show(
    console: Console, job_id: str, about: dict[str, Any], outcomes: Sequence[Outcome], ablation: Sequence[AblationRow]
) -> None:
    """Print the comparison for people."""
    first, last = about["first_step"], about["first_step"] + about["steps"] - 1
    console.print(
        f"job {job_id}\nsteps {first} to {last} of {about['steps_of_job']}: {about['samples']} samples, "
        f"{about['images']} images, {about['tokens']} tokens, {about['truncated_tokens']} cut\n"
        "means over the steps, as simulated; *: the job as it is; module: largest / mean load of its ranks;\n"
        "held: microbatches that the fullest stage holds"
    )
    if len(about["datasets"]) > 1:
        counts = ", ".join(f"{name} {count}" for name, count in about["datasets"].items())
        console.print(f"samples of each dataset: {counts}")
    console.print(comparison_table(outcomes))
    console.print(ablation_table(ablation))
    for line in (*_short_line(about["short_last_step"]), *notes(outcomes), verdict(outcomes)):
        print(line)


def _short_line(short: dict[str, Any] | None) -> list[str]:
    """What the short last step takes, as a sentence."""
    if short is None:
        return []
    said = f"the last step, {short['step']}, holds {short['samples']} samples and is no part of the means"
    if short["baseline_ns"] is None:
        return [f"{said}: {short['step_ns'] / 1e6:.1f} ms"]
    beside = f"{short['step_ns'] / short['baseline_ns']:.3f} of the baseline's {short['baseline_ns'] / 1e6:.1f} ms"
    return [f"{said}: {short['step_ns'] / 1e6:.1f} ms, {beside}"]
