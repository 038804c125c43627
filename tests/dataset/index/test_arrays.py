"""Files of arrays: what comes back is what was written, and nothing else ever does."""

import json
from pathlib import Path

import numpy as np
import pytest
from crc32c import crc32c as crc32c_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dataserver.dataset import DatasetError
from dataserver.dataset.index import arrays
from dataserver.dataset.index.arrays import ArraysError, read_arrays, write_arrays

WRITTEN = {
    "numbers": np.arange(12, dtype=np.int64).reshape(3, 4),
    "bytes": np.array([1, 2, 255], np.uint8),
    "none": np.zeros((0, 32), np.int32),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_arrays(tmp_path / "file", {"version": 1, "names": ["ä"]}, WRITTEN)
    return tmp_path / "file"


def test_what_was_written_comes_back(path: Path) -> None:
    about, found = read_arrays(path)
    assert about == {"version": 1, "names": ["ä"]}
    assert found.keys() == WRITTEN.keys()
    for name, array in WRITTEN.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        assert (found[name] == array).all()
    assert [p.name for p in path.parent.iterdir()] == ["file"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(at=st.integers(0, 10_000), bit=st.integers(0, 7), cut=st.booleans())
def test_no_changed_byte_and_no_cut_goes_unseen(path: Path, at: int, bit: int, cut: bool) -> None:
    whole = path.read_bytes()
    damaged = bytearray(whole)
    damaged[at % len(whole)] ^= 1 << bit
    path.write_bytes(whole[: at % len(whole)] if cut else damaged)
    try:
        with pytest.raises(ArraysError, match=r"damaged|limit"):
            read_arrays(path)
    finally:
        path.write_bytes(whole)


@pytest.mark.parametrize(
    "content",
    [
        {},
        {"about": 1, "arrays": []},
        {"about": {}, "arrays": [["x", "<i8", [1 << 62]]]},
        {"about": {}, "arrays": [["x", "<i8", [1 << 40, 1 << 40]]]},
        {"about": {}, "arrays": [["x", "|O", [1]]]},
        {"about": {}, "arrays": [["x", "<i8", [-1]]]},
        {"about": {}, "arrays": [["x", "<i8", [True]]]},
        {"about": {}, "arrays": [["x", "|u1", [3]]]},
        {"about": {}, "arrays": [["x", "|u1", [1]]]},
        [],
    ],
)
def test_whole_files_of_somebody_else_are_refused(tmp_path: Path, content: object) -> None:
    rest = json.dumps(content).encode() + b"\n" + b"12"
    crc = b"%08x" % crc32c_of(rest)
    (tmp_path / "x").write_bytes(b"disttrain arrays 2 " + crc + b"\n" + rest)
    with pytest.raises(ArraysError):
        read_arrays(tmp_path / "x")


def test_larger_files_than_memory_should_hold_are_not_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays, "MAX_FILE_BYTES", path.stat().st_size)
    read_arrays(path)
    monkeypatch.setattr(arrays, "MAX_FILE_BYTES", path.stat().st_size - 1)
    with pytest.raises(ArraysError, match=r"it has \d+ bytes, the limit is"):
        read_arrays(path)


def test_files_that_are_not_there_and_folders_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_arrays(tmp_path / "none")
    (tmp_path / "file").write_text("")
    with pytest.raises(DatasetError, match="cannot write"):
        write_arrays(tmp_path / "file" / "x", {}, {})
