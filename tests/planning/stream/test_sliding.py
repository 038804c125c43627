"""Order version 2: every sample exactly once, in steps of the right size, with no edge at which all shards change."""

import hashlib
from collections import Counter
from itertools import islice, pairwise

import numpy as np
import pytest
from builders.jobs import dataset, make_job
from builders.samples import SyntheticDatasets, make_table
from planning.plan.test_plan_identity import golden_table

from dataserver.planning.stream.axis import Axis
from dataserver.planning.stream.order import StreamOrder
from dataserver.planning.stream.sliding import PARTS, SlidingEpoch


def sliding(num_shards: int, samples: int, window: int, batch: int, **stream: object) -> SyntheticDatasets:
    """Two epochs of shards of about so many samples."""
    changes = {"packing": {"enabled": False}, "global_batch": batch, "shuffle_window": window, "order_version": 2}
    job = make_job(stream={**changes, **stream}, execution={"end": {"epochs": 2, "last": "pad"}})
    rng = np.random.default_rng(5)
    counts = rng.integers(max(0, samples // 2), samples * 3 // 2 + 1, num_shards).tolist()
    return SyntheticDatasets(job, [[make_table(job, rng, count) for count in counts]])


@pytest.mark.parametrize(
    ("num_shards", "window"), [(1, 8), (7, 8), (8, 8), (9, 8), (15, 7), (40, 1), (90, 64)], ids=str
)
@pytest.mark.parametrize("packed", [False, True])
def test_every_sample_comes_once_an_epoch(num_shards: int, window: int, packed: bool) -> None:
    batch = 16 if window < 64 else 512
    data = sliding(num_shards, 6, window, batch, packing={"enabled": packed}, seq_len=512)
    found = Counter(sample for step in range(data.order.num_steps) for sample in data.ids(step))
    expected = {(0, e, s << 32 | r) for e in (0, 1) for s, t in enumerate(data.tables[0]) for r in t.row.tolist()}
    assert found.keys() == expected
    assert set(found.values()) == {1}
    if not packed:
        assert all(len(data.ids(step)) == batch for step in range(data.order.num_steps - 1))


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("packed", [False, True])
def test_what_a_step_holds_is_needed_by_it_and_not_long_before(packed: bool, version: int) -> None:
    window = 4
    data = sliding(20, 60, window, 24, packing={"enabled": packed}, seq_len=512, order_version=version)
    parts = 1 << 16
    previous: set[int] = set()
    missed = total = 0
    for step in range(data.order.num_steps):
        needed = [(of.shard, of.low, of.high) for of in data.order.needed(step, step)]
        for _, _, sample in data.ids(step):
            shard, row = sample >> 32, data.tables[0][sample >> 32].row.tolist().index(sample & ((1 << 32) - 1))
            n = len(data.tables[0][shard].row)
            total += 1
            missed += not any(
                s == shard and low < parts * (row + 1) / n and parts * row / n < high for s, low, high in needed
            )
        shards = {shard for shard, _, _ in needed}
        if version == 2:
            assert len(shards) <= window + 3
            assert step == 0 or len(shards - previous) <= 3
        previous = shards
    assert missed <= (0 if version == 1 else total // 50)


def test_a_step_is_found_from_the_tables_of_a_window() -> None:
    num_shards, window = 20_000, 64
    job = make_job(
        stream={"packing": {"enabled": False}, "shuffle_window": window, "order_version": 2, "global_batch": 64},
        execution={"end": {"epochs": 2}},
    )
    order = StreamOrder(job.stream, job.spec.execution.end, [np.full(num_shards, 50)])
    for step in (0, 1, order.num_steps // 4, order.num_steps // 2, order.num_steps - 1):
        spans = order.spans(step)
        assert 1 <= len(spans) <= 2
        assert all(window // 2 <= len(span.shards) <= window + 4 for span in spans)


def test_shards_come_in_one_by_one_and_an_epoch_goes_on_with_the_last_ones() -> None:
    num_shards, window = 24, 6
    data = sliding(num_shards, 200, window, 50)
    present = [{sample >> 32 for _, _, sample in data.ids(step)} for step in range(data.order.num_steps)]
    epochs = [{epoch for _, epoch, _ in data.ids(step)} for step in range(data.order.num_steps)]
    assert max(len(after - before) for before, after in pairwise(present)) <= 3
    border = next(step for step, found in enumerate(epochs) if 1 in found)
    assert len(present[border - 1]) <= window // 2 + 2  # half a window is under way
    assert len(present[border + 1] - present[border - 1]) <= 2
    first, second = (
        list(dict.fromkeys(sample >> 32 for step in steps for _, e, sample in data.ids(step) if e == epoch))
        for epoch, steps in ((0, range(border + 1)), (1, range(border, data.order.num_steps)))
    )
    assert first != second


def blocks_read(num_shards: int, samples: int, window: int, batch: int, blocks: int, version: int) -> list[int]:
    """What each step of two epochs adds to a cache of 1.25 windows that is told what is needed, in blocks of shards."""
    stream = {"packing": {"enabled": False}, "global_batch": batch, "shuffle_window": window, "order_version": version}
    job = make_job(stream=stream, execution={"end": {"epochs": 2}})
    order = StreamOrder(job.stream, job.spec.execution.end, [np.full(num_shards, samples)])
    room, held, counts = int(1.25 * window * blocks), dict[tuple[int, int], None](), []
    for step in range(order.num_steps):
        stretches = (
            (part.shard, part.low * blocks, -(-part.high * blocks // PARTS)) for part in order.needed(step, step)
        )
        told = ((shard, number) for shard, low, end in stretches for number in range(low // PARTS, end))
        needed = dict.fromkeys(islice(dict.fromkeys(told), room))
        counts.append(len(needed.keys() - held.keys()))
        before = [block for block in held if block not in needed]
        held = dict.fromkeys([*before, *needed][-room:])  # what is needed goes last
    return counts


@pytest.mark.parametrize(
    ("num_shards", "samples", "window", "batch", "blocks"), [(64, 1000, 8, 512, 10), (48, 600, 6, 384, 9)], ids=str
)
def test_a_store_is_read_evenly_also_at_the_border_of_epochs(
    num_shards: int, samples: int, window: int, batch: int, blocks: int
) -> None:
    """By the schedule alone: how fast a store is changes nothing of it."""
    peaks = {}
    for version in (1, 2):
        counts = blocks_read(num_shards, samples, window, batch, blocks, version)
        begun = window * samples // batch  # the first window is read before there is anything to wait behind
        peaks[version] = max(counts[begun:]) / np.mean(counts)
        border = len(counts) // 2
        assert sum(counts[border - 4 : border + 5]) > 0
        assert sum(counts) <= 1.1 * 2 * num_shards * blocks
    assert peaks[2] <= 2.5 < 5 < peaks[1]


def test_samples_of_a_shard_spread_over_a_window() -> None:
    """Over as many places as with windows, but for the ends of an epoch; and no two halves of a shard stay apart."""
    num_shards, samples, window = 40, 400, 8
    data = sliding(num_shards, samples, window, 100)
    numbers = [sample for step in range(data.order.num_steps) for _, e, sample in data.ids(step) if e == 0]
    position = {sample: at / (len(numbers) / num_shards) for at, sample in enumerate(numbers)}
    spreads = []
    for shard, table in enumerate(data.tables[0]):
        at = np.array([position[shard << 32 | row] for row in table.row.tolist()])
        spreads.append(at.std())
        middle = len(at) // 2
        assert abs(at[:middle].mean() - at[middle:].mean()) < 1.5
    uniform = window / 12**0.5
    assert 0.85 * uniform < np.mean(spreads) < 1.1 * uniform


def test_the_order_stays_what_it_is() -> None:
    """A change here is a new order_version: running jobs would get other samples."""
    job = make_job(
        stream={"datasets": [dataset("laion")], "seed": 42, "seq_len": 1024, "global_batch": 4, "shuffle_window": 3,
                "order_version": 2},
        execution={"end": {"epochs": 2}},
    )  # fmt: skip
    data = SyntheticDatasets(job, [[golden_table(job, n, 1) for n in (40, 0, 35, 50, 3, 28, 61)]])
    ids = [data.ids(step) for step in range(data.order.num_steps)]
    digest = "4543c7a37a3a7ca503534d65740609440dc2dc80b0376c1677e65f55c420e80d"
    assert hashlib.sha256(repr(ids).encode()).hexdigest() == digest


@pytest.mark.parametrize("version", [1, 2])
def test_what_lies_before_a_unit_is_found_from_shards_and_windows(version: int) -> None:
    data = sliding(20, 12, 4, 16, order_version=version)
    axis = Axis(data.job.stream, 0, np.array([len(table.row) for table in data.tables[0]]))
    order = [sample for step in range(data.order.num_steps) for _, _, sample in data.ids(step)]
    for unit in (0, 1, 30, 77, axis.length - 1, axis.length, axis.length + 50):
        epoch, whole, spans = axis.before(unit)
        assert epoch == unit // axis.length
        found = {sample for span in spans for sample in data.numbers(span)}
        found |= {shard << 32 | row for shard in whole for row in data.tables[0][shard].row.tolist()}
        assert found == set(order[epoch * axis.length : unit])
        assert len(spans) <= 2 * 4 + 3


def test_slots_are_as_wide_as_a_dataset_allows_however_wide_the_window() -> None:
    shards, lengths = np.arange(40), np.full(40, 10)
    found = [SlidingEpoch.of(shards, lengths, window) for window in (40, 1000)]
    assert len(found[0].borders) == len(found[1].borders) == 41
