"""Statistics of real datasets: computed once, cached on disk, and again where the disk has them otherwise."""

import multiprocessing
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from shards import write_interleaved, write_pairs, write_texts

from dataserver.assembly.tokens import load_tokenizer
from dataserver.dataset import (
    Dataset,
    IndexRules,
    Quarantine,
    Shard,
    TextOnly,
    TokensMissingError,
    build_index,
    count_tokens,
)
from dataserver.dataset.index.arrays import read_arrays, write_arrays
from dataserver.jobs import shard_statistics, statistics_cache
from dataserver.jobs.errors import StatisticsPendingError
from dataserver.jobs.scheduler import WorkCancelledError
from dataserver.jobs.shard_statistics import Rules, compute_statistics
from dataserver.jobs.statistics_cache import StatisticsCache, beside_indexes, index_statistics
from dataserver.planning.job.fields import Sizing
from dataserver.planning.stream.statistics import Lists, ShardStatistics

BYTES = load_tokenizer("bytes", None)
PLAIN = Rules(BYTES.digest, Sizing())
PATIENCE_S = 200
"""For processes that start on a busy machine."""
FILTERED = Rules(BYTES.digest, Sizing(max_patches=256), "width >= 96 and punsafe < 0.5")


def index(folder: Path) -> Dataset:
    build_index(folder, workers=1, rules=IndexRules(TextOnly.ALLOW))
    count_tokens(folder, BYTES)
    return Dataset.open(folder)


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    folder = write_pairs(tmp_path / "data", num_samples=40, shard_size=8)
    write_interleaved(folder / "documents", num_samples=10, shard_size=5)
    write_texts(folder / "texts", num_samples=6, shard_size=3)
    return index(folder)


