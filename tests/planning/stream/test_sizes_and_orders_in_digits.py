"""Sizing, order and packing at their limits, each module in one test: exact values on both sides of every boundary."""

from typing import Any

import numpy as np
import pytest
from builders.jobs import dataset, make_job
from builders.samples import SyntheticDatasets, make_table

from dataserver.planning.job.identity import Job
from dataserver.planning.stream.grids import patch_grid
from dataserver.planning.stream.order import DatasetEmptyError, StepOutOfRangeError, StreamOrder
from dataserver.planning.stream.packing import MAX_SEQ_LEN, balanced, best_fit_decreasing, number_by_first
from dataserver.planning.stream.samples import ShardTable, Task
from dataserver.planning.stream.sizing import (
    SampleTooLargeError,
    concatenate,
    draw_tasks,
    may_be_generated,
    may_be_understood,
    most_tokens,
    shard_table,
    size_samples,
)
from dataserver.planning.stream.windows import Span


def table(job: Job, samples: list[tuple[int, list[int]]]) -> ShardTable:
    """Samples of so many text tokens and images of so many backbone tokens, in rows 5, 6, ..."""
    widths = [28 * tokens for _, images in samples for tokens in images]
    return shard_table(
        job.stream,
        5 + np.arange(len(samples)),
        np.array([text for text, _ in samples], np.int64),
        np.concatenate([[0], np.cumsum([len(images) for _, images in samples])]).astype(np.int64),
        np.array(widths, np.int32),
        np.full(len(widths), 28, np.int32),
        "shard s",
    )


SAMPLES: list[tuple[int, list[int]]] = [(10, [4]), (0, [4]), (10, []), (10, [4, 5]), (90, [4]), (99, [])]
"""A pair; no text; no image; two images; a text that is cut; one without images that is cut."""


def job(ratio: str, seq_len: int = 64, queries: int = 20) -> Job:
    generation = {"ratio": ratio, "query_tokens": queries}
    return make_job(stream={"seq_len": seq_len, "generation": generation, "packing": {"enabled": True}}, generator=1)


