"""The summary of a dataset's indexes: when it stands for them, and that it never says anything else than they do."""

import json
from pathlib import Path

import numpy as np
import pytest
from shards import write_pairs, write_texts

from dataserver.dataset import Dataset, IndexRules, StaleIndexError, TextOnly, build_index
from dataserver.dataset.index import fresh
from dataserver.dataset.index.arrays import read_arrays, write_arrays
from dataserver.dataset.index.format import read_schema
from dataserver.dataset.index.summary import SUMMARY_NAME, Summary

ALLOW = IndexRules(TextOnly.ALLOW)
"""Texts lie beside pairs here."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Six shards with two kinds of columns, indexed and summed up."""
    folder = write_pairs(tmp_path / "data", 12, 4)
    write_texts(folder / "texts", 6, 2)
    build_index(folder, workers=1, rules=ALLOW)
    build_index(folder, workers=1, rules=ALLOW)  # the first one's last index may have the summary's time
    return folder


def opened(folder: Path, monkeypatch: pytest.MonkeyPatch, index_dir: Path | None = None) -> tuple[Dataset, list[str]]:
    """The dataset, and the indexes that were read for it."""
    read: list[str] = []
    monkeypatch.setattr(fresh, "read_schema", lambda path, *a: (read.append(path.name), read_schema(path, *a))[1])
    try:
        return Dataset.open(folder, index_dir), read
    finally:
        monkeypatch.undo()


def test_a_summary_stands_for_all_indexes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short, read = opened(folder, monkeypatch)
    assert read == []
    (folder / SUMMARY_NAME).unlink()
    long, read = opened(folder, monkeypatch)
    assert len(read) == 6
    assert short.fingerprint == long.fingerprint
    assert [(s.name, s.header, s.columns) for s in short.shards] == [(s.name, s.header, s.columns) for s in long.shards]


def test_indexes_that_changed_since_are_read_themselves(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "00001.tar.index").touch()
    before, read = opened(folder, monkeypatch)
    assert read == ["00001.tar.index"]
    build_index(folder, workers=1, rules=ALLOW)
    after, read = opened(folder, monkeypatch)
    assert (read, after.fingerprint) == ([], before.fingerprint)
    shard = folder / "00001.tar"
    shard.write_bytes(shard.read_bytes().replace(b"bigdata", b"bigDATA"))
    with pytest.raises(StaleIndexError, match=r"another content of 00001\.tar"):
        Dataset.open(folder)
    assert build_index(folder, workers=1, rules=ALLOW).num_built == 1
    changed, read = opened(folder, monkeypatch)
    assert changed.fingerprint != before.fingerprint
    assert set(read) <= {"00001.tar.index"}
    (folder / "texts/00002.tar.index").unlink()
    with pytest.raises(StaleIndexError, match="it has no index"):
        Dataset.open(folder)


def test_an_index_as_old_as_the_summary_is_read_itself(folder: Path) -> None:
    """It may have been written behind it, within the same tick of the clock."""
    name, index = "00001.tar", (folder / "00001.tar.index").stat()
    entry = Summary.read(folder).find(name, index)
    assert entry is not None
    for later_ns in (-1, 0, 1):
        summary = Summary({name: entry}, index.st_ctime_ns + later_ns)
        assert summary.find(name, index) is (entry if later_ns > 0 else None)