@pytest.fixture(autouse=True)
def _always_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics_cache, "STORED_FROM_S", -1.0)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the shards whose statistics were computed."""
    names: list[str] = []

    def noted(shards: Sequence[Shard], *arguments: Any) -> list[ShardStatistics]:
        names.extend(shard.name for shard in shards)
        return compute_statistics(shards, *arguments)

    monkeypatch.setattr(statistics_cache, "compute_statistics", noted)
    return names


def same(one: ShardStatistics, other: ShardStatistics) -> bool:
    def arrays(statistics: ShardStatistics) -> list[np.ndarray[Any, Any]]:
        parts = [getattr(statistics, field.name) for field in fields(ShardStatistics)]
        return [array for part in parts for array in ((part.at, part.values) if isinstance(part, Lists) else (part,))]

    return all(np.array_equal(a, b) for a, b in zip(arrays(one), arrays(other), strict=True))


@pytest.mark.parametrize("rules", [PLAIN, FILTERED])
def test_statistics_are_computed_once_and_found_after_a_restart(
    dataset: Dataset, rules: Rules, made: list[str], tmp_path: Path
) -> None:
    first = StatisticsCache(tmp_path / "cache").get(dataset, rules)
    assert len(made) == 9
    again = StatisticsCache(tmp_path / "cache")
    assert same(again.get(dataset, rules), first)
    assert same(again.get(dataset, rules), first)
    assert len(made) == 9
    assert same(StatisticsCache().get(dataset, rules), first)
    assert len(made) == 18, "without a folder it is made by every server"
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_rules_have_statistics_of_their_own(dataset: Dataset, made: list[str], tmp_path: Path) -> None:
    listed = Quarantine.from_samples([(dataset.shards[0].name, dataset.shards[0].keys()[1])])
    cache = StatisticsCache(tmp_path)
    nothing = Rules(BYTES.digest, Sizing(), "width < 1")
    all_rules = (PLAIN, FILTERED, Rules(BYTES.digest, Sizing(), "", listed), nothing)
    counts = [int(cache.get(dataset, rules).samples.sum()) for rules in all_rules]
    assert counts[0] == 56
    assert 0 < counts[1] < 40
    assert counts[2:] == [55, 0]
    assert len(made) == 4 * 9
    assert len(list(tmp_path.glob("statistics-*"))) == 4


def test_indexing_leaves_statistics_that_servers_take(dataset: Dataset, made: list[str], tmp_path: Path) -> None:
    index_statistics(dataset, PLAIN, lambda *_: None, 1)
    assert len(made) == 9
    before = beside_indexes(dataset, PLAIN).stat().st_ino
    index_statistics(dataset, PLAIN, lambda *_: None, 1)
    assert beside_indexes(dataset, PLAIN).stat().st_ino == before, "what is whole is not written again"
    StatisticsCache(tmp_path / "cache").get(dataset, PLAIN)
    assert len(made) == 9
    assert not (tmp_path / "cache").exists()


def test_a_dataset_that_grew_is_looked_at_where_it_is_new(dataset: Dataset, made: list[str], tmp_path: Path) -> None:
    index_statistics(dataset, PLAIN, lambda *_: None, 1)
    folder = dataset.index_folder
    for suffix in ("tar", "parquet"):
        (folder / f"00001.{suffix}").unlink()
    for file in folder.glob("00001.tar.*"):
        file.unlink()
    write_texts(folder / "more", num_samples=3, shard_size=3, seed=9)
    grown = index(folder)
    made.clear()
    expected = StatisticsCache().get(grown, Rules(BYTES.digest, Sizing(), "width < 9999 or not width < 9999"))
    assert sorted(made) == [shard.name for shard in grown.shards]
    made.clear()
    assert same(StatisticsCache().get(grown, PLAIN), expected)
    assert made == ["more/00000.tar"]
    made.clear()
    index_statistics(grown, PLAIN, lambda *_: None, 1)
    assert made == ["more/00000.tar"]
    made.clear()
    assert same(StatisticsCache().get(grown, PLAIN), expected)
    assert made == []


@pytest.mark.parametrize("change", ["cut", "flip", "version", "rules", "shape", "negative", "order", "missing"])
def test_damaged_and_foreign_files_are_computed_again(
    dataset: Dataset, change: str, made: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = StatisticsCache(tmp_path).get(dataset, FILTERED)
    (path,) = tmp_path.glob("statistics-*")
    if change in ("cut", "flip"):
        whole = path.read_bytes()
        path.write_bytes(whole[:-1] if change == "cut" else whole[:-9] + bytes([whole[-9] ^ 4]) + whole[-8:])
    else:
        about, arrays = read_arrays(path)
        arrays = {name: array.copy() for name, array in arrays.items()}
        if change == "version":
            about["version"] = 99
        elif change == "rules":
            about["rules"] = PLAIN.key()
        elif change == "shape":
            arrays["samples"] = arrays["samples"][:-1]
        elif change == "negative":
            arrays["long_texts"][0] = -1
        elif change == "order":
            arrays["long_texts.at"][1:3] = arrays["long_texts.at"][2:0:-1]
        else:
            del arrays["images"]
        write_arrays(path, about, arrays)
    made.clear()
    assert same(StatisticsCache(tmp_path).get(dataset, FILTERED), expected)
    assert len(made) == 9
    (warning,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert f"{path}" in warning
    assert "it is computed again" in warning
    assert same(StatisticsCache(tmp_path).get(dataset, FILTERED), expected)
    assert len(made) == 9


def test_a_folder_that_cannot_be_written_costs_one_warning(
    dataset: Dataset, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    cache = StatisticsCache(tmp_path / "file" / "cache")
    assert cache.get(dataset, PLAIN).samples.sum() == 56
    assert cache.get(dataset, FILTERED).samples.sum() < 56
    (warning,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert "or name another folder with --cache-dir" in warning


def test_a_full_disk_costs_one_warning(dataset: Dataset, tmp_path: Path) -> None:
    """A process that may write no file of more than 100 bytes, as on a disk that is full."""
    program = (
        "import logging, sys; from pathlib import Path; import test_statistics_cache as t\n"
        "logging.basicConfig(); t.statistics_cache.STORED_FROM_S = -1.0\n"
        "dataset = t.Dataset.open(Path(sys.argv[1])); cache = t.StatisticsCache(Path(sys.argv[2]))\n"
        "print(*(cache.get(dataset, rules).samples.sum() for rules in (t.PLAIN, t.FILTERED)))\n"
    )

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))

    ran = subprocess.run(
        [sys.executable, "-c", program, dataset.index_folder, tmp_path / "cache"],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]),
            "PYTHONDONTWRITEBYTECODE": "1",  # files that are cut at 100 bytes would stay
        },
        preexec_fn=limit,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    expected = [int(StatisticsCache().get(dataset, rules).samples.sum()) for rules in (PLAIN, FILTERED)]
    assert [int(n) for n in ran.stdout.split()] == expected
    assert ran.stderr.count("WARNING") == 1
    assert "[Errno 27] File too large" in ran.stderr
    assert "make room there" in ran.stderr
    assert list((tmp_path / "cache").iterdir()) == []


def test_two_callers_compute_once(dataset: Dataset, made: list[str]) -> None:
    cache, barrier = StatisticsCache(), threading.Barrier(6)
    found: list[ShardStatistics] = []

    def ask() -> None:
        barrier.wait(timeout=20)
        found.append(cache.get(dataset, FILTERED))

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert len({id(statistics) for statistics in found}) == 1
    assert len(made) == 9


class Held:
    """Lets computing go on shard by shard."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps = threading.Semaphore(0)
        self.computed = 0
        original = shard_statistics.row_statistics

        def held(*arguments: Any) -> ShardStatistics:
            assert self.steps.acquire(timeout=60)
            self.computed += 1
            return original(*arguments)

        monkeypatch.setattr(shard_statistics, "row_statistics", held)


