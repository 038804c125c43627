"""The picture of a solution: what the step of each choice goes into, and which module has how many devices."""

import io
from pathlib import Path
from typing import TYPE_CHECKING, Final

from dataserver.outputs import write_output
from trainclient.orchestrate.report import degrees
from trainclient.orchestrate.solving import Scored, Solution

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS: Final = ("#4477AA", "#EE7733", "#228833", "#AA3377", "#66CCEE", "#CCBB44")
"""Distinguishable without colour vision (Tol's bright scheme)."""
SUFFIXES: Final = (".png", ".svg", ".pdf")


def draw(solution: Solution, path: Path) -> None:
    """Write the picture; the suffix of `path` (.png, .svg, .pdf) chooses the format.

    Raises:
        ValueError: matplotlib is not installed.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("drawing needs matplotlib, which is not installed; run: pip install matplotlib") from None
    scored = solution.scored
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "disttrain"}):
        figure = Figure(figsize=(13, 1.8 + 0.5 * len(scored)), layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=[3, 2], sharey=True)
        _draw_parts(left, scored)
        _draw_devices(right, solution)
        kind, drawn = path.suffix.lower().removeprefix("."), io.BytesIO()
        dates = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)
        figure.savefig(drawn, format=kind, dpi=110, metadata=dates)
    write_output("--plot", path, drawn.getvalue())


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
