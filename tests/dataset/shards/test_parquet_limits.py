"""Parquet files of more rows, values or columns than memory holds."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from builders.parquets import pairs_table, varint, write_table
from dataset.shards.parquet_datasets import ROWS, details, index, with_footer

from dataserver.dataset.shards.parquet import format as format_module


def test_a_row_group_of_more_rows_than_memory_holds_is_one_finding(tmp_path: Path) -> None:
    path = write_table(tmp_path / "0.parquet", pairs_table(ROWS), row_group_size=100)
    with_footer(path, b"\x16" + varint(2 * 23), b"\x16" + varint(2 << 58))
    assert pq.ParquetFile(path).metadata.row_group(0).num_rows == 1 << 58
    _, findings = index(tmp_path)
    assert findings == {"corrupt_parquet": 1}
    assert f"{1 << 58} rows, limit" in details(tmp_path)["corrupt_parquet"]


def test_values_of_all_columns_are_counted_before_they_take_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing = {f"image {n}": pa.nulls(23, pa.binary()) for n in range(9)}
    write_table(tmp_path / "0.parquet", pairs_table(ROWS, **nothing), row_group_size=10)
    monkeypatch.setattr(format_module, "MAX_VALUES", 230)
    assert index(tmp_path)[0].shards[0].num_samples == 23
    write_table(tmp_path / "0.parquet", pairs_table(ROWS, more=pa.nulls(23, pa.binary()), **nothing))
    assert index(tmp_path)[1] == {"corrupt_parquet": 1}
    assert "values in columns of images, limit 230" in details(tmp_path)["corrupt_parquet"]


def test_files_of_very_many_columns_are_one_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(format_module, "MAX_LEAVES", 3)
    write_table(tmp_path / "0.parquet", pairs_table(ROWS))
    assert index(tmp_path)[1] == {"corrupt_parquet": 1}
    assert "4 columns, limit 3" in details(tmp_path)["corrupt_parquet"]
