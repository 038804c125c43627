"""What storage refuses while a dataset is listed, indexed and read, in the words that users see."""

import errno
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from shards import write_tar, write_texts

from dataserver.dataset import (
    Dataset,
    DatasetError,
    ShardReadError,
    StaleIndexError,
    TokensMissingError,
    build_index,
    count_tokens,
    lint,
)
from dataserver.dataset.errors import Findings
from dataserver.dataset.index import indexing
from dataserver.dataset.index.indexing import index_shard
from dataserver.dataset.machine.workers import in_processes
from dataserver.dataset.shard_tokens import ShardTokens
from dataserver.dataset.shards import formats, sidecar
from dataserver.dataset.shards.listing import find_shards


class Bytes:
    """A tokenizer."""

    digest, vocab_size = "bytes", 256

    def encode_all(self, texts: list[str]) -> list[Any]:
        return [np.frombuffer(text.encode(), np.uint8).astype(np.int32) for text in texts]


def failing(*_: object, **__: object) -> Any:
    raise OSError(5, "Input/output error", "the file")


def test_a_folder_that_cannot_be_listed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_texts(tmp_path / "a", 2, 2)
    monkeypatch.setattr(os, "scandir", failing)
    with pytest.raises(DatasetError) as caught:
        find_shards(tmp_path)
    assert str(caught.value) == "cannot list the file: Input/output error; make the folder readable"


def test_a_shard_that_cannot_be_read_is_not_indexed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (shard,) = find_shards(write_texts(tmp_path, 2, 2))
    monkeypatch.setattr(formats, "scan_members", failing)
    with pytest.raises(DatasetError) as caught:
        index_shard(shard)
    assert str(caught.value) == (
        f"cannot read shard {shard.path}: [Errno 5] Input/output error: 'the file'; make it readable and index again"
    )
    assert not shard.index_path.exists()


def test_a_shard_that_changes_while_it_is_indexed_is_not_indexed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (shard,) = find_shards(write_texts(tmp_path, 2, 2))
    read = indexing.read_sidecar

    def touching(*given: Any) -> Any:
        os.utime(shard.path, (1, 1))
        return read(*given)

    monkeypatch.setattr(indexing, "read_sidecar", touching)
    with pytest.raises(DatasetError) as caught:
        index_shard(shard)
    assert str(caught.value) == (f"shard {shard.path} changed while it was indexed; index again when it is complete")
    assert not shard.index_path.exists()


def test_storage_that_fails_is_no_damaged_sidecar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, findings = tmp_path / "0.parquet", Findings()
    path.write_bytes(b"no parquet")
    found = sidecar.read_sidecar(path, ["a"], [{"width": 3}], findings)
    assert found.to_pydict() == {"width": [3]}
    assert findings.counts == {"bad_sidecar": 1}
    monkeypatch.setattr(sidecar, "parquet_columns", failing)
    with pytest.raises(OSError, match="Input/output error"):
        sidecar.read_sidecar(path, ["a"], [{}], findings)


@pytest.fixture
def counted(tmp_path: Path) -> Path:
    """Two texts whose tokens are counted."""
    write_tar(tmp_path / "0.tar", [("0.txt", b"one two"), ("1.txt", b"three")])
    build_index(tmp_path, workers=1)
    count_tokens(tmp_path, Bytes())
    return tmp_path


