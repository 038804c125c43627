from fractions import Fraction
from math import isqrt

import numpy as np
import pytest
from builders.jobs import make_job
from builders.samples import make_samples, make_table
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dataserver.planning.job.fields import Sizing
from dataserver.planning.stream.grids import patch_grid, patch_grids
from dataserver.planning.stream.samples import Task
from dataserver.planning.stream.sizing import (
    SampleTooLargeError,
    concatenate,
    draw_tasks,
    shard_table,
    size_samples,
)

sides = st.one_of(st.integers(1, 3000), st.integers(1, 2**31 - 1))


@st.composite
def sizings(draw: st.DrawFn) -> Sizing:
    merge = draw(st.integers(1, 4))
    return Sizing(patch=draw(st.integers(1, 32)), merge=merge, max_patches=draw(st.integers(merge**2, 5000)))


@given(width=sides, height=sides, sizing=sizings())
@example(width=1, height=100_000, sizing=Sizing())
@example(width=100_000, height=1, sizing=Sizing())
@example(width=1, height=1, sizing=Sizing())
def test_grid_is_legal_and_never_enlarged(width: int, height: int, sizing: Sizing) -> None:
    rows, columns = patch_grid(width, height, sizing)
    block = sizing.patch * sizing.merge
    assert rows >= 1
    assert columns >= 1
    assert rows % sizing.merge == columns % sizing.merge == 0
    assert rows * columns <= sizing.max_patches
    # At most half a merge block more than the image has, and at least one block.
    assert rows * sizing.patch <= max(block, height + block / 2)
    assert columns * sizing.patch <= max(block, width + block / 2)