def test_sizes_in_digits() -> None:
    # Understood: BOS and EOS, text, BOI and EOI around the tokens of each image; generated: BOS, text, BOI, 20 queries.
    understood, generated = [18, 8, 12, 25, 64, 64], [32, 8, 12, 25, 64, 64]
    assert table(job("0"), SAMPLES).nominal.tolist() == understood
    assert table(job("1"), SAMPLES).nominal.tolist() == generated
    assert table(job("0.25"), SAMPLES).nominal.tolist() == [(3 * 18 + 32) // 4, *understood[1:]]
    for ratio, seen, made, most in (
        ("0", [True] * 6, [False] * 6, understood),
        ("0.5", [True] * 6, [True, False, False, False, True, False], [32, 8, 12, 25, 64, 64]),
        ("1", [False, True, True, True, False, True], [True, False, False, False, True, False], generated),
    ):
        stream, sizes = job(ratio).stream, table(job(ratio), SAMPLES)
        assert may_be_understood(stream, sizes).tolist() == seen
        assert may_be_generated(stream, sizes).tolist() == made
        assert most_tokens(stream, sizes).tolist() == most
    numbers = np.arange(6, dtype=np.uint64)
    for ratio, tokens, kept, cut in (
        ("0", understood, [10, 0, 10, 10, 56, 62], [0, 0, 0, 0, 34, 37]),
        ("1", generated, [10, 0, 10, 10, 42, 62], [0, 0, 0, 0, 48, 37]),
    ):
        samples = size_samples(job(ratio).stream, 0, 3, numbers, table(job(ratio), SAMPLES))
        assert (samples.tokens.tolist(), samples.text_tokens.tolist()) == (tokens, kept)
        assert samples.truncated_tokens.tolist() == cut
        made_of = [Task.GENERATION if ratio == "1" and s in (0, 4) else Task.UNDERSTANDING for s in range(6)]
        assert samples.task.tolist() == made_of
        assert (samples.epoch.tolist(), samples.dataset.tolist()) == ([3] * 6, [0] * 6)
        twice = concatenate([samples, samples])
        assert twice.image_offsets.tolist() == [0, 1, 2, 2, 4, 5, 5, 6, 7, 7, 9, 10, 10]
        assert (twice.tokens.tolist(), twice.image_sample.tolist()[-3:]) == (tokens * 2, [9, 9, 10])
        assert twice.locate(np.arange(10))[1].tolist() == [0, 0, 0, 1, 0, 0, 0, 0, 1, 0]
        assert twice.locate(np.arange(10))[0].tolist() == twice.image_sample.tolist()
    nothing = concatenate([])
    assert (len(nothing), nothing.image_offsets.tolist(), nothing.sample.dtype) == (0, [0], np.uint64)
    assert (draw_tasks(job("1").stream, 0, 0, numbers, np.ones(6, np.bool_)) == Task.GENERATION).all()
    sizing = job("0").stream.sizing
    assert [patch_grid(w, h, sizing) for w, h in ((1, 1), (41, 42), (42, 41), (70, 28))] == [
        (2, 2), (4, 2), (2, 4), (2, 6),
    ]  # fmt: skip
    # 1024 patches are 256 blocks: 16 x 16 fit, one column more is scaled down.
    assert [patch_grid(w, 448, sizing) for w in (448, 461, 462)] == [(32, 32), (32, 32), (30, 30)]
    assert table(job("0", 12), [(0, [8])]).nominal.tolist() == [12]
    with pytest.raises(SampleTooLargeError) as refusal:
        table(job("0", 12), [(0, [8]), (0, [9]), (0, [4, 4]), (0, [10])])
    assert str(refusal.value) == (
        "shard s, row 7: its images take 14 tokens without any text, but seq_len is 12 (3 such samples in this shard); "
        "raise seq_len, lower sizing.max_patches, or leave such samples out with a filter or a quarantine list"
    )


def order(counts: list[list[int]], end: dict[str, Any], batch: int, weights: list[str] | None = None) -> StreamOrder:
    """Without packing, two shards in a window: units are samples."""
    entries = [dataset(f"d{i}", weight=w) for i, w in enumerate(weights or ["1"] * len(counts))]
    stream = {"datasets": entries, "packing": {"enabled": False}, "global_batch": batch, "shuffle_window": 2}
    made = make_job(stream=stream, execution={"end": end})
    return StreamOrder(made.stream, made.spec.execution.end, [np.array(c) for c in counts])


def taken(found: StreamOrder, step: int) -> list[tuple[int, int, int, int]]:
    """Dataset, pass, first and last unit of each span."""
    return [(s.dataset, s.epoch, s.first, s.last) for s in found.spans(step)]


def test_orders_in_digits() -> None:
    one = order([[4, 4, 4]], {"epochs": 1}, 5)
    assert one.num_steps == 3
    spans = [one.spans(step) for step in range(3)]
    assert [[(s.first, s.last) for s in found] for found in spans] == [[(0, 5)], [(5, 10), (5, 10)], [(10, 12)]]
    assert [[s.window_start for s in found] for found in spans] == [[0], [0, 8], [8]]
    assert sorted(spans[0][0].shards + spans[2][0].shards) == [0, 1, 2]
    assert spans[0][0] == Span(0, 0, spans[1][0].shards, 0, 0, 5, 0)
    # Steps that end with a window, and with a pass, touch no further one.
    assert taken(order([[4, 4, 4]], {"steps": 9}, 8), 0) == [(0, 0, 0, 8)]
    assert taken(order([[4, 4, 4]], {"steps": 9}, 12), 1) == [(0, 1, 0, 12), (0, 1, 0, 12)]
    assert taken(order([[3]], {"steps": 2}, 7), 0) == [(0, 0, 0, 3), (0, 1, 0, 3), (0, 2, 0, 1)]
    # One and two thirds: of 5 samples 1 and 4, then 3 and 7 of ten, 5 and 10 of 15.
    mixed = order([[9], [6]], {"steps": 3}, 5, ["1", "2"])
    assert [taken(mixed, step) for step in range(3)] == [
        [(0, 0, 0, 1), (1, 0, 0, 4)],
        [(0, 0, 1, 3), (1, 0, 4, 6), (1, 1, 0, 1)],
        [(0, 0, 3, 5), (1, 1, 1, 4)],
    ]
    assert mixed.in_step([18, 6]) == 1 * 18 // 9 + 4
    assert order([[9], [0]], {"steps": 1}, 5, ["1", "0"]).in_step([9, 0]) == 5
    # Taken in all: 5 and 10. Of 9 no sample comes twice; of 6, a run of 6 meets the end of a pass once, of 8 twice.
    assert [mixed.repeats(run) for run in (1, 2, 7, 8)] == [[1, 1], [1, 2], [1, 2], [1, 3]]
    assert order([[5], [0]], {"steps": 1}, 5, ["1", "0"]).repeats(9) == [1, 0]
    for last, steps in (("pad", 3), ("drop", 2)):
        assert order([[11]], {"epochs": 1, "last": last}, 5).num_steps == steps
        assert order([[10]], {"epochs": 1, "last": last}, 5).num_steps == 2
    assert order([[10]], {"epochs": 3}, 5).num_steps == 6
    assert taken(order([[11]], {"epochs": 1}, 5), 2) == [(0, 0, 10, 11)]
    for step in (-1, 3):
        with pytest.raises(StepOutOfRangeError) as missing:
            one.spans(step)
        assert str(missing.value) == f"step {step} does not exist; the job ends after step 2"
    with pytest.raises(DatasetEmptyError, match=r"do not fill a single step and end\.last is drop"):
        order([[4]], {"epochs": 1, "last": "drop"}, 5)
    assert order([[5]], {"epochs": 1, "last": "drop"}, 5).num_steps == 1
    with pytest.raises(DatasetEmptyError, match="leave no sample of 3 shards"):
        order([[1], [0, 0, 0]], {"epochs": 1}, 5)
    with pytest.raises(ValueError, match=f"the job would take more than {2**53 - 1} steps to complete 7 epochs"):
        order([[3], [3]], {"epochs": 7}, 5, ["100000000000000", "0.000000000000001"])


def test_samples_are_selected_where_they_start() -> None:
    """With packing a step takes the samples that start in it: together, all steps take each once."""
    made = make_job(stream={"global_batch": 2, "shuffle_window": 2}, execution={"end": {"epochs": 2}})
    rng = np.random.default_rng(5)
    data = SyntheticDatasets(made, [[make_table(made, rng, n) for n in (7, 0, 9)]])
    ids = [sample for step in range(data.order.num_steps) for sample in data.ids(step)]
    assert len(ids) == len(set(ids)) == 32
    units = [int(t.nominal.sum()) for t in data.tables[0]]
    fill = 2 * 512 * 97
    assert data.order.num_steps == -(-2 * sum(units) * 100 // fill)
    first = data.order.spans(0)[0]
    assert (first.first, first.last, first.window_start, len(first.shards)) == (0, fill // 100, 0, 2)


def test_packing_in_digits() -> None:
    assert MAX_SEQ_LEN == 2**30
    assert best_fit_decreasing(np.array([6, 4, 5, 5, 1]), 10).tolist() == [0, 0, 1, 1, 2]
    assert best_fit_decreasing(np.array([1]), 1).tolist() == [0]
    assert best_fit_decreasing(np.array([2**30]), 2**30).tolist() == [0]
    assert best_fit_decreasing(np.empty(0, np.int64), 8).tolist() == []
    for tokens, seq_len, message in (
        ([1, 0], 8, "sample 1 has 0 tokens; a sequence holds samples of 1 to 8"),
        ([8, 9, 10], 8, "sample 1 has 9 tokens; a sequence holds samples of 1 to 8"),
        ([1], 0, rf"sequences of 0 tokens; their length must lie in \[1, {2**30}\]"),
        ([1], 2**30 + 1, rf"sequences of {2**30 + 1} tokens; their length must lie in \[1, {2**30}\]"),
    ):
        with pytest.raises(ValueError, match=message):
            best_fit_decreasing(np.array(tokens), seq_len)
    assert number_by_first(np.array([4, 1, 4, 0, 1])).tolist() == [0, 1, 0, 2, 1]
    assert number_by_first(np.empty(0, np.int64)).tolist() == []
    sizes = np.array([50, 30, 50, 70])
    assert balanced(sizes, sizes**2, 100).tolist() == [0, 1, 0, 1]
    assert balanced(sizes, sizes**2, 100, 4).tolist() == [0, 1, 2, 3]
    even = balanced(sizes, sizes**2, 120, 2)
    assert np.bincount(even, sizes**2).tolist() == [5000, 5800]
    with pytest.raises(ValueError, match="4 samples of 200 tokens take 2 sequences of 100, there are 1; raise"):
        balanced(sizes, sizes, 100, 1)
    assert balanced(np.empty(0, np.int64), np.empty(0, np.int64), 8).tolist() == []
