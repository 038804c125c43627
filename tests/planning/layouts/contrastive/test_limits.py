"""Contrastive jobs that are accepted can be planned, whichever samples meet; those refused are told what would do."""

import re
from typing import Any

import numpy as np
import pytest
from builders.contrastive import UNIT_BYTES, contrastive_job, contrastive_steps, contrastive_table, tower, two_towers
from hypothesis import given, settings
from hypothesis import strategies as st
from planning.layouts.contrastive.checks import advised, check_groups

from dataserver.planning import I64
from dataserver.planning.job.identity import Job, parse_job
from dataserver.planning.layouts.contrastive.batches import barrier_units, deal_by_size
from dataserver.planning.layouts.contrastive.limits import TowerLimits, TowerMemoryError
from dataserver.planning.planner import plan_step
from dataserver.planning.stream.gathering import gather_window
from dataserver.planning.stream.order import StreamOrder
from dataserver.planning.stream.samples import ROW_BITS, ShardTable
from dataserver.planning.stream.sizing import shard_table, size_samples


def check(job: Job, *tables: ShardTable, repeats: int = 1) -> None:
    largest = TowerLimits(job.spec)
    for shard in tables:
        largest.add(0, shard, "a shard")
    largest.check([repeats])


def refused(job: Job, *tables: ShardTable) -> str:
    with pytest.raises(TowerMemoryError) as caught:
        check(job, *tables)
    return str(caught.value)


