"""Prints what the planner reaches: quality against bounds, optima and the papers' methods, and its own time.

Every row is measured in this run on one core with the default policies and budgets, over 20 fixed seeds unless it says
otherwise. The exit code is 1 if a row with a target misses it. Takes under ten minutes.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from planning_rows import balancing, colocated, entrain, flexsp, optimiser, phases, pipeline, steps
from planning_rows.row import Row
from rich.console import Console
from rich.table import Table

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA, help="folder with laion-mini and flexsp")
    parser.add_argument(
        "--only",
        help="part to measure",
        choices=["balancing", "pipeline", "optimiser", "steps", "entrain", "flexsp", "phases"],
    )
    arguments = parser.parse_args()
    parts: dict[str, Callable[[], list[Row]]] = {
        "balancing": balancing.rows,
        "pipeline": pipeline.rows,
        "optimiser": optimiser.rows,
        "steps": lambda: [*steps.scenario_b(arguments.data / "laion-mini"), *steps.planning_time()],
        "entrain": entrain.rows,
        "flexsp": flexsp.rows,
        "phases": lambda: [*phases.rows(), *colocated.rows(arguments.data / "laion-mini")],
    }
    rows = [row for name, part in parts.items() if arguments.only in (None, name) for row in part()]
    Console(width=180).print(table(rows))
    missed = [row.name for row in rows if row.reached is False]
    print(f"{len(missed)} rows missed: {missed}" if missed else "all rows with a target reached it")
    return 1 if missed else 0


def table(rows: list[Row]) -> Table:
    """The table."""
    shown = Table("what", "measured (median, worst)", "target", "")
    for row in rows:
        verdict = {True: "reached", False: "[red]missed[/red]", None: ""}[row.reached]
        shown.add_row(row.name, row.measured, row.target, verdict)
    return shown


if __name__ == "__main__":
    sys.exit(main())
