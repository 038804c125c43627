"""Datasets in stores that others wrote: what `range_server` takes S3 for is not all there is to it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from dataset.storage.emulators import azurite, fake_gcs, moto
from shards import write_pairs
from stores import forget_stores

from dataserver.dataset import Dataset, ShardReadError, StaleIndexError, build_index, publish
from dataserver.dataset.storage.registry import remote_storage
from dataserver.dataset.storage.urls import Url


@pytest.fixture(params=[moto, *(pytest.param(store, marks=pytest.mark.long) for store in (azurite, fake_gcs))])
def bucket(request: pytest.FixtureRequest, no_stores: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Url]:
    """An empty bucket."""
    with request.param(request) as (url, environment):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        yield url


def put(bucket: Url, folder: Path) -> None:
    """Upload shards and their metadata."""
    for path in (*folder.glob("*.tar"), *folder.glob("*.parquet")):
        remote_storage(bucket).write(bucket / "laion" / path.name, path)


def images(dataset: Dataset) -> list[bytes]:
    return [dataset.read(shard.image(row, 0)) for shard in dataset.shards for row in range(shard.num_samples)]


def test_a_bucket_is_indexed_published_and_read(bucket: Url, tmp_path: Path) -> None:
    folder = write_pairs(tmp_path / "local", 12, 4)
    build_index(folder, workers=1)
    put(bucket, folder)
    assert build_index(bucket / "laion", workers=1).num_built == 3
    assert publish(bucket / "laion", None) > 3
    there, local = Dataset.open(bucket / "laion"), Dataset.open(folder)
    assert there.fingerprint == local.fingerprint
    assert images(there) == images(local)
    store = remote_storage(bucket).store(bucket)
    found = list(store.objects("laion"))
    assert [store.client.head(info.key) for info in found] == found, "listings say what heads say"
    keys = {info.key for info in found}
    assert {f"laion/{path.name}" for path in folder.glob("*.tar")} < keys
    assert "laion/disttrain.summary" in keys


def test_an_object_that_is_replaced_is_noticed(bucket: Url, tmp_path: Path) -> None:
    """By one of its size, between an index and its reader."""
    folder = write_pairs(tmp_path / "local", 4, 4)
    put(bucket, folder)
    build_index(bucket / "laion", tmp_path / "index", workers=1)
    dataset = Dataset.open(bucket / "laion", tmp_path / "index")
    before = images(dataset)
    (shard,) = folder.glob("*.tar")
    sound = shard.read_bytes()
    at = dataset.shards[0].image(1, 0).offset + 50
    for data, is_sound in ((sound[:at] + bytes([sound[at] ^ 1]) + sound[at + 1 :], False), (sound, True)):
        shard.write_bytes(data)
        put(bucket, folder)
        forget_stores()
        dataset = Dataset.open(bucket / "laion", tmp_path / "index")
        if is_sound:
            assert images(dataset) == before
        else:
            with pytest.raises((StaleIndexError, ShardReadError), match=r"00000\.tar"):
                images(dataset)


def test_what_is_removed_here_is_removed_there(bucket: Url, tmp_path: Path) -> None:
    put(bucket, write_pairs(tmp_path / "local", 4, 4))
    store = remote_storage(bucket).store(bucket)
    remote_storage(bucket).write(bucket / "laion" / "more", Path(__file__))
    store.client.remove("laion/more")
    assert "laion/more" not in {info.key for info in store.objects("laion")}
