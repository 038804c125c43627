"""The picture of a plan: loads per rank and the pipeline's timeline, before and after planning."""

import io
from pathlib import Path
from typing import TYPE_CHECKING, Final

from dataserver.cli.timelines import Bar, bars_of, labels_of, modules_of
from dataserver.planning.expectation import imbalance
from dataserver.planning.layouts import PlannedTimeline
from dataserver.planning.planner import PlanSummary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS: Final = ("#4477AA", "#EE7733", "#228833", "#AA3377", "#66CCEE", "#CCBB44")
"""One for each module, in pipeline order; distinguishable without colour vision (Tol's bright scheme)."""
BUBBLE: Final = "#E8E8E8"
INK: Final = "#111111"
BACKWARD_ALPHA: Final = 0.55
MOST_ROWS: Final = 48
"""Nodes drawn; of a wider job some ranks of each stage are shown, those of the critical path before others."""
MOST_NUMBERED: Final = 16
"""Microbatches up to which their numbers are written."""


def draw_plan(summary: PlanSummary, title: str, path: Path) -> None:
    """Write the picture; the suffix of `path` (.png, .svg, .pdf) chooses the format.

    Raises:
        ValueError: matplotlib is not installed, or does not know the suffix.
    """
    _require_matplotlib()
    from matplotlib import rc_context

    dates = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(path.suffix.lower())
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "disttrain"}):
        _figure(summary, title).savefig(path, dpi=110, metadata=dates)


def svg_of_plan(summary: PlanSummary) -> str:
    """The same picture as an <svg> element that stands in a page.

    Raises:
        ValueError: matplotlib is not installed.
    """
    _require_matplotlib()
    from matplotlib import rc_context

    drawn = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "disttrain"}):
        _figure(summary, "").savefig(drawn, format="svg", metadata=nothing)
    text = drawn.getvalue()
    return text[text.index("<svg") :]


def _require_matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ValueError("drawing needs matplotlib, which is not installed; run: pip install matplotlib") from None


def _figure(summary: PlanSummary, title: str) -> "Figure":
    from matplotlib.figure import Figure

    panels = (
        ("before: canonical order", summary.before, summary.loads_before),
        ("after: planned", summary.after, summary.loads_after),
    )
    bars = [bars_of(timeline) for _, timeline, _ in panels]
    rows = [_rows(timeline, found) for (_, timeline, _), found in zip(panels, bars, strict=True)]
    figure = Figure(figsize=(13, 3.4 + 0.44 * len(rows[0])), layout="constrained")
    if title:
        figure.suptitle(title)
    grid = figure.add_gridspec(2, 2, width_ratios=[1, 5])
    longest = max(summary.before.makespan_ns, summary.after.makespan_ns)
    for line, (name, timeline, loads) in enumerate(panels):
        _draw_loads(figure.add_subplot(grid[line, 0]), {m: loads[m].tolist() for m in modules_of(timeline)})
        axes = figure.add_subplot(grid[line, 1])
        _draw_timeline(axes, timeline, bars[line], rows[line])
        axes.set_xlim(0, max(longest, 1) / 1e6)
        axes.set_title(
            f"{name}: {timeline.makespan_ns / 1e6:.1f} ms, {timeline.timeline.bubble_ppm / 1e4:.1f} % bubble"
        )
    return figure


def _rows(planned: PlannedTimeline, bars: list[list[Bar]]) -> list[int]:
    """Nodes to draw, rank by rank within each stage."""
    most_ranks = max(1, MOST_ROWS // planned.pipeline.num_stages)
    stage = planned.pipeline.stage.tolist()
    taken, rows = [0] * planned.pipeline.num_stages, []
    for node in sorted(range(len(bars)), key=lambda n: (not any(bar.critical for bar in bars[n]), n)):
        if taken[stage[node]] < most_ranks:
            taken[stage[node]] += 1
            rows.append(node)
    return sorted(rows)


def _draw_loads(axes: "Axes", loads: dict[str, list[int]]) -> None:
    position = 0
    ticks, labels = [], []
    for colour, (module, values) in zip(COLOURS * len(loads), loads.items(), strict=False):
        axes.barh(range(position, position + len(values)), [v / 1e6 for v in values], color=colour)
        ticks.append(position + (len(values) - 1) / 2)
        labels.append(f"{module}\n{imbalance(values):.2f}")
        position += len(values) + 1
    axes.set_yticks(ticks, labels)
    axes.invert_yaxis()
    axes.set_xlabel("forward load per rank, ms")
    axes.set_title("load; max / mean", fontsize="medium")


def _draw_timeline(axes: "Axes", planned: PlannedTimeline, bars: list[list[Bar]], rows: list[int]) -> None:
    labels, modules = labels_of(planned), modules_of(planned)
    numbered = planned.pipeline.forward_ns.shape[1] <= MOST_NUMBERED
    for row, node in enumerate(rows):
        axes.barh(row, planned.makespan_ns / 1e6, color=BUBBLE, height=0.9)
        colours = {module: COLOURS[i % len(COLOURS)] for i, module in enumerate(modules)}
        _draw_node(axes, row, bars[node], colours)
        for bar in bars[node] if numbered else ():
            if bar.end_ns - bar.start_ns > planned.makespan_ns / 90:
                axes.text(
                    (bar.start_ns + bar.end_ns) / 2e6, row, str(bar.microbatch),
                    ha="center", va="center", fontsize=6, color="white" if bar.forward else INK,
                )  # fmt: skip
    axes.set_yticks(range(len(rows)), [labels[node] for node in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlabel("simulated time, ms (dark: forward, light: backward, grey: idle, outlined: critical path)")


def _draw_node(axes: "Axes", row: int, bars: list[Bar], colours: dict[str, str]) -> None:
    from matplotlib.colors import to_rgba

    for outlined in (False, True):  # outlines over the edges of their neighbours
        chosen = [bar for bar in bars if bar.critical or not outlined]
        if not chosen:
            continue
        axes.barh(
            [row] * len(chosen),
            [(bar.end_ns - bar.start_ns) / 1e6 for bar in chosen],
            left=[bar.start_ns / 1e6 for bar in chosen],
            color="none"
            if outlined
            else [to_rgba(colours[b.module], 1 if b.forward else BACKWARD_ALPHA) for b in chosen],
            height=0.9,
            edgecolor=INK if outlined else "white",
            linewidth=0.9 if outlined else 0.4,
        )
