"""Local search with its default budget against the stored optima of HiGHS."""

import json
from pathlib import Path

import numpy as np

from dataserver.planning.balancing import bin_loads, lower_bound, searched

DOCUMENT = json.loads(Path(__file__).with_name("balancing_optima.json").read_text())
INSTANCES = DOCUMENT["instances"]


def test_the_stored_instances_are_what_they_should_be() -> None:
    assert DOCUMENT["command"] == "nice -n 19 python scripts/make_balancing_optima.py"
    assert len({tuple(entry["loads"]) for entry in INSTANCES}) == 100
    assert {(len(entry["loads"]), entry["bins"]) for entry in INSTANCES} == {(12, 3), (24, 4), (40, 8)}
    for entry in INSTANCES:
        assert entry["bound"] <= entry["best"]
        assert entry["closed"] == (entry["bound"] == entry["best"])


def test_close_to_the_optimum() -> None:
    gaps = []
    for entry in INSTANCES:
        loads, bins = np.array(entry["loads"], np.int64), entry["bins"]
        placed = searched(loads, bins, len(loads) // bins)
        assert set(np.bincount(placed).tolist()) == {len(loads) // bins}
        heaviest = int(bin_loads(loads, placed, bins).max())
        assert heaviest >= entry["bound"] >= lower_bound(loads, bins, len(loads) // bins) or not entry["closed"]
        if entry["closed"]:
            assert heaviest >= entry["best"]
            gaps.append((heaviest - entry["best"]) / entry["best"])
        else:
            assert heaviest <= entry["bound"] * 1.01
    assert len(gaps) >= 90
    assert sum(gap <= 0.001 for gap in gaps) >= 0.95 * len(gaps)
    assert max(gaps) <= 0.001
