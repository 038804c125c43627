"""An index of a store that other machines make: they have other mirrors, and what they write comes back."""

import pickle
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from benchmarks.range_server import State
from shards import write_pairs

from dataserver.dataset import DatasetError, IndexRules, TextOnly, build_index, publish
from dataserver.dataset.machine.workers import LostWorkerError
from dataserver.dataset.storage import index_mirror
from dataserver.dataset.storage.urls import Url

Stores = tuple[State, str]
ROOT = Url("s3:/bucket/laion")


class Others:
    """An engine whose tasks run on a machine with caches of its own, as those of Ray do."""

    num_workers = 1

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
        self.monkeypatch, self.cache = monkeypatch, cache

    def run(self, work: Callable[[Any], Any], tasks: Sequence[Any], num_workers: int) -> Iterator[tuple[int, Any]]:
        assert num_workers == min(len(tasks), self.num_workers)
        sent = pickle.dumps((work, tasks))
        with self.monkeypatch.context() as patched:
            patched.setenv("XDG_CACHE_HOME", str(self.cache))
            index_mirror.index_root.cache_clear()
            there, its_tasks = pickle.loads(sent)
            found = pickle.dumps([there(task) for task in its_tasks])
        index_mirror.index_root.cache_clear()
        yield from enumerate(pickle.loads(found))


def files(folder: Path) -> dict[str, bytes]:
    found = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return {name: content for name, content in found.items() if name != "mirror.json"}


@pytest.fixture
def shards(stores: Stores, tmp_path: Path) -> None:
    folder = write_pairs(tmp_path / "shards", 12, 4)
    stores[0].put_folder("/bucket/laion", folder)
    stores[0].put_folder("/bucket/again", folder)


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Others:
    return Others(monkeypatch, tmp_path / "theirs")


@pytest.mark.usefixtures("shards")
def test_the_index_is_that_of_one_machine_and_is_published(stores: Stores, others: Others) -> None:
    again = Url("s3:/bucket/again")
    assert build_index(again, workers=1).num_built == 3
    assert build_index(ROOT, engine=others).num_built == 3
    made, expected = files(index_mirror.mirror_folder(ROOT)), files(index_mirror.mirror_folder(again))
    assert made.keys() == expected.keys()
    assert {name for name in made if name.endswith((".index", ".numeric")) and made[name] != expected[name]} == set()
    assert len([name for name in made if name.endswith(".index")]) == 3
    assert files(others.cache) == {}, "another machine leaves nothing behind"
    assert publish(ROOT, None) == len(made)
    assert {f"/bucket/laion/{name}" for name in made} <= stores[0].objects.keys()
    assert build_index(ROOT, engine=others).num_built == 0


@pytest.mark.usefixtures("shards")
def test_other_rules_replace_it_as_a_whole(others: Others) -> None:
    """And what lay beside the earlier indexes does not lie beside the new ones."""
    build_index(ROOT, engine=others)
    folder = index_mirror.mirror_folder(ROOT)
    before = files(folder)
    for name in before:
        if name.endswith(".index"):
            (folder / name).with_suffix(".joined").write_text("of earlier rules")
    assert build_index(ROOT, engine=others, rules=IndexRules(TextOnly.ALLOW)).num_built == 3
    after = files(folder)
    assert after.keys() - before.keys() <= {"disttrain.flags"}
    assert all(after[name] != before[name] for name in before if name.endswith(".index"))


@pytest.mark.usefixtures("shards")
def test_a_run_that_was_killed_goes_on_with_the_shards_that_are_left(others: Others) -> None:
    class Killed(Others):
        def run(self, work: Callable[[Any], Any], tasks: Sequence[Any], num_workers: int) -> Iterator[tuple[int, Any]]:
            yield next(super().run(work, tasks, num_workers))
            raise LostWorkerError("killed")

    killed, allowed = Killed(others.monkeypatch, others.cache), IndexRules(TextOnly.ALLOW)
    with pytest.raises(LostWorkerError):
        build_index(ROOT, engine=killed)
    assert build_index(ROOT, engine=others).num_built == 2
    with pytest.raises(LostWorkerError):
        build_index(ROOT, engine=killed, rules=allowed)
    assert build_index(ROOT, engine=others).num_built == 0, "the dataset is as it was"
    with pytest.raises(LostWorkerError):
        build_index(ROOT, engine=killed, rules=allowed)
    assert build_index(ROOT, engine=others, rules=allowed).num_built == 2


@pytest.mark.usefixtures("shards")
def test_a_file_beside_an_index_is_written_again_without_reading_a_shard(others: Others) -> None:
    class Idle(Others):
        def run(self, work: Callable[[Any], Any], tasks: Sequence[Any], num_workers: int) -> Iterator[tuple[int, Any]]:
            assert not tasks
            return super().run(work, tasks, num_workers)

    build_index(ROOT, engine=others)
    folder = index_mirror.mirror_folder(ROOT)
    before = files(folder)
    (folder / "00001.tar.numeric").unlink()
    assert build_index(ROOT, engine=Idle(others.monkeypatch, others.cache)).num_built == 0
    assert files(folder) == before


@pytest.mark.usefixtures("shards")
def test_a_local_folder_of_the_index_is_one_that_all_see(others: Others, tmp_path: Path) -> None:
    assert build_index(ROOT, tmp_path / "index", engine=others).num_built == 3
    assert len([name for name in files(tmp_path / "index") if name.endswith(".index")]) == 3


@pytest.mark.usefixtures("shards")
def test_a_machine_that_cannot_read_the_store_fails_the_command(stores: Stores, others: Others) -> None:
    class Lost(Others):
        def run(self, work: Callable[[Any], Any], tasks: Sequence[Any], num_workers: int) -> Iterator[tuple[int, Any]]:
            del stores[0].objects["/bucket/laion/00000.tar"]
            return super().run(work, tasks, num_workers)

    with pytest.raises(DatasetError, match=r"cannot read shard s3://bucket/laion/00000.tar"):
        build_index(ROOT, engine=Lost(others.monkeypatch, others.cache))
