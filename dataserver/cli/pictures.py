"""The picture of a plan: loads per rank and the pipeline's timeline, before and after planning."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from dataserver.cli.gantt import BACKWARD_ALPHA, BUBBLE, INK, INTERACTION, Chart, chart_of, draw_chart
from dataserver.drawing import COLOURS, drawing, file_of
from dataserver.outputs import write_whole
from dataserver.planning.plan.expectation import imbalance
from dataserver.planning.planner import PlanSummary
from dataserver.planning.simulation import OperationKind
from dataserver.reporting.ablation import AblationRow
from dataserver.reporting.timelines import modules_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CAPTION_WIDTH: Final = 150
MOST_LARGE_ROWS: Final = 30
"""Rows are drawn lower if there are more than this."""


def draw_plan(summary: PlanSummary, title: str, path: Path, ablation: Sequence[AblationRow] = ()) -> None:
    """Write the picture; the suffix of `path` (.png, .svg, .pdf) chooses the format.

    Below the title stands what each change of the `ablation` brings, if it is given.

    Raises:
        ValueError: matplotlib is not installed, or does not know the suffix.
    """
    with drawing():
        drawn = file_of(_figure(summary, "\n".join([title, *_caption(ablation)])), path.suffix)
    write_whole(path, drawn)


def svg_of_plan(summary: PlanSummary) -> str:
    """The same picture as an <svg> element for a page.

    Raises:
        ValueError: matplotlib is not installed.
    """
    drawn = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with drawing():
        _figure(summary, "").savefig(drawn, format="svg", metadata=nothing)
    text = drawn.getvalue()
    return text[text.index("<svg") :]


def _caption(ablation: Sequence[AblationRow]) -> list[str]:
    """Lines of at most so many characters."""
    rows = [f"{name} {time} ms" for name, time, *_ in (row.cells for row in ablation)]
    lines: list[str] = []
    for row in rows:
        if lines and len(lines[-1]) + len(row) < CAPTION_WIDTH:
            lines[-1] += f"   {row}"
        else:
            lines.append(row)
    return lines


def _figure(summary: PlanSummary, title: str) -> "Figure":
    from matplotlib.figure import Figure

    panels = (
        ("before: canonical order", summary.before, summary.loads_before, summary.baseline),
        ("after: planned", summary.after, summary.loads_after, summary.plan),
    )
    charts = [chart_of(planned, plan.groups) for _, planned, _, plan in panels]
    rows = max(len(chart.rows) for chart in charts)
    small = rows > MOST_LARGE_ROWS
    figure = Figure(figsize=(13, 3.6 + 2 * rows * (0.13 if small else 0.22)), layout="constrained")
    if title:
        figure.suptitle(title)
    grid = figure.add_gridspec(2, 2, width_ratios=[1, 5])
    longest = max(summary.before.makespan_ns, summary.after.makespan_ns)
    largest = max(int(values.max()) for _, _, loads, _ in panels for values in loads.values())
    for line, ((name, planned, loads, _), chart) in enumerate(zip(panels, charts, strict=True)):
        left = figure.add_subplot(grid[line, 0])
        _draw_loads(left, {m: loads[m].tolist() for m in modules_of(planned)})
        left.set_xlim(0, 1.05 * max(largest, 1) / 1e6)
        axes = figure.add_subplot(grid[line, 1])
        draw_chart(axes, chart, longest, small)
        axes.set_title(f"{name}: {planned.makespan_ns / 1e6:.1f} ms, {planned.timeline.bubble_ppm / 1e4:.1f} % bubble")
    _add_legend(figure, charts)
    return figure


def _draw_loads(axes: "Axes", loads: dict[str, list[int]]) -> None:
    position, ticks, labels = 0, [], []
    height = 0.8 if sum(map(len, loads.values())) <= MOST_LARGE_ROWS * 2 else 1  # gaps of less than a pixel flicker
    for colour, (module, values) in zip(COLOURS * len(loads), loads.items(), strict=False):
        axes.barh(range(position, position + len(values)), [v / 1e6 for v in values], height=height, color=colour)
        ticks.append(position + (len(values) - 1) / 2)
        labels.append(f"{module}\n{imbalance(values):.2f}")
        position += len(values) + 1
    axes.set_yticks(ticks, labels)
    axes.set_ylim(position - 1.4, -0.6)
    axes.set_xlabel("forward load per rank, ms")
    axes.set_title("load; max / mean", fontsize="medium")


def _add_legend(figure: "Figure", charts: Sequence[Chart]) -> None:
    from matplotlib.patches import Patch

    modules = modules_of(charts[0].planned)
    interacts = any(bar.kind is OperationKind.INTERACTION for bars in charts[0].bars for bar in bars)
    entries = [
        *(Patch(facecolor=COLOURS[i % len(COLOURS)], label=module) for i, module in enumerate(modules)),
        *([Patch(facecolor=INTERACTION, label="interaction")] if interacts else []),
        Patch(facecolor="#777777", label="dark: forward"),
        Patch(facecolor="#777777", alpha=BACKWARD_ALPHA, label="light: backward"),
        Patch(facecolor=BUBBLE, label="idle"),
        Patch(facecolor="white", edgecolor=INK, label="critical path"),
    ]
    figure.legend(handles=entries, loc="outside lower center", ncols=min(len(entries), 8), frameon=False)
