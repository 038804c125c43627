"""Datasets in stores that others wrote: what `range_server` takes S3 for is not all there is to it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from dataset.storage.emulators import Emulated, azurite, fake_gcs, moto
from shards import write_pairs
from stores import forget_stores

from dataserver.dataset import Dataset, ShardReadError, StaleIndexError, build_index, publish
from dataserver.dataset.storage.registry import remote_storage
from dataserver.dataset.storage.urls import Url


@pytest.fixture(params=[moto, *(pytest.param(store, marks=pytest.mark.long) for store in (azurite, fake_gcs))])
def emulated(request: pytest.FixtureRequest, no_stores: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Emulated]:
    with request.param(request) as found:
        for name, value in found.environment.items():
            monkeypatch.setenv(name, value)
        yield found


@pytest.fixture
def bucket(emulated: Emulated) -> Url:
    """An empty bucket."""
    return emulated.url


def put(emulated: Emulated, folder: Path) -> None:
    """Upload shards and their metadata."""
    for path in (*folder.glob("*.tar"), *folder.glob("*.parquet")):
        if emulated.upload is None:
            remote_storage(emulated.url).write(emulated.url / "laion" / path.name, path)
        else:
            emulated.upload(f"laion/{path.name}", path.read_bytes())


def images(dataset: Dataset) -> list[bytes]:
    return [dataset.read(shard.image(row, 0)) for shard in dataset.shards for row in range(shard.num_samples)]


def test_a_bucket_is_indexed_published_and_read(emulated: Emulated, bucket: Url, tmp_path: Path) -> None:
    folder = write_pairs(tmp_path / "local", 12, 4)
    build_index(folder, workers=1)
    put(emulated, folder)
    index_dir = None if emulated.upload is None else tmp_path / "index"
    assert build_index(bucket / "laion", index_dir, workers=1).num_built == 3
    if index_dir is None:
        assert publish(bucket / "laion", None) > 3
    there, local = Dataset.open(bucket / "laion", index_dir), Dataset.open(folder)
    assert there.fingerprint == local.fingerprint
    assert images(there) == images(local)
    store = remote_storage(bucket).store(bucket)
    found = list(store.objects("laion"))
    assert [store.client.head(info.key) for info in found] == found, "listings say what heads say"
    keys = {info.key for info in found}
    assert {f"laion/{path.name}" for path in folder.glob("*.tar")} < keys
    assert ("laion/disttrain.summary" in keys) == (index_dir is None)


def test_an_object_that_is_replaced_is_noticed(emulated: Emulated, bucket: Url, tmp_path: Path) -> None:
    """By one of its size, between an index and its reader."""
    folder = write_pairs(tmp_path / "local", 4, 4)
    put(emulated, folder)
    build_index(bucket / "laion", tmp_path / "index", workers=1)
    dataset = Dataset.open(bucket / "laion", tmp_path / "index")
    before = images(dataset)
    (shard,) = folder.glob("*.tar")
    sound = shard.read_bytes()
    at = dataset.shards[0].image(1, 0).offset + 50
    for data, is_sound in ((sound[:at] + bytes([sound[at] ^ 1]) + sound[at + 1 :], False), (sound, True)):
        shard.write_bytes(data)
        put(emulated, folder)
        forget_stores()
        dataset = Dataset.open(bucket / "laion", tmp_path / "index")
        if is_sound:
            assert images(dataset) == before
        else:
            with pytest.raises((StaleIndexError, ShardReadError), match=r"00000\.tar"):
                images(dataset)


def test_what_is_removed_here_is_removed_there(emulated: Emulated, bucket: Url, tmp_path: Path) -> None:
    if emulated.upload is not None:
        pytest.skip("this server takes no uploads of clients")
    put(emulated, write_pairs(tmp_path / "local", 4, 4))
    store = remote_storage(bucket).store(bucket)
    remote_storage(bucket).write(bucket / "laion" / "more", Path(__file__))
    store.client.remove("laion/more")
    assert "laion/more" not in {info.key for info in store.objects("laion")}