def test_ids_that_cannot_be_read_are_trouble_of_the_storage(counted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, unopened = Dataset.open(counted).shards[0], Dataset.open(counted).shards[0]
    opened.document(0, "bytes")
    monkeypatch.setattr(os, "pread", failing)
    (path,) = counted.glob("*.ids-*")
    for shard in (opened, unopened):
        with pytest.raises(ShardReadError) as caught:
            shard.document(1, "bytes")
        assert str(caught.value) == (f"cannot read {path}: [Errno 5] Input/output error: 'the file'; check the storage")


def test_counts_of_another_number_of_texts_are_refused(counted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (shard,) = Dataset.open(counted).shards
    counts = shard.tokens.stored("bytes")
    for wrong in (counts.counts[:1], np.append(counts.counts, 1).astype(np.int32)):
        found = replace(counts, counts=wrong)
        monkeypatch.setattr(ShardTokens, "stored", lambda *_, found=found: found)
        with pytest.raises(DatasetError) as caught:
            shard.tokens.counts("bytes")
        assert str(caught.value) == (
            f"{shard.file.tokens_path('bytes')} has {len(wrong)} counts for 2 texts; remove the file and count again"
        )


@pytest.mark.parametrize(
    ("number", "kind"),
    [(errno.EIO, ShardReadError), (errno.ESTALE, ShardReadError), (errno.ENOENT, TokensMissingError)],
)
def test_counts_that_storage_does_not_give_are_not_missing_ones(
    counted: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[DatasetError]
) -> None:
    def refuse(path: Path) -> bytes:
        raise OSError(number, "the system's words", str(path))

    (shard,) = Dataset.open(counted).shards
    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(kind):
        shard.tokens.counts("bytes")
    monkeypatch.undo()
    assert len(shard.tokens.counts("bytes")) == 2


@pytest.mark.parametrize(
    ("number", "kind"), [(errno.EIO, ShardReadError), (errno.EMFILE, ShardReadError), (errno.ENOENT, StaleIndexError)]
)
def test_an_index_that_storage_does_not_give_is_not_stale(
    counted: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[DatasetError]
) -> None:
    def refuse(path: str) -> None:
        raise OSError(number, "the system's words", path)

    (shard,) = Dataset.open(counted).shards
    monkeypatch.setattr(pa, "memory_map", refuse)
    with pytest.raises(kind, match="the system's words"):
        shard.keys()
    monkeypatch.undo()
    assert len(shard.keys()) == 2


def test_a_worker_that_dies_ends_the_work() -> None:
    with pytest.raises(DatasetError, match=r"^a worker process died, perhaps for lack of memory; use fewer workers$"):
        list(in_processes(signal.raise_signal, [signal.SIGKILL], 1))


def test_processes_give_way_as_they_are_told() -> None:
    own = os.nice(0)
    assert list(in_processes(os.nice, [0], 1, niceness=3)) == [(0, min(own + 3, 19))]


def make_odd(path: Path, kind: str) -> None:
    """Something that is no regular file in a file's place."""
    path.unlink(missing_ok=True)
    if kind == "folder":
        path.mkdir()
    else:
        os.mkfifo(path)


@pytest.mark.timeout(60)  # to open a FIFO would wait for ever
@pytest.mark.parametrize("kind", ["FIFO", "folder"])
def test_a_sidecar_that_is_no_regular_file_is_a_bad_one(tmp_path: Path, kind: str) -> None:
    """It is told apart from a parquet, and from none, by what takes its place later."""
    write_tar(tmp_path / "s.tar", [("0.txt", b"x"), ("0.json", b'{"score": 1}')])
    sidecar_path = tmp_path / "s.parquet"
    make_odd(sidecar_path, kind)
    assert build_index(tmp_path, workers=1).findings == {"bad_sidecar": 1}
    (finding,) = lint(tmp_path).findings
    assert finding.detail == f"s.parquet: it is a {kind}, no regular file"
    assert Dataset.open(tmp_path).shards[0].column("score").to_pylist() == [1]
    assert build_index(tmp_path, workers=1).num_built == 0
    if kind == "folder":
        (sidecar_path / "file").write_bytes(b"changes the folder's times")
        assert build_index(tmp_path, workers=1).num_built == 0
        (sidecar_path / "file").unlink()
        sidecar_path.rmdir()
    else:
        sidecar_path.unlink()
    assert (build_index(tmp_path, workers=1).num_built, lint(tmp_path).findings) == (1, ())


@pytest.mark.timeout(60)
def test_files_of_an_index_that_are_fifos_are_made_again(counted: Path) -> None:
    names = sorted(path.name for path in counted.iterdir() if path.name not in ("0.tar", "1.tar"))
    assert len(names) == 7, "index, its numbers and what is known, a summary, sets, counts and ids"
    for name in names:
        make_odd(counted / name, "FIFO")
        if name.endswith(".known"):  # the summary knows as much
            (counted / "disttrain.summary").unlink()
        build_index(counted, workers=1)
        count_tokens(counted, Bytes())
        assert (counted / name).is_file(), name
        assert Dataset.open(counted).shards[0].tokens.counts("bytes").tolist() == [7, 5]


@pytest.mark.timeout(60)
def test_files_of_an_index_that_become_fifos_are_refused(counted: Path) -> None:
    opened = Dataset.open(counted).shards[0]
    (ids,) = counted.glob("*.ids-*")
    make_odd(ids, "FIFO")
    with pytest.raises(ShardReadError, match=f"cannot read {ids}: it is a FIFO, no regular file"):
        opened.document(0, "bytes")
    (counts,) = counted.glob("*.tokens-*")
    make_odd(counts, "FIFO")
    with pytest.raises(TokensMissingError, match="it is a FIFO, no regular file"):
        Dataset.open(counted).shards[0].tokens.counts("bytes")
    make_odd(counted / "0.tar.index", "FIFO")
    with pytest.raises(StaleIndexError, match=r"it is a FIFO, no regular file.*; remove it and index again"):
        Dataset.open(counted)
