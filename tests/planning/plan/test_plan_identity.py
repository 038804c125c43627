"""Plans are the same everywhere, and their hash covers all of them."""

import json
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from builders.grouped import sample_groups
from builders.jobs import dataset, make_job
from builders.pipelined import sample_plan
from builders.samples import SyntheticDatasets

from dataserver.planning.job.identity import Job
from dataserver.planning.plan.integers import to_fewest_bytes
from dataserver.planning.plan.plan import (
    Arrangement,
    ModuleSchedule,
    RankGroups,
    Routing,
    StepPlan,
    plan_hash,
)
from dataserver.planning.planner import plan_step, timeline
from dataserver.planning.stream.samples import ShardTable, StepSamples
from dataserver.planning.stream.sizing import shard_table

GOLDEN = Path(__file__).with_name("golden.json")


@pytest.mark.parametrize("version", [5, 6, 7, 8])
def test_the_hash_covers_everything(version: int) -> None:
    plan = sample_plan()

    def hash_again(plan: StepPlan, **changes: object) -> bytes:
        changed = replace(plan, **changes)  # type: ignore[arg-type]
        return plan_hash(version, changed.job_id, changed.step, changed)

    hashes = {hash_again(plan), hash_again(plan, job_id="0" * 64), hash_again(plan, step=6)}
    assert (hash_again(plan) == plan.hash) == (version == 8)
    hashes.add(hash_again(plan, num_microbatches=plan.num_microbatches + 1))
    hashes.add(hash_again(plan, routings=plan.routings[::-1]))
    expected = 5
    groups: dict[str, tuple[StepSamples | Arrangement | Routing | ModuleSchedule | RankGroups, ...]] = {
        "samples": (plan.samples,),
        "arrangements": plan.arrangements,
        "routings": plan.routings,
        "schedules": plan.schedules,
        "groups": (plan.groups,),
    }
    for name, parts in groups.items():
        for number, part in enumerate(parts):
            for field in fields(part):
                value = getattr(part, field.name)
                other = (
                    value + "x" if isinstance(value, str) else value + 4 if isinstance(value, int) else _bumped(value)
                )
                changed = (*parts[:number], replace(part, **{field.name: other}), *parts[number + 1 :])
                hashes.add(hash_again(plan, **{name: changed[0] if name in ("samples", "groups") else changed}))
                expected += 1
    assert expected == 5 + 16 + 3 * 6 + 2 * 9 + 3 * 4 + 4
    assert len(hashes) == expected


def _bumped(values: np.ndarray | None) -> np.ndarray:
    if values is None:
        return np.ones(1, np.int64)
    return np.append(values[:-1], values[-1:] + 1) if len(values) else np.ones(1, np.int64)


def test_arrays_of_other_widths_have_other_hashes() -> None:
    """Four small numbers have the bytes of two larger ones."""
    plan = sample_plan()
    few, many = (replace(plan.groups, degree=np.array(v)) for v in ([0x0201, 0x0403], [1, 2, 3, 4]))
    assert to_fewest_bytes(few.degree).tobytes() == to_fewest_bytes(many.degree).tobytes()
    assert len({plan_hash(2, plan.job_id, 0, replace(plan, groups=g)) for g in (few, many)}) == 2


def test_every_part_of_a_plan_is_hashed() -> None:
    """A new field of a plan must enter its hash or follow from what does."""
    assert {f.name for f in fields(StepPlan)} == {
        "job_id", "step", "samples", "num_microbatches", "arrangements", "routings", "schedules", "groups",  # hashed
        "stream_id", "sequences_per_microbatch",  # follow from the job
        "text_tokens", "target_patches",  # follow from the samples
        "hash", "candidates", "decisions",  # say how it was made
    }  # fmt: skip


CODE = """
from builders.grouped import sample_groups
from builders.pipelined import sample_plan
print(sample_plan().hash.hex(), sample_groups().hash.hex())
"""


def test_another_process_makes_the_same_plans() -> None:
    tests = Path(__file__).resolve().parents[2]
    paths = ":".join(str(path) for path in (tests, tests.parent, tests.parent / "scripts"))
    for seed in ("0", "4711"):
        environment = {"PYTHONHASHSEED": seed, "PYTHONPATH": paths}
        result = subprocess.run(
            [sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, timeout=60, check=True
        )
        assert result.stdout.split() == [sample_plan().hash.hex(), sample_groups().hash.hex()]


# Golden order and plans of a fixed job. If `order` below changes, the change is order-breaking and must raise
# order_version; if only `plans` change, it is plan-breaking and must raise plan_version: a running job that is resumed
# by a new release would otherwise see other samples, or servers of two releases would disagree about one step.
# Rewrite the file with `python -m planning.plan.test_plan_identity` from tests/, together with the raised version.


def golden_job(version: int) -> Job:
    return make_job(
        stream={
            "datasets": [dataset("laion", weight="0.7"), dataset("obelics", weight="0.3")],
            "seq_len": 1024,
            "global_batch": 16,
            "generation": {"ratio": "0.25"},
            "shuffle_window": 2,
            "seed": 42,
        },
        execution={"microbatch": 2, "end": {"epochs": 2}, "plan_version": version},
        encoder=3,
        backbone=(2, 2),
        generator=2,
    )


def golden_table(job: Job, num_samples: int, max_images: int) -> ShardTable:
    """A shard by arithmetic alone: numpy may change its distributions between releases."""
    rows = np.arange(num_samples, dtype=np.int64)
    counts = rows * 5 % (max_images + 1)
    images = np.arange(int(counts.sum()), dtype=np.int32)
    offsets = np.concatenate([[0], np.cumsum(counts)])
    return shard_table(job.stream, rows, rows * 83 % 311, offsets, 16 + images * 197 % 907, 16 + images * 331 % 601)


def golden(version: int) -> dict[str, object]:
    job = golden_job(version)
    sizes = (((90, 0, 70, 80), 1), ((40, 50), 3))
    tables = [[golden_table(job, n, images) for n in shards] for shards, images in sizes]
    data = SyntheticDatasets(job, tables)
    found = {step: data.samples(step) for step in (0, 1, 7)}
    plans = {step: plan_step(job, step, samples) for step, samples in found.items()}
    return {
        "order_version": job.stream.order_version,
        "plan_version": job.spec.execution.plan_version,
        "job_id": job.job_id,
        "num_steps": data.order.num_steps,
        "order": {str(step): [list(sample) for sample in data.ids(step)] for step in found},
        "plans": {
            str(step): {
                "hash": plan.hash.hex(),
                "num_microbatches": plan.num_microbatches,
                "backbone": [
                    plan.arrangement("llm").item.tolist(),
                    plan.arrangement("llm").rank.tolist(),
                    plan.arrangement("llm").microbatch.tolist(),
                ],
                "text_tokens": plan.text_tokens,
                "target_patches": plan.target_patches,
                "makespan_ns": timeline(job.spec, plan).makespan_ns,
            }
            for step, plan in plans.items()
        },
    }


@pytest.mark.parametrize("version", [5, 6, 7, 8])
def test_golden_order_and_plans(version: int) -> None:
    expected, found = json.loads(GOLDEN.read_text())[version - 5], golden(version)
    assert found["order"] == expected["order"], "order-breaking: raise order_version"
    assert found == expected, "plan-breaking: raise plan_version"


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps([golden(version) for version in (5, 6, 7, 8)], separators=(",", ":")) + "\n")
