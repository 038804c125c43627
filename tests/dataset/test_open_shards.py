"""Bytes of shards: those that are asked for or an error, from few descriptors, of files that may change meanwhile."""

import gc
import os
import shutil
from pathlib import Path

import pytest
from shards import write_texts

from dataserver.dataset import ShardReadError, StaleIndexError, build_index
from dataserver.dataset import open_shards as module
from dataserver.dataset.index import fresh
from dataserver.dataset.index.fresh import read_fresh_index
from dataserver.dataset.open_shards import OpenShards
from dataserver.dataset.shards.listing import find_shards


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three small shards, indexed."""
    folder = write_texts(tmp_path / "shards", 6, 2)
    build_index(folder, workers=1)
    return folder


def opened(folder: Path) -> OpenShards:
    return OpenShards([read_fresh_index(file) for file in find_shards(folder)])


def paths(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.tar"))


def test_all_bytes_that_are_asked_for_or_an_error(folder: Path) -> None:
    shards = opened(folder)
    for position, path in enumerate(paths(folder)):
        content = path.read_bytes()
        size = len(content)
        for offset, length in ((0, size), (0, 0), (5, 7), (size - 1, 1), (size, 0)):
            assert shards.read(position, [(offset, length)]) == [content[offset : offset + length]]
        for offset, length, left in ((0, size + 1, size), (size - 1, 2, 1), (size, 1, 0), (size + 9, 1, 0)):
            said = rf"{path} gave {left} of {length} bytes at {offset}; was it cut\? index it again"
            with pytest.raises(ShardReadError, match=said):
                shards.read(position, [(offset, length)])


def test_pieces_are_read_with_one_look_at_the_file_behind_all(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards, (path, *_), looks = opened(folder), paths(folder), 0

    def looked_at(descriptor: int) -> os.stat_result:
        nonlocal looks
        looks += 1
        return os.stat(descriptor)

    content = path.read_bytes()
    monkeypatch.setattr(os, "fstat", looked_at)
    assert shards.read(0, [(7, 2), (0, 5), (512, 9)]) == [content[7:9], content[:5], content[512:521]]
    assert looks == 1
    said = rf"{path} gave 1 of 3 bytes at {len(content) - 1}; was it cut\?"
    with pytest.raises(ShardReadError, match=said):
        shards.read(0, [(0, 5), (len(content) - 1, 3), (0, 1)])


def test_few_descriptors_are_open(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_OPEN_SHARDS", 2)
    shards = opened(folder)

    def descriptors() -> list[str]:
        gc.collect()
        files = (Path(f"/proc/self/fd/{number}").resolve() for number in range(256))
        return sorted(file.name for file in files if file.parent == folder.resolve() and file.suffix == ".tar")

    for position, held in ((0, [0]), (0, [0]), (1, [0, 1]), (0, [0, 1]), (2, [0, 2]), (1, [1, 2])):
        shards.read(position, [(0, 1)])
        assert descriptors() == [paths(folder)[n].name for n in held]


def test_a_descriptor_on_which_reading_failed_is_used_no_more(folder: Path) -> None:
    """One whose file the storage has lost fails for ever, though the path leads to a file that can be read."""
    shards, path = opened(folder), paths(folder)[0]
    shards.read(0, [(0, 1)])
    unreadable = os.open(folder, os.O_RDONLY)
    os.dup2(unreadable, shards._descriptors.get(0, lambda: module.Descriptor(path)).number)
    os.close(unreadable)
    with pytest.raises(ShardReadError, match=rf"cannot read {path}: .*; check the storage"):
        shards.read(0, [(0, 1)])
    assert shards.read(0, [(0, 1)]) == [path.read_bytes()[:1]]


def test_a_shard_that_changes_whenever_it_is_read_is_given_up(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards, path, reads = opened(folder), paths(folder)[0], 0
    pread = os.pread

    def changing(*arguments: int) -> bytes:
        nonlocal reads
        reads += 1
        os.utime(path, ns=(reads, reads))
        return pread(*arguments)

    monkeypatch.setattr(os, "pread", changing)
    with pytest.raises(ShardReadError, match=rf"{path} changes while it is read; index it again when it is complete"):
        shards.read(0, [(0, 1)])
    assert reads == 2
    monkeypatch.undo()
    assert shards.read(0, [(0, 1)]) == [path.read_bytes()[:1]]


def test_another_content_of_the_same_size_is_read_once_and_refused_until_it_changes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards, path, digests = opened(folder), paths(folder)[1], list[Path]()
    content = path.read_bytes()
    digest = fresh.digest_file

    def counted(path: Path) -> str:
        digests.append(path)
        return digest(path)

    monkeypatch.setattr(fresh, "digest_file", counted)
    path.write_bytes(bytes(reversed(content)))
    for _ in range(3):
        with pytest.raises(StaleIndexError, match=rf"{path} changed while it was served, its index describes another"):
            shards.read(1, [(0, 1)])
    assert digests == [path]
    copy = folder / "copy"
    copy.write_bytes(content)
    shutil.move(copy, path)
    assert shards.read(1, [(n, 1) for n in range(3)]) == [content[n : n + 1] for n in range(3)]
    assert digests == [path, path]
    path.write_bytes(content + b"x")
    said = rf"{path} has {len(content) + 1} bytes, its index describes {len(content)}; run dataserver index .* again"
    with pytest.raises(StaleIndexError, match=said):
        shards.read(1, [(0, 1)])
    assert len(digests) == 2
