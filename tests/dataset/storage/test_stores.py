"""Datasets in stores: indexed, read and checked as those on disk are, whatever a store does meanwhile."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks.range_server import State, range_server
from shards import write_pairs
from stores import SECRET, forget_stores

from dataserver.cli import index as index_command
from dataserver.cli import main
from dataserver.dataset import Dataset, DatasetError, ImageRef, ShardReadError, StaleIndexError, build_index, publish
from dataserver.dataset.shards.listing import list_shards
from dataserver.dataset.storage import blocks, remote, retries
from dataserver.dataset.storage.http_client import Answer
from dataserver.dataset.storage.hub_client import HubClient
from dataserver.dataset.storage.registry import storage_of

Stores = tuple[State, str]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three shards of pairs, indexed on disk."""
    found = write_pairs(tmp_path_factory.mktemp("local"), 12, 4)
    build_index(found, workers=1)
    return found


def refs_of(dataset: Dataset) -> Iterator[ImageRef]:
    for shard in dataset.shards:
        for row in range(shard.num_samples):
            yield shard.image(row, 0)


def images(dataset: Dataset) -> list[bytes]:
    return [dataset.read(ref) for ref in refs_of(dataset)]


def put(stores: Stores, folder: Path, scheme: str) -> Path:
    """Put the shards into the store; the URL of the dataset."""
    state, address = stores
    state.put_folder("/bucket/laion", folder)
    if scheme == "s3":
        return Path("s3://bucket/laion")
    return Path(f"{address}/bucket/laion/{{00000..00002}}.tar")


@pytest.fixture(params=["s3", "http"])
def scheme(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_a_dataset_in_a_store_is_the_dataset_on_disk(stores: Stores, folder: Path, scheme: str, tmp_path: Path) -> None:
    url = put(stores, folder, scheme)
    local = Dataset.open(folder)
    report = build_index(url, tmp_path / "index", workers=1)
    assert (report.num_built, report.num_samples) == (3, 12)
    sizes = {f"/bucket/laion/{file.name}": file.stat().st_size for file in folder.glob("*.tar")}
    read = [one for one in stores[0].ranges() if one.path in sizes]
    assert sum(end - start for start, end in (one.range or (0, 0) for one in read)) == sum(sizes.values())
    dataset = Dataset.open(url, tmp_path / "index")
    assert dataset.fingerprint == local.fingerprint
    assert images(dataset) == images(local)
    refs = list(refs_of(dataset))
    forget_stores()
    dataset = Dataset.open(url, tmp_path / "index")
    dataset.read_ahead(refs)
    assert [dataset.read(ref) for ref in refs] == images(local)
    assert build_index(url, tmp_path / "index", workers=1).num_built == 0


def test_an_index_beside_the_shards_serves_all_machines(
    stores: Stores, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    state, _ = stores
    url = put(stores, folder, "s3")
    assert main(["index", str(url), "--workers", "1"]) == 0
    out = capsys.readouterr().out
    assert f"fingerprint  {Dataset.open(folder).fingerprint}" in out
    assert "published" in out
    assert "/bucket/laion/disttrain.summary" in state.objects
    for number in range(3):
        assert f"/bucket/laion/0000{number}.tar.index" in state.objects
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other machine"))
    forget_stores()
    state.asked.clear()
    dataset = Dataset.open(Path("s3://bucket/laion"))
    assert all(shard.num_samples == 4 for shard in dataset.shards)
    assert not [one for one in state.ranges() if one.path.endswith(".tar")]
    assert images(dataset) == images(Dataset.open(folder))
    for command in ("lint", "describe"):
        assert main([command, "s3://bucket/laion"]) == 0
    assert main(["sizes", "s3://bucket/laion", "--output", str(tmp_path / "sizes.json")]) == 0
    assert json.loads((tmp_path / "sizes.json").read_text())["samples"]
    captured = capsys.readouterr()
    assert SECRET not in captured.out + captured.err
    assert not list((tmp_path / "other machine").rglob("*.tar"))


def test_what_was_indexed_elsewhere_meanwhile_is_taken(stores: Stores, folder: Path, tmp_path: Path) -> None:
    state, _ = stores
    url = put(stores, folder, "s3")
    for path in [path for path in state.objects if "00002" in path]:
        del state.objects[path]
    build_index(url, workers=1)
    publish(Path("s3://bucket/laion"), None)
    before = Dataset.open(url).fingerprint
    put(stores, folder, "s3")
    assert build_index(url, workers=1).num_built == 1
    assert publish(Path("s3://bucket/laion"), None) > 0
    assert publish(Path("s3://bucket/laion"), None) == 0
    dataset = Dataset.open(url)
    assert dataset.fingerprint == Dataset.open(folder).fingerprint
    assert before in [earlier.fingerprint for earlier in dataset.earlier_sets()]


def test_machines_index_a_bucket_together(
    stores: Stores, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    state, _ = stores
    url = str(put(stores, folder, "s3"))
    for number in range(2):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / f"machine {number}"))
        forget_stores()
        assert main(["index", url, "--workers", "1", "--shards", f"{number}/2"]) == 0
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "third"))
    forget_stores()
    state.asked.clear()
    assert main(["index", url, "--workers", "1"]) == 0
    assert not [one for one in state.ranges() if one.path.endswith(".tar")]
    assert f"fingerprint  {Dataset.open(folder).fingerprint}" in capsys.readouterr().out
    for wrong in ("2/2", "x", "-1/2", "3/1000000", "1/"):
        assert main(["index", url, f"--shards={wrong}"]) == 2


