"""A plan as one HTML page: tables and picture, with nothing to fetch."""

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from dataserver.cli.pictures import svg_of_plan
from dataserver.cli.tables import compositions, in_flight
from dataserver.outputs import write_whole
from dataserver.planning.job.identity import Job
from dataserver.planning.plan.expectation import imbalance, padding_ppm
from dataserver.planning.plan.plan import StepPlan
from dataserver.planning.planner import PlanSummary
from dataserver.reporting.ablation import COLUMNS, TITLE, AblationRow
from dataserver.reporting.timelines import critical_ns

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 90rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin: 0 0 .4rem; }
.tables { display: flex; flex-wrap: wrap; gap: 2.5rem; margin: 1.5rem 0; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .15rem .7rem; text-align: right; border-bottom: 1px solid #ddd; }
th:first-child, td:first-child, .words th, .words td { text-align: left; }
svg { width: 100%; height: auto; } code { font-size: .85em; }
"""


def write_page(job: Job, plan: StepPlan, summary: PlanSummary, ablation: Sequence[AblationRow], path: Path) -> None:
    """Write the page.

    Raises:
        ValueError: matplotlib is not installed.
    """
    title = f"Step {plan.step} of job {job.job_id[:12]}"
    samples = plan.samples
    facts = (
        f"{len(samples)} samples, {len(samples.image_rows)} images, {int(samples.tokens.sum())} tokens, "
        f"{int(samples.truncated_tokens.sum())} cut; {plan.num_microbatches} microbatches per rank. "
        f"Layout: {job.spec.execution.layout.kind}."
    )
    steps = _table(TITLE.capitalize(), COLUMNS, (row.cells for row in ablation))
    parts = [_step(summary), steps, _path(summary), _modules(job, summary)]
    if plan.candidates:
        parts.append(_choice(plan))
    if plan.decisions:
        rows = ([d.subject, d.chosen, d.reason] for d in plan.decisions)
        parts.append(_table("Decisions", ("about", "chosen", "why"), rows, of_words=True))
    if len(plan.groups.degree):
        parts.append(_groups(plan))
    write_whole(
        path,
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style></head>\n<body><h1>{escape(title)}, as simulated</h1>\n<p>{escape(facts)}<br>"
        f"<code>job {escape(job.job_id)}<br>stream {escape(plan.stream_id)}<br>plan {plan.hash.hex()}</code></p>\n"
        f'<div class="tables">{"".join(parts)}</div>\n{svg_of_plan(summary)}</body></html>\n',
    )


def _step(summary: PlanSummary) -> str:
    bound = summary.bound_ns
    both = summary.before, summary.after
    rows = (
        ["makespan ms", *(f"{t.makespan_ns / 1e6:.3f}" for t in both)],
        ["above lower bound %", *(f"{100 * (t.makespan_ns - bound) / bound:.1f}" if bound else "-" for t in both)],
        ["bubble %", *(f"{t.timeline.bubble_ppm / 1e4:.2f}" for t in both)],
    )
    return _table("Simulated step", ("", "before", "after"), rows)


def _path(summary: PlanSummary) -> str:
    spent = [(critical_ns(t), max(t.makespan_ns, 1)) for t in (summary.before, summary.after)]
    names = dict.fromkeys(name for parts, _ in spent for name in parts)
    rows = ([name, *(f"{100 * parts.get(name, 0) / whole:.1f}" for parts, whole in spent)] for name in names)
    return _table("Critical path, % of the step", ("", "before", "after"), rows)


def _modules(job: Job, summary: PlanSummary) -> str:
    rows = []
    for module in job.spec.execution.modules:
        loads = summary.loads_before[module.name].tolist(), summary.loads_after[module.name].tolist()
        largest = (f"{max(values) / 1e6:.3f}" for values in loads)
        padding = f"{padding_ppm(module, summary.plan) / 1e4:.1f}" if module.padded else "-"
        balance = (f"{imbalance(values):.3f}" for values in loads)
        schedule = next(s for s in summary.plan.schedules if s.module == module.name)
        stages = in_flight(schedule.in_flight.tolist(), schedule.chunks)
        rows.append([module.name, str(module.dp), *largest, *balance, padding, stages])
    head = ("", "ranks", "largest ms before", "after", "max / mean before", "after", "padding %", "in flight by stage")
    return _table("Forward loads of the ranks, and microbatches in flight", head, rows)


def _groups(plan: StepPlan) -> str:
    groups = plan.groups
    rows = ([str(m), c] for m, c in compositions(groups.microbatch.tolist(), groups.degree.tolist()))
    return _table("Sequence-parallel groups", ("microbatch", "degrees"), rows)


def _choice(plan: StepPlan) -> str:
    fastest = max(plan.candidates[0].makespan_ns, 1)
    rows = (
        [c.name, f"{c.makespan_ns / 1e6:.3f}", f"{100 * (c.makespan_ns - fastest) / fastest:.2f}"]
        for c in plan.candidates
    )
    return _table("Plans compared, the first was chosen", ("", "makespan ms", "slower %"), rows)


def _table(title: str, head: Sequence[str], rows: Iterable[Sequence[str]], of_words: bool = False) -> str:
    def line(tag: str, cells: Sequence[str]) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    body, kind = "".join(line("td", row) for row in rows), ' class="words"' if of_words else ""
    return f"<section><h2>{escape(title)}</h2><table{kind}>{line('th', head)}{body}</table></section>"