def until(condition: Callable[[], bool]) -> None:
    waited = threading.Event()
    for _ in range(600):
        if condition():
            return
        waited.wait(0.1)
    raise AssertionError


def test_a_caller_without_patience_is_told_how_far_it_is(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    held, cache = Held(monkeypatch), StatisticsCache()
    with pytest.raises(StatisticsPendingError, match=r"0 of 9 shards are computed, which a new filter.* ask again"):
        cache.get(dataset, PLAIN, patience_s=0.2)
    held.steps.release(4)
    until(lambda: held.computed == 4)
    with pytest.raises(StatisticsPendingError, match=r"[34] of 9 shards are computed \(about \d+ s left\)"):
        cache.get(dataset, PLAIN, patience_s=0.2)
    held.steps.release(100)
    assert cache.get(dataset, PLAIN).samples.sum() == 56
    assert held.computed == 9


def test_a_caller_that_leaves_and_work_that_nobody_asks_for(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    held, cache = Held(monkeypatch), StatisticsCache()
    with pytest.raises(WorkCancelledError):
        cache.get(dataset, PLAIN, cancelled=lambda: True)
    monkeypatch.setattr(statistics_cache, "FORGOTTEN_S", 0.0)
    held.steps.release(100)
    until(lambda: not cache._pending)
    assert held.computed < 9
    monkeypatch.undo()
    assert cache.get(dataset, PLAIN).samples.sum() == 56


def test_what_fails_fails_for_all_and_is_tried_again(dataset: Dataset) -> None:
    cache, other = StatisticsCache(), Rules("0" * 64, Sizing())
    for _ in range(2):
        with pytest.raises(TokensMissingError, match="is not counted"):
            cache.get(dataset, other)


def test_processes_find_what_one_finds(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = Quarantine.from_samples([(s.name, s.keys()[0]) for s in dataset.shards[:3]])
    rules = Rules(BYTES.digest, Sizing(), "width >= 90", listed)
    alone = compute_statistics(dataset.shards, rules)
    monkeypatch.setattr(shard_statistics, "MANY", 2)
    monkeypatch.setattr(shard_statistics, "TASK", 2)
    told: list[tuple[int, int]] = []
    shared = compute_statistics(dataset.shards, rules, lambda *told_now: told.append(told_now), workers=2)
    assert all(same(a, b) for a, b in zip(alone, shared, strict=True))
    assert (told[0], told[-1]) == ((0, 9), (9, 9))

    def ended() -> None:
        raise WorkCancelledError

    with pytest.raises(WorkCancelledError):
        compute_statistics(dataset.shards, rules, look=ended, workers=2)


def test_one_dataset_at_a_time_has_processes(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_statistics, "MANY", 2)
    rules = [Rules(BYTES.digest, Sizing(), f"width >= {n}") for n in (90, 91)]
    expected = [compute_statistics(dataset.shards, one, workers=1) for one in rules]
    going, looked = threading.Event(), threading.Event()
    found: dict[int, list[ShardStatistics]] = {}

    def first(done: int, _total: int) -> None:
        if done:
            going.set()
            assert looked.wait(PATIENCE_S), "the other one waits, and whoever it is for may leave"

    def other() -> None:
        found[1] = compute_statistics(dataset.shards, rules[1], look=looked.set)

    def one() -> None:
        found[0] = compute_statistics(dataset.shards, rules[0], first, workers=2)

    threads = [threading.Thread(target=one), threading.Thread(target=other)]
    threads[0].start()
    assert going.wait(PATIENCE_S)
    threads[1].start()
    assert looked.wait(PATIENCE_S)
    assert len(multiprocessing.active_children()) <= 2
    for thread in threads:
        thread.join(PATIENCE_S)
    for number, made in found.items():
        assert all(same(a, b) for a, b in zip(made, expected[number], strict=True))
    assert found.keys() == {0, 1}


def test_a_cache_folder_has_what_was_used_last(
    dataset: Dataset, tmp_path: Path, made: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(statistics_cache, "STORED_FILES", 2)
    tmp_path /= "cache"
    rules = [Rules(BYTES.digest, Sizing(), f"width >= {n}") for n in range(3)]
    for number, one in enumerate(rules[:2]):
        StatisticsCache(tmp_path).get(dataset, one)
        for file in tmp_path.iterdir():
            os.utime(file, (number, number))
    StatisticsCache(tmp_path).get(dataset, rules[0])
    StatisticsCache(tmp_path).get(dataset, rules[2])
    made.clear()
    StatisticsCache(tmp_path).get(dataset, rules[0])
    assert not made
    assert len(list(tmp_path.iterdir())) == 2