class KilledError(BaseException):
    """Ends a run at once."""


def test_another_machine_goes_on_where_one_was_killed(
    stores: Stores, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    url = str(put(stores, folder, "s3"))
    published = []

    def kill(root: Path, index_dir: Path | None) -> int:
        published.append(publish(root, index_dir))
        if len(published) == 2:
            raise KilledError
        return published[-1]

    with monkeypatch.context() as killed:
        killed.setattr(index_command, "PUBLISH_EVERY_S", 0.0)
        killed.setattr(index_command, "publish", kill)
        with pytest.raises(KilledError):
            main(["index", url, "--workers", "1"])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other machine"))
    forget_stores()
    assert main(["index", url, "--workers", "1"]) == 0
    out = capsys.readouterr().out
    assert "shards       3 (1 indexed now)" in out
    assert f"fingerprint  {Dataset.open(folder).fingerprint}" in out


FAULTS = ("503", "500", "429:0", "short", "cut", "reset", "long", "shifted", "other", "whole")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_costs_a_request_and_no_byte(
    stores: Stores, folder: Path, scheme: str, fault: str, tmp_path: Path
) -> None:
    state, _ = stores
    url = put(stores, folder, scheme)
    local, dataset = Dataset.open(folder), indexed(url, tmp_path)
    for ref in list(refs_of(dataset))[::3]:
        state.faults = [fault]
        try:
            found = dataset.read(ref)
        except (ShardReadError, StaleIndexError):
            assert fault in ("whole", "shifted", "other", "long")
            continue
        assert found == local.read(ref)
    state.faults.clear()
    assert len(state.ranges()) < 60


def indexed(url: Path, tmp_path: Path) -> Dataset:
    build_index(url, tmp_path / "index", workers=1)
    forget_stores()
    return Dataset.open(url, tmp_path / "index")


@pytest.mark.parametrize("change", ["another", "same size", "cut", "gone"])
def test_a_shard_that_is_replaced_is_noticed(
    stores: Stores, folder: Path, scheme: str, change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, _ = stores
    url = put(stores, folder, scheme)
    dataset = indexed(url, tmp_path)
    monkeypatch.setattr(blocks.Blocks, "_want", lambda *_: None)  # each read asks the store
    ref = dataset.shards[0].image(1, 0)
    before = dataset.read(ref)
    data = bytearray(state.objects["/bucket/laion/00000.tar"].data)
    data[ref.offset + 50] ^= 1
    if change == "gone":
        del state.objects["/bucket/laion/00000.tar"]
    else:
        contents = {"another": bytes(data) * 2, "same size": bytes(data), "cut": bytes(data[: len(data) // 2])}
        state.put("/bucket/laion/00000.tar", contents[change])
    with pytest.raises((StaleIndexError, ShardReadError), match=r"00000\.tar"):
        dataset.read(ref)
    state.put("/bucket/laion/00000.tar", (folder / "00000.tar").read_bytes())
    assert dataset.read(ref) == before


def test_the_same_content_uploaded_again_is_served(stores: Stores, folder: Path, tmp_path: Path) -> None:
    state, _ = stores
    dataset = indexed(put(stores, folder, "s3"), tmp_path)
    for stored in state.objects.values():
        stored.modified += 1000
    assert images(dataset) == images(Dataset.open(folder))


def test_without_etags_size_and_date_are_compared(
    stores: Stores, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, address = stores
    for file in folder.glob("*.tar"):
        state.put(f"/bucket/laion/{file.name}", file.read_bytes(), with_etag=False)
    dataset = indexed(Path(f"{address}/bucket/laion/{{00000..00002}}.tar"), tmp_path)
    assert images(dataset) == images(Dataset.open(folder))
    blocks.BLOCKS.forget()
    stored = state.objects["/bucket/laion/00001.tar"]
    stored.data, stored.modified = bytes(len(stored.data)), stored.modified + 60
    with pytest.raises(StaleIndexError):
        images(dataset)


def test_a_storm_ends_in_an_error_or_in_the_right_bytes(
    stores: Stores, folder: Path, scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, _ = stores
    monkeypatch.setattr(retries, "PATIENCE_S", 1.0)
    dataset = indexed(put(stores, folder, scheme), tmp_path)
    ref = dataset.shards[1].image(2, 0)
    state.always = "503"
    before = len(state.asked)
    for _ in range(3):
        with pytest.raises(ShardReadError, match="check the storage") as caught:
            dataset.read(ref)
        assert SECRET not in str(caught.value)
    assert len(state.asked) - before < 200
    state.always = ""
    for _ in range(20):
        with contextlib.suppress(ShardReadError):  # the pause is not over yet
            assert dataset.read(ref) == Dataset.open(folder).read(ref)
            return
        time.sleep(0.5)
    pytest.fail("it never answers again")


BAD = {
    "s3://missing/x": "has nothing there|there is no",
    "s3://bucket/missing": "has nothing there",
    "hf://datasets/ORG/NAME": "--index-dir",
    "http://127.0.0.1:9/a/{0..1}.tar": "--index-dir",
    "s3://bucket/laion/notes.txt": "is not a .tar",
}


@pytest.mark.parametrize("url", BAD)
def test_what_is_not_there_is_one_clear_error(stores: Stores, folder: Path, url: str) -> None:
    put(stores, folder, "s3")
    stores[0].put("/bucket/laion/notes.txt", b"x")
    with pytest.raises(DatasetError, match=BAD[url]):
        build_index(Path(url), workers=1)


@pytest.mark.parametrize("status", ["401", "403"])
def test_no_permission_is_said_at_once(stores: Stores, folder: Path, status: str) -> None:
    state, _ = stores
    put(stores, folder, "s3")
    state.always = status
    before = len(state.asked)
    with pytest.raises(DatasetError, match="check the credentials") as caught:
        build_index(Path("s3://bucket/laion/00000.tar"), workers=1)
    assert len(state.asked) - before <= 2
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("name", ["a/./b.tar", "a//b.tar", "../b.tar"])
def test_a_name_that_no_path_has_is_said_at_once(stores: Stores, folder: Path, tmp_path: Path, name: str) -> None:
    state, _ = stores
    url = put(stores, folder, "s3")
    state.put(f"/bucket/laion/{name}", b"x")
    with pytest.raises(DatasetError, match="rename that object"):
        build_index(url, tmp_path / "index", workers=1)


def test_many_files_without_extensions_are_not_all_looked_at(stores: Stores, folder: Path, tmp_path: Path) -> None:
    state, _ = stores
    url = put(stores, folder, "s3")
    for number in range(2500):
        state.put(f"/bucket/laion/part-{number}", b"x")
    build_index(url, tmp_path / "index", workers=1)
    assert sum("/part-" in one.path for one in state.asked) <= 2 * 16
    assert sum("list-type" in one.path for one in state.asked) >= 3


def test_a_manifest_beside_shards_is_named_with_what_helps_there(stores: Stores, folder: Path, tmp_path: Path) -> None:
    url = put(stores, folder, "s3")
    stores[0].put("/bucket/laion/more.jsonl", b"{}")
    for name in ("0.tar", "more.jsonl"):
        (tmp_path / name).write_bytes(b"")
    far, near = (dict(list_shards(at).unread)["more.jsonl"] for at in (url, tmp_path))
    assert far.startswith("manifests and loose images are read from disks alone")
    assert near.endswith("give a manifest and its images a folder of their own")


def test_a_redirect_to_another_host_is_refused_unless_it_is_named(
    stores: Stores, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, address = stores
    other = State()
    other.put_folder("/bucket/laion", folder)
    with range_server(other) as target:
        target = target.replace("127.0.0.1", "localhost")
        state.always = f"redirect:{target}"
        url = Path(f"{address}/bucket/laion/{{00000..00002}}.tar")
        with pytest.raises(DatasetError, match=f"DISTTRAIN_REDIRECT_HOSTS={target[7:]}"):
            build_index(url, tmp_path / "index", workers=1)
        assert not other.asked
        monkeypatch.setenv("DISTTRAIN_REDIRECT_HOSTS", target[7:])
        forget_stores()
        assert build_index(url, tmp_path / "index", workers=1).num_samples == 12
        dataset = Dataset.open(url, tmp_path / "index")
        assert images(dataset) == images(Dataset.open(folder))
        # What a redirect led to is asked at once from then on, until it is refused there.
        blocks.BLOCKS.forget()
        other.faults = ["403"]
        assert images(dataset) == images(Dataset.open(folder))


@pytest.mark.parametrize("target", ["file:///etc", "https://127.0.0.1@evil.example", "ftp://127.0.0.1"])
def test_a_redirect_to_something_else_is_refused(stores: Stores, folder: Path, target: str, tmp_path: Path) -> None:
    state, address = stores
    state.put_folder("/bucket/laion", folder)
    state.always = f"redirect:{target}"
    with pytest.raises(DatasetError, match="redirects to"):
        build_index(Path(f"{address}/bucket/laion/{{00000..00002}}.tar"), tmp_path / "index", workers=1)


def test_the_hub(stores: Stores, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state, address = stores
    monkeypatch.setenv("HF_ENDPOINT", address)
    monkeypatch.setenv("HF_TOKEN", "hf_hunter2")
    commit = "c0ffee"
    state.put_folder(f"/datasets/ORG/NAME/resolve/{commit}/data", folder)
    begin = f"/datasets/ORG/NAME/resolve/{commit}/"
    entries = [
        {"type": "file", "path": p.removeprefix(begin), "size": len(s.data), "oid": (s.etag or "").strip('"')}
        for p, s in state.objects.items()
    ]
    state.put("/api/datasets/ORG/NAME/revision/v1", json.dumps({"sha": commit}).encode())
    state.put(f"/api/datasets/ORG/NAME/tree/{commit}/data", json.dumps(entries).encode())
    url = Path("hf://datasets/ORG/NAME@v1/data")
    assert build_index(url, tmp_path / "index", workers=1).num_samples == 12
    dataset = Dataset.open(url, tmp_path / "index")
    assert dataset.fingerprint == Dataset.open(folder).fingerprint
    assert images(dataset) == images(Dataset.open(folder))
    assert {one.headers.get("authorization") for one in state.asked} == {"Bearer hf_hunter2"}


def test_the_first_file_of_the_hub_costs_one_page(monkeypatch: pytest.MonkeyPatch) -> None:
    client, asked = HubClient("datasets/ORG/NAME"), list[str]()
    tree = f"{client._endpoint}/api/datasets/ORG/NAME/tree/c0ffee"

    def ask(_method: str, url: str, _length: int) -> Answer:
        asked.append(url)
        page = json.dumps([{"type": "file", "path": f"{len(asked)}.tar", "size": 1, "oid": "x"}]).encode()
        return Answer(200, {"link": f'<{tree}?page=2>; rel="next"'} if len(asked) == 1 else {}, page, url, {})

    monkeypatch.setattr(client, "ask", ask)
    client._commit = "c0ffee"
    listing = client.objects("", "")
    assert next(listing).key == "1.tar"
    assert asked == [f"{tree}?recursive=true"]
    assert [info.key for info in listing] == ["2.tar"]
    assert asked[1:] == [f"{tree}?page=2"]


def test_workers_and_credentials_of_the_environment(stores: Stores, folder: Path, tmp_path: Path) -> None:
    """In processes of their own, as users run it."""
    url = put(stores, folder, "s3")
    options = ["--index-dir", str(tmp_path / "index"), "--workers", "2"]
    command = [sys.executable, "-m", "dataserver", "index", str(url), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    assert f"fingerprint  {Dataset.open(folder).fingerprint}" in done.stdout
    assert SECRET not in done.stdout + done.stderr


def test_an_object_that_changed_is_asked_for_anew_when_it_is_opened_next(stores: Stores, folder: Path) -> None:
    """Also by whoever opens it without asking for its state."""
    state, storage = stores[0], storage_of("s3://bucket/laion")
    path = put(stores, folder, "s3") / "00000.tar"
    before = storage.ranges(path)
    state.put("/bucket/laion/00000.tar", b"another content")
    assert before.read([(0, 7)]) == [b""]
    assert storage.ranges(path).read([(0, 7)]) == [b"another"]
    assert before.read([(0, 7)]) == [b""], "a file stays one version"
    heads = [one for one in state.asked if one.method == "HEAD"]
    assert len(heads) == 2, "one for each version"


def test_a_block_that_differs_from_its_index_is_not_held(
    stores: Stores, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store gives the same version and size; what differs are zeros at the end, so images are right."""
    url = put(stores, folder, "s3")
    build_index(url, tmp_path / "index", workers=1)
    dataset = Dataset.open(url, tmp_path / "index")
    stored = stores[0].objects["/bucket/laion/00001.tar"]
    sound, stored.data = stored.data, stored.data[:-1] + b"x"
    whole = (0, len(sound))

    def reads() -> int:
        """How often the block was asked for, when all its images have been read one after the other."""
        for ref in refs_of(dataset):
            assert dataset.read(ref)
            settle()
        found = [one.range for one in stores[0].ranges() if one.path.endswith("/00001.tar")]
        stores[0].asked.clear()
        return found.count(whole)

    stores[0].asked.clear()
    assert reads() == 1, "four images want it"
    assert images(dataset) == images(Dataset.open(folder))
    assert held_shards() == {"00000.tar", "00002.tar"}
    monkeypatch.setattr(remote, "REFUSED_S", 0)
    assert reads() > 0
    told = "block 0 of s3://bucket/laion/00001.tar differs from what was indexed"
    assert [told in record.getMessage() for record in caplog.records].count(True) == 1
    stored.data = sound
    assert reads() == 1
    assert held_shards() == {"00000.tar", "00001.tar", "00002.tar"}


def settle() -> None:
    """Wait for blocks that load."""
    until = time.monotonic() + 60
    while blocks.BLOCKS._loading and time.monotonic() < until:
        time.sleep(0.01)


def held_shards() -> set[str]:
    names = {key.info.key.rpartition("/")[2] for key in blocks.BLOCKS.held._held}
    return {name for name in names if name.endswith(".tar")}
