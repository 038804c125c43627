"""Indexing by other rules changes a dataset when all of it is done and accepted, or not at all."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from shards import write_tar

from dataserver.dataset import Dataset, DatasetError, IndexRules, KeyEnd, ShardReadError, build_index, parse_captions
from dataserver.dataset.index import indexing
from dataserver.dataset.index.pending import PENDING_NAME


def write_texts(path: Path, texts: dict[str, str]) -> None:
    write_tar(path, [(f"{key}.txt", text.encode()) for key, text in texts.items()])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for n in range(3):
        write_texts(tmp_path / "d" / f"s/{n}.tar", {f"k{n}": f"text {n}"})
        write_texts(tmp_path / "more" / f"s/{n}.tar", {f"k{n}.long": f"long {n}"})
    build_index(tmp_path / "d", workers=1)
    return tmp_path


def state(folder: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in sorted((folder / "d").rglob("*")) if p.is_file()}


LONG = "long=long.txt"


def index(folder: Path, *captions: str, join: bool = True, **rules: Any) -> int:
    joins = (folder / "more",) if join else ()
    asked = IndexRules(captions=parse_captions(captions), joins=joins, **rules)
    return build_index(folder / "d", workers=1, rules=asked).num_built


def captions(folder: Path) -> list[str]:
    return Dataset.open(folder / "d").captions


def in_both(folder: Path) -> None:
    write_texts(folder / "more" / "s/2.tar", {"k2": "again"})


def of_others(folder: Path) -> None:
    write_texts(folder / "more" / "s/2.tar", {"other": "again"})


def no_tar(_folder: Path) -> None:
    """The caption alone is wrong."""


@pytest.mark.parametrize(
    ("spoil", "why"), [(in_both, "same member"), (of_others, "nothing in"), (no_tar, "no sample of")]
)
def test_a_command_that_is_refused_leaves_the_dataset_as_it_was(
    folder: Path, spoil: Callable[[Path], None], why: str
) -> None:
    before, fingerprint = state(folder), Dataset.open(folder / "d").fingerprint
    spoil(folder)
    with pytest.raises(DatasetError, match=why):
        index(folder, "typo=lang.txt")
    assert state(folder) == before
    assert Dataset.open(folder / "d").fingerprint == fingerprint
    assert not (folder / "d" / PENDING_NAME).exists()


def test_a_command_that_is_killed_leaves_the_dataset_and_continues(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, make = state(folder), indexing.index_shard

    def killed(shard: Any, *rest: Any) -> str:
        if shard.name == "s/2.tar":
            raise KeyboardInterrupt
        return make(shard, *rest)

    monkeypatch.setattr(indexing, "index_shard", killed)
    with pytest.raises(KeyboardInterrupt):
        index(folder, LONG)
    assert {path: data for path, data in state(folder).items() if PENDING_NAME not in path} == before
    assert captions(folder) == []
    monkeypatch.undo()
    assert index(folder, LONG) == 1, "two were made before"
    assert captions(folder) == ["long"]
    assert len(list((folder / "d").rglob("*.joined"))) == 3
    assert not (folder / "d" / PENDING_NAME).exists()
    assert index(folder, LONG) == 0


def test_what_a_killed_command_left_is_removed_and_nothing_else(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(shard: Any, *rest: Any) -> str:
        made = make(shard, *rest)
        if shard.name == "s/1.tar":
            raise KeyboardInterrupt
        return made

    make = indexing.index_shard
    monkeypatch.setattr(indexing, "index_shard", killed)
    with pytest.raises(KeyboardInterrupt):
        index(folder, join=False, key=KeyEnd.LAST_DOT)
    monkeypatch.undo()
    waiting = folder / "d" / PENDING_NAME
    (waiting / "s" / "notes").write_text("a user's own")
    assert index(folder, join=False) == 0
    assert [path.name for path in waiting.rglob("*") if path.is_file()] == ["notes"]


def test_another_folder_to_join_is_other_rules(folder: Path) -> None:
    assert index(folder, LONG) == 3
    for n in range(3):
        write_texts(folder / "new" / f"s/{n}.tar", {f"k{n}.long": f"new {n}"})
    before = state(folder)
    (folder / "new" / "s/1.tar").write_bytes(b"no tar " * 100)
    joins = IndexRules(captions=parse_captions([LONG, "typo=x"]), joins=(folder / "new",))
    with pytest.raises(DatasetError, match="no sample of"):
        build_index(folder / "d", workers=1, rules=joins)
    assert state(folder) == before
    assert index(folder, LONG) == 0


def test_what_was_made_stays_where_storage_fails(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, make = state(folder), indexing.index_shard

    def failing(shard: Any, *rest: Any) -> str:
        if shard.name == "s/2.tar":
            raise ShardReadError("cannot read it")
        return make(shard, *rest)

    monkeypatch.setattr(indexing, "index_shard", failing)
    with pytest.raises(ShardReadError):
        index(folder, LONG)
    assert {path: data for path, data in state(folder).items() if PENDING_NAME not in path} == before
    monkeypatch.undo()
    assert index(folder, LONG) == 1, "two were made before"


def test_folders_that_others_fill_meanwhile_stay(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where another command indexes other shards of the dataset."""
    remove = Path.rmdir

    def raced(path: Path) -> None:
        (path / "of another").touch()
        remove(path)

    monkeypatch.setattr(Path, "rmdir", raced)
    assert index(folder, LONG) == 3
    assert (folder / "d" / PENDING_NAME / "s" / "of another").exists()


def test_one_shard_leaves_what_is_noted_of_all(tmp_path: Path) -> None:
    for n in range(2):
        write_texts(tmp_path / f"{n}.tar", {f"k{n}": f"text {n}"})
    build_index(tmp_path, workers=1, rules=IndexRules(key=KeyEnd.LAST_DOT))
    noted = {path.name: path.read_bytes() for path in tmp_path.glob("disttrain.*")}
    assert "disttrain.flags" in noted
    assert build_index(tmp_path / "0.tar", workers=1, rules=IndexRules(allow_duplicates=True)).num_built == 1
    assert {path.name: path.read_bytes() for path in tmp_path.glob("disttrain.*")} == noted
