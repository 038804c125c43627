"""`dataserver simulate`."""

import json as json_format
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from textwrap import wrap
from typing import Annotated, Any, Final

import tyro
from rich import box
from rich.console import Console
from rich.table import Table

from dataserver.cli.arguments import Pairs
from dataserver.cli.comparison import Outcome, compare
from dataserver.cli.plan import open_job
from dataserver.cli.progress import progress_bar
from dataserver.planning.identity import Job
from dataserver.serving.jobs import JobPlanner

WIDTH: Final = 110
"""Of the table where the output is no terminal."""
WORTHWHILE_PERCENT: Final = 0.5
"""A smaller gain is no reason to change a job."""


def simulate(
    job: Path,
    steps: int = 20,
    first_step: int = 0,
    dataset: Pairs = (),
    index_dir: Pairs = (),
    quarantine: Pairs = (),
    tokenizer: Pairs = (),
    config: Path | None = None,
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
) -> None:
    """Plan some steps of a job under every combination of policies, and compare what the simulator expects of them.

    The samples of a step are the same under all of them. Times are those of the job's cost model, so `dataserver fit`
    comes first. No server is needed and no image is read.

    Args:
        job: YAML or JSON file of the job.
        steps: Steps to plan; fewer where the job ends before.
        first_step: The first of them, from 0.
        dataset: Dataset by the logical name that the job uses; may be repeated.
        index_dir: Folder of a dataset's index, where it does not lie beside the shards; may be repeated.
        quarantine: Quarantine list of a dataset; may be repeated.
        tokenizer: Hugging Face tokenizers file by logical name; may be repeated. `bytes` is built in.
        config: YAML file of a server, for the same names.
        json: Print the comparison as JSON.
    """
    if first_step < 0 or steps < 1:
        raise ValueError(f"--first-step is {first_step}, --steps is {steps}; at least 0 and 1 are required")
    planner = open_job(job, dataset, index_dir, quarantine, tokenizer, config)
    taken = range(first_step, max(first_step + 1, min(first_step + steps, planner.num_steps)))
    about = _about(planner, taken)
    with progress_bar("planning") as progress:
        outcomes = compare(planner, taken, progress)
    if json:
        rows = [_row(outcome, outcomes[0]) for outcome in outcomes]
        print(json_format.dumps({**about, "rows": rows}, indent=1))
        return
    console = Console()
    _show(console if console.is_terminal else Console(width=WIDTH), planner.job, about, outcomes)


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
    }


def _row(outcome: Outcome, own: Outcome) -> dict[str, Any]:
    """A row as JSON."""
    return {
        **asdict(outcome.choice),
        "own": outcome is own,
        "step_ns": outcome.step_ns,
        "slower_than_own_percent": _beyond(outcome.step_ns, own.step_ns),
        "lower_bound_ns": outcome.bound_ns,
        "above_bound_percent": _beyond(outcome.step_ns, outcome.bound_ns),
        "bubble_percent": outcome.bubble_percent,
        "imbalance": outcome.imbalance,
        "microbatches": outcome.microbatches,
        "fill_percent": outcome.fill_percent,
        "empty_sequences_percent": outcome.empty_percent,
        "planning_ns": outcome.planning_ns,
    }


def _beyond(time_ns: int, reference_ns: int) -> float:
    return 100 * (time_ns - reference_ns) / reference_ns if reference_ns else 0.0


def _show(console: Console, job: Job, about: dict[str, Any], outcomes: Sequence[Outcome]) -> None:
    """Print the comparison for people, the fastest first; more microbatches in flight stand apart: they cost memory."""
    first, last = about["first_step"], about["first_step"] + about["steps"] - 1
    console.print(
        f"job {job.job_id}\nsteps {first} to {last} of {about['steps_of_job']}: {about['samples']} samples, "
        f"{about['images']} images, {about['tokens']} tokens, {about['truncated_tokens']} cut"
    )
    own, packed = outcomes[0], job.stream.packing.enabled
    same = [o for o in outcomes if o.choice.extra_in_flight == own.choice.extra_in_flight]
    other = [o for o in outcomes if o not in same]
    table = _table([m.name for m in job.spec.execution.modules], console.width >= WIDTH)
    for group in sorted(same, key=lambda o: o.step_ns), sorted(other, key=lambda o: o.choice.extra_in_flight or 0):
        for outcome in group:
            style = "bold" if outcome is own else ""
            table.add_row(*_cells(outcome, own, packed), style=style, end_section=outcome is group[-1])
    console.print(table)
    console.print(_verdict(min(same, key=lambda o: o.step_ns), own, packed))


def _table(modules: Sequence[str], wide: bool) -> Table:
    title = "means over the steps, as simulated; *: the job's own; module: largest / mean load of its ranks"
    table = Table(title=title, box=box.SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("packing, balance, order")
    folded = ["\n".join(wrap(name, 12 if wide else 5)) for name in modules]
    for name in ("step\nms", "vs *\n%", "above\nbound\n%", "bubble\n%", *folded, "waves", "fill\n%", "plan\nms"):
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _cells(outcome: Outcome, own: Outcome, packed: bool) -> list[str]:
    choice = outcome.choice
    if choice.extra_in_flight == own.choice.extra_in_flight:
        packing = f"{choice.packing}, " if packed else ""
        name = f"{packing}{choice.balance}, {choice.order}" + (" *" if outcome is own else "")
    else:
        name = f"as *, extra_in_flight {choice.extra_in_flight}"
    return [
        name,
        f"{outcome.step_ns / 1e6:.1f}",
        f"{_beyond(outcome.step_ns, own.step_ns):+.1f}",
        f"{_beyond(outcome.step_ns, outcome.bound_ns):.1f}",
        f"{outcome.bubble_percent:.1f}",
        *(f"{value:.3f}" for value in outcome.imbalance.values()),
        f"{outcome.microbatches:.1f}",
        f"{outcome.fill_percent:.1f}",
        f"{outcome.planning_ns / 1e6:.1f}",
    ]


def _verdict(best: Outcome, own: Outcome, packed: bool) -> str:
    """What to write into the job."""
    gain = -_beyond(best.step_ns, own.step_ns)
    if gain < WORTHWHILE_PERCENT:
        return f"the job's own policies are the fastest, or within {WORTHWHILE_PERCENT} % of it"
    policies: dict[str, str | None] = {"packing": best.choice.packing} if packed else {}
    policies |= {"balance": best.choice.balance, "order": best.choice.order}
    chosen = ", ".join(f"{name}: {value}" for name, value in policies.items())
    return f"{gain:.1f} % less time than the job's own: policies: {{{chosen}}}"
