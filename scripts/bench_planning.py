"""Prints what the planner reaches: quality against bounds, optima and the papers' methods, and its own time.

Every row is measured in this run on one core with the default policies and budgets, over 20 fixed seeds unless it says
otherwise, and has a held-out variant of another size, skew and seed, but for the papers' own experiments. Times are
scaled to the reference machine (`benchmarks.calibration`). The exit code is 1 if a row with a target misses it.
"""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.rows import Row, report
from planning_rows import (
    balancing,
    colocated,
    entrain,
    flexsp,
    large,
    long_ranks,
    modalities,
    optimiser,
    phases,
    pipeline,
    steps,
    transfers,
    whole_ranks,
)

BESIDE = Path(__file__).resolve().parents[2] / "shared" / "data"
DATA = Path(os.environ.get("DISTTRAIN_TEST_DATA", BESIDE))
PARTS: dict[str, Callable[[Path], list[Row]]] = {
    "balancing": lambda _: balancing.rows(),
    "pipeline": lambda _: pipeline.rows(),
    "optimiser": lambda _: optimiser.rows(),
    "long_ranks": lambda _: long_ranks.rows(),
    "steps": lambda data: [*steps.scenario_b(data / "laion-mini"), *steps.planning_time()],
    "entrain": lambda _: entrain.rows(),
    "flexsp": lambda data: flexsp.rows(data / "flexsp"),
    "phases": lambda data: [*phases.rows(), *colocated.rows(data / "laion-mini")],
    "transfers": lambda _: transfers.rows(),
    "modalities": lambda _: modalities.rows(),
    "whole_ranks": lambda _: whole_ranks.rows(),
    "large": lambda _: large.rows(),
}
"""Each takes the folder of the data and gives its rows."""


def main() -> int:
    """Measure all groups of rows, and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA, help="folder with laion-mini and flexsp")
    parser.add_argument("--only", help="part to measure", choices=PARTS)
    arguments = parser.parse_args()
    chosen = [PARTS[arguments.only]] if arguments.only else PARTS.values()
    return report(row for part in chosen for row in part(arguments.data))


if __name__ == "__main__":
    sys.exit(main())
