"""Exact optima of small balancing problems, the reference of tests and benchmark.

    nice -n 19 python scripts/make_balancing_optima.py

Solves 100 fixed instances (12 items on 3 bins, 24 on 4, 40 on 8; equal counts; log-normal loads of sigma 0.75 and 1.2)
with HiGHS on one thread, 60 s each, to gap zero. Writes tests/planning/balancing/balancing_optima.json after
every instance and keeps what is there already, so that an interrupted run continues.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any, cast

import highspy
import numpy as np

OUTPUT = Path(__file__).parent.parent / "tests" / "planning" / "balancing" / "balancing_optima.json"
COMMAND = "nice -n 19 python scripts/make_balancing_optima.py"
TIME_LIMIT_S = 60
MIX = ((12, 3, 40), (24, 4, 40), (40, 8, 20))
"""Items, bins, instances: the largest seldom close within the limit, so there are fewer of them."""
SIGMAS = (0.75, 1.2)
MEDIAN = 400
"""Median load, about the tokens of an image with its caption."""


def instances() -> list[tuple[list[int], int, float]]:
    """The fixed instances: loads, number of bins, sigma."""
    made = []
    for items, bins, count in MIX:
        for number in range(count):
            sigma = SIGMAS[number % len(SIGMAS)]
            draw = np.random.default_rng([items, bins, number]).lognormal(0, sigma, items)
            made.append(((draw * MEDIAN).astype(np.int64) + 1, bins, sigma))
    return [(loads.tolist(), bins, sigma) for loads, bins, sigma in made]


def solve(loads: list[int], bins: int) -> dict[str, Any]:
    """Minimise the heaviest bin with equal counts: x[i, b] binary, heaviest integer.

    Bins are interchangeable, so the i-th heaviest item is kept to the first i + 1 bins.
    """
    ordered = sorted(loads, reverse=True)
    per_bin = len(loads) // bins
    model: Any = cast(Any, highspy).Highs()
    model.setOptionValue("output_flag", False)
    model.setOptionValue("threads", 1)
    model.setOptionValue("time_limit", float(TIME_LIMIT_S))
    model.setOptionValue("mip_rel_gap", 0.0)
    model.setOptionValue("mip_abs_gap", 0.9)  # the objective is an integer
    smallest = max(-(-sum(loads) // bins), ordered[0] + sum(ordered[len(ordered) - per_bin + 1 :]))
    heaviest = model.addIntegral(lb=smallest, ub=sum(ordered[:per_bin]))
    x: list[list[Any]] = [[model.addBinary() if b <= i else None for b in range(bins)] for i in range(len(ordered))]
    for row in x:
        model.addConstr(sum(v for v in row if v is not None) == 1)
    for b in range(bins):
        column = [(load, row[b]) for load, row in zip(ordered, x, strict=True) if row[b] is not None]
        model.addConstr(sum(v for _, v in column) == per_bin)
        model.addConstr(sum(load * v for load, v in column) <= heaviest)
    started = time.monotonic()
    model.minimize(heaviest)
    info = model.getInfo()
    closed = model.getModelStatus() == highspy.HighsModelStatus.kOptimal
    best = round(info.objective_function_value)
    bound = best if closed else max(smallest, int(np.ceil(info.mip_dual_bound - 1e-6)))
    return {"best": best, "bound": bound, "closed": closed, "seconds": round(time.monotonic() - started, 1)}


def main() -> None:
    """Solve what the file lacks."""
    formatter = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser(description=__doc__, formatter_class=formatter).parse_args()
    document: dict[str, Any] = {
        "command": COMMAND,
        "solver": f"HiGHS {cast(Any, highspy).Highs().version()}, 1 thread, {TIME_LIMIT_S} s, gap zero",
        "instances": [],
    }
    if OUTPUT.exists():
        document["instances"] = json.loads(OUTPUT.read_text())["instances"]
    known = {(tuple(entry["loads"]), entry["bins"]) for entry in document["instances"]}
    for loads, bins, sigma in instances():
        if (tuple(loads), bins) in known:
            continue
        document["instances"].append({"bins": bins, "sigma": str(sigma), "loads": loads, **solve(loads, bins)})
        lines = ",\n".join(json.dumps(entry) for entry in document["instances"])
        head = json.dumps({key: value for key, value in document.items() if key != "instances"})[:-1]
        OUTPUT.write_text(f'{head}, "instances": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
