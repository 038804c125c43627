"""Building indexes: what is built when, atomically, through kills; the fingerprint of copies."""

import os
import re
import resource
import select
import shutil
import signal
import subprocess
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shards import write_interleaved, write_pairs, write_tar, write_texts

from dataserver.dataset import Dataset, DatasetError, IndexRules, StaleIndexError, build_index, location
from dataserver.dataset.index import build
from dataserver.dataset.machine.memory import Memory
from dataserver.dataset.shards.listing import ShardFile
from dataserver.dataset.storage.etags import Etag


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*.index"))}


def test_only_what_changed_is_built(tmp_path: Path) -> None:
    folder = write_pairs(tmp_path, 12, 4)
    calls: list[tuple[int, int]] = []
    report = build_index(folder, workers=1, progress=lambda *call: calls.append(call))
    total = sum(p.stat().st_size for p in folder.glob("*.tar"))
    assert (report.num_shards, report.num_built, report.num_samples, report.num_bytes) == (3, 3, 12, total)
    assert calls[0] == (0, total)
    assert calls[-1] == (total, total)
    assert build_index(folder, workers=1).num_built == 0
    before = contents(folder)
    shard = folder / "00001.tar"
    shard.write_bytes(shard.read_bytes().replace(b"bigdata", b"bigDATA"))
    with pytest.raises(StaleIndexError, match=r"describes another content of 00001\.tar; run: dataserver index"):
        Dataset.open(folder)
    assert build_index(folder, workers=1).num_built == 1
    assert build_index(folder, workers=1).num_built == 0
    after = contents(folder)
    assert [name for name in before if before[name] != after[name]] == ["00001.tar.index"]


def replace_unseen(path: Path, content: bytes) -> None:
    """Replace a file by one of the same size and an older modification time, as a copy that keeps times does."""
    assert path.stat().st_size == len(content)
    other = path.with_name("other")
    other.write_bytes(content)
    os.utime(other, (path.stat().st_mtime - 3600,) * 2)
    other.replace(path)


def test_a_file_replaced_by_one_of_the_same_size_and_an_older_time_is_noticed(tmp_path: Path) -> None:
    folder = write_pairs(tmp_path, 4, 4)
    build_index(folder, workers=1)
    for name, old, new in (("00000.tar", b"bigdata", b"BIGDATA"), ("00000.parquet", b"synthetic/", b"SYNTHETIC/")):
        path = folder / name
        original = path.read_bytes()
        replace_unseen(path, original.replace(old, new))
        assert path.read_bytes() != original
        with pytest.raises(StaleIndexError, match=f"another content of {name}; run: dataserver index"):
            Dataset.open(folder)
        replace_unseen(path, original)
        Dataset.open(folder)


