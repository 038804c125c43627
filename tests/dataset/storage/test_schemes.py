"""A store of another kind: one line for its scheme, and a client; its datasets are those that they are elsewhere."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from shards import write_pairs

from dataserver.dataset import Dataset, DatasetError, build_index, lint
from dataserver.dataset.storage.client_interface import ObjectInfo, check_version
from dataserver.dataset.storage.registry import REMOTE, STORAGES
from dataserver.dataset.storage.remote import RemoteStorage
from dataserver.dataset.storage.schemes import SCHEMES, Scheme
from dataserver.dataset.storage.urls import location


class ToyClient:
    """Asks a folder as if it were a store."""

    lists_at_once = True

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def objects(self, prefix: str, after: str) -> Iterator[ObjectInfo]:  # noqa: ARG002 - it gives all at once
        for path in sorted((self._folder / prefix).rglob("*")):
            if path.is_file():
                yield self.head(path.relative_to(self._folder).as_posix())

    def head(self, key: str) -> ObjectInfo:
        path = self._folder / key
        if not path.is_file():
            raise FileNotFoundError(2, "no such object", key)
        return ObjectInfo(key, path.stat().st_size, str(path.stat().st_mtime_ns), 0)

    def get(self, wanted: ObjectInfo, start: int, length: int) -> bytes:
        check_version(wanted, self.head(wanted.key).version, wanted.num_bytes, 0)
        return (self._folder / wanted.key).read_bytes()[start : start + length]

    def put(self, key: str, source: Path) -> ObjectInfo:
        (self._folder / key).parent.mkdir(exist_ok=True)
        (self._folder / key).write_bytes(source.read_bytes())
        return self.head(key)

    def remove(self, key: str) -> None:
        (self._folder / key).unlink()


@pytest.mark.parametrize("can_write", [True, False])
def test_a_dataset_in_a_store_of_another_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_write: bool) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    local = write_pairs(tmp_path / "buckets" / "b" / "pairs", 6, 3)
    clients = []

    def client(scheme: str, store: str) -> ToyClient:
        clients.append((scheme, store))
        return ToyClient(tmp_path / "buckets" / store)

    monkeypatch.setitem(SCHEMES, "toy", Scheme(client, 1, "toy://BUCKET/PREFIX", can_write=can_write))
    for backends in (REMOTE, STORAGES):
        monkeypatch.setitem(backends, "toy", RemoteStorage("toy"))
    there, index_dir = Path("toy://b/pairs"), None if can_write else tmp_path / "indexes"
    build_index(local, tmp_path / "local")
    assert build_index(there, index_dir, workers=1).num_samples == 6
    here, found = Dataset.open(local, tmp_path / "local"), Dataset.open(there, index_dir)
    assert found.fingerprint == here.fingerprint
    ref = here.shards[1].image(1, 0)
    assert found.read(ref) == here.read(ref)
    assert lint(there, index_dir).num_samples == 6
    assert set(clients) == {("toy", "b")}
    with pytest.raises(DatasetError, match="toy://BUCKET/PREFIX is required"):
        location(Path("toy://b/../c"))
    if not can_write:
        with pytest.raises(DatasetError, match="--index-dir"):
            build_index(there)
