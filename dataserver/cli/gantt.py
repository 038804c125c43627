"""What every node does over a simulated step, as bars."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from dataserver.drawing import COLOURS
from dataserver.planning import I64
from dataserver.planning.layouts.interface import PlannedTimeline
from dataserver.planning.plan.plan import RankGroups
from dataserver.planning.simulation import OperationKind
from dataserver.reporting.timelines import Bar, bars_of, labels_of, modules_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INTERACTION: Final = "#222222"
BUBBLE: Final = "#E8E8E8"
INK: Final = "#111111"
BACKWARD_ALPHA: Final = 0.55
MOST_ROWS: Final = 48
"""Nodes drawn; of a wider job some ranks of each stage are shown, those of the critical path before others."""
MOST_GROUPED_ROWS: Final = 96
"""The same where ranks form groups, which span rows."""
DIGIT_WIDTH: Final = 0.0055
NUMBER_MARGIN: Final = 0.0025
"""Parts of the axis; a bar gets its number where that fits."""


@dataclass(frozen=True, slots=True)
class Chart:
    """A simulated step that is drawn."""

    planned: PlannedTimeline
    bars: Sequence[Sequence[Bar]]
    """The bars of each node, in order of time."""
    rows: Sequence[int]
    """Nodes that are drawn, from top to bottom."""
    groups: I64
    """int64 [microbatches, ranks]: first rank of the sequence-parallel group of each backbone rank; empty without."""
    grouped: str
    """Module whose ranks form groups."""


def chart_of(planned: PlannedTimeline, groups: RankGroups) -> Chart:
    """The chart of a step; `groups` are those of the plan."""
    bars = bars_of(planned)
    firsts = np.zeros((0, 0), np.int64)
    if len(groups.degree):
        firsts = np.repeat(groups.first_rank, groups.degree).reshape(planned.pipeline.forward_ns.shape[1], -1)
    return Chart(planned, bars, _rows(planned, bars, bool(firsts.size)), firsts, groups.module)


def _rows(planned: PlannedTimeline, bars: Sequence[Sequence[Bar]], grouped: bool) -> list[int]:
    """Nodes to draw, rank by rank within each stage."""
    most_ranks = max(1, (MOST_GROUPED_ROWS if grouped else MOST_ROWS) // planned.pipeline.num_stages)
    stage = planned.pipeline.stage.tolist()
    taken, rows = [0] * planned.pipeline.num_stages, []
    for node in sorted(range(len(bars)), key=lambda n: (not any(bar.critical for bar in bars[n]), n)):
        if taken[stage[node]] < most_ranks:
            taken[stage[node]] += 1
            rows.append(node)
    return sorted(rows)


@dataclass(slots=True)
class _Box:
    """A bar, over as many rows as it spans."""

    bar: Bar
    row: int
    rows: int
    critical: bool


def draw_chart(axes: "Axes", chart: Chart, longest_ns: int, small: bool) -> None:
    """Draw a chart on axes that reach to `longest_ns`, with small or ordinary labels."""
    planned, labels = chart.planned, labels_of(chart.planned)
    modules = modules_of(planned)
    colours = {module: COLOURS[i % len(COLOURS)] for i, module in enumerate(modules)}
    axes.barh(range(len(chart.rows)), planned.makespan_ns / 1e6, color=BUBBLE, height=0.9)
    boxes = _boxes(chart)
    _draw_boxes(axes, boxes, colours, outlined=False)
    _draw_boxes(axes, [b for b in boxes if b.critical], colours, outlined=True)  # over the edges of their neighbours
    for box in boxes:
        bar, number = box.bar, str(box.bar.microbatch)
        if bar.end_ns - bar.start_ns > (NUMBER_MARGIN + DIGIT_WIDTH * len(number)) * longest_ns:
            axes.text(
                (bar.start_ns + bar.end_ns) / 2e6, box.row + (box.rows - 1) / 2, number,
                ha="center", va="center", fontsize=6, color=INK if bar.kind is OperationKind.BACKWARD else "white",
            )  # fmt: skip
    axes.set_yticks(range(len(chart.rows)), [labels[node] for node in chart.rows], fontsize=6 if small else None)
    axes.set_ylim(len(chart.rows) - 0.4, -0.6)
    axes.set_xlim(0, max(longest_ns, 1) / 1e6)
    axes.set_xlabel("simulated time, ms")


def _boxes(chart: Chart) -> list[_Box]:
    """The bars of all rows; those of a group's ranks are one."""
    found: list[_Box] = []
    open_boxes: dict[tuple[OperationKind, int, int], _Box] = {}
    for row, node in enumerate(chart.rows):
        about = chart.planned.nodes[node]
        shares = bool(chart.groups.size) and about.modules == (chart.grouped,)
        for bar in chart.bars[node]:
            if shares:
                key = bar.kind, bar.microbatch, int(chart.groups[bar.microbatch, about.rank])
                box = open_boxes.get(key)
                if box is not None and box.row + box.rows == row:
                    box.rows += 1
                    box.critical |= bar.critical
                    continue
            box = _Box(bar, row, 1, bar.critical)
            found.append(box)
            if shares:
                open_boxes[key] = box
    return found


def _draw_boxes(axes: "Axes", boxes: Sequence[_Box], colours: dict[str, str], outlined: bool) -> None:
    if not boxes:
        return
    axes.barh(
        [box.row + (box.rows - 1) / 2 for box in boxes],
        [(box.bar.end_ns - box.bar.start_ns) / 1e6 for box in boxes],
        left=[box.bar.start_ns / 1e6 for box in boxes],
        color="none" if outlined else [colour_of(box.bar, colours) for box in boxes],
        height=[box.rows - 0.1 for box in boxes],
        edgecolor=INK if outlined else "white",
        linewidth=0.9 if outlined else 0.4,
    )


def colour_of(bar: Bar, colours: dict[str, str]) -> tuple[float, float, float, float]:
    """Dark is forward, light backward."""
    from matplotlib.colors import to_rgba

    if bar.kind is OperationKind.INTERACTION:
        return to_rgba(INTERACTION)
    return to_rgba(colours[bar.module], BACKWARD_ALPHA if bar.kind is OperationKind.BACKWARD else 1)
