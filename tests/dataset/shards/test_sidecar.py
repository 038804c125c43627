"""Sidecar columns straight from parquets and .json entries: what is kept, as which type, and each limit."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dataserver.dataset.errors import Findings
from dataserver.dataset.shards import parquet_columns, scalar_rows, sidecar_columns
from dataserver.dataset.shards.sidecar import promised_images, read_sidecar

Columns = dict[str, tuple[str, list[Any]]]


def read(path: Path, scalars: list[dict[str, Any]]) -> tuple[Columns, list[tuple[str, str, str]]]:
    findings = Findings()
    table = read_sidecar(path, [str(i) for i in range(len(scalars))], scalars, findings)
    columns = {
        name: (str(table.schema.field(name).type), table.column(name).to_pylist()) for name in table.schema.names
    }
    assert list(columns) == sorted(columns)
    return columns, [(o.key, o.kind, o.detail) for o in findings.details]


def test_columns_of_json_entries(tmp_path: Path) -> None:
    lowest, highest = -(1 << 63), (1 << 63) - 1
    rows = [
        {"bool": True, "low": lowest, "high": highest, "float": 1, "lower": lowest - 1, "higher": highest + 1},
        {"low": 0, "float": float("nan"), "text": "x", "mixed": "x", "bools": 1, "higher": 0.5, "key": "k", "": 1},
        {
            "mixed": 2.5,
            "bools": True,
            "exif": "e",
            "caption": "c",
            "n" * 128: 1,
            "n" * 129: 1,
            "a\nb": 1,
            "lower": None,
        },
    ]
    columns, findings = read(tmp_path / "none.parquet", rows)
    assert columns == {
        "bool": ("bool", [True, None, None]),
        "bools": ("int64", [None, 1, None]),
        "float": ("double", [1.0, None, None]),
        "high": ("int64", [highest, None, None]),
        "higher": ("double", [float(1 << 63), 0.5, None]),
        "low": ("int64", [lowest, 0, None]),
        "lower": ("int64", [None, None, None]),
        "mixed": ("double", [None, None, 2.5]),
        "n" * 128: ("int64", [None, None, 1]),
        "text": ("string", [None, "x", None]),
    }
    null = "and are null: 1, the first is"
    need = "a name needs 1 to 128 characters that can be printed"
    assert findings == [
        ("", "unusable_column", f"a column is called '', 0 characters; {need}"),
        ("", "unusable_column", f"a column is called 'a\\nb', 3 characters; {need}"),
        ("", "unusable_column", f"a column is called '{'n' * 40}', 129 characters; {need}"),
        ("", "odd_values", f"bools: values that do not fit int64 {null} 'True' of sample 2"),
        ("", "odd_values", f"lower: values that do not fit int64 {null} '{lowest - 1}' of sample 0"),
        ("", "odd_values", f"mixed: values that do not fit double {null} 'x' of sample 1"),
    ]
    full = {f"c{i:03d}": i for i in range(256)}
    columns, findings = read(tmp_path / "none", [full])
    assert (list(columns), findings) == (list(full), [])
    columns, findings = read(tmp_path / "none", [{**full, "c9": 1}])
    assert list(columns) == list(full)
    assert findings == [("", "too_many_columns", "257 sidecar columns, the first 256 are kept")]


def test_a_json_column_has_the_type_of_most_of_its_values(tmp_path: Path) -> None:
    """Numbers before strings before booleans where there are as many, whatever comes first."""
    cases: list[tuple[list[Any], str, list[Any], int]] = [
        ([1, "x", 2], "int64", [1, None, 2], 1),
        (["x", 1, "y"], "string", ["x", None, "y"], 1),
        (["x", 1], "int64", [None, 1], 1),
        (["x", True], "string", ["x", None], 1),
        ([True, False, 1, "x"], "bool", [True, False, None, None], 2),
        (["x", "y", 1, 2.5], "double", [None, None, 1.0, 2.5], 2),
        ([1.5, 10**400, 1 << 64], "double", [1.5, None, float(1 << 64)], 1),
        ([1, float("nan"), float("inf")], "double", [1.0, None, float("inf")], 0),
    ]
    for values, kind, kept, odd in cases:
        found, findings = read(tmp_path / "none", [{"a": value} for value in values])
        assert found == {"a": (kind, kept)}
        words = [f"a: values that do not fit {kind} and are null: {odd}, the first is"] * (odd > 0)
        assert [detail[: len(words[0])] for _, _, detail in findings] == words


def test_columns_of_a_parquet(tmp_path: Path) -> None:
    path = tmp_path / "0.parquet"
    columns = {
        "key": ["2", "0", "0", "7"],
        "half": pa.array([1.5, float("nan"), 2.0, 3.0], pa.float32()),
        "small": pa.array([1, 2, 3, None], pa.int8()),
        "large": pa.array(["a", "b", "c", "d"], pa.large_string()),
        "coded": pa.array(["a", "b", "c", "d"]).dictionary_encode(),
        "flag": [True, False, True, True],
        "bytes": [b"x"] * 4,
        "nothing": pa.nulls(4),
        "unsigned": pa.array([1, (1 << 63) - 1, 1 << 63, 1 << 63], pa.uint64()),
        "view": pa.array(["a", "b", "c", "d"], pa.string_view()),
        "broken": pa.Array.from_buffers(pa.string(), 4, pa.array([b"\xff"] * 4, pa.binary()).buffers()),
        "caption": ["c"] * 4,
    }
    pq.write_table(pa.table(columns), path)
    found, findings = read(path, [{"json": 1}] * 3)
    assert found == {
        "coded": ("string", ["b", None, "a"]),
        "flag": ("bool", [False, None, True]),
        "half": ("double", [None, None, 1.5]),
        "large": ("string", ["b", None, "a"]),
        "small": ("int64", [2, None, 1]),
        "unsigned": ("int64", [(1 << 63) - 1, None, 1]),
        "view": ("string", ["b", None, "a"]),
    }
    assert {(kind, detail.partition(" ")[0]) for _, kind, detail in findings if kind == "unusable_column"} == {
        ("unusable_column", "broken:"),
        ("unusable_column", "bytes:"),
    }
    assert (
        sorted(kind for _, kind, _ in findings)
        == ["row_without_sample", "row_without_sample", "sample_without_row"] + ["unusable_column"] * 2
    )


def too_large(limit: int) -> tuple[str, str, str]:
    return "", "unusable_column", f"score: {limit + 1} bytes of values, {limit} are left of {limit}"


def test_each_limit_of_a_parquet_on_both_sides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be used is a finding, and the .json entries stand in for it; not for a column that is too large."""
    limits = ("MAX_SIDECAR_BYTES", "MAX_SIDECAR_ROWS", "MAX_SIDECAR_VALUE_BYTES", "READ_ROWS")
    assert [getattr(parquet_columns, name) for name in limits] == [1 << 30, 1 << 22, 1 << 29, 256]
    assert sidecar_columns.MAX_COLUMNS == 256
    path = tmp_path / "0.parquet"
    keys = [str(i) for i in range(600)]
    values = [f"a longer value {i}" for i in range(600)]
    table = pa.table({"key": keys, "score": values})
    pq.write_table(table, path)
    rows = [{"json": 1}] * 600
    whole = {"score": ("string", values)}
    instead = {"json": ("int64", [1] * 600)}
    size = path.stat().st_size
    value_bytes = pq.read_table(path, columns=["score"], read_dictionary=["score"]).nbytes
    assert value_bytes > pq.read_metadata(path).row_group(0).column(1).total_uncompressed_size
    for name, limit, words in (
        ("MAX_SIDECAR_BYTES", size, f"{size} bytes, limit {size - 1}"),
        ("MAX_SIDECAR_ROWS", 600, "600 rows, limit 599"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(parquet_columns, name, limit)
            assert read(path, rows) == (whole, []), name
            patch.setattr(parquet_columns, name, limit - 1)
            assert read(path, rows) == (instead, [("", "bad_sidecar", f"0.parquet: {words}")])
    for limit, found in ((value_bytes, (whole, [])), (value_bytes - 1, ({}, [too_large(value_bytes - 1)]))):
        monkeypatch.setattr(parquet_columns, "MAX_SIDECAR_VALUE_BYTES", limit)
        assert read(path, rows) == found
    monkeypatch.undo()
    needed = "0.parquet: needs one string column 'key' and no repeated names"
    for wrong in (
        pa.table({"score": [1]}),
        pa.table({"key": [1]}),
        pa.Table.from_arrays([pa.array(["0"]), pa.array([1]), pa.array([1])], ["key", "score", "score"]),
    ):
        pq.write_table(wrong, path)
        assert read(path, rows) == (instead, [("", "bad_sidecar", needed)])
    pq.write_table(pa.table({"key": pa.array([], pa.string()), "score": pa.array([], pa.int32())}), path)
    columns, findings = read(path, rows)
    assert columns == {"score": ("int64", [None] * 600)}
    assert [kind for _, kind, _ in findings] == ["sample_without_row"]


@pytest.mark.parametrize("how", ["zstd", "dictionary", "delta"])
def test_what_a_parquet_unfolds_to_is_known_before_it_takes_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """A few bytes that stand for one long string, for one string very often, and for strings with one beginning."""
    limit = 16 << 20
    monkeypatch.setattr(parquet_columns, "MAX_SIDECAR_VALUE_BYTES", limit)
    path, keys = tmp_path / "0.parquet", [str(i) for i in range(20)]
    texts = {"zstd": ["x" * (4 * limit), *["a"] * 19]}.get(how, ["x" * (limit // 5)] * 20)
    table = pa.table({"key": keys, "a": texts, "b": keys})
    encoding = {"a": "DELTA_BYTE_ARRAY", "b": "DELTA_BYTE_ARRAY", "key": "DELTA_BYTE_ARRAY"} if how == "delta" else None
    pq.write_table(table, path, compression="zstd", use_dictionary=how == "dictionary", column_encoding=encoding)
    assert path.stat().st_size < limit // 100
    del table
    pool = pa.proxy_memory_pool(pa.default_memory_pool())
    before = pa.default_memory_pool()
    pa.set_memory_pool(pool)
    try:
        found, ((_, kind, detail),) = read(path, [{}] * 20)
    finally:
        pa.set_memory_pool(before)
    assert found == {"b": ("string", keys)}
    assert (kind, detail.endswith(f"bytes of values, {limit} are left of {limit}")) == ("unusable_column", True)
    assert pool.max_memory() < 2 * limit


def test_entries_of_json_members_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """All or none of a shard, whatever they are; what makes no column does not count."""
    for row, num_bytes in (({"a": 1}, 2 * 64 + 1), ({"a": "x" * 9}, 2 * 64 + 10), ({"caption": "c"}, 0)):
        for limit in (num_bytes, num_bytes - 1):
            monkeypatch.setattr(scalar_rows, "MAX_SCALAR_BYTES", limit)
            rows, findings = scalar_rows.ScalarRows(), Findings()
            rows.add(dict(row), findings)
            kept = {name: value for name, value in row.items() if name != "caption"}
            fits = limit == num_bytes or not kept
            assert (rows.rows, findings.counts) == ([kept if fits else {}], {} if fits else {"unusable_column": 1})
    rows, findings = scalar_rows.ScalarRows(), Findings()
    monkeypatch.setattr(scalar_rows, "MAX_SCALAR_BYTES", 1000)
    for number in range(100):
        rows.add({"number": number}, findings)
    assert (rows.rows, findings.counts) == ([{}] * 100, {"unusable_column": 1})
    assert findings.details[0].detail.startswith("the entries of .json members need more than 1000 bytes, and none is")


def test_sizes_that_a_sidecar_promises() -> None:
    rows = [
        (3, 2, {}, "3 x 2 pixels"),
        (1, 1, {}, "1 x 1 pixels"),
        (0.5, 1, {}, "0.5 x 1 pixels"),
        (0, 2, {}, None),
        (2, 0, {}, None),
        (None, 2, {}, None),
        (2, None, {"width": 5, "height": 6}, "5 x 6 pixels"),
        (7, 8, {"width": 5, "height": 6}, "7 x 8 pixels"),
        (None, None, {"width": "5", "height": 6}, None),
        (None, None, {"width": 5}, None),
    ]
    widths, heights, scalars, sizes = zip(*rows, strict=True)
    columns = pa.table({"width": pa.array(widths, pa.float64()), "height": pa.array(heights, pa.float64())})
    expected = [(row, size) for row, size in enumerate(sizes) if size is not None]
    found = list(promised_images(range(len(rows)), columns, scalars))
    assert [(row, size.replace(".0", "")) for row, size in found] == expected
    assert [row for row, _ in promised_images([7, 6, 0], columns, scalars)] == [7, 6, 0]
    assert [row for row, _ in promised_images(range(10), pa.table({"height": pa.array(heights)}), scalars)] == [6, 7]
