"""The order of samples against a reference that lays out whole axes, sample by sample."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from math import floor

import numpy as np
import pytest
from builders.jobs import dataset, make_job
from builders.samples import SyntheticDatasets, make_table, sample_number
from hypothesis import given, settings
from hypothesis import strategies as st

from dataserver.planning.job.identity import Job
from dataserver.planning.stream.gathering import gather_window
from dataserver.planning.stream.order import DatasetEmptyError, StepOutOfRangeError, StreamOrder
from dataserver.planning.stream.randomness import Operator, dataset_key, draw
from dataserver.planning.stream.windows import units_of

Id = tuple[int, int, int]


@st.composite
def streams(draw_: st.DrawFn, end: dict[str, object]) -> SyntheticDatasets:
    """Jobs over one to three datasets of small shards, some of them empty."""
    packed = draw_(st.booleans())
    weights = draw_(st.lists(st.sampled_from(["0", "0.001", "0.3", "1", "7.77"]), min_size=1, max_size=3))
    if all(w == "0" for w in weights):
        weights[0] = "1"
    sizes = [draw_(st.lists(st.integers(0, 12), min_size=1, max_size=6)) for _ in weights]
    for weight, shards in zip(weights, sizes, strict=True):
        if weight != "0" and not sum(shards):
            shards[-1] = 1
    batch = draw_(st.integers(1, 7))
    stream = {
        "datasets": [dataset(f"d{i}", weight=w) for i, w in enumerate(weights)],
        "packing": {"enabled": packed, "fill": draw_(st.sampled_from(["1", "0.97", "0.333"]))},
        "global_batch": batch,
        "shuffle_window": draw_(st.integers(1, 4)),
        "order_version": draw_(st.sampled_from([1, 2])),
        "seed": draw_(st.integers(0, 1000)),
    }
    job = make_job(stream=stream, execution={"end": end})
    rng = np.random.default_rng(draw_(st.integers(0, 2**32)))
    return SyntheticDatasets(job, [[make_table(job, rng, n) for n in shards] for shards in sizes])


def walk(data: SyntheticDatasets, number: int, epoch: int) -> list[tuple[Id, int]]:
    """One epoch of one dataset: every sample with its units, in canonical order. Slow and obvious."""
    stream, shards = data.job.stream, data.tables[number]
    key = dataset_key(stream.datasets[number].name)

    def word(operator: Operator, of: int) -> int:
        return int(draw(stream.seed, operator, key, epoch, np.array([of], np.uint64))[0])

    def shuffled(of_epoch: int) -> list[int]:
        words = draw(stream.seed, Operator.SHARD_ORDER, key, of_epoch, np.arange(len(shards), dtype=np.uint64))
        return sorted(range(len(shards)), key=lambda s: (int(words[s]), s))

    if stream.order_version == 2:
        return [((number, epoch, sample), units) for sample, units in walk_sliding(data, number, epoch, shuffled, word)]
    permuted = shuffled(epoch)
    found: list[tuple[Id, int]] = []
    for first in range(0, len(permuted), stream.shuffle_window):
        window = [
            (sample_number(s, int(row)), int(units))
            for s in permuted[first : first + stream.shuffle_window]
            for row, units in zip(shards[s].row, units_of(stream, shards[s]), strict=True)
        ]
        window.sort(key=lambda sample: (word(Operator.SAMPLE_ORDER, sample[0]), sample[0]))
        found += [((number, epoch, sample), units) for sample, units in window]
    return found


def walk_sliding(
    data: SyntheticDatasets,
    number: int,
    epoch: int,
    shuffled: Callable[[int], list[int]],
    word: Callable[[Operator, int], int],
) -> Iterator[tuple[int, int]]:
    """One epoch in order version 2: the numbers of all samples with their units."""
    stream, shards = data.job.stream, data.tables[number]
    permuted, window, n = shuffled(epoch), stream.shuffle_window, len(shards)
    half = -(-window // 2)
    if epoch and n > window:
        begun = [s for s in permuted[:-half] if s in shuffled(epoch - 1)[-half:]]
        permuted = begun + [s for s in permuted if s not in begun]
    reach, unit, end = window if n > window else 2 * n, 1 << 32, 2 * n << 32

    def turned(at: int) -> int:
        return -at if at < 0 else 2 * end - at if at > end else at

    def before(at: Fraction | int) -> Fraction:
        """How much of two units, spread over `reach` to either side, lies below a position from the first."""
        x = min(max(Fraction(at), Fraction(0)), Fraction(2 * reach + 2))
        if x <= 2:
            return x * x / (8 * reach)
        return (x - 1) / (2 * reach) if x <= 2 * reach else 1 - (2 * reach + 2 - x) ** 2 / (8 * reach)

    slots: list[list[tuple[int, int, int]]] = [[] for _ in range(n)]  # windows this small have slots of one shard
    for place, shard in enumerate(permuted):
        rows = list(zip(shards[shard].row.tolist(), units_of(stream, shards[shard]).tolist(), strict=True))
        positions = []
        for at, (row, units) in enumerate(rows):
            sample = sample_number(shard, row)
            moved = (word(Operator.SAMPLE_ORDER, sample) >> 32) * 2 * reach
            positions.append(
                (turned(((2 * place - reach) * unit) + at * (2 * unit // len(rows)) + moved), sample, units)
            )
        length, first, begun_units = sum(units for _, units in rows), 2 * place - reach, 0
        shares = [
            before(y - first) - before(-y - first) + 1 - before(4 * n - y - first) for y in range(2, 2 * n + 1, 2)
        ]
        bounds = [floor(length * share) for share in shares]
        for position, sample, units in sorted(positions):
            slots[sum(bound <= begun_units for bound in bounds)].append((position, sample, units))
            begun_units += units
    for slot in slots:
        yield from ((sample, units) for _, sample, units in sorted(slot))


def reference(data: SyntheticDatasets, num_steps: int) -> list[list[Id]]:
    """The samples of steps 0 .. num_steps - 1 if the job had no end."""
    stream = data.job.stream
    weights = [Fraction(d.weight) for d in stream.datasets]
    axes: list[list[Id]] = [[] for _ in weights]
    bounds: list[list[int]] = [[0] * (num_steps + 1) for _ in weights]
    for step in range(1, num_steps + 1):
        left, weight_left = step * stream.global_batch, sum(weights)
        for d, weight in enumerate(weights):
            if stream.packing.enabled:
                share = weight / sum(weights)
                quota = share * Fraction(stream.packing.fill) * stream.global_batch * stream.seq_len
                bounds[d][step] = int(step * quota)
            elif weight:
                bounds[d][step] = int(left * weight / weight_left)
                left, weight_left = left - bounds[d][step], weight_left - weight
    steps: list[list[Id]] = [[] for _ in range(num_steps)]
    for d, axis in enumerate(axes):
        at, epoch = 0, 0
        while at < bounds[d][-1]:
            for sample, units in walk(data, d, epoch):
                step = next((k for k in range(num_steps) if bounds[d][k] <= at < bounds[d][k + 1]), None)
                if step is not None:
                    steps[step].append(sample)
                axis.append(sample)
                at += units
            epoch += 1
    return steps


@settings(max_examples=50, deadline=None)
@given(data=streams(end={"steps": 12}), order=st.permutations(range(12)))
def test_random_access_is_the_sequential_walk(data: SyntheticDatasets, order: list[int]) -> None:
    expected = reference(data, 12)
    found = {step: data.ids(step) for step in order}
    assert [found[step] for step in range(12)] == expected
    if not data.job.stream.packing.enabled:
        assert {len(ids) for ids in expected} == {data.job.stream.global_batch}


def steps_until_end(data: SyntheticDatasets, at_most: int = 150) -> list[list[Id]]:
    return [data.ids(step) for step in range(min(data.order.num_steps, at_most))]


@settings(max_examples=50, deadline=None)
@given(data=streams(end={"epochs": 2, "last": "pad"}))
def test_every_sample_once_per_pass(data: SyntheticDatasets) -> None:
    steps = steps_until_end(data)
    counts = Counter(sample for ids in steps for sample in ids)
    assert not counts or set(counts.values()) == {1}
    whole = len(steps) == data.order.num_steps
    for d, spec in enumerate(data.job.stream.datasets):
        everything = {sample for p in range(2) for sample, _ in walk(data, d, p)}
        seen = {sample for sample in counts if sample[0] == d}
        if spec.weight == "0":
            assert not seen
        elif whole:
            assert everything <= seen
        # Nobody is on epoch p + 1 before epoch p is complete.
        epochs = [sample[1] for ids in steps for sample in ids if sample[0] == d]
        assert epochs == sorted(epochs)
    if not data.job.stream.packing.enabled:
        full = steps[:-1] if whole else steps
        assert all(len(ids) == data.job.stream.global_batch for ids in full)
        if whole:
            assert 0 < len(steps[-1]) <= data.job.stream.global_batch


@settings(max_examples=50, deadline=None)
@given(data=streams(end={"epochs": 1, "last": "pad"}))
def test_a_job_ends_as_soon_as_every_dataset_has_completed_its_passes(data: SyntheticDatasets) -> None:
    last = data.order.num_steps - 1
    if last > 150:
        return
    before = {sample for step in range(last) for sample in data.ids(step)}
    missing = [
        sample
        for d, spec in enumerate(data.job.stream.datasets)
        if spec.weight != "0"
        for sample, _ in walk(data, d, 0)
        if sample not in before
    ]
    if not data.job.stream.packing.enabled:
        assert missing
    assert set(missing) <= set(data.ids(last))


@settings(max_examples=50, deadline=None)
@given(data=streams(end={"epochs": 1, "last": "pad"}))
def test_the_end_changes_only_a_last_short_step(data: SyntheticDatasets) -> None:
    """Epochs 1 -> 2, drop instead of pad, steps instead of epochs: all earlier steps stay as they are.

    The last short step of a job that ends with `epochs` and pads is the one exception: there a dataset stops at its
    epoch, while in a job that goes on the same step takes the first samples of the next epoch as well. So a checkpoint
    taken at the very end of a padded job continues exactly only from that step's start.
    """
    steps = min(data.order.num_steps, 60)
    padded = [data.ids(step) for step in range(steps)]
    endless = _with_end(data, {"steps": steps + 1})
    extended = _with_end(data, {"epochs": 2})
    for other in (endless, extended):
        found = [other.ids(step) for step in range(steps)]
        assert found[:-1] == padded[:-1]
        assert set(padded[-1]) <= set(found[-1])
    try:
        dropped = _with_end(data, {"epochs": 1, "last": "drop"})
    except DatasetEmptyError:
        assert data.order.num_steps == 1
        return
    assert dropped.order.num_steps in (data.order.num_steps, data.order.num_steps - 1)
    for step in range(min(dropped.order.num_steps, steps)):
        assert dropped.ids(step) == endless.ids(step)


def _with_end(data: SyntheticDatasets, end: dict[str, object]) -> SyntheticDatasets:
    spec = data.job.spec.model_dump(mode="json")
    job = make_job(stream=spec["stream"], execution={"end": end})
    assert job.stream_id == data.job.stream_id
    return SyntheticDatasets(job, data.tables)


def _synthetic(counts: list[list[int]], end: dict[str, object], **stream: object) -> SyntheticDatasets:
    changes = {"packing": {"enabled": False}, "datasets": [dataset(f"d{i}") for i in range(len(counts))], **stream}
    job = make_job(stream=changes, execution={"end": end})
    rng = np.random.default_rng(3)
    return SyntheticDatasets(job, [[make_table(job, rng, n) for n in shards] for shards in counts])


def test_drop_shortens_no_other_step() -> None:
    # d0 ends inside the last step; d1 inside the one before, which must be full all the same.
    data = _synthetic([[10], [7]], {"epochs": 1, "last": "drop"}, global_batch=4)
    assert data.order.num_steps == 5
    data = _synthetic([[9], [7]], {"epochs": 1, "last": "drop"}, global_batch=4)
    assert [len(data.ids(step)) for step in range(data.order.num_steps)] == [4] * 4
    padded = _synthetic([[9], [7]], {"epochs": 1, "last": "pad"}, global_batch=4)
    assert [len(padded.ids(step)) for step in range(padded.order.num_steps)] == [4] * 4 + [3]


def test_drop_of_the_only_step_is_refused() -> None:
    with pytest.raises(DatasetEmptyError, match=r"do not fill a single step .* lower global_batch"):
        _synthetic([[3]], {"epochs": 1, "last": "drop"}, global_batch=4)
    assert _synthetic([[3]], {"epochs": 1}, global_batch=4).order.num_steps == 1


def test_steps_beyond_the_end_are_refused() -> None:
    data = _synthetic([[10]], {"epochs": 1}, global_batch=4)
    assert len(data.ids(2)) == 2
    for step in (3, 2**63, -1):
        with pytest.raises(StepOutOfRangeError, match=f"step {step} does not exist; the job ends after step 2"):
            data.ids(step)


def test_a_dataset_of_nothing_is_refused_by_name() -> None:
    with pytest.raises(DatasetEmptyError, match="dataset d1: filter '' and quarantine leave no sample of 2 shards"):
        _synthetic([[3], [0, 0]], {"epochs": 1})
    zero = [dataset("d0"), dataset("d1", weight="0")]
    assert _synthetic([[3], [0, 0]], {"epochs": 1}, datasets=zero).order.num_steps == 3


def test_a_weight_that_never_completes_a_pass_is_refused() -> None:
    tiny = [dataset("d0", weight="100000000000000"), dataset("d1", weight="0.000000000000001")]
    with pytest.raises(ValueError, match=r"more than \d+ steps .* raise the smallest weight"):
        _synthetic([[3], [3]], {"epochs": 1}, datasets=tiny)


def test_passes_seeds_and_datasets_are_ordered_differently() -> None:
    data = _synthetic([[40] * 3, [40] * 3], {"epochs": 3}, global_batch=8, shuffle_window=2)
    other = _synthetic([[40] * 3, [40] * 3], {"epochs": 3}, global_batch=8, shuffle_window=2, seed=1)
    orders = [
        tuple(sample for _, _, sample in (s for s, _ in walk(d, number, epoch)))
        for d in (data, other)
        for number in range(2)
        for epoch in range(3)
    ]
    assert len(set(orders)) == len(orders)
    shard_orders = {tuple(dict.fromkeys(s >> 32 for s in order)) for order in orders}
    assert len(shard_orders) > 2


def test_samples_of_a_window_are_mixed() -> None:
    data = _synthetic([[100] * 4], {"epochs": 1}, global_batch=400, shuffle_window=4)
    shards = [sample >> 32 for _, _, sample in data.ids(0)]
    assert sum(a != b for a, b in pairwise(shards)) > 250  # of 399; 3 if shards stayed together


@pytest.mark.parametrize("packed", [False, True])
def test_a_step_touches_the_tables_of_its_windows_only(packed: bool) -> None:
    shards = 100_000
    stream = {"packing": {"enabled": packed}, "global_batch": 64, "shuffle_window": 8}
    job = make_job(stream=stream, execution={"end": {"epochs": 1}})
    tables = [make_table(job, np.random.default_rng(i), 20) for i in range(10)]
    units = np.array([units_of(job.stream, t).sum() for t in tables])
    order = StreamOrder(job.stream, job.spec.execution.end, [np.tile(units, shards // 10)])
    for step in (0, order.num_steps // 2, order.num_steps - 1):
        spans = order.spans(step)
        touched = {s for span in spans for s in span.shards}
        assert len(touched) <= 8 * 3
        found = [gather_window(order, span, [tables[s % 10] for s in span.shards]).part(span)[0] for span in spans]
        assert 0 < sum(len(numbers) for numbers in found) <= 200
    everywhere = {s >> 10 for step in range(0, order.num_steps, order.num_steps // 50) for s in _shards(order, step)}
    assert len(everywhere) > 60  # shards are permuted over the whole epoch, not taken in name order


def _shards(order: StreamOrder, step: int) -> set[int]:
    return {s for span in order.spans(step) for s in span.shards}


def test_a_small_dataset_may_pass_several_times_within_a_step() -> None:
    data = _synthetic([[3]], {"steps": 2}, global_batch=7)
    assert [epoch for _, epoch, _ in data.ids(0) + data.ids(1)] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4]


def test_a_mixture_of_a_thousand_datasets_is_planned_exactly() -> None:
    entries = [dataset(f"d{i}", weight=f"0.{i + 1:04d}") for i in range(1000)]
    job = make_job(
        stream={"datasets": entries, "packing": {"enabled": False}, "global_batch": 256},
        execution={"end": {"epochs": 1}},
    )
    order = StreamOrder(job.stream, job.spec.execution.end, [np.array([5, 5])] * 1000)
    for step in (0, 1, order.num_steps - 2):
        assert sum(span.last - span.first for span in order.spans(step)) == 256


def test_rows_that_were_left_out_keep_the_numbers_of_the_others() -> None:
    job: Job = make_job(stream={"packing": {"enabled": False}, "global_batch": 3})
    table = make_table(job, np.random.default_rng(0), 3)
    kept = replace(table, row=np.array([4, 7, 9]))
    data = SyntheticDatasets(job, [[kept]])
    assert sorted(sample for _, _, sample in data.ids(0)) == [4, 7, 9]


def test_samples_of_equal_words_come_by_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of 2^64 words are never equal in practice, and the order must not depend on how they are sorted."""
    data = _synthetic([[9, 8]], {"steps": 1}, shuffle_window=2)
    (span,) = data.order.spans(0)
    monkeypatch.setattr(
        "dataserver.planning.stream.windows.draw", lambda *given: (given[-1] >> np.uint64(1)) % np.uint64(3)
    )
    (window,) = data.windows(span)
    words = ((window.sample >> np.uint64(1)) % np.uint64(3)).tolist()
    found = list(zip(words, window.sample.tolist(), strict=True))
    assert found == sorted(found)
    assert len(set(window.sample.tolist())) == 17
