"""Indexes in a store: what one side removes, the other one removes, too."""

import shutil
from pathlib import Path

import pytest
from benchmarks.range_server import State
from shards import write_pairs

from dataserver.dataset import DatasetError, publish
from dataserver.dataset.shards.listing import list_shards
from dataserver.dataset.storage.index_mirror import mirror_folder, pull
from dataserver.dataset.storage.urls import Url, location

Stores = tuple[State, str]
NAMES = ("0.tar.index", "0.tar.joined", "disttrain.flags", "disttrain.joins", "disttrain.summary")
ROOT = Path("s3://bucket/laion")


@pytest.fixture
def mirror(stores: Stores) -> Path:
    """The local folder, with files that the store has as well."""
    url = location(ROOT)
    assert isinstance(url, Url)
    for name in NAMES:
        (mirror_folder(url) / name).write_text(name)
    assert publish(ROOT, None) == len(NAMES)
    return mirror_folder(url)


def there(stores: Stores) -> set[str]:
    return {path.removeprefix("/bucket/laion/") for path in stores[0].objects}


def here(mirror: Path) -> set[str]:
    return {path.name for path in mirror.iterdir()} - {"mirror.json"}


def test_what_indexing_removes_leaves_the_store(stores: Stores, mirror: Path) -> None:
    for name in NAMES[1:4]:
        (mirror / name).unlink()
    pull(ROOT, None)
    assert here(mirror) == {NAMES[0], NAMES[4]}
    publish(ROOT, None)
    assert there(stores) == {NAMES[0], NAMES[4]}


def test_what_changed_in_the_store_is_not_removed(stores: Stores, mirror: Path) -> None:
    (mirror / "disttrain.flags").unlink()
    stores[0].put("/bucket/laion/disttrain.flags", b"of another machine")
    publish(ROOT, None)
    assert "disttrain.flags" in there(stores)


def test_what_left_the_store_is_removed_here_unless_it_changed(stores: Stores, mirror: Path) -> None:
    for name in NAMES[:2]:
        del stores[0].objects[f"/bucket/laion/{name}"]
    (mirror / NAMES[0]).write_text("made here meanwhile")
    pull(ROOT, None)
    assert here(mirror) == {*NAMES} - {NAMES[1]}
    assert publish(ROOT, None) == 1
    assert there(stores) == {*NAMES} - {NAMES[1]}


@pytest.mark.parametrize("with_state", [True, False])
def test_a_mirror_that_somebody_emptied_is_filled_again(stores: Stores, mirror: Path, with_state: bool) -> None:
    state = (mirror / "mirror.json").read_text()
    shutil.rmtree(mirror)
    mirror.mkdir(mode=0o700)
    if with_state:
        (mirror / "mirror.json").write_text(state)
    pull(ROOT, None)
    publish(ROOT, None)
    assert here(mirror) == there(stores) == {*NAMES}


def test_an_index_that_is_missing_here_is_fetched_again(stores: Stores, mirror: Path) -> None:
    (mirror / NAMES[0]).unlink()
    (mirror / NAMES[4]).unlink()
    pull(ROOT, None)
    assert here(mirror) == {*NAMES}


def test_images_in_files_of_their_own_need_a_local_index(tmp_path: Path) -> None:
    write_pairs(tmp_path / "shards", 2, 2)
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "a.png").write_bytes(b"x")
    with pytest.raises(DatasetError, match="name a local folder with --index-dir"):
        list_shards(tmp_path / "images", ROOT)
    assert list_shards(tmp_path / "shards", ROOT).shards