def test_shards_that_come_and_go(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for suffix in ("tar", "tar.index", "parquet"):
        (folder / f"00000.{suffix}").unlink()
    dataset, read = opened(folder, monkeypatch)
    assert (len(dataset.shards), read) == (5, [])
    build_index(folder, workers=1, rules=ALLOW)
    assert len(read_arrays(folder / SUMMARY_NAME)[0]["names"]) == 5
    written = (folder / SUMMARY_NAME).stat()
    build_index(folder, workers=1, rules=ALLOW)
    assert (folder / SUMMARY_NAME).stat() == written, "what holds is not written again"


def test_one_shard_alone_leaves_the_summary_as_it_is(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = (folder / SUMMARY_NAME).read_bytes()
    build_index(folder / "00001.tar", workers=1, rules=ALLOW)
    assert (folder / SUMMARY_NAME).read_bytes() == before
    dataset, read = opened(folder / "00001.tar", monkeypatch)
    assert ([shard.name for shard in dataset.shards], read) == (["00001.tar"], [])


def test_summaries_beside_indexes_elsewhere(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = Dataset.open(folder).fingerprint
    for _ in range(2):
        build_index(folder, tmp_path / "indexes", workers=1, rules=ALLOW)
    dataset, read = opened(folder, monkeypatch, tmp_path / "indexes")
    assert (dataset.fingerprint, read) == (expected, [])


def test_shards_that_are_gone_are_told_until_the_dataset_is_indexed_without_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_texts(tmp_path / "d", num_samples=4, shard_size=2)
    build_index(folder, workers=1)
    Dataset.open(folder)
    assert not caplog.messages
    (folder / "00001.tar").unlink()
    Dataset.open(folder / "00000.tar")
    assert not caplog.messages
    Dataset.open(folder)
    build_index(folder, workers=1)
    assert [message.partition(". ")[0] for message in caplog.messages] == [
        f"{folder} lacks shards that were indexed: 1, the first is '00001.tar'; their samples are not served"
    ] * 2
    caplog.clear()
    Dataset.open(folder)
    assert not caplog.messages


@pytest.mark.parametrize("change", ["cut", "flip", "version", "format", "names", "columns", "negative", "shape"])
def test_damaged_and_foreign_summaries_are_passed_over(
    folder: Path, change: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = Dataset.open(folder).fingerprint
    path = folder / SUMMARY_NAME
    if change in ("cut", "flip"):
        whole = path.read_bytes()
        path.write_bytes(whole[:-7] if change == "cut" else whole[:-7] + bytes([whole[-7] ^ 1]) + whole[-6:])
    else:
        about, arrays = read_arrays(path)
        about |= {"version": {"version": 99}, "format": {"format_version": 99}, "names": {"names": [1]}}.get(change, {})
        about |= {"columns": []} if change == "columns" else {}
        if change in ("negative", "shape"):
            numbers = arrays["numbers"].copy()
            numbers[0, 3] = -5
            arrays["numbers"] = numbers if change == "negative" else numbers[:, :2]
        write_arrays(path, about, arrays)
    dataset, read = opened(folder, monkeypatch)
    assert dataset.fingerprint == expected
    assert len(read) == 6
    (warning,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert f"{path} cannot be used" in warning
    assert "dataserver index makes it again" in warning
    build_index(folder, workers=1, rules=ALLOW)
    assert len(opened(folder, monkeypatch)[1]) <= 1


def test_a_summary_that_lies_serves_nothing_wrong(folder: Path) -> None:
    about, arrays = read_arrays(folder / SUMMARY_NAME)
    digests = arrays["digests"].copy()
    digests[0, 2] ^= 1
    write_arrays(folder / SUMMARY_NAME, about, {**arrays, "digests": digests})
    dataset = Dataset.open(folder)
    with pytest.raises(StaleIndexError, match="another index was written"):
        dataset.shards[0].sizes()
    assert dataset.shards[1].num_samples == 4


def test_a_folder_that_cannot_be_written_costs_a_warning(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / SUMMARY_NAME).unlink()
    (folder / SUMMARY_NAME).mkdir()
    (folder / SUMMARY_NAME / "in the way").write_text("")
    assert build_index(folder, workers=1, rules=ALLOW).num_samples == 18
    assert "servers start more slowly without it" in caplog.text
    assert len(opened(folder, monkeypatch)[1]) == 6


def test_columns_are_shared_where_they_are_the_same(folder: Path) -> None:
    shards = Dataset.open(folder).shards
    assert len({json.dumps(dict(s.sidecar_columns)) for s in shards}) == len({id(s.sidecar_columns) for s in shards})
    assert np.unique([len(s.sidecar_columns) for s in shards]).tolist() == [0, 9]
