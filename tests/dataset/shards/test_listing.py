"""Where the files of a dataset lie, which of them are shards, and when an index is trusted."""

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest
from shards import write_texts

from dataserver.dataset import DatasetError, StaleIndexError, build_index, lint
from dataserver.dataset.index.format import NO_SIDECAR
from dataserver.dataset.index.fresh import read_fresh_index, read_index
from dataserver.dataset.shards import listing
from dataserver.dataset.shards.listing import ShardFile, find_shards, list_shards
from dataserver.dataset.storage.etags import Etag

SHARDS = ".tar, .parquet or .jsonl shards"


def test_names_and_paths_of_shards(tmp_path: Path) -> None:
    for name in ("b.tar", "a/c.tar", "a/.hidden.tar", ".git/d.tar", "a/e.tar.gz", "a/d/f.tar"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    shards = find_shards(tmp_path, Path("/indexes"))
    assert [shard.name for shard in shards] == ["a/c.tar", "a/d/f.tar", "b.tar"]
    assert {(shard.root, shard.index_dir) for shard in shards} == {(tmp_path, Path("/indexes"))}
    (alone,) = find_shards(tmp_path / "a/c.tar")
    assert alone == ShardFile("c.tar", tmp_path / "a", None)
    assert (alone.path, alone.index_path) == (tmp_path / "a/c.tar", tmp_path / "a/c.tar.index")
    assert alone.sidecar_path == tmp_path / "a/c.parquet"
    assert shards[0].index_path == Path("/indexes/a/c.tar.index")
    short = hashlib.sha256(b"digest").hexdigest()[:16]
    assert shards[0].tokens_path("digest") == Path(f"/indexes/a/c.tar.tokens-{short}")


@pytest.mark.parametrize("name", ["x{0..1}.jsonl", "x{0..1}.json", "x{0..1}/folder.images"])
def test_braces_name_no_shards_whose_images_lie_in_other_files(tmp_path: Path, name: str) -> None:
    with pytest.raises(DatasetError, match="manifests and loose images are read from disks alone"):
        list_shards(Path(f"https://127.0.0.1:9/data/{name}"), tmp_path)


def test_what_is_no_dataset_is_refused_in_these_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, outside = tmp_path / "data", tmp_path / "outside"
    folder.mkdir()
    outside.mkdir()

    def refused(path: Path) -> str:
        with pytest.raises(DatasetError) as caught:
            find_shards(path)
        return str(caught.value)

    gone = tmp_path / "gone"
    assert refused(gone) == (
        f"dataset path {gone} cannot be opened (No such file or directory);"
        " name a folder that holds .tar, .parquet or .jsonl shards"
    )
    assert (
        refused(folder)
        == f"no {SHARDS} and no images, clips or videos below {folder}; name a folder that img2dataset or datasets"
        " wrote"
    )
    (folder / "x.txt").write_text("")
    assert refused(folder / "x.txt") == (
        f"{folder / 'x.txt'} is not a {SHARDS[:-1]}; name a folder that holds {SHARDS}"
    )
    (outside / "0.tar").write_bytes(b"")
    link = folder / "0.tar"
    link.symlink_to(outside / "0.tar")
    left = f"is a link that leaves the dataset folder {folder}; copy the file into it or name its own folder"
    assert refused(folder) == f"{link} {left}"
    link.unlink()
    link.write_bytes(b"")
    (folder / "0.parquet").symlink_to(outside / "0.tar")
    assert refused(folder) == f"{folder / '0.parquet'} {left}"
    (folder / "0.parquet").unlink()
    (folder / "1.tar").symlink_to(folder / "none")
    assert refused(folder) == f"shard {folder / '1.tar'} is not a regular file; remove it or repair the link"
    (folder / "1.tar").unlink()
    (folder / "1.tar").symlink_to(link)
    assert len(find_shards(folder)) == 2
    (folder / "\n.tar").write_bytes(b"")
    odd = "shard name '\\n.tar' is not UTF-8, or has control characters or line breaks; rename the file"
    assert refused(folder) == odd
    (folder / "\n.tar").unlink()
    assert listing.MAX_SHARDS == 1 << 20
    monkeypatch.setattr(listing, "MAX_SHARDS", 2)
    assert len(find_shards(folder)) == 2
    monkeypatch.setattr(listing, "MAX_SHARDS", 1)
    assert refused(folder) == f"more than 1 shards below {folder}; split the dataset"


def test_folders_behind_links_are_not_searched_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_texts(tmp_path / "outside", 2, 2)
    folder = tmp_path / "data"
    folder.mkdir()
    for name in ("a", "z"):
        (folder / name).symlink_to(tmp_path / "outside")
    said = "folders behind links are not searched: 'a', 'z'"
    with pytest.raises(DatasetError) as caught:
        find_shards(folder)
    assert str(caught.value) == (
        f"no {SHARDS} and no images, clips or videos below {folder} ({said}); name a folder that img2dataset or"
        " datasets wrote"
    )
    write_texts(folder / "own", 2, 2)
    listing = list_shards(folder)
    assert ([shard.name for shard in listing.shards], listing.links) == (["own/00000.tar"], ("a", "z"))
    for look in (build_index, lint):
        caplog.clear()
        look(folder)
        assert [record.message.partition(";")[0] for record in caplog.records if record.levelname == "WARNING"] == [
            said
        ]
    for number in range(8):
        (folder / f"b{number}").symlink_to(tmp_path / "outside")
    caplog.clear()
    list_shards(folder).warn_of_links()
    assert "'b6' and 2 more;" in caplog.text


def test_an_index_is_compared_with_contents_unless_both_times_of_the_shard_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_texts(tmp_path, 3, 3)
    build_index(folder, workers=1)
    (shard,) = find_shards(folder)
    etag, sidecar = shard.etags()
    assert sidecar is None
    header = read_index(shard).header
    assert (header.shard_bytes, header.sidecar_bytes, header.num_samples) == (etag.num_bytes, NO_SIDECAR, 3)
    written = shard.index_path.stat().st_ctime_ns
    found: dict[str, tuple[Etag, Etag | None]] = {}
    monkeypatch.setattr(ShardFile, "etags", lambda _: found["etags"])
    for changed, is_known, is_late in (
        ({}, True, False),
        ({"inode": 5, "device": 7}, True, False),
        ({"mtime_ns": etag.mtime_ns + 1}, False, False),
        ({"ctime_ns": written - 1}, False, False),
        ({"ctime_ns": written}, False, True),
        ({"ctime_ns": written + 1}, False, True),
    ):
        found["etags"] = etag._replace(**changed), None
        indexed = read_index(shard)
        assert (indexed.is_known, indexed.is_late) == (is_known, is_late)
        assert (indexed.file, indexed.etags, indexed.columns) == (shard, found["etags"], {})
        assert read_fresh_index(shard, lazily=True) == replace(indexed, is_known=is_known or is_late)
        assert read_fresh_index(shard) == replace(indexed, is_known=True)
    run = f"run: dataserver index {folder}"
    for off in (-1, 1):
        found["etags"] = etag._replace(num_bytes=etag.num_bytes + off), None
        with pytest.raises(StaleIndexError) as caught:
            read_index(shard)
        assert str(caught.value) == (
            f"shard {shard.path}: its index describes {etag.num_bytes} bytes, it has {etag.num_bytes + off}; {run}"
        )
    found["etags"] = etag, etag._replace(num_bytes=5)
    with pytest.raises(StaleIndexError) as caught:
        read_index(shard)
    assert str(caught.value) == f"shard {shard.path}: its index was made with another {shard.sidecar_path.name}; {run}"
    found["etags"] = etag._replace(ctime_ns=written), None
    content = bytearray(shard.path.read_bytes())
    content[-1] ^= 1
    shard.path.write_bytes(content)
    with pytest.raises(StaleIndexError) as caught:
        read_fresh_index(shard)
    assert str(caught.value) == (f"shard {shard.path}: its index describes another content of {shard.path.name}; {run}")
    shard.path.unlink()
    with pytest.raises(DatasetError, match=f"shard {shard.path} cannot be reached: .*; check the storage"):
        read_fresh_index(shard)
    shard.index_path.unlink()
    with pytest.raises(StaleIndexError) as caught:
        read_index(shard)
    assert str(caught.value) == f"shard {shard.path}: it has no index at {shard.index_path}; {run}"


def test_files_that_cannot_be_reached_are_named(tmp_path: Path) -> None:
    """A shard that was there when it was indexed, and an index that is no file."""
    folder = write_texts(tmp_path, 3, 3)
    build_index(folder, workers=1)
    (shard,) = find_shards(folder)
    content = shard.path.read_bytes()
    shard.path.unlink()
    with pytest.raises(DatasetError) as caught:
        read_index(shard)
    assert str(caught.value) == (
        f"shard {shard.path} cannot be reached: [Errno 2] No such file or directory: '{shard.path}'; check the storage"
    )
    assert not isinstance(caught.value, StaleIndexError)
    shard.path.write_bytes(content)
    shard.index_path.unlink()
    shard.index_path.mkdir()
    with pytest.raises(StaleIndexError, match=f"shard {shard.path}: .*; run: dataserver index {folder}$"):
        read_index(shard)