@pytest.mark.parametrize("name", ["00001.tar", "00001.parquet"])
def test_what_was_touched_is_compared_once_and_not_refused(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    folder = write_pairs(tmp_path, 8, 4)
    build_index(folder, workers=1)
    Dataset.open(folder)
    assert not caplog.records
    (folder / name).touch()
    for _ in range(2):
        caplog.clear()
        Dataset.open(folder)
        assert [record.args[0].name for record in caplog.records] == ["00001.tar"]
        assert f"dataserver index {folder} does so once" in caplog.text
    assert build_index(folder, workers=1).num_built == 0
    caplog.clear()
    Dataset.open(folder)
    assert build_index(folder, workers=1).num_built == 0
    assert not caplog.records


def test_a_changed_or_new_sidecar_makes_an_index_stale(tmp_path: Path) -> None:
    folder = write_pairs(tmp_path, 4, 4, parquet=False)
    build_index(folder, workers=1)
    first = Dataset.open(folder)
    pq.write_table(pa.table({"key": first.shards[0].keys(), "score": [1, 2, 3, 4]}), folder / "00000.parquet")
    with pytest.raises(StaleIndexError, match=r"00000\.parquet"):
        Dataset.open(folder)
    build_index(folder, workers=1)
    second = Dataset.open(folder)
    assert second.shards[0].column("score").to_pylist() == [1, 2, 3, 4]
    assert second.fingerprint != first.fingerprint


def test_processes_give_the_bytes_that_one_gives(tmp_path: Path) -> None:
    folder = write_pairs(tmp_path / "data", 24, 4)
    shutil.copytree(write_texts(tmp_path / "texts", 6, 3), folder / "nested")
    build_index(folder, tmp_path / "one", workers=1)
    report = build_index(folder, tmp_path / "two", workers=2)
    assert (report.num_shards, report.num_built) == (8, 8)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    assert "nested/00001.tar.index" in contents(tmp_path / "two")
    assert not list(folder.rglob("*.index"))


def test_a_copy_elsewhere_has_the_same_fingerprint(tmp_path: Path) -> None:
    folder = write_interleaved(tmp_path / "here", 9, 3)
    build_index(folder, workers=1)
    original = Dataset.open(folder).fingerprint
    copy = shutil.copytree(folder, tmp_path / "there", ignore=shutil.ignore_patterns("*.index"))
    build_index(copy, tmp_path / "indexes", workers=1)
    assert Dataset.open(copy, tmp_path / "indexes").fingerprint == original
    (copy / "00002.tar").rename(copy / "00003.tar")
    build_index(copy, workers=1)
    assert Dataset.open(copy).fingerprint != original


def test_the_fingerprint_covers_bytes_that_no_sample_shows(tmp_path: Path) -> None:
    fingerprints = set()
    for filler in (b"a", b"b"):
        write_tar(tmp_path / "0.tar", [("0.txt", b"x"), ("README", filler)])
        build_index(tmp_path, workers=1)
        fingerprints.add(Dataset.open(tmp_path).fingerprint)
        (tmp_path / "0.tar.index").unlink()
    assert len(fingerprints) == 2


INTERRUPTED = """
import multiprocessing, os, signal, sys
from pathlib import Path
from dataserver.dataset import build_index
from dataserver.dataset.index import indexing

index_shard = indexing.index_shard

def index_or_hang(shard, *rules):
    if shard.name.startswith("00001") or shard.name >= "00020":
        signal.pause()  # storage that never answers: however late the signals come, one is in hand, and some are left
    index_shard(shard, *rules)

indexing.index_shard = index_or_hang  # in the workers too, which import this file

def progress(done, total):
    if done:
        print(*(child.pid for child in multiprocessing.active_children()), flush=True)
        if sys.argv[2] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if sys.argv[2] == "interrupt alone":
            os.kill(os.getpid(), signal.SIGINT)
        else:
            os.killpg(0, signal.SIGINT)  # what Ctrl-C does

if __name__ == "__main__":
    try:
        build_index(Path(sys.argv[1]), workers=2, progress=progress)
    except KeyboardInterrupt:
        sys.exit(130)
"""


def wait_for_exit(pid: int, timeout_s: float) -> bool:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    ended, _, _ = select.select([descriptor], [], [], timeout_s)
    os.close(descriptor)
    return bool(ended)


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ("kill", -signal.SIGKILL),
        ("interrupt", 130),
        pytest.param("interrupt alone", 130, marks=pytest.mark.long),
    ],
)
def test_an_interrupted_build_continues_and_leaves_no_process(tmp_path: Path, how: str, code: int) -> None:
    folder = tmp_path / "data"
    for shard in range(24):
        write_tar(folder / f"{shard:05d}.tar", [("0.txt", f"text {shard}".encode())])
    script = tmp_path / "interrupted.py"
    script.write_text(INTERRUPTED)
    ended = subprocess.run(
        [sys.executable, script, folder, how], capture_output=True, text=True, timeout=60, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, start_new_session=True,
    )  # fmt: skip
    assert ended.returncode == code
    assert "Traceback" not in ended.stderr
    workers = [int(pid) for pid in ended.stdout.split()]
    assert len(workers) == 2
    assert all(wait_for_exit(pid, 20) for pid in workers)
    survived = contents(folder)
    assert 0 < len(survived) < 24
    report = build_index(folder, workers=1)
    assert report.num_built == 24 - len(survived)
    assert contents(folder).items() >= survived.items()
    assert report.num_samples == 24
    build_index(folder, tmp_path / "undisturbed", workers=1)
    assert contents(folder) == contents(tmp_path / "undisturbed")


def test_old_temporary_files_are_swept(tmp_path: Path) -> None:
    folder = write_texts(tmp_path, 3, 3)
    old, young = folder / ".00000.tar.index.old.disttrain-tmp", folder / ".00000.tar.index.young.disttrain-tmp"
    old.touch()
    young.touch()
    os.utime(old, (0, 0))
    build_index(folder, workers=1)
    assert not old.exists()
    assert young.exists()
    assert [p.name for p in folder.iterdir() if p.name.endswith("-tmp")] == [young.name]


