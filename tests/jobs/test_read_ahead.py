"""A job's blocks are read before they are wanted, whichever step its streams are at."""

import time
from pathlib import Path

import pytest
from benchmarks.range_server import State
from jobs.test_planner import index, planner
from shards import write_pairs
from stores import no_stores, stores  # noqa: F401  fixtures

from dataserver.dataset import BLOCKS, Blocks, Dataset
from dataserver.jobs.read_ahead import LATE, ReadAhead, _threads
from dataserver.planning.stream.samples import ROW_BITS

WAIT_S = 30


def settled() -> None:
    """Wait until everything that was begun is there."""
    _threads.submit(bool).result(WAIT_S)  # behind what was begun before
    end = time.monotonic() + WAIT_S
    while BLOCKS._loading and time.monotonic() < end:
        time.sleep(0.02)
    assert not BLOCKS._loading


@pytest.mark.parametrize("version", [1, 2])
def test_no_image_is_asked_for_alone_that_was_known_before(
    stores: tuple[State, str],  # noqa: F811
    tmp_path: Path,
    version: int,
) -> None:
    state, _ = stores
    state.put_folder("/bucket/laion", write_pairs(tmp_path / "pairs", 64, 8))
    dataset = Dataset.open(index(Path("s3://bucket/laion")))
    jobs = planner(dataset, changes={"order_version": version, "shuffle_window": 3})
    before = BLOCKS.counts.piece_requests
    for step in range(jobs.num_steps):
        jobs.read_ahead(step)
        settled()
        refs = [
            dataset.shards[number >> ROW_BITS].image(number & ((1 << ROW_BITS) - 1), 0)
            for number in jobs.plan(step).samples.sample.tolist()
        ]
        dataset.read_ahead(refs)
        assert all(dataset.read(ref) for ref in refs)
    assert BLOCKS.counts.piece_requests == before


class Recording(Blocks):
    """A cache that notes what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.told = 0

    def need(self, *_: object) -> None:
        self.told += 1


class Nowhere:
    """A dataset in a store, without blocks."""

    def __init__(self, reads_ahead: bool) -> None:
        self.reads_ahead = reads_ahead

    def blocks(self, *_: int) -> list[tuple[object, object]]:
        return []


def test_a_step_is_told_once_and_again_where_a_trainer_begins_anew(tmp_path: Path) -> None:
    jobs = planner(Dataset.open(index(write_pairs(tmp_path / "pairs", 200, 50))))
    recording = Recording()
    ahead = ReadAhead("job", jobs._order, [Nowhere(True)], recording)  # type: ignore[list-item]
    for steps, told in (([0, 0, 1, 0, 1, 2], 3), ([2 + LATE], 4), ([2, 3, 4], 4), ([0], 5)):
        for step in steps:
            ahead.reach(step)
            settled()
        assert recording.told == told
    local = ReadAhead("job", jobs._order, [Nowhere(False)], recording)  # type: ignore[list-item]
    local.reach(0)
    settled()
    assert recording.told == 5
