"""The second file of an index, which holds its numeric columns: it never says anything else than the index does."""

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from shards import write_interleaved, write_pairs, write_tar, write_texts

from dataserver.dataset import Dataset, IndexRules, TextOnly, build_index
from dataserver.dataset.index import numeric
from dataserver.dataset.index.arrays import read_arrays, write_arrays
from dataserver.dataset.index.format import read_columns
from dataserver.dataset.index.numeric import NumericColumns, read_numeric

SUFFIX = ".tar.numeric"

ALLOW = IndexRules(TextOnly.ALLOW)
"""Texts lie beside pairs here."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Pairs, documents, texts, and a shard without a sample, indexed."""
    folder = write_pairs(tmp_path / "data", 6, 3, median_size=24)
    write_interleaved(folder / "documents", 4, 4, median_size=24)
    write_texts(folder / "texts", 300, 300)
    write_tar(folder / "none.tar", [])
    build_index(folder, workers=1, rules=ALLOW)
    return folder


@pytest.fixture(autouse=True)
def _nothing_told() -> None:
    numeric._told.clear()


def read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[list[NumericColumns], list[str]]:
    """The columns of all shards, and the indexes that were read for them."""
    asked: list[str] = []
    monkeypatch.setattr(
        numeric, "read_columns", lambda path, *of: (asked.append(path.name), read_columns(path, *of))[1]
    )
    try:
        return [read_numeric(s.file.index_path, s.header) for s in Dataset.open(folder).shards], asked
    finally:
        monkeypatch.undo()


def assert_equal(found: list[NumericColumns], expected: list[NumericColumns]) -> None:
    for one, other in zip(found, expected, strict=True):
        for field in fields(NumericColumns):
            values, others = getattr(one, field.name), getattr(other, field.name)
            if values is None:  # there are neither clips nor videos here
                assert others is None
                continue
            np.testing.assert_array_equal(values, others, field.name)
            assert values.dtype == others.dtype, field.name
            assert values.flags.aligned, field.name


def test_it_says_what_the_index_says_and_spares_reading_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, asked = read(folder, monkeypatch)
    assert asked == []
    assert [len(columns.text_bytes) for columns in found][-2:] == [0, 300]
    for file in folder.rglob(f"*{SUFFIX}"):
        file.unlink()
    expected, asked = read(folder, monkeypatch)
    assert len(asked) == len(found) == 5
    assert_equal(found, expected)
    assert build_index(folder, workers=1, rules=ALLOW).num_built == 0, "nothing but what is missing is made again"
    again, asked = read(folder, monkeypatch)
    assert asked == []
    assert_equal(again, expected)


@pytest.mark.parametrize("change", ["damaged", "of another index", "of another release", "without a column"])
def test_one_that_does_not_fit_is_named_and_the_index_read(
    folder: Path, change: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _ = read(folder, monkeypatch)
    path, other = folder / f"00000{SUFFIX}", folder / f"00001{SUFFIX}"
    about, arrays = read_arrays(path)
    if change == "damaged":
        path.write_bytes(path.read_bytes()[:-1])
    elif change == "of another index":
        path.write_bytes(other.read_bytes())
    elif change == "of another release":
        write_arrays(path, {**about, "numeric": 0}, arrays)
    else:
        write_arrays(path, about, {name: array for name, array in arrays.items() if name != "orientation"})
    caplog.clear()
    found, asked = read(folder, monkeypatch)
    assert asked == ["00000.tar.index"]
    assert_equal(found, expected)
    (warning,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert f"{path} is not used" in warning
    path.unlink()
    build_index(folder, workers=1, rules=ALLOW)
    assert read(folder, monkeypatch)[1] == []


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("text_bytes", lambda a: a.astype(np.int64)),
        ("text_bytes", lambda a: a[:-1]),
        ("text_bytes", lambda a: -1 - a),
        ("text_offsets", lambda a: a.reshape(1, -1)),
        ("text_offsets", lambda a: a[:-1]),
        ("text_offsets", lambda a: a + 1),
        ("text_offsets", lambda a: np.append(a[:-1], 1 << 40)),
        ("image_offsets", lambda a: np.concatenate([a[:1], [np.iinfo(a.dtype).max, np.iinfo(a.dtype).min], a[3:]])),
        ("kinds", lambda a: a + 1),
        ("kinds", lambda a: 1 - a),
        ("image_width", lambda a: a * 0),
        ("image_width", lambda a: a * 0 + (1 << 30)),
        ("image_height", lambda a: a[:-1]),
        ("image_offset", lambda a: -1 - a),
        ("image_length", lambda a: a * 0 + (1 << 60)),
        ("orientation", lambda a: a * 0 + 9),
    ],
)
def test_one_with_other_values_than_an_index_may_have_is_not_used(
    folder: Path, name: str, change: Callable[[np.ndarray], np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever writes into the folder can make a file whose digest is right."""
    expected, _ = read(folder, monkeypatch)
    path = folder / f"documents/00000{SUFFIX}"
    about, arrays = read_arrays(path)
    write_arrays(path, about, {**arrays, name: change(arrays[name])})
    found, asked = read(folder, monkeypatch)
    assert asked == ["00000.tar.index"]
    assert_equal(found, expected)


def test_a_shard_that_changed_leaves_none_of_its_old_ones(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even where indexing ends between the two files."""
    shard = folder / "00001.tar"
    shard.write_bytes(shard.read_bytes().replace(b"bigdata", b"bigDATA"))
    monkeypatch.setattr("dataserver.dataset.index.indexing.write_numeric", lambda *_: "")
    assert build_index(folder, workers=1, rules=ALLOW).num_built == 1
    assert not (folder / f"00001{SUFFIX}").exists()
    monkeypatch.undo()
    assert build_index(folder, workers=1, rules=ALLOW).num_built == 0
    assert read(folder, monkeypatch)[1] == []


def test_one_that_cannot_be_written_costs_a_warning(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, other = folder / f"00000{SUFFIX}", folder / f"00001{SUFFIX}"
    for taken in (path, other):
        taken.unlink()
        taken.mkdir()
        (taken / "something").touch()
    shard = Dataset.open(folder).shards[0]
    assert build_index(folder, workers=1, rules=ALLOW).num_built == 0
    assert len(shard.sizes().text_bytes) == 3
    messages = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert [str(path) in message for message in messages] == [True, True]
    assert "servers read 2 shards more slowly without such files" in messages[0]


def test_damaged_ones_cost_one_warning(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    for file in folder.rglob(f"*{SUFFIX}"):
        file.write_bytes(file.read_bytes()[:-1] + b"x")
    assert [len(shard.sizes().text_bytes) for shard in Dataset.open(folder).shards][-1] == 300
    (warning,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert "Others are logged as INFO" in warning


@pytest.mark.parametrize("change", ["cut", "of another index", "nothing", "no arrays", "odd shapes"])
def test_one_that_does_not_fit_is_made_again_by_indexing(
    folder: Path, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _ = read(folder, monkeypatch)
    path, other = folder / f"00000{SUFFIX}", folder / f"00001{SUFFIX}"
    content = path.read_bytes()
    odd = content.replace(b'"<i8", [', b'"<i8", [-', 1)
    path.write_bytes(
        {"cut": content[:-1], "of another index": other.read_bytes(), "nothing": b"", "odd shapes": odd}.get(
            change, b"x"
        )
    )
    assert build_index(folder, workers=1, rules=ALLOW).num_built == 0
    found, asked = read(folder, monkeypatch)
    assert asked == []
    assert_equal(found, expected)
