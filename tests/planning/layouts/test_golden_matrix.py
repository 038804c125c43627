"""Golden plans of many small jobs of every layout and policy: what a search finds is part of a job's identity.

A change to a `plan` is plan-breaking and must raise plan_version; so is one that refuses a job that had a plan. What is
`simulated` and `compared` may change, since only the best plan is run. Write the file again with
`PYTHONPATH=../scripts python -m planning.layouts.test_golden_matrix` from tests/.
"""

import json
from dataclasses import astuple, fields, replace
from hashlib import sha256
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from builders.jobs import LAYOUT_KINDS, in_version
from builders.matrix import Step, matrix, samples_of

from dataserver.planning import computing_on
from dataserver.planning.layouts.interface import PlannedTimeline, layout_of
from dataserver.planning.planner import ablation, module_loads, plan_step, timeline
from dataserver.planning.simulation import Timeline

GOLDEN = Path(__file__).with_name("golden_matrix.json")
BLOCKS, BLOCK = 8, 10
"""Of each layout's kind, and jobs in a block."""
FEW = {8: 3}
"""Blocks of each kind by version, one of earlier ones; the rest is for the long tests."""
STEP = 3
CASES = [
    ("pipelined", 5),
    ("pipelined", 6),
    ("grouped", 6),
    *((kind, version) for version, kind in product((7, 8), LAYOUT_KINDS)),
]
"""Kinds and plan versions: version 6 changes pipelines alone, version 7 pipelines and groups, 8 all but towers."""


def outcome(step: Step, version: int) -> dict[str, str]:
    """What planning a step says, in short."""
    job, tables = in_version(step[0], version), step[1]
    limits = layout_of(job.spec.execution).limits(job.spec)
    found = {}
    try:
        for dataset, table in enumerate(tables):
            limits.add(dataset, table, f"dataset {dataset}")
        limits.check([1] * len(tables))
    except ValueError as error:
        found["limits"] = str(error)
    try:
        plan = plan_step(job, STEP, samples_of(job, tables))
    except ValueError as error:
        return found | {"refused": str(error)}
    simulated = of_computing(timeline(job.spec, plan))
    times = [getattr(simulated, field.name) for field in fields(simulated)] + [*module_loads(job.spec, plan).values()]
    bound = layout_of(job.spec.execution).lower_bound_ns(job, plan)
    compared = [astuple(entry) for entry in (*plan.candidates, *plan.decisions, *ablation(job, plan))]
    return found | {
        "plan": plan.hash.hex()[:16],
        "simulated": _digest([bound, *(np.asarray(time).tolist() for time in times)]),
        "compared": _digest(compared),
    }


def of_computing(planned: PlannedTimeline) -> Timeline:
    """A timeline as if programs had no collectives, which take no time and so change none."""
    found, lists = planned.timeline, [list(listed) for listed in planned.pipeline.operations]
    computes = [[o.computes for o in lists[stage]] for stage in planned.pipeline.stage.tolist()]
    width, length = max(map(sum, computes), default=0), found.start_ns.shape[1]
    places = {
        node * length + old: node * width + new
        for node, mine in enumerate(computes)
        for new, old in enumerate(np.flatnonzero(mine).tolist())
    }
    start, end, cause = np.full((3, len(computes) * width), -1)
    for old, new in places.items():
        before = int(found.cause.flat[old])
        while before >= 0 and before not in places:
            before = int(found.cause.flat[before])
        start[new], end[new], cause[new] = found.start_ns.flat[old], found.end_ns.flat[old], places.get(before, -1)
    shaped = {"start_ns": start, "end_ns": end, "cause": cause}
    return replace(found, **{name: values.reshape(-1, width) for name, values in shaped.items()})


def _digest(found: object) -> str:
    return sha256(json.dumps(found).encode()).hexdigest()[:16]


def block_of(kind: str, block: int, version: int) -> list[dict[str, str]]:
    return [outcome(matrix(kind, number), version) for number in range(block * BLOCK, (block + 1) * BLOCK)]


@pytest.mark.parametrize(
    ("kind", "version", "block"),
    [
        pytest.param(kind, version, block, marks=[pytest.mark.long] * (block >= FEW.get(version, 1)))
        for (kind, version), block in product(CASES, range(BLOCKS))
    ],
)
def test_golden_matrix(kind: str, version: int, block: int) -> None:
    """Each block on one core more than the one before: the golden plans were all made on one."""
    golden = json.loads(GOLDEN.read_text())[f"{kind} {version}"][block]
    with computing_on(1 + block):
        made = block_of(kind, block, version)
    for number, (found, expected) in enumerate(zip(made, golden, strict=True)):
        assert found == expected, f"job {block * BLOCK + number} of the {kind} ones"


def write() -> None:
    """Write the golden file."""
    found = {f"{kind} {version}": [block_of(kind, b, version) for b in range(BLOCKS)] for kind, version in CASES}
    GOLDEN.write_text(json.dumps(found, indent=0) + "\n")


if __name__ == "__main__":
    write()