def images_of(job: Job, patches: list[int]) -> ShardTable:
    """Pairs with images of so many patches, multiples of 4."""
    n = len(patches)
    widths = np.array([28 * p // 4 for p in patches], np.int32)
    return shard_table(
        job.stream, np.arange(n), np.ones(n, np.int64), np.arange(n + 1), widths, np.full_like(widths, 28)
    )


def step_of(job: Job, table: ShardTable, rows: I64) -> Any:
    """These pairs of a table as a step."""
    samples = size_samples(job.stream, 0, 0, table.row.astype(np.uint64), table)
    picked = shard_table(
        job.stream,
        table.row[rows],
        samples.text_tokens[rows],
        np.arange(len(rows) + 1),
        table.image_columns[rows] * 14,
        table.image_rows[rows] * 14,
    )
    return size_samples(job.stream, 0, 0, picked.row.astype(np.uint64), picked)


@settings(max_examples=25, deadline=None)
@given(contrastive_steps(), st.integers(0, 2**32), st.integers(1, 3), st.integers(1, 4))
def test_an_accepted_job_can_be_planned_and_advice_suffices(
    problem: tuple[Job, Any], seed: int, size: int, repeats: int
) -> None:
    job, _ = problem
    rng, batch = np.random.default_rng(seed), job.stream.contrastive_batch or 1
    count = size * -(-batch // repeats)
    table = contrastive_table(job, count, seed)
    shards = [make_part(table, part) for part in np.array_split(np.arange(count), 3)]
    try:
        check(job, *shards, repeats=repeats)
    except TowerMemoryError as error:
        for changed in advised(job, str(error)):
            check(changed, table, repeats=repeats)
        check(with_memory(job, str(error)), table, repeats=repeats)
        return
    for number in range(3):
        rows = np.concatenate(
            [
                rng.permutation(np.repeat(np.argsort(-table.image_columns * table.image_rows), repeats)[:batch])
                if number
                else rng.choice(np.repeat(np.arange(count), repeats), batch, replace=False)
                for _ in range(job.stream.global_batch // batch)
            ]
        )
        check_groups(job, plan_step(job, number, step_of(job, table, rows)))


def make_part(table: ShardTable, rows: I64) -> ShardTable:
    """Some pairs of a table, as a shard of their own."""
    return ShardTable(
        table.text_tokens[rows],
        np.arange(len(rows) + 1),
        table.image_rows[rows],
        table.image_columns[rows],
        table.row[rows],
        table.nominal[rows],
    )


def with_memory(job: Job, message: str) -> Job:
    """The job with the memory that a message asks for."""
    data = job.spec.model_dump(mode="json", exclude_none=True)
    by_name = {m["name"]: m for m in data["execution"]["modules"]}
    budgets = re.findall(r"of ([a-z]+(?:-\d)?) to (\d+)", message)
    assert budgets
    for name, budget in budgets:
        assert by_name[name]["memory"]["budget_bytes"] < int(budget)
        by_name[name]["memory"]["budget_bytes"] = int(budget)
    return parse_job(data)


@settings(max_examples=100)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 4), st.booleans(), st.integers(0, 2**32))
def test_what_the_fullest_rank_holds(ranks: int, size: int, each: int, padded: bool, seed: int) -> None:
    """Exactly, and more of it where items are larger."""
    rng, count = np.random.default_rng(seed), ranks * size * each
    sizes = rng.integers(0, 50, (2, count))
    place = deal_by_size(sizes.ravel(), np.repeat([0, 1], count), ranks, size, padded)
    cells = np.zeros((ranks, 2 * size), np.int64)
    if padded:
        np.maximum.at(cells, (place.rank, place.microbatch), sizes.ravel())
        cells *= each
    else:
        np.add.at(cells, (place.rank, place.microbatch), sizes.ravel())
    held = int(cells.reshape(ranks, 2, size).sum(axis=2).max())
    assert held == barrier_units(sizes, ranks, size, padded)
    assert held <= barrier_units(sizes, ranks, size, padded, in_order=True)
    assert held <= barrier_units(sizes + rng.integers(0, 3, sizes.shape), ranks, size, padded)
    counts = np.bincount(place.rank * 2 * size + place.microbatch, minlength=ranks * 2 * size)
    assert set(counts.tolist()) == {each}


def test_the_message() -> None:
    """12 samples on each of two ranks: dealt out by size, each has one of both of 64, 60, ..., 20 patches."""
    table = images_of(contrastive_job(two_towers()), [4 * n for n in range(1, 17)] * 2 + [4] * 100)
    most = 64 + 64 + 60 + 60 + 56 + 56 + 52 + 52 + 48 + 48 + 44 + 44
    need = sum(range(64, 16, -4))
    check(contrastive_job(two_towers(memory=need), batch=24, groups=2, microbatches=2), table)
    assert refused(contrastive_job(two_towers(memory=need - 1), batch=24, groups=2, microbatches=2), table) == (
        "the largest samples of the datasets may meet in one contrastive batch of 24 samples, which waits for a "
        f"barrier as a whole; then there must be room for {need} patches on a rank of image, whose memory holds "
        f"{need - 1}: raise memory.budget_bytes of image to {need * UNIT_BYTES}, or lower stream.contrastive_batch to "
        "16, or leave the largest samples out with a filter or a quarantine list"
    )
    in_order = contrastive_job(two_towers(memory=most, balance="none"), batch=24, groups=2, microbatches=2)
    check(in_order, table)
    assert f"room for {most} patches" in refused(
        contrastive_job(two_towers(memory=most - 1, balance="none"), batch=24, groups=2, microbatches=2), table
    )


def test_more_microbatches_leave_less_to_pad() -> None:
    towers = [
        tower("image", "image", padded=True, memory={"budget_bytes": 100, "unit_bytes": 1}),
        tower("text", "text"),
    ]
    job = contrastive_job(towers, batch=8, groups=1)
    table = images_of(job, [64, 8, 4, 4, 4, 4, 4, 4])
    message = refused(job, table)
    assert "room for 512 patches" in message
    assert "or raise layout.microbatches to 8, or leave" in message
    check(contrastive_job(towers, batch=8, groups=1, microbatches=8), table)


def test_how_often_a_sample_is_in_a_batch() -> None:
    job = contrastive_job(two_towers(), batch=24, groups=2)
    once = StreamOrder(job.stream, job.spec.execution.end, [np.array([100, 44])])
    assert once.repeats(24) == [1]
    again = StreamOrder(job.stream, job.spec.execution.end, [np.array([100, 43])])
    assert again.repeats(24) == [2]
    small = StreamOrder(job.stream, job.spec.execution.end, [np.array([10])])
    assert small.repeats(11) == [2]
    assert small.repeats(12) == [3]
    for step in range(3):
        numbers = [
            number
            for span in small.spans(step)
            for number in gather_window(small, span, [contrastive_table(job, 10)]).part(span)[0].tolist()
        ]
        assert max(np.bincount([n & ((1 << ROW_BITS) - 1) for n in numbers[:24]])) <= small.repeats(24)[0]
