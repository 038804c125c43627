"""A job's blocks are read before they are wanted, whichever step its streams are at."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
from bench_storage import Case, CountingStore, Steps, through_caches
from benchmarks.range_server import State
from benchmarks.shuffles import Shape
from jobs.test_planner import index, planner
from shards import write_pairs
from stores import no_stores, stores  # noqa: F401  fixtures

from dataserver.dataset import BLOCKS, Blocks, Dataset, IoThreads
from dataserver.jobs.read_ahead import AGAIN_S, LATE, READERS, ReadAhead
from dataserver.planning.stream.order import StreamOrder
from dataserver.planning.stream.samples import ROW_BITS

WAIT_S = 30


def settled(ahead: ReadAhead) -> None:
    """Wait until everything that was begun is there."""
    end = time.monotonic() + WAIT_S
    while (ahead._is_telling or BLOCKS._loading) and time.monotonic() < end:
        time.sleep(0.02)
    assert not ahead._is_telling
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
        settled(jobs._ahead)
        refs = [
            dataset.shards[number >> ROW_BITS].image(number & ((1 << ROW_BITS) - 1), 0)
            for number in jobs.plan(step).samples.sample.tolist()
        ]
        dataset.read_ahead(refs)
        assert all(dataset.read(ref) for ref in refs)
    assert BLOCKS.counts.piece_requests == before


class Recording(Blocks):
    """A cache that notes what it is told, and may make who tells it wait."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[list[object]] = []
        self.behind: list[list[object]] = []
        self.going_on = threading.Event()
        self.going_on.set()

    def need(self, _: str, blocks: Iterable[object], behind: Iterable[object] = ()) -> None:
        self.told.append(list(blocks))
        self.behind.append(list(behind))
        self.going_on.wait(WAIT_S)


class Nowhere:
    """A dataset in a store, whose only blocks are named by its shards; some cannot be looked at."""

    def __init__(self, reads_ahead: bool, failing: Sequence[int] = ()) -> None:
        self.reads_ahead = reads_ahead
        self.failing = failing

    def blocks(self, shard: int, *_: int) -> list[int]:
        if shard in self.failing:
            raise OSError("503")
        return [shard]


@pytest.fixture
def order(tmp_path: Path) -> StreamOrder:
    """Of 80 steps in ten epochs, each of one shard."""
    dataset = Dataset.open(index(write_pairs(tmp_path / "pairs", 64, 8)))
    return planner(dataset, changes={"shuffle_window": 1}, execution={"end": {"epochs": 10}})._order


def follow(order: StreamOrder, recording: Recording, *failing: int) -> ReadAhead:
    return ReadAhead("job", order, [Nowhere(True, failing)], recording)  # type: ignore[list-item]


def test_a_step_is_told_once_and_again_where_a_trainer_begins_anew(order: StreamOrder) -> None:
    recording = Recording()
    ahead = follow(order, recording)
    for steps, told in (([0, 0, 1, 0, 1, 2], 3), ([2 + LATE], 4), ([2, 3, 4], 4), ([0], 5)):
        for step in steps:
            ahead.reach(step)
            settled(ahead)
        assert len(recording.told) == told
    local = ReadAhead("job", order, [Nowhere(False)], recording)  # type: ignore[list-item]
    local.reach(0)
    settled(local)
    assert len(recording.told) == 5


def shards_of(order: StreamOrder, steps: Iterable[int]) -> set[int]:
    return {shard for step in steps for span in order.spans(step) for shard in span.shards}


def test_what_ranks_need_that_are_behind_is_told_apart_the_latest_first(order: StreamOrder) -> None:
    recording = Recording()
    ahead = follow(order, recording)
    step = order.num_steps - 1
    ahead.reach(step)
    settled(ahead)
    (told,), (behind,) = recording.told, recording.behind
    assert shards_of(order, range(step - LATE, step)) - shards_of(order, [step])
    assert set(behind) >= shards_of(order, range(step - LATE, step))
    assert set(told) == shards_of(order, [step])
    assert behind[0] in shards_of(order, [step])
    assert behind[-1] in shards_of(order, [step - LATE])


@pytest.mark.parametrize("servers", [1, 2])
def test_blocks_that_steps_have_left_are_not_read_again(servers: int) -> None:
    """Of a window that eight steps pass through by half, where the caches hold a quarter more than a window."""
    shape, store = Shape(shards=32, samples=120, window=8, batch=64, seed=0), CountingStore()
    needed, _ = through_caches(Case("", servers), shape, Steps.of(shape, 1.0, 2), store, 77_000)
    assert store.num_bytes <= 1.1 * needed


def test_a_long_step_is_told_again_before_it_is_forgotten(order: StreamOrder, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("dataserver.jobs.read_ahead.monotonic", lambda: now[0])
    recording = Recording()
    ahead = follow(order, recording)
    for now[0], told in ((1.0, 1), (2.0, 1), (1.0 + AGAIN_S, 2), (2.0 + AGAIN_S, 2)):
        ahead.reach(3)
        settled(ahead)
        assert len(recording.told) == told


def test_what_could_not_be_told_for_want_of_threads_is_told_later(
    order: StreamOrder, monkeypatch: pytest.MonkeyPatch
) -> None:
    recording = Recording()
    monkeypatch.setattr("dataserver.jobs.read_ahead._threads", IoThreads(1, "test"))

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        ahead = follow(order, recording)
        ahead.reach(0)
    assert recording.told == []
    ahead.reach(1)
    settled(ahead)
    assert len(recording.told) == 1


def test_two_readers_of_a_job_are_followed_and_one_call_waits(order: StreamOrder) -> None:
    recording = Recording()
    recording.going_on.clear()
    ahead = follow(order, recording)
    far = 3 * LATE
    for _ in range(50):
        for step in (0, far):
            ahead.reach(step)
    recording.going_on.set()
    settled(ahead)
    assert len(recording.told) == 2
    assert set(recording.told[-1]) >= shards_of(order, [0, far])
    for step in range(0, 8 * (LATE + 1), LATE + 1):
        ahead.reach(step)
    settled(ahead)
    assert len(ahead._readers) == READERS


def test_a_shard_that_cannot_be_looked_at_costs_itself_alone_and_is_warned_of_once(
    order: StreamOrder, caplog: pytest.LogCaptureFixture
) -> None:
    recording = Recording()
    step = order.num_steps - 1
    first, second = list(dict.fromkeys(stretch.shard for stretch in reversed(order.needed(step - LATE, step))))[:2]
    ahead = follow(order, recording, first)
    for _ in range(2):
        ahead.reach(step)
        settled(ahead)
    ahead._tell_latest()
    assert second in recording.behind[0]
    assert first not in recording.told[0] + recording.behind[0]
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        f"job job: shard {first} of dataset 0 is not read ahead: 503"
    ]


ENDING = """
import sys, threading, time
from types import SimpleNamespace
from dataserver.dataset import Blocks
from dataserver.jobs.read_ahead import ReadAhead
from dataserver.planning.stream.axis import Stretch

class Slow:
    reads_ahead = True
    def blocks(self, *_):
        begun.set()
        time.sleep(0.2)
        return []

begun = threading.Event()
order = SimpleNamespace(first_step=0, needed=lambda *_: [Stretch(0, shard, 0, 1) for shard in range(1000)])
ReadAhead("job", order, [Slow()], Blocks()).reach(0)
begun.wait()
"""


def test_a_process_ends_while_it_tells() -> None:
    subprocess.run([sys.executable, "-c", ENDING], check=True, timeout=WAIT_S)
