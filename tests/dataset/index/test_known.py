"""Indexes of another content are never served, wherever they were copied to; and how seldom contents are compared."""

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from cli.server_process import spawn
from shards import write_pairs, write_texts

from dataserver.assembly import load_tokenizer
from dataserver.dataset import Dataset, StaleIndexError, build_index, count_tokens
from dataserver.dataset.index import fresh
from dataserver.dataset.index.format import read_schema
from dataserver.dataset.index.fresh import read_fresh_index, read_index
from dataserver.dataset.index.known import known_path, read_known, state_of, write_known
from dataserver.dataset.shards.listing import ShardFile, find_shards
from dataserver.dataset.storage.etags import TICK_S

SHARDS = ["00000.tar", "00001.tar"]
BYTES = load_tokenizer("bytes")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two shards of four pairs each with their sidecars, indexed and counted."""
    folder = write_pairs(tmp_path / "data", 8, 4)
    build_index(folder, workers=1)
    count_tokens(folder, BYTES)
    return folder


@pytest.fixture
def digested(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files whose contents are compared, as they are."""
    names: list[str] = []
    digest = fresh.digest_file

    def counted(path: Path) -> str:
        names.append(path.name)
        return digest(path)

    monkeypatch.setattr(fresh, "digest_file", counted)
    return names


def replace_content(path: Path) -> None:
    """Give a file another content of the same size, later than its index."""
    content = bytearray(path.read_bytes())
    at = len(content) // 2  # of a parquet anything may break
    if path.suffix == ".tar":
        (shard,) = Dataset.open(path).shards
        image = shard.image(0, 0)
        at = image.offset + image.length - 3
    content[at] ^= 1
    path.write_bytes(content)


def copied(folder: Path, *last: str) -> Path:
    """A copy in which the files with these suffixes are the youngest, as where a tool copies them behind the others."""
    copy = folder.with_name("copy")
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns(*(f"*{suffix}" for suffix in last)))
    time.sleep(TICK_S)
    shutil.copytree(
        folder, copy, ignore=lambda _, names: [n for n in names if not n.endswith(last)], dirs_exist_ok=True
    )
    return copy


def copied_later(folder: Path) -> Path:
    return copied(folder, ".index", ".summary", ".known", ".numeric")


def touched(folder: Path) -> Path:
    time.sleep(TICK_S)
    for path in folder.glob("*.index"):
        path.chmod(0o664)
    return folder


def of_an_older_release(folder: Path) -> Path:
    """It wrote no notes."""
    for path in folder.glob("*.known"):
        path.unlink()
    (folder / "disttrain.summary").unlink()
    return touched(folder)


def read_all(dataset: Dataset) -> list[bytes]:
    return [dataset.read(s.image(row, 0)) for s in dataset.shards for row in range(s.num_samples)]


@pytest.mark.parametrize("name", ["00001.tar", "00001.parquet"])
@pytest.mark.parametrize("youngest", [copied_later, touched, of_an_older_release])
def test_an_index_of_another_content_is_never_served_however_young(
    folder: Path, youngest: Callable[[Path], Path], name: str
) -> None:
    replace_content(folder / name)
    there = youngest(folder)
    stale = read_index(find_shards(there)[1])
    assert (stale.is_known, stale.is_late) == (False, False)
    dataset = Dataset.open(there)
    assert dataset.read(dataset.shards[0].image(0, 0))
    for _ in range(2):
        with pytest.raises(
            StaleIndexError, match=r"00001\.tar may have changed since it was indexed, its index describes"
        ):
            dataset.read(dataset.shards[1].image(0, 0))
        with pytest.raises(
            StaleIndexError, match=rf"another content; run dataserver index {there} and start the server"
        ):
            dataset.document(1, 0, BYTES.digest)
    with pytest.raises(StaleIndexError, match=rf"another content of {name}; run: dataserver index {there}"):
        Dataset.open(there, lazily=False)
    with pytest.raises(StaleIndexError, match="another content"):
        count_tokens(there, BYTES)
    assert build_index(there, workers=1).num_built == 1
    assert build_index(there, workers=1).num_built == 0
    assert len(read_all(Dataset.open(there))) == 8


def test_commands_refuse_a_stale_copy_and_make_its_index_again(folder: Path) -> None:
    replace_content(folder / "00000.tar")
    copy = copied_later(folder)

    refusal = spawn("lint", copy).refusal()
    assert f"its index describes another content of 00000.tar; run: dataserver index {copy}" in refusal
    assert "(1 indexed now)" in spawn("index", copy, "--workers", "1").stdout
    assert "(0 indexed now)" in spawn("index", copy, "--workers", "1").stdout
    assert spawn("lint", copy).returncode == 0


