"""The picture of a solution: what the step of each choice goes into, and which module has how many devices."""

from pathlib import Path
from typing import TYPE_CHECKING, Final

from dataserver.drawing import COLOURS, drawing, file_of
from dataserver.outputs import write_output
from trainclient.orchestrate.report import degrees
from trainclient.orchestrate.solving import Scored, Solution

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SUFFIXES: Final = (".png", ".svg", ".pdf")


def draw(solution: Solution, path: Path) -> None:
    """Write the picture; the suffix of `path` (.png, .svg, .pdf) chooses the format.

    Raises:
        ValueError: matplotlib is not installed.
    """
    scored = solution.scored
    with drawing():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(13, 1.8 + 0.5 * len(scored)), layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=[3, 2], sharey=True)
        _draw_parts(left, scored)
        _draw_devices(right, solution)
        drawn = file_of(figure, path.suffix)
    write_output("--plot", path, drawn)


def _draw_parts(axes: "Axes", scored: tuple[Scored, ...]) -> None:
    names = list(dict.fromkeys(name for s in scored for name, ns in s.choice.parts.items() if ns))
    lefts = [0.0] * len(scored)
    for name, colour in zip(names, COLOURS * len(names), strict=False):
        widths = [s.choice.parts.get(name, 0.0) / 1e9 for s in scored]
        axes.barh(range(len(scored)), widths, left=lefts, color=colour, label=name)
        lefts = [left + width for left, width in zip(lefts, widths, strict=True)]
    for row, s in enumerate(scored):
        if s.simulated_ns is not None:
            axes.plot([s.simulated_ns / 1e9] * 2, [row - 0.4, row + 0.4], color="#111111", linewidth=2)
    axes.plot([], [], color="#111111", linewidth=2, label="simulated")
    axes.set_yticks(
        range(len(scored)),
        [f"{s.choice.layout}\n{', '.join(degrees(m) for m in s.choice.modules)}" for s in scored],
        fontsize="small",
    )
    axes.invert_yaxis()
    axes.set_xlabel("seconds of a step, as solved; modules: dp x tp x pp, r: computes activations again")
    _legend(axes)


def _draw_devices(axes: "Axes", solution: Solution) -> None:
    networks = solution.problem.networks
    lefts = [0.0] * len(solution.scored)
    for number, network in enumerate(networks):
        widths = []
        for scored in solution.scored:
            modules = scored.choice.modules
            gpus = next(m.gpus for m in modules if m.option.network is network)
            widths.append(gpus * scored.choice.gpus / sum(m.gpus for m in modules))  # less where modules share them
        axes.barh(range(len(lefts)), widths, left=lefts, color=COLOURS[number % len(COLOURS)], label=network.name)
        lefts = [left + width for left, width in zip(lefts, widths, strict=True)]
    axes.axvline(solution.problem.cluster.gpus, color="#777777", linestyle=":")
    axes.set_xlabel("GPUs (colocated modules share all of theirs)")
    _legend(axes)


def _legend(axes: "Axes") -> None:
    """Above the bars, so that it hides none."""
    axes.legend(fontsize="small", loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4, frameon=False)
