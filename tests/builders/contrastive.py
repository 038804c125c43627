"""Contrastive jobs of two towers or more with the samples of a step."""

from typing import Any

import numpy as np
from builders.jobs import BALANCES, Data, compose_whole, module
from hypothesis import strategies as st

from dataserver.planning.job.identity import Job, parse_job
from dataserver.planning.layouts.contrastive.options import ContrastiveSchedule
from dataserver.planning.layouts.contrastive.programs import tower_in_flight, with_interactions
from dataserver.planning.simulation import Operations, stage_operations
from dataserver.planning.stream.samples import ShardTable, StepSamples
from dataserver.planning.stream.sizing import shard_table, size_samples

UNIT_BYTES = 100


def tower(name: str, modality: str, **fields: Any) -> Data:
    return module("tower", name, modality=modality, **fields)


def contrastive_job(towers: list[Data], *, batch: int = 8, groups: int = 2, **layout: Any) -> Job:
    return parse_job(
        compose_whole(
            towers,
            seq_len=77,
            sizing={"max_patches": 64},
            global_batch=batch * groups,
            contrastive_batch=batch,
            packing={"enabled": False},
            layout={"kind": "contrastive", **layout},
            end={"steps": 3},
        )
    )


def two_towers(*, memory: int | None = None, **fields: Any) -> list[Data]:
    """A heavy image tower of two ranks of three stages and a light text tower of one rank."""
    room = {} if memory is None else {"memory": {"budget_bytes": memory * UNIT_BYTES, "unit_bytes": UNIT_BYTES}}
    heavy = {"microbatch_ns": 10_000, "linear_ps": 3_000_000, "quadratic_fs": 10_000_000}
    light = {"microbatch_ns": 10_000, "linear_ps": 500_000, "quadratic_fs": 1_000_000}
    image = tower("image", "image", dp=2, pp=3, cost=heavy, **room, **fields)
    return [image, tower("text", "text", cost=light, **fields)]


def contrastive_table(job: Job, count: int, seed: int = 0) -> ShardTable:
    rng = np.random.default_rng(seed)
    widths, heights = (rng.integers(16, 400, count).astype(np.int32) for _ in range(2))
    texts = rng.integers(1, 200, count)
    return shard_table(job.stream, np.arange(count), texts, np.arange(count + 1), widths, heights)


def contrastive_samples(job: Job, seed: int = 0) -> StepSamples:
    table = contrastive_table(job, job.stream.global_batch, seed)
    return size_samples(job.stream, 0, 0, table.row.astype(np.uint64), table)


@st.composite
def contrastive_steps(draw: st.DrawFn) -> tuple[Job, StepSamples]:
    """Two or three towers of any degrees and policies, some padded, some with little memory."""
    size = draw(st.integers(1, 3))
    degrees = draw(st.lists(st.sampled_from([1, 2, 3]), min_size=2, max_size=3))
    batch = 6 * size * draw(st.integers(1, 2))
    towers = []
    for number, dp in enumerate(degrees):
        modality = draw(st.sampled_from(["image", "text"]))
        fields: Data = {"dp": dp, "pp": draw(st.integers(1, 3)), "padded": draw(st.booleans())}
        if draw(st.booleans()):
            units = draw(st.integers(1, 4)) * batch // dp * (80 if modality == "text" else 64) // 2
            fields["memory"] = {"budget_bytes": units * UNIT_BYTES, "unit_bytes": UNIT_BYTES}
        fields["balance"] = draw(st.sampled_from(BALANCES)).value
        towers.append(tower(f"{modality}-{number}", modality, **fields))
    schedule = draw(st.sampled_from(list(ContrastiveSchedule)))
    job = contrastive_job(
        towers,
        batch=batch,
        groups=draw(st.integers(1, 3)),
        microbatches=size,
        schedule=schedule.value,
        extra_in_flight=0 if schedule is ContrastiveSchedule.BATCH_SYNC else draw(st.integers(0, 2)),
        interaction_ns=draw(st.sampled_from([0, 1_000_000])),
    )
    return job, contrastive_samples(job, draw(st.integers(0, 2**32)))


def batch_sync_operations(stage: int, num_stages: int, size: int, groups: int) -> Operations:
    """What one stage of a tower does for so many contrastive batches of `size` microbatches under batch_sync."""
    found = stage_operations(size, size * groups, drain_every=size)
    return with_interactions(found, size) if stage == num_stages - 1 else found


def distmm_operations(stage: int, num_stages: int, size: int, groups: int, extra: int = 0) -> Operations:
    """The same under DISTMM-Pipe."""
    held = int(tower_in_flight(num_stages, size, ContrastiveSchedule.DISTMM_PIPE, extra)[stage])
    found = stage_operations(held, size * groups)
    return with_interactions(found, size) if stage == num_stages - 1 else found