def test_a_damaged_index_is_stale_and_built_again(tmp_path: Path) -> None:
    folder = write_texts(tmp_path, 3, 3)
    build_index(folder, workers=1)
    index = folder / "00000.tar.index"
    content = index.read_bytes()
    for damaged in (b"", content[:100], content[: len(content) // 2], b"x" * len(content)):
        index.write_bytes(damaged)
        with pytest.raises(StaleIndexError, match="run: dataserver index"):
            Dataset.open(folder)
        assert build_index(folder, workers=1).num_built == 1
        assert index.read_bytes() == content


def test_an_index_of_another_format_is_stale(tmp_path: Path) -> None:
    folder = write_texts(tmp_path, 3, 3)
    build_index(folder, workers=1)
    index = folder / "00000.tar.index"
    table = pa.ipc.open_file(index.read_bytes()).read_all()
    header = table.schema.metadata[b"disttrain.header"].replace(b'"format_version":3', b'"format_version":999')
    table = table.replace_schema_metadata({b"disttrain.header": header})
    with pa.ipc.new_file(str(index), table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(StaleIndexError, match="format version 999"):
        Dataset.open(folder)
    assert build_index(folder, workers=1).num_built == 1


@pytest.mark.parametrize("name", ["missing", "empty", "file.txt"])
def test_no_shards(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.txt").touch()
    for use in (build_index, Dataset.open):
        with pytest.raises(DatasetError, match=r"name a folder"):
            use(tmp_path / name)


def test_shards_behind_links_that_leave_the_folder(tmp_path: Path) -> None:
    write_texts(tmp_path / "outside", 3, 3)
    folder = write_texts(tmp_path / "data", 3, 3)
    (folder / "alias.tar").symlink_to("00000.tar")
    assert build_index(folder, workers=1, rules=IndexRules(allow_duplicates=True)).num_shards == 2
    (folder / "00001.tar").symlink_to(tmp_path / "outside" / "00000.tar")
    with pytest.raises(DatasetError, match=r"00001\.tar is a link that leaves"):
        build_index(folder, workers=1)
    (folder / "00001.tar").unlink()
    (folder / "00001.tar").symlink_to("nowhere.tar")
    with pytest.raises(DatasetError, match=r"00001\.tar is not a regular file"):
        build_index(folder, workers=1)


def test_an_index_folder_that_cannot_be_made(tmp_path: Path) -> None:
    folder = write_texts(tmp_path / "data", 3, 3)
    (tmp_path / "file").touch()
    for workers in (1, 2):
        with pytest.raises(DatasetError, match="--index-dir"):
            build_index(folder, tmp_path / "file" / "indexes", workers=workers)
    with pytest.raises(DatasetError, match="at least 1"):
        build_index(folder, workers=0)


def test_an_empty_tar_and_a_file_that_is_no_tar(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w"):
        pass
    (tmp_path / "b.tar").write_bytes(b"this is not a tar" * 100)
    (tmp_path / "c.tar").touch()
    report = build_index(tmp_path, workers=1)
    assert (report.num_shards, report.num_samples) == (3, 0)
    assert report.findings == {"corrupt_tar": 1, "cut_tar": 1}
    with pytest.raises(DatasetError, match="no usable sample"):
        Dataset.open(tmp_path)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_damaged_shards_index_without_an_error(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = write_pairs(tmp_path_factory.mktemp("damaged"), 3, 3, median_size=24)
    for file in (folder / "00000.tar", folder / "00000.parquet"):
        content = bytearray(file.read_bytes())
        for _ in range(data.draw(st.integers(0, 8))):
            content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
        file.write_bytes(content[: data.draw(st.integers(0, len(content)) | st.just(len(content)))])
    report = build_index(folder, workers=1)
    assert report.num_samples <= 3
    assert report.num_samples == 3 or report.findings
    if report.num_samples:
        shard = Dataset.open(folder).shards[0]
        assert len(shard.keys()) == len(shard.sizes().image_width) == report.num_samples


def test_an_index_folder_on_a_full_disk_is_named_and_nothing_half_is_left(tmp_path: Path) -> None:
    """As on a disk that is full: no file may grow beyond 3,000 bytes, which is too little for one of two shards."""
    write_texts(tmp_path / "data", 3, 3)
    write_texts(tmp_path / "data" / "large", 600, 600, seed=1)
    command = [sys.executable, "-m", "dataserver", "index", tmp_path / "data", "--index-dir", tmp_path / "index"]

    def full() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000))

    for workers in ("1", "2"):
        ran = subprocess.run(
            [*command, "--workers", workers],
            preexec_fn=full,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},  # files that are cut would stay
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert ran.returncode != 0
        assert "Traceback" not in ran.stderr, ran.stderr
        assert re.search(r"cannot write .*large/00000\.tar\.index: .*File too large", ran.stderr), ran.stderr
        assert "make the folder writable and the disk large enough" in ran.stderr
        left = sorted(p.name for p in (tmp_path / "index").rglob("*") if p.is_file())
        assert left == ["00000.tar.index", "00000.tar.known", "00000.tar.numeric"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    assert "shards       2 (1 indexed now)" in ran.stdout


@pytest.mark.parametrize(
    ("root", "name", "number"),
    [
        (location("s3://bucket/d"), "a.parquet", 3),
        (location("s3://bucket/d"), "a.tar", 11),
        (Path("/data"), "a.parquet", 11),
    ],
)
def test_processes_are_as_many_as_there_is_memory_for_what_they_hold(
    monkeypatch: pytest.MonkeyPatch, root: Path, name: str, number: int
) -> None:
    """Of Parquet in a store each holds blocks, 256 MiB of them."""
    monkeypatch.setattr(build, "usable_memory", lambda: Memory(2 << 30, "this machine's memory"))
    monkeypatch.setattr(build, "usable_cores", lambda: 64)
    shard = ShardFile(name, root, None, listed=(Etag(0, 0, 1, 0, 0), None))
    joins: Any = SimpleNamespace(table_state=tuple)
    assert build._Run([shard], joins, None, None, None, None, None)._workers == number
    assert build._Run([shard], joins, 7, None, None, None, None)._workers == 7
