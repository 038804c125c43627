"""Plans the demo's steps without a server: figures of every step, a picture of one, and the jobs to measure.

Writes into a folder plans.json, plan.png, and two complete jobs: canonical.json, the baseline, and planned.json. With
--compare plans.json also says what planning gains in other jobs.
"""

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from dataserver.cli.jobs import DataFlags, open_job
from dataserver.cli.pictures import draw_plan
from dataserver.jobs import JobPlanner
from dataserver.planning.job.fields import ModuleKind
from dataserver.planning.job.identity import Job, identify
from dataserver.planning.layouts.interface import layout_of
from dataserver.planning.plan.expectation import imbalance
from dataserver.planning.plan.plan import StepPlan
from dataserver.planning.planner import AblationResult, PlanSummary, ablation, explain
from dataserver.reporting.ablation import mean_ablation

PICTURED_STEP = 0
COMPARED_STEPS = 4
"""Steps that are planned of each of several jobs."""


def before_after(summary: PlanSummary) -> dict[str, Any]:
    """The figures of a step in canonical order, and as planned; all of them simulated."""
    sides = {
        "before": (summary.baseline, summary.before, summary.loads_before),
        "after": (summary.plan, summary.after, summary.loads_after),
    }
    return {
        side: {
            "step_ms": timeline.makespan_ns / 1e6,
            "bubble_percent": timeline.timeline.bubble_ppm / 1e4,
            "imbalance": {module: imbalance(values.tolist()) for module, values in loads.items()},
            "in_flight": {s.module: s.in_flight.tolist() for s in plan.schedules},
        }
        for side, (plan, timeline, loads) in sides.items()
    }


def choice(plan: StepPlan) -> str:
    """What was chosen for a step, and why."""
    said = [f"{d.chosen} ({d.reason})" for d in plan.decisions if d.subject == "step"]
    return said[0] if said else "; ".join(f"{d.subject}: {d.chosen} ({d.reason})" for d in plan.decisions)


def compared(planner: JobPlanner, steps: int) -> dict[str, Any]:
    """What a job reads, and means over its first steps in canonical order and as planned; all of it simulated."""
    found = [before_after(explain(planner.job, planner.plan(step))) for step in range(steps)]
    encoders = planner.job.spec.execution.of_kind(ModuleKind.ENCODER)

    def mean(side: str) -> dict[str, Any]:
        imbalances = {e.name: fmean(step[side]["imbalance"][e.name] for step in found) for e in encoders}
        return {"step_ms": fmean(step[side]["step_ms"] for step in found), "imbalance": imbalances}

    return {"modalities": [e.reads for e in encoders], **{side: mean(side) for side in ("before", "after")}}


def baseline_job(job: Job) -> Job:
    """The same stream in canonical order."""
    baseline = layout_of(job.spec.execution).ablation(job)[0]
    return identify(job.spec.model_copy(update={"execution": baseline.execution}))


def parse() -> argparse.Namespace:
    """Read the command line of the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", type=Path)
    parser.add_argument("--dataset", action="append", required=True, metavar="NAME=PATH")
    parser.add_argument("--index-dir", action="append", required=True, metavar="NAME=PATH")
    parser.add_argument("--compare", nargs="+", type=Path, default=[], metavar="JOB", help="other jobs to plan")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--output", type=Path, required=True)
    return parser.parse_args()


def main() -> None:
    """Plan, and say on stdout what is being done."""
    arguments = parse()
    logging.basicConfig(level=logging.INFO, format="%(message)s")  # names the kernels that are compiled
    located = DataFlags(tuple(arguments.dataset), tuple(arguments.index_dir))
    planner = open_job(arguments.job, located)
    output: Path = arguments.output
    summaries: list[PlanSummary] = []
    ablations: list[Sequence[AblationResult]] = []
    for step in range(arguments.steps):
        print(f"planning step {step + 1} of {arguments.steps}")
        summaries.append(explain(planner.job, planner.plan(step)))
        ablations.append(ablation(planner.job, summaries[-1].plan))
    print(f"drawing the pipeline of step {PICTURED_STEP}")
    pictured, title = summaries[PICTURED_STEP], f"step {PICTURED_STEP} of the demo, as simulated"
    draw_plan(pictured, title, output / "plan.png", mean_ablation([ablations[PICTURED_STEP]]))
    (output / "planned.json").write_text(planner.job.text)
    (output / "canonical.json").write_text(baseline_job(planner.job).text)
    comparison = []
    for number, job in enumerate(arguments.compare, 1):
        print(f"comparing modalities, {number} of {len(arguments.compare)}")
        comparison.append(compared(open_job(job, located), min(arguments.steps, COMPARED_STEPS)))
    found = {
        "steps": [before_after(summary) for summary in summaries],
        "ablation": [asdict(row) for row in mean_ablation(ablations)],
        "chosen": choice(pictured.plan),
        "comparison": comparison,
    }
    (output / "plans.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(f"{Path(__file__).name}: {error}")
