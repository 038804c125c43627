"""A storage backend of another kind: a zip file with shards in it, indexed and served through the registry."""

import io
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from io import BufferedIOBase
from pathlib import Path, PurePath

import pytest
from shards import write_pairs

from dataserver.dataset import Dataset, DatasetError, ShardReadError, StaleIndexError, build_index, lint
from dataserver.dataset.storage.etags import Etag
from dataserver.dataset.storage.interface import Entry, EntryKind, Storage, StoredFile
from dataserver.dataset.storage.local import LocalStorage
from dataserver.dataset.storage.registry import LOCAL, STORAGES, storage_of


class _Member:
    def __init__(self, storage: "ZipStorage", name: str) -> None:
        self._storage, self._name = storage, name

    def read(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        data = self._storage.content(self._name)
        return [data[offset : offset + length] for offset, length in ranges]

    def etag(self) -> Etag:
        return self._storage.etag(self._name)


class ZipStorage:
    """Members of one zip file; `zip:/FOLDER` is a folder in it."""

    is_local = False
    holds_indexes = False

    def __init__(self, file: Path) -> None:
        self._file = file

    def content(self, name: str) -> bytes:
        with zipfile.ZipFile(self._file) as opened:
            try:
                return opened.read(name.removeprefix("zip:/"))
            except KeyError:
                raise FileNotFoundError(2, "no such member", name) from None

    def is_file(self, path: PurePath) -> bool:
        self.content(str(path)) if path.suffix else None
        return bool(path.suffix)

    def walk(self, root: PurePath) -> Iterator[Entry]:
        with zipfile.ZipFile(self._file) as opened:
            for name in opened.namelist():
                yield Entry(name.removeprefix(f"{root}/".removeprefix("zip:/")), EntryKind.FILE)

    def check(self, root: PurePath, name: str) -> None:
        pass

    def etag(self, path: str) -> Etag:
        data = self.content(path)
        return Etag(0, 0, len(data), zlib.crc32(data), 1)

    def open(self, path: PurePath, holds_blocks: bool = False) -> BufferedIOBase:  # noqa: ARG002 - all is in memory
        return io.BytesIO(self.content(str(path)))

    def ranges(self, path: PurePath) -> _Member:
        return _Member(self, str(path))

    def read_ahead(self, wanted: Sequence[tuple[StoredFile, Sequence[tuple[int, int]]]]) -> None:
        pass


def pack(folder: Path, file: Path) -> None:
    with zipfile.ZipFile(file, "w") as packed:
        for path in folder.iterdir():
            if path.suffix in (".tar", ".parquet"):
                packed.write(path, f"data/{path.name}")


@pytest.fixture
def packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of shards, which the backend has once more."""
    folder = write_pairs(tmp_path / "local", 6, 3)
    pack(folder, tmp_path / "all.zip")
    backend: Storage = ZipStorage(tmp_path / "all.zip")
    monkeypatch.setitem(STORAGES, "zip", backend)
    return folder


def test_a_dataset_elsewhere_is_the_same_dataset(packed: Path, tmp_path: Path) -> None:
    build_index(packed)
    there, index_dir = Path("zip:/data"), tmp_path / "indexes"
    report = build_index(there, index_dir, workers=1)
    assert (report.num_shards, report.num_samples) == (2, 6)
    here, found = Dataset.open(packed), Dataset.open(there, index_dir)
    assert found.fingerprint == here.fingerprint
    for shard in (0, 1):
        ref = here.shards[shard].image(1, 0)
        assert found.shards[shard].image(1, 0) == ref
        assert found.read(ref) == here.read(ref)
    assert lint(there, index_dir).num_samples == 6


def test_a_shard_that_changes_elsewhere_is_noticed(packed: Path, tmp_path: Path) -> None:
    there, index_dir = Path("zip:/data"), tmp_path / "indexes"
    build_index(there, index_dir, workers=1)
    dataset = Dataset.open(there, index_dir)
    ref = dataset.shards[0].image(0, 0)
    data = bytearray((packed / "00000.tar").read_bytes())
    data[ref.offset + 50] ^= 1
    (packed / "00000.tar").write_bytes(data)
    pack(packed, tmp_path / "all.zip")
    with pytest.raises(StaleIndexError, match="changed while it was served"):
        dataset.read(ref)
    (tmp_path / "all.zip").unlink()
    with pytest.raises(ShardReadError, match="cannot read"):
        dataset.read(ref)


def test_indexes_need_a_local_folder(packed: Path) -> None:
    with pytest.raises(DatasetError, match="--index-dir"):
        build_index(Path("zip:/data"))


def test_paths_choose_their_backend(packed: Path) -> None:
    assert isinstance(storage_of(Path("zip:/data")), ZipStorage)
    for local in (packed, Path("zip"), Path("relative/zip:/x"), Path("other:/data")):
        assert storage_of(local) is LOCAL
        assert isinstance(storage_of(local), LocalStorage)