@pytest.mark.parametrize("youngest", [copied_later, touched, of_an_older_release])
def test_a_copy_of_the_same_content_is_compared_once(
    folder: Path, youngest: Callable[[Path], Path], digested: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    images = read_all(Dataset.open(folder))
    assert digested == []
    there = youngest(folder)
    unknown = [] if youngest is touched else ["00000.tar", "00000.parquet", "00001.tar", "00001.parquet"]
    dataset = Dataset.open(there)
    assert digested == [], "a server starts without reading the shards"
    said = f"2 of 2 shards at {there} may have changed since they were indexed" if unknown else ""
    assert said in caplog.text
    assert [read_all(dataset) for _ in range(2)] == [images, images]
    assert dataset.document(0, 0, BYTES.digest).texts
    assert digested == unknown
    digested.clear()
    assert build_index(there, workers=1).num_built == 0
    assert digested == unknown
    digested.clear()
    caplog.clear()
    for _ in range(2):
        assert build_index(there, workers=1).num_built == 0
        assert read_all(Dataset.open(there)) == images
        assert Dataset.open(there, lazily=False).fingerprint == dataset.fingerprint
    assert (digested, caplog.text) == ([], "")


def test_texts_wait_for_the_comparison_too(tmp_path: Path, digested: list[str]) -> None:
    folder = write_texts(tmp_path / "data", 4, 2)
    build_index(folder, workers=1)
    count_tokens(folder, BYTES)
    dataset = Dataset.open(copied_later(folder))
    for _ in range(2):
        dataset.document(1, 0, BYTES.digest)
    assert digested == ["00001.tar"]


def test_an_index_folder_of_a_dataset_that_nobody_may_write(folder: Path, tmp_path: Path, digested: list[str]) -> None:
    before = {path: path.stat() for path in folder.iterdir()}
    for num_built in (2, 0):
        assert build_index(folder, tmp_path / "indexes", workers=1).num_built == num_built
        assert len(read_all(Dataset.open(folder, tmp_path / "indexes"))) == 8
    assert digested == []
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == {p: s.st_mtime_ns for p, s in before.items()}


def test_a_note_that_cannot_be_written_costs_a_warning(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    for shard in find_shards(folder):
        known_path(shard.index_path).unlink()
        known_path(shard.index_path).mkdir()
        (known_path(shard.index_path) / "in the way").touch()
    (folder / "disttrain.summary").unlink()
    report = build_index(folder, workers=1)
    assert report.num_built == 0
    assert f"cannot write {folder / '00000.tar.known'}" in caplog.text
    assert "servers read 2 shards more slowly without such files" in caplog.text
    assert len(read_all(Dataset.open(folder))) == 8


def test_one_shard_alone_is_known_to_the_folder_as_well(folder: Path, digested: list[str]) -> None:
    (folder / "00001.tar").touch()
    build_index(folder / "00001.tar", workers=1)
    digested.clear()
    Dataset.open(folder, lazily=False)
    assert digested == []


def test_what_is_noted_and_what_is_no_note(folder: Path) -> None:
    shard = find_shards(folder)[0]
    index, (header, _) = shard.index_path, read_schema(shard.index_path)
    state = state_of(shard.etags())
    shard_etag, sidecar = shard.etags()
    assert sidecar is not None
    assert state == (shard_etag.mtime_ns, shard_etag.ctime_ns, sidecar.mtime_ns, sidecar.ctime_ns)
    assert state_of((shard_etag, None)) == (*state[:2], 0, 0)
    assert read_known(index, header) == state
    assert write_known(index, header, (1, 2, 3, 4)) == ""
    assert read_known(index, header) == (1, 2, 3, 4)
    assert not read_index(shard).is_known
    path = known_path(index)
    assert path == folder / "00000.tar.known"
    whole = path.read_text()
    noted = json.loads(whole)
    other = "0" * 64
    for text in (
        *("", "[]", "{", "null", "[" * 1024, whole[:-3]),
        *(json.dumps(noted | change) for change in ({"known": 2}, {"sha256": other}, {"sidecar_sha256": other})),
        *(json.dumps(noted | {"times_ns": times}) for times in (None, [1, 2, 3], [1, 2, 3, "x"], 5)),
        json.dumps({name: value for name, value in noted.items() if name != "times_ns"}),
    ):
        path.write_text(text)
        assert read_known(index, header) is None, text
        assert not read_index(shard).is_known
    path.unlink()
    assert read_known(index, header) is None


def test_files_that_changed_this_moment_are_waited_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within one tick of its clock a file system gives two contents one time."""
    shard = find_shards(folder)[0]
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    etag, sidecar = shard.etags()
    assert sidecar is not None
    for age_s, expected in ((1, []), (0, [TICK_S]), (-5, [TICK_S])):
        for young in (0, 1):
            etags = [etag._replace(ctime_ns=1), sidecar._replace(ctime_ns=1)]
            etags[young] = etags[young]._replace(ctime_ns=time.time_ns() - int(age_s * 1e9))
            monkeypatch.setattr(ShardFile, "etags", lambda _, found=tuple(etags): found)
            waited.clear()
            assert (shard.settled_etags(), waited) == (tuple(etags), expected)
    monkeypatch.undo()
    time.sleep(TICK_S)
    before = shard.settled_etags()
    replace_content(shard.path)
    assert shard.etags() != before
    with pytest.raises(StaleIndexError, match="another content"):
        read_fresh_index(shard, lazily=True)
