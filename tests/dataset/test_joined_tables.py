"""Parquet files whose rows are about several shards: which row a sample gets, and what is said of all others."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from shards import write_tar

from dataserver.dataset import Dataset, DatasetError, IndexRules, MetadataKeys, build_index, lint, parse_captions
from dataserver.dataset.index import table_rows
from dataserver.dataset.index.join_findings import JOINS_NAME
from dataserver.dataset.shards import parquet_columns

KEYS = {"0.tar": ["a0", "a1", "a2"], "b/1.tar": ["b0", "b1"], "2.tar": ["c0"]}


def write_texts(path: Path, texts: dict[str, str]) -> None:
    write_tar(path, [(f"{key}.txt", text.encode()) for key, text in texts.items()])


def write_table(path: Path, row_group_size: int = 2, **columns: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path, row_group_size=row_group_size)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, keys in KEYS.items():
        write_texts(tmp_path / "d" / name, {key: f"text {key}" for key in keys})
    return tmp_path


def index(folder: Path, *joins: str, captions: tuple[str, ...] = (), **rules: Any) -> tuple[Dataset, int]:
    asked = IndexRules(joins=tuple(folder / join for join in joins), captions=parse_captions(captions), **rules)
    report = build_index(folder / "d", workers=1, rules=asked)
    return Dataset.open(folder / "d"), report.num_built


def column(dataset: Dataset, name: str) -> dict[str, Any]:
    found = {}
    for shard in dataset.shards:
        values = shard.column(name).to_pylist() if name in shard.columns else [None] * shard.num_samples
        found |= dict(zip(shard.keys(), values, strict=True))
    return found


def said(folder: Path) -> list[tuple[str, str, str]]:
    return [(Path(f.shard).name, f.kind, f.detail) for f in lint(folder / "d").findings]


@pytest.mark.parametrize("seed", range(12))
def test_samples_get_their_rows_wherever_these_lie(folder: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    keys = [key for names in KEYS.values() for key in names] + ["x0", "b2", "zz"]
    rows = rng.permutation(rng.choice(keys, int(rng.integers(1, 14))))
    rows = np.sort(rows) if seed % 2 else rows  # row groups are left out by their statistics
    files = np.sort(rng.integers(0, 3, len(rows)))
    expected: dict[str, tuple[int | None, str]] = {}
    for number in range(3):
        mine = [key for key, file in zip(rows, files, strict=True) if file == number]
        scores = [None if rng.integers(4) == 0 else int(rng.integers(100)) for _ in mine]
        write_table(
            folder / "t" / f"part-{number}.parquet",
            int(rng.integers(1, 4)),
            key=pa.array(mine, pa.string()),
            score=pa.array(scores, pa.int64()),
            long=pa.array([f"long {key}" for key in mine], pa.string()),
        )
        for key, score in zip(mine, scores, strict=True):
            expected.setdefault(key, (score, f"long {key}"))
    samples = {key for names in KEYS.values() for key in names}
    if not samples & expected.keys():
        with pytest.raises(DatasetError, match=r"no row of \S+part-0.parquet and the others there belongs to a sample"):
            index(folder, "t")
        return
    dataset, _ = index(folder, "t", captions=("long=parquet:long",))
    assert column(dataset, "score") == {key: expected.get(key, (None, ""))[0] for key in samples}
    assert column(dataset, "caption.long") == {key: expected.get(key, (0, None))[1] for key in samples}
    told = [detail for _, kind, detail in said(folder) if kind == "row_without_sample"]
    again = [detail for detail in told if "rows repeat the key of an earlier row, which counts" in detail]
    assert sum(int(detail.split()[0]) for detail in told if detail not in again) == sum(k not in samples for k in rows)
    hits = [key for key in rows if key in samples]
    assert sum(int(detail.split()[0]) for detail in again) == len(hits) - len(set(hits))
    lacking = {shard: sum(key not in expected for key in names) for shard, names in KEYS.items()}
    found = {name: detail for name, kind, detail in said(folder) if kind == "sample_without_row"}
    assert {name: int(detail.split()[0]) for name, detail in found.items()} == {
        Path(shard).name: count for shard, count in lacking.items() if count
    }


def test_rows_without_any_sample_and_files_without_a_shard_are_findings(folder: Path) -> None:
    write_table(
        folder / "t.parquet", key=["b1", "x", "y", "a0"], status=["success", "failed", None, "success"], n=[1, 2, 3, 4]
    )
    write_texts(folder / "more/0.tar", {"a0": "again"})
    write_texts(folder / "more/7.tar", {"a0": "again"})
    (folder / "more" / "README").write_text("no partner")
    with pytest.raises(DatasetError, match=r"bring the same member .txt of sample 'a0'"):
        index(folder, "more")
    (folder / "more/0.tar").unlink()
    write_table(folder / "more/0.parquet", key=["a0", "a1", "a2"], m=[1, 2, 3])
    dataset, _ = index(folder, "t.parquet", "more")
    assert column(dataset, "n") == {"a0": 4, "a1": None, "a2": None, "b0": None, "b1": 1, "c0": None}
    whole = [finding for finding in said(folder) if finding[1] in ("row_without_sample", "unread_file")]
    assert whole == [
        ("7.tar", "unread_file", "no shard has this name: nothing of the file is joined"),
        ("t.parquet", "row_without_sample", "1 of 4 rows have no sample in any shard, the first is 'y'"),
    ]
    (folder / "d" / JOINS_NAME).write_text("damaged")
    assert [f for f in said(folder) if f[1] == "unread_file"] == []
    assert index(folder, "t.parquet", "more")[1] == 0
    assert [f for f in said(folder) if f[1] == "unread_file"]
    assert index(folder)[1] == 3
    assert said(folder) == []


def test_a_table_that_changed_is_joined_again(folder: Path) -> None:
    write_table(folder / "t.parquet", key=["a0"], n=[1])
    first, _ = index(folder, "t.parquet")
    write_table(folder / "t.parquet", key=["a0"], n=[2])
    second, built = index(folder, "t.parquet")
    assert (built, column(second, "n")["a0"]) == (3, 2)
    assert first.fingerprint != second.fingerprint


def test_tables_that_cannot_be_joined_are_refused(folder: Path) -> None:
    write_table(folder / "t/0.parquet", key=["x/a0"], n=[1])
    with pytest.raises(DatasetError, match=r"0.parquet, which is joined, cannot be used \(no row of 0.parquet belongs"):
        index(folder, "t")
    (folder / "t/0.parquet").rename(folder / "t/part.parquet")
    with pytest.raises(DatasetError, match=r"the samples are called 'a0' where it says 'x/a0'; .* last-part"):
        index(folder, "t")
    dataset, _ = index(folder, "t", metadata_keys=MetadataKeys.LAST_PART)
    assert column(dataset, "n")["a0"] == 1
    write_table(folder / "t/other.parquet", key=["a0"], n=[1.5])
    with pytest.raises(DatasetError, match=r"the column 'n' of \S+part.parquet is int64, that of other files"):
        index(folder, "t", metadata_keys=MetadataKeys.LAST_PART)
    write_table(folder / "t/other.parquet", n=[1])
    with pytest.raises(DatasetError, match=r"other.parquet, which is joined, cannot be used \(needs one string column"):
        index(folder, "t")
    write_table(folder / "d/0.parquet", key=["a0"], n=[1])
    write_table(folder / "u.parquet", key=["a0"], n=[1])
    with pytest.raises(DatasetError, match=r"u.parquet brings the column 'n', which the samples have already"):
        index(folder, "u.parquet")
    with pytest.raises(DatasetError, match="names a folder twice, or the dataset's own"):
        index(folder, "d/0.parquet")
    write_texts(folder / "d/3.tar", {"a0": "text"})
    (folder / "d/0.parquet").unlink()
    with pytest.raises(DatasetError, match=r"u.parquet for 'a0' belongs to samples of several shards, 0.tar and 3.tar"):
        index(folder, "u.parquet")


def test_a_table_of_many_rows_is_compared_in_runs_of_row_groups(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are sorted, so each shard takes one row group of two rows; the table has more than a shard may take."""
    keys = sorted([key for names in KEYS.values() for key in names] + [f"x{n}" for n in range(6)])
    write_table(folder / "t" / "all.parquet", key=keys, score=list(range(len(keys))))
    monkeypatch.setattr(parquet_columns, "MAX_SIDECAR_ROWS", 4)
    monkeypatch.setattr(table_rows, "RUN_ROWS", 3)
    dataset, _ = index(folder, "t")
    assert column(dataset, "score") == {key: keys.index(key) for names in KEYS.values() for key in names}
    (found,) = [one for one in said(folder) if one[1] == "row_without_sample"]
    assert found[2] == f"6 of {len(keys)} rows have no sample in any shard, the first is 'x0'"


def test_rows_that_repeat_an_earlier_one_of_their_table_are_counted(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_rows, "RUN_ROWS", 2)
    write_table(folder / "t/p0.parquet", key=["a0", "b1", "b1", "a0", "a1"], n=[1, 2, 3, 4, 5])
    write_table(folder / "t/p1.parquet", key=["c0", "a1", "b0"], n=[6, 7, 8])
    dataset, _ = index(folder, "t")
    assert column(dataset, "n") == {"a0": 1, "a1": 5, "a2": None, "b0": 8, "b1": 2, "c0": 6}
    repeat = "rows repeat the key of an earlier row, which counts, the first is"
    assert [found for found in said(folder) if found[1] == "row_without_sample"] == [
        ("p0.parquet", "row_without_sample", f"2 of 5 {repeat} 'b1'"),
        ("p1.parquet", "row_without_sample", f"1 of 3 {repeat} 'a1'"),
    ]