@given(width=sides, height=sides, sizing=sizings())
def test_grid_keeps_the_aspect_within_rounding(width: int, height: int, sizing: Sizing) -> None:
    rows, columns = (n // sizing.merge for n in patch_grid(width, height, sizing))
    limit = sizing.max_patches // sizing.merge**2
    # Some scale of the image reaches this grid with less than one block of error in each direction, unless a side is
    # at the bound of one block or of all blocks.
    scales = [((n - 1) / side, (n + 1) / side) for n, side in ((rows, height), (columns, width))]
    overlap = max(low for low, _ in scales) <= min(high for _, high in scales)
    assert overlap or min(rows, columns) == 1 or max(rows, columns) == limit


@given(st.integers(1, 600), st.integers(1, 600))
def test_small_images_are_only_rounded(width: int, height: int) -> None:
    rows, columns = patch_grid(width, height, Sizing(patch=14, merge=2, max_patches=2**20))
    assert rows == 2 * max(1, (height + 14) // 28)
    assert columns == 2 * max(1, (width + 14) // 28)


def test_known_grids() -> None:
    sizing = Sizing(patch=14, merge=2, max_patches=1024)
    assert patch_grid(224, 224, sizing) == (16, 16)
    assert patch_grid(4000, 4000, sizing) == (32, 32)
    assert patch_grid(4000, 2000, sizing) == (22, 44)
    assert patch_grid(1, 100_000, sizing) == (512, 2)
    assert patch_grid(100_000, 1, sizing) == (2, 512)


def grid_by_hand(width: int, height: int, sizing: Sizing) -> tuple[int, int]:
    """The rule in Python's unbounded integers."""
    block, limit = sizing.patch * sizing.merge, sizing.max_patches // sizing.merge**2
    rows, columns = (max(1, (2 * side + block) // (2 * block)) for side in (height, width))
    if rows * columns > limit:
        rows = min(max(1, isqrt(limit * height // width)), limit)
        columns = max(1, min(limit // rows, (2 * rows * width + height) // (2 * height)))
        rows = min(limit // columns, rows)
    return rows * sizing.merge, columns * sizing.merge


@settings(max_examples=300)
@given(st.lists(st.tuples(sides, sides), max_size=8), sizings())
@example([(2**31 - 1, 2**31 - 1), (1, 2**31 - 1), (2**31 - 1, 1)], Sizing(patch=1, merge=1, max_patches=2**20))
def test_many_grids_are_those_of_each(images: list[tuple[int, int]], sizing: Sizing) -> None:
    pairs = np.array(images, np.int32).reshape(-1, 2)
    rows, columns = patch_grids(pairs[:, 0], pairs[:, 1], sizing)
    found = list(zip(rows.tolist(), columns.tolist(), strict=True))
    assert found == [grid_by_hand(w, h, sizing) for w, h in images]
    assert found == [patch_grid(w, h, sizing) for w, h in images]


def _pair(job, text_tokens: int, width: int = 224, height: int = 224):  # type: ignore[no-untyped-def]
    one = np.array([0], np.int64)
    tokens, offsets = np.array([text_tokens], np.int64), np.array([0, 1], np.int64)
    return shard_table(
        job.stream, one, tokens, offsets, np.array([width], np.int32), np.array([height], np.int32), "shard x"
    )


@pytest.mark.parametrize(
    ("ratio", "text", "nominal"),
    [
        ("0", 10, 64 + 4 + 10),
        ("1", 10, 2 + 10 + 64),
        ("0.5", 10, (78 + 76) // 2),
        ("0", 10**6, 512),
        ("1", 10**6, 512),
        ("0.5", 0, 68),  # without text there is nothing to generate from: no pair
    ],
)
def test_nominal_tokens(ratio: str, text: int, nominal: int) -> None:
    job = make_job(stream={"generation": {"ratio": ratio}}, generator=1)
    assert _pair(job, text).nominal.tolist() == [nominal]


@given(st.integers(0, 2**32), st.integers(0, 5), st.sampled_from(["0", "0.3", "1"]))
def test_truncation_cuts_text_only(seed: int, max_images: int, ratio: str) -> None:
    changes = {"generation": {"ratio": ratio, "query_tokens": 100}, "seq_len": 300, "sizing": {"max_patches": 196}}
    job = make_job(stream=changes, generator=1)
    table = make_table(job, np.random.default_rng(seed), 30, max_images)
    samples = size_samples(job.stream, 0, 0, table.row.astype(np.uint64), table)
    assert np.array_equal(samples.image_offsets, table.image_offsets)
    assert np.array_equal(samples.image_rows, table.image_rows)
    assert np.array_equal(samples.image_columns, table.image_columns)
    assert np.array_equal(samples.text_tokens + samples.truncated_tokens, table.text_tokens)
    for i in range(len(samples)):
        images = slice(int(table.image_offsets[i]), int(table.image_offsets[i + 1]))
        patches = table.image_rows[images].astype(np.int64) * table.image_columns[images]
        generated = samples.task[i] == Task.GENERATION
        fixed = 2 + 100 if generated else 2 + int((patches // 4 + 2).sum())
        assert samples.tokens[i] == fixed + samples.text_tokens[i] <= 300
        cut = samples.truncated_tokens[i] > 0
        assert not cut or samples.tokens[i] == 300
        if generated:
            assert len(patches) == 1
            assert samples.text_tokens[i] > 0


def test_the_nominal_size_is_the_real_one_where_no_task_is_drawn() -> None:
    job = make_job()
    table = make_table(job, np.random.default_rng(1), 200, 1)
    samples = size_samples(job.stream, 0, 0, table.row.astype(np.uint64), table)
    assert np.array_equal(samples.tokens, table.nominal)


def test_too_large_sample_is_named() -> None:
    job = make_job(stream={"seq_len": 67})
    with pytest.raises(SampleTooLargeError, match=r"shard x, row 0: its images take 68 tokens .* seq_len is 67"):
        _pair(job, 5)
    assert _pair(make_job(stream={"seq_len": 68}), 5).nominal.tolist() == [68]
    job = make_job(stream={"seq_len": 67, "sizing": {"rule": "square", "side": 280}})
    with pytest.raises(SampleTooLargeError, match=r"take 104 tokens .* raise seq_len, lower sizing\.side, or leave"):
        _pair(job, 5)


def test_an_image_that_is_only_a_target_needs_no_room_in_the_sequence() -> None:
    generation = {"ratio": "1", "query_tokens": 8}
    job = make_job(stream={"seq_len": 40, "generation": generation}, encoder=0, generator=1)
    assert _pair(job, 5).nominal.tolist() == [15]
    with pytest.raises(SampleTooLargeError):
        _pair(job, 0)


@given(st.permutations(range(20)), st.integers(0, 19), st.integers(0, 3))
def test_task_draws_do_not_depend_on_grouping(order: list[int], cut: int, epoch: int) -> None:
    job = make_job(stream={"generation": {"ratio": "0.5"}}, generator=1)
    numbers, pairs = np.arange(20, dtype=np.uint64), np.ones(20, np.bool_)
    whole = draw_tasks(job.stream, 0, epoch, numbers, pairs)
    shuffled = np.array(order, np.uint64)
    parts = [draw_tasks(job.stream, 0, epoch, part, pairs[: len(part)]) for part in np.split(shuffled, [cut])]
    assert np.array_equal(np.concatenate(parts), whole[order])


@pytest.mark.parametrize(("ratio", "expected"), [("0", 0), ("1", 10_000), ("0.5", 4982), ("0.03", 290)])
def test_frequency_of_generation(ratio: str, expected: int) -> None:
    job = make_job(stream={"generation": {"ratio": ratio}}, generator=1)
    tasks = draw_tasks(job.stream, 0, 0, np.arange(10_000, dtype=np.uint64), np.ones(10_000, np.bool_))
    found = int((tasks == Task.GENERATION).sum())
    assert found == expected  # exact: a change is order-breaking
    assert abs(Fraction(found, 10_000) - Fraction(ratio)) < Fraction(2, 100)


def test_tasks_differ_between_passes_and_seeds_but_are_only_for_pairs() -> None:
    jobs = [make_job(stream={"generation": {"ratio": "0.5"}, "seed": s}, generator=1) for s in (0, 1)]
    numbers, pairs = np.arange(64, dtype=np.uint64), np.arange(64) % 2 == 0
    drawn = [draw_tasks(job.stream, 0, p, numbers, pairs).tobytes() for job in jobs for p in (0, 1)]
    assert len(set(drawn)) == 4
    tasks = draw_tasks(jobs[0].stream, 0, 0, numbers, pairs)
    assert (tasks[1::2] == Task.UNDERSTANDING).all()


@given(st.lists(st.integers(0, 6), max_size=4))
def test_concatenate_is_one_after_the_other(sizes: list[int]) -> None:
    job = make_job(stream={"seq_len": 2048})
    parts = [make_samples(job, n, seed, 3) for seed, n in enumerate(sizes)]
    whole = concatenate(parts)
    assert len(whole) == sum(sizes)
    assert whole.sample.tolist() == [s for p in parts for s in p.sample.tolist()]
    assert np.diff(whole.image_offsets).tolist() == [c for p in parts for c in np.diff(p.image_offsets).tolist()]
    assert whole.patches.tolist() == [n for p in parts for n in p.patches.tolist()]
    assert len(whole.image_sample) == whole.image_offsets[-1]
