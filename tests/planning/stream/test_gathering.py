"""Rows of shards put in order, against the same row by row."""

import dataclasses
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from builders.jobs import TWO_DATASETS, make_job
from builders.samples import SyntheticDatasets, make_table, pick

from dataserver.planning.job.fields import PLAN_LIMITS, SINGLE_STEP
from dataserver.planning.stream.columns import ShardColumns
from dataserver.planning.stream.gathering import Window, gather_step, pick_sizes, size_rows
from dataserver.planning.stream.samples import ShardTable
from dataserver.planning.stream.sizing import MicrobatchTooLargeError
from dataserver.planning.stream.slices import cut, gather_slice
from dataserver.planning.stream.windows import Span


def assert_same(found: Any, expected: Any) -> None:
    for field in dataclasses.fields(expected):
        one, other = getattr(found, field.name), getattr(expected, field.name)
        np.testing.assert_array_equal(one, other, field.name)
        assert (one is None) == (other is None), field.name
        assert one is None or one.dtype == other.dtype, field.name


@pytest.mark.parametrize("seed", range(20))
def test_samples_of_several_tables(seed: int) -> None:
    rng, job = np.random.default_rng(seed), make_job(stream={"seq_len": 4096})
    tables = [make_table(job, rng, int(rng.integers(0, 9)), max_images=3) for _ in range(4)]
    count = sum(len(table.row) for table in tables)
    at = rng.integers(0, max(1, count), int(rng.integers(0, 30)) if count else 0)
    assert_same(pick_sizes(tables, at), pick(tables, at))


def test_a_step_is_gathered_from_the_shards_that_it_needs() -> None:
    job = make_job(stream={"seed": 3, "seq_len": 4096}, execution={"end": {"epochs": 2}})
    rng = np.random.default_rng(5)
    datasets = SyntheticDatasets(job, [[make_table(job, rng, 20, max_images=2) for _ in range(5)]])
    for step in range(datasets.order.num_steps):
        found = gather_step(job.stream, datasets.order, step, datasets.windows, PLAN_LIMITS[8])
        assert_same(found, datasets.samples(step))
        assert len(found)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("slice_bytes", [1, 300, 2_000, 100_000])
def test_slices_of_a_window_are_the_window(packed: bool, slice_bytes: int) -> None:
    """One after the other, from tables that are asked for one by one; and every span finds the slices it lies in."""
    stream = {"seed": 3, "seq_len": 4096, "global_batch": 4, "shuffle_window": 3, "packing": {"enabled": packed}}
    job = make_job(stream=stream, execution={"end": {"epochs": 2}})
    rng = np.random.default_rng(5)
    datasets = SyntheticDatasets(job, [[make_table(job, rng, 30, max_images=2) for _ in range(5)]])

    def table(shard: int) -> ShardTable:
        return datasets.tables[0][shard]

    def sliced(span: Span) -> list[Window]:
        slices = cut(datasets.order, span, table, slice_bytes)
        parts = [gather_slice(datasets.order, span, table, slices, number) for number in range(len(slices))]
        (window,) = datasets.windows(span)
        np.testing.assert_array_equal(np.concatenate([part.sample for part in parts]), window.sample)
        np.testing.assert_array_equal(np.concatenate([part.first for part in parts]), window.first)
        assert all(48 * len(part.sample) <= slice_bytes + 256 for part in parts), "a 4,096th of the window more"
        assert len(parts) == 1 or slice_bytes < 100_000
        held = {number for number, part in enumerate(parts) if len(part.part(span)[0])}
        assert held <= set(slices.of(span))
        assert len(slices.of(span)) <= len(held) + 1, "the last sample of a slice may reach into the span"
        return [parts[number] for number in slices.of(span)]

    for step in range(datasets.order.num_steps):
        found = gather_step(job.stream, datasets.order, step, sliced, PLAN_LIMITS[8])
        assert_same(found, datasets.samples(step))


def test_kept_rows_are_sized_by_their_own_texts_and_images() -> None:
    job = make_job()
    columns = ShardColumns(
        text_offsets=np.array([0, 2, 2, 3, 5]),
        text_tokens=np.array([1, 2, 4, 8, 16], np.int32),
        image_offsets=np.array([0, 1, 3, 3, 4]),
        image_width=np.array([28, 56, 84, 112], np.int32),
        image_height=np.array([28, 28, 28, 28], np.int32),
    )
    table = size_rows(job.stream, columns, np.array([1, 3]), "shard")
    assert table.row.tolist() == [1, 3]
    assert table.text_tokens.tolist() == [0, 24]
    assert table.image_offsets.tolist() == [0, 2, 3]
    assert table.image_columns.tolist() == [4, 6, 8]
    assert table.image_rows.tolist() == [2, 2, 2]


def test_a_step_may_have_so_many_samples_and_images_in_all_its_datasets_together() -> None:
    stream = {"datasets": TWO_DATASETS, "seq_len": 4096, "global_batch": 64}
    job, rng = make_job(stream=stream), np.random.default_rng(5)
    shards = [[make_table(job, rng, 200, max_images=3) for _ in range(5)] for _ in TWO_DATASETS]
    datasets = SyntheticDatasets(job, shards)
    found = datasets.samples(1)
    samples, images = len(found), len(found.image_sample)
    assert len({span.dataset for span in datasets.order.spans(1)}) == 2
    assert samples != images
    here = PLAN_LIMITS[8]
    just = replace(here, step_samples=-(-samples // SINGLE_STEP), step_images=-(-images // SINGLE_STEP))
    assert_same(gather_step(job.stream, datasets.order, 1, datasets.windows, just), found)
    for less in (
        replace(just, step_samples=(samples - 1) // SINGLE_STEP),
        replace(just, step_images=(images - 1) // SINGLE_STEP),
    ):
        said = f"step 1 has more than {4 * less.step_samples:,} samples or {4 * less.step_images:,} images, 4 times"
        with pytest.raises(MicrobatchTooLargeError, match=said):
            gather_step(job.stream, datasets.order, 1, datasets.windows, less)
