"""A comparison of alternatives as a table for people, and what it recommends."""

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from textwrap import wrap
from typing import Final

import yaml
from rich import box
from rich.table import Table
from rich.text import Text

from dataserver.planning.job.spec import Execution
from dataserver.reporting.alternatives import ABLATION, ASKED_FOR, changes
from dataserver.reporting.comparison import Figures, Outcome

WORTHWHILE_PERCENT: Final = 0.5
"""A smaller gain is no reason to change a job."""
MODULES_WIDTH: Final = 34
"""Characters that the columns of all modules share."""
MOST_MODULES: Final = 4
"""Modules of several ranks that have a column each; of more only the worst is shown."""

Cell = Callable[[Figures, Figures], str]
"""The text of a cell, from the figures of its row and those of the job as it is."""


def beyond(value: float, reference: float) -> float:
    """Percent that a value lies above another."""
    return 100 * (value - reference) / reference if reference else 0.0


def comparison_table(outcomes: Sequence[Outcome]) -> Table:
    """All outcomes but the ablation's under their headings: the job's own first, the main ones by time."""
    own = outcomes[0]
    assert own.figures is not None
    table = Table(box=box.SIMPLE, padding=0, pad_edge=False)
    table.add_column("")
    columns = _columns(own.alternative.execution, own.figures)
    for heading, _ in columns:
        table.add_column(heading, justify="right", no_wrap=True)
    compared = [o for o in outcomes if o.alternative.heading != ABLATION]
    for heading, found in groupby(compared, key=lambda o: o.alternative.heading):
        rows = list(found)
        if own in rows:
            rows.sort(key=lambda o: o.figures.step_ns if o.figures else float("inf"))
        table.add_row(Text(heading, style="bold"))
        for outcome in rows:
            name = f"{'*' if outcome is own else ' '} {outcome.alternative.name}"
            figures = outcome.figures
            cells = [cell(figures, own.figures) if figures else "-" for _, cell in columns]
            table.add_row(name, *cells, style="bold" if outcome is own else "", end_section=outcome is rows[-1])
    return table


def _columns(execution: Execution, own: Figures) -> list[tuple[str, Cell]]:
    """Headings and what stands below."""
    found: list[tuple[str, Cell]] = [
        ("step\nms", lambda f, _: f"{f.step_ns / 1e6:.1f}"),
        ("vs *\n%", lambda f, own: f"{beyond(f.step_ns, own.step_ns):+.1f}"),
        ("above\nbound\n%", lambda f, _: f"{beyond(f.step_ns, f.bound_ns):.1f}"),
        ("bubble\n%", lambda f, _: f"{f.bubble_percent:.1f}"),
        *_module_columns([m.name for m in execution.modules if m.dp > 1]),
    ]
    if own.padding_percent:
        found.append(("pad\n%", lambda f, _: f"{max(f.padding_percent.values()):.1f}"))
    if "between_nodes_bytes" in own.of_layout:
        found.append(("between\nnodes\nMB", lambda f, _: f"{f.of_layout['between_nodes_bytes'] / 1e6:.1f}"))
    found += [("waves", lambda f, _: f"{f.microbatches:.1f}"), ("held", lambda f, _: f"{_held(f):.1f}")]
    if "fill_percent" in own.of_layout:
        found.append(("fill\n%", lambda f, _: f"{f.of_layout['fill_percent']:.1f}"))
    return [*found, ("plan\nms", lambda f, _: f"{f.planning_ns / 1e6:.1f}")]


def _module_columns(modules: Sequence[str]) -> list[tuple[str, Cell]]:
    if len(modules) > MOST_MODULES:
        return [("worst\nmodule", lambda f, _: f"{max(f.imbalance.values()):.3f}")]
    width = MODULES_WIDTH // max(len(modules), 1)

    def cell(name: str) -> Cell:
        return lambda f, _: f"{f.imbalance[name]:.3f}"

    return [("\n".join(wrap(name, width)), cell(name)) for name in modules]


def _held(figures: Figures) -> float:
    """Microbatches that the fullest stage holds."""
    return max(figures.in_flight.values())


def notes(outcomes: Iterable[Outcome]) -> list[str]:
    """Why alternatives could not be planned."""
    return [
        f"{o.alternative.heading} {o.alternative.name}: not possible, {o.refusal}"
        for o in outcomes
        if o.figures is None
    ]


def verdict(outcomes: Sequence[Outcome]) -> str:
    """What to take, in a sentence with its gain, and what to write into the job for it.

    First comes what needs no more memory than the job as it is.
    """
    own = outcomes[0]
    assert own.figures is not None
    execution = own.alternative.execution
    shown = (ABLATION, *ASKED_FOR)
    planned = [o for o in outcomes if o.figures and o.alternative.heading not in shown]
    best = _fastest([o for o in planned if not _needs_memory(o, own)])
    found = []
    if _gain(best, own) < WORTHWHILE_PERCENT:
        found.append(f"the job's own policies are the fastest, or within {WORTHWHILE_PERCENT} % of it")
    else:
        gain = f"{_gain(best, own):.1f} % less time than the job as it is"
        found.append(f"Take {_title(best)}: {gain}, with\n{_yaml(execution, best)}")
    larger = _fastest(planned)
    if _gain(larger, best) >= WORTHWHILE_PERCENT:
        limits, held = _sequences(own), _sequences(larger)
        more = ", ".join(f"{m} {held[m]:.1f}, now {limits[m]:.1f}" for m in held if held[m] > limits[m])
        found.append(
            f"If there is memory for more sequences in the fullest stage ({more}),\n"
            f"take {_title(larger)}: {_gain(larger, own):.1f} % less time, with\n{_yaml(execution, larger)}"
        )
    return "\n".join(found)


def _title(outcome: Outcome) -> str:
    """What to take, for people."""
    return f"{outcome.alternative.name} ({outcome.alternative.heading})"


def _sequences(outcome: Outcome) -> dict[str, float]:
    """For each module: sequences of one rank that the microbatches in its fullest stage hold."""
    assert outcome.figures is not None
    each = outcome.alternative.execution.microbatch
    return {module: held * each for module, held in outcome.figures.in_flight.items()}


def _most_sequences(outcome: Outcome) -> float:
    return max(_sequences(outcome).values())


def _needs_memory(outcome: Outcome, own: Outcome) -> bool:
    """Whether more may be in flight than in the job as it is, and the job does not say whether there is memory."""
    limits = _sequences(own)
    more = any(held > limits[module] for module, held in _sequences(outcome).items())
    return more and any(m.memory is None for m in own.alternative.execution.modules)


def _fastest(outcomes: Sequence[Outcome]) -> Outcome:
    """The one that holds least among those that are as fast as the fastest, but for what is not worth a change."""
    planned = [(o, o.figures.step_ns) for o in outcomes if o.figures is not None]
    limit = min(step for _, step in planned) * (1 + WORTHWHILE_PERCENT / 100)
    near = [(o, step) for o, step in planned if step <= limit]
    return min(near, key=lambda pair: (_most_sequences(pair[0]), pair[1]))[0]


def _gain(outcome: Outcome, reference: Outcome) -> float:
    assert outcome.figures is not None
    assert reference.figures is not None
    return -beyond(outcome.figures.step_ns, reference.figures.step_ns)


def _yaml(own: Execution, outcome: Outcome) -> str:
    text: str = yaml.safe_dump({"execution": changes(own, outcome.alternative.execution)}, sort_keys=False, width=110)
    return text.rstrip()
