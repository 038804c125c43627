"""The picture of a plan: loads per rank and the pipeline's timeline, before and after planning."""

from pathlib import Path
from typing import TYPE_CHECKING

from dataserver.planning.expectation import PlannedTimeline, imbalance
from dataserver.planning.pipeline import OperationKind
from dataserver.planning.planner import PlanSummary

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#4477AA", "#EE7733", "#228833", "#AA3377", "#66CCEE", "#CCBB44")
"""One for each module, in pipeline order; distinguishable without colour vision (Tol's bright scheme)."""
BUBBLE = "#E8E8E8"
MOST_ROWS = 48
"""Nodes drawn; of a wider job the first ranks of each stage are shown."""


def draw_plan(summary: PlanSummary, title: str, path: Path) -> None:
    """Write the picture; the suffix of `path` (.png, .svg, .pdf) chooses the format.

    Raises:
        ValueError: matplotlib is not installed, or does not know the suffix.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError(
            "drawing needs matplotlib, which is not installed; run: pip install 'disttrain[plot]'"
        ) from None
    rows = _rows(summary.after)
    figure = Figure(figsize=(13, 3.4 + 0.44 * len(rows)), layout="constrained")
    figure.suptitle(title)
    grid = figure.add_gridspec(2, 2, width_ratios=[1, 5])
    longest = max(summary.before.makespan_ns, summary.after.makespan_ns)
    for line, (name, timeline, loads) in enumerate(
        (
            ("before: canonical order", summary.before, summary.loads_before),
            ("after: planned", summary.after, summary.loads_after),
        )
    ):
        _draw_loads(figure.add_subplot(grid[line, 0]), {m: [int(v) for v in loads[m]] for m in _modules(timeline)})
        axes = figure.add_subplot(grid[line, 1])
        _draw_timeline(axes, timeline, rows)
        axes.set_xlim(0, longest / 1e6)
        axes.set_title(
            f"{name}: {timeline.makespan_ns / 1e6:.1f} ms, {timeline.timeline.bubble_ppm / 1e4:.1f} % bubble"
        )
    figure.savefig(path, dpi=110)


def _modules(timeline: PlannedTimeline) -> list[str]:
    return list(dict.fromkeys(module for module, _, _ in timeline.nodes))


def _rows(timeline: PlannedTimeline) -> list[int]:
    """Nodes to draw, rank by rank within each stage."""
    most_ranks = max(1, MOST_ROWS // len(timeline.stages))
    return [i for i, (_, rank, _) in enumerate(timeline.nodes) if rank < most_ranks]


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


def _draw_timeline(axes: "Axes", planned: PlannedTimeline, rows: list[int]) -> None:
    modules = _modules(planned)
    numbers = len(planned.stages[0].forward[0])
    lists = planned.pipeline.lists
    for row, node in enumerate(rows):
        module, rank, _ = planned.nodes[node]
        stage = int(planned.pipeline.stage[node])
        axes.barh(row, planned.makespan_ns / 1e6, color=BUBBLE, height=0.9)
        times = planned.stages[stage]
        for operation, start in zip(lists[stage], planned.timeline.start_ns[node], strict=True):
            forward = operation.kind is OperationKind.FORWARD
            width = (times.forward if forward else times.backward)[rank, operation.microbatch] / 1e6
            colour = COLOURS[modules.index(module) % len(COLOURS)]
            bar = axes.barh(
                row, width, left=start / 1e6, color=colour, alpha=1.0 if forward else 0.55, height=0.9,
                edgecolor="white", linewidth=0.4,
            )  # fmt: skip
            if numbers <= 16 and width > planned.makespan_ns / 1e6 / 90:
                axes.bar_label(bar, [str(operation.microbatch)], label_type="center", fontsize=6, color="white")
    axes.set_yticks(range(len(rows)), [_label(planned, node) for node in rows])
    axes.invert_yaxis()
    axes.set_xlabel("simulated time, ms (dark: forward, light: backward, grey: idle)")


def _label(planned: PlannedTimeline, node: int) -> str:
    module, rank, stage = planned.nodes[node]
    stages = sum(1 for m, r, _ in planned.nodes if (m, r) == (module, rank))
    return f"{module} {rank}" + (f", stage {stage}" if stages > 1 else "")
