"""A plan as one HTML page: tables and picture, with nothing to fetch."""

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from dataserver.cli.pictures import svg_of_plan
from dataserver.cli.timelines import critical_ns, modules_of
from dataserver.planning.expectation import imbalance
from dataserver.planning.identity import Job
from dataserver.planning.plan import StepPlan
from dataserver.planning.planner import PlanSummary

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 90rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin: 0 0 .4rem; }
.tables { display: flex; flex-wrap: wrap; gap: 2.5rem; margin: 1.5rem 0; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .15rem .7rem; text-align: right; border-bottom: 1px solid #ddd; }
th:first-child, td:first-child { text-align: left; }
svg { width: 100%; height: auto; } code { font-size: .85em; }
"""


def write_page(job: Job, plan: StepPlan, summary: PlanSummary, path: Path) -> None:
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
    tables = _pipeline(summary) + _path(summary) + _loads(summary) + (_choice(plan) if plan.candidates else "")
    path.write_text(
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style></head>\n<body><h1>{escape(title)}, as simulated</h1>\n<p>{escape(facts)}<br>"
        f"<code>job {escape(job.job_id)}<br>stream {escape(plan.stream_id)}<br>plan {plan.hash.hex()}</code></p>\n"
        f'<div class="tables">{tables}</div>\n{svg_of_plan(summary)}</body></html>\n',
        encoding="utf-8",
    )


def _pipeline(summary: PlanSummary) -> str:
    bound = summary.bound_ns
    both = summary.before, summary.after
    rows = (
        ["makespan ms", *(f"{t.makespan_ns / 1e6:.3f}" for t in both)],
        ["above lower bound %", *(f"{100 * (t.makespan_ns - bound) / bound:.1f}" if bound else "-" for t in both)],
        ["bubble %", *(f"{t.timeline.bubble_ppm / 1e4:.2f}" for t in both)],
    )
    return _table("Pipeline", ("", "before", "after"), rows)


def _path(summary: PlanSummary) -> str:
    parts = critical_ns(summary.before), critical_ns(summary.after)
    whole = summary.before.makespan_ns, summary.after.makespan_ns
    rows = (
        [
            module,
            *(f"{100 * part[module] / total:.1f}" if total else "-" for part, total in zip(parts, whole, strict=True)),
        ]
        for module in modules_of(summary.after)
    )
    return _table("Critical path by module, %", ("", "before", "after"), rows)


def _loads(summary: PlanSummary) -> str:
    rows = []
    for module in modules_of(summary.after):
        loads = summary.loads_before[module].tolist(), summary.loads_after[module].tolist()
        largest = (f"{max(values) / 1e6:.3f}" for values in loads)
        rows.append([module, str(len(loads[0])), *largest, *(f"{imbalance(values):.3f}" for values in loads)])
    head = ("", "ranks", "largest ms before", "after", "max / mean before", "after")
    return _table("Forward loads of the ranks", head, rows)


def _choice(plan: StepPlan) -> str:
    fastest = max(plan.candidates[0].makespan_ns, 1)
    rows = (
        [c.name, f"{c.makespan_ns / 1e6:.3f}", f"{100 * (c.makespan_ns - fastest) / fastest:.2f}"]
        for c in plan.candidates
    )
    return _table("Plans compared, the first was chosen", ("", "makespan ms", "slower %"), rows)


def _table(title: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    def line(tag: str, cells: Sequence[str]) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    body = "".join(line("td", row) for row in rows)
    return f"<section><h2>{escape(title)}</h2><table>{line('th', head)}{body}</table></section>"
