"""Converting: compressed tars byte by byte, rows with their images, on from a kill, and sources that are damaged."""

import base64
import bz2
import gzip
import hashlib
import json
import lzma
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.parquet.encryption as encryption
import pytest
import zstandard
from builders.parquets import IMAGE, WRITERS, pairs_table, tar_documents, tar_pairs, write_table
from dataset.said import said_of
from shards import make_image, write_interleaved, write_pairs

from dataserver.dataset import Dataset, DatasetError, build_index
from dataserver.dataset.conversion import convert as convert_module
from dataserver.dataset.conversion import decompression, parquet_samples
from dataserver.dataset.conversion.convert import STATE_FOLDER, ConversionReport, convert
from dataserver.dataset.machine.memory import Memory
from dataserver.dataset.shards.parquet.stored import open_parquet

RNG = np.random.default_rng(3)
COMPRESS = {".gz": gzip.compress, ".zst": zstandard.compress, ".bz2": bz2.compress, ".xz": lzma.compress}


def converted(source: Path, target: Path, shard_bytes: int = 1 << 30) -> ConversionReport:
    return convert(source, target, shard_bytes, workers=1)


def samples_of(folder: Path) -> dict[str, tuple[tuple[int, ...], tuple[str, ...], list[bytes]]]:
    """Parts and images of all samples, by key."""
    build_index(folder, workers=1)
    return {key: (parts.kinds, parts.texts, images) for key, parts, _, images in said_of(Dataset.open(folder))}


@pytest.fixture(scope="module")
def tars(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pairs(tmp_path_factory.mktemp("tars"), 20, 10)


def test_sources_that_are_gone_or_others_of_the_same_time_are_told_and_converted(tmp_path: Path) -> None:
    source, target = tmp_path / "in", tmp_path / "out"
    source.mkdir()
    for name, text in (("a", "one"), ("b", "other")):
        pq.write_table(pa.table({"key": ["k"], "text": [text]}), source / f"{name}.parquet", compression="none")
    assert converted(source, target).left_over == ()
    (source / "b.parquet").unlink()
    path = source / "a.parquet"
    before = path.stat()
    pq.write_table(pa.table({"key": ["k"], "text": ["two"]}), path, compression="none")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    report = converted(source, target)
    assert (report.num_converted, report.left_over) == (1, ("b-00000.tar",))
    build_index(target, workers=1)
    assert [shard.parts(0).texts for shard in Dataset.open(target).shards] == [("two",), ("other",)]


@pytest.mark.parametrize("compression", COMPRESS)
def test_compressed_tars_become_what_they_were(tars: Path, tmp_path: Path, compression: str) -> None:
    source, target = tmp_path / "in", tmp_path / "out"
    (source / "sub").mkdir(parents=True)
    first, second = sorted(tars.glob("*.tar"))
    data = first.read_bytes()
    half = len(data) // 2
    streams = COMPRESS[compression](data[:half]) + COMPRESS[compression](data[half:])  # as `cat` or pigz make them
    (source / f"sub/{first.name}{compression}").write_bytes(streams)
    (source / f"sub/{first.stem}.parquet").write_bytes(first.with_suffix(".parquet").read_bytes())
    (source / second.name).write_bytes(second.read_bytes())
    (source / "notes.txt").write_text("")
    report = converted(source, target)
    assert (report.num_sources, report.num_converted, report.num_tars) == (3, 3, 2)
    assert report.passed_over == ("notes.txt",)
    assert (target / "sub" / first.name).read_bytes() == data
    assert (target / second.name).read_bytes() == second.read_bytes()
    assert len(samples_of(target)) == 20
    assert Dataset.open(target).shards[1].column("punsafe").null_count == 0
    assert converted(source, target).num_converted == 0


@pytest.mark.parametrize("writer", [*WRITERS, "brotli"])
def test_rows_become_samples_with_the_same_bytes(tars: Path, tmp_path: Path, writer: str) -> None:
    source, target = tmp_path / "in", tmp_path / "out"
    for tar in tars.glob("*.tar"):
        options = {"compression": "brotli"} if writer == "brotli" else WRITERS[writer]
        table = pairs_table(tar_pairs(tar), score=np.arange(10.0))
        write_table(source / f"{tar.stem}.parquet", table, "pyarrow", **options)
    report = converted(source, target, shard_bytes=20_000)
    assert (report.num_samples, report.findings) == (20, {})
    assert report.num_tars > 4
    assert samples_of(target) == samples_of(tars)
    assert all(shard.column("score").null_count == 0 for shard in Dataset.open(target).shards)


def test_documents_keep_their_order(tmp_path: Path) -> None:
    folder = write_interleaved(tmp_path / "tars", 8, 8)
    write_table(tmp_path / "in/0.parquet", tar_documents(folder / "00000.tar"))
    converted(tmp_path / "in", tmp_path / "out")
    assert samples_of(tmp_path / "out") == samples_of(folder)


@pytest.mark.parametrize("encoding", ["DELTA_LENGTH_BYTE_ARRAY", "DELTA_BYTE_ARRAY"])
def test_what_index_names_is_converted(tars: Path, tmp_path: Path, encoding: str) -> None:
    table = pairs_table(tar_pairs(tars / "00000.tar"), pa.binary())
    write_table(tmp_path / "in/0.parquet", table, column_encoding={"image": encoding})
    assert build_index(tmp_path / "in", workers=1).findings == {"needs_convert": 10}
    report = converted(tmp_path / "in", tmp_path / "out")
    assert (report.num_samples, report.findings) == (10, {})
    expected = samples_of(tars)
    assert samples_of(tmp_path / "out") == {key: expected[key] for key in table["key"].to_pylist()}


def test_lists_of_texts_stay_and_bytes_that_are_no_images_are_named(tmp_path: Path) -> None:
    lists = pa.array([["a", "b"], None, ["c"]], pa.list_(pa.binary())).cast(pa.list_(pa.string()))
    odd = pa.ListArray.from_arrays([0, 1, 2, 3], pa.array([b"x", b"\xff", b"y"]).view(pa.string()))
    rows = [(str(n), make_image(RNG, 20, 20), "text") for n in range(3)]
    write_table(tmp_path / "in/0.parquet", pairs_table(rows, captions=lists, odd=odd, blob=[b"1", b"2", b"3"]))
    report = converted(tmp_path / "in", tmp_path / "out")
    assert (report.num_samples, report.findings) == (3, {"odd_values": 1, "unusable_column": 1})
    assert [(name, found.detail) for name, found in report.details] == [
        ("0.parquet", "odd: values that are not UTF-8 and are null, in a list of texts"),
        ("0.parquet", "blob: a column of bytes that are no images"),
    ]
    with tarfile.open(tmp_path / "out/0-00000.tar") as tar:
        documents = [json.loads(tar.extractfile(f"{n}.json").read()) for n in range(3)]  # type: ignore[union-attr]
    assert [document.get("captions") for document in documents] == [["a", "b"], None, ["c"]]
    assert [document["odd"] for document in documents] == [["x"], [None], ["y"]]


def test_pages_that_memory_does_not_hold_are_refused(
    tars: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = pairs_table(tar_pairs(tars / "00000.tar"))
    write_table(tmp_path / "in/0.parquet", table, data_page_size=1 << 30, row_group_size=10)
    monkeypatch.setattr(parquet_samples, "MAX_BATCH_BYTES", 1000)
    monkeypatch.setattr(parquet_samples, "usable_memory", lambda: Memory(10_000, "this machine's memory"))
    with pytest.raises(DatasetError, match=r"column image, row group 0: a page of \d+ bytes takes \d+ of memory"):
        converted(tmp_path / "in", tmp_path / "out")
    monkeypatch.setattr(parquet_samples, "usable_memory", lambda: Memory(1 << 30, "this machine's memory"))
    assert converted(tmp_path / "in", tmp_path / "out").num_samples == 10


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_a_page_over_a_gibibyte_is_converted(tmp_path: Path, compression: str) -> None:
    """pyarrow looks at the size of a page once in 1,024 values."""
    jpeg = make_image(RNG, 64, 64)
    images = [jpeg + RNG.bytes(1_200_000) for _ in range(1000)]
    table = pa.table({"image": pa.array(images, pa.large_binary()), "text": ["text"] * 1000})
    path = write_table(tmp_path / "in/0.parquet", table, "pyarrow", use_dictionary=False, compression=compression,
                       row_group_size=1000)  # fmt: skip
    with open_parquet(path) as opened:
        assert opened.column(0, 0).largest_page > 1 << 30
    report = converted(tmp_path / "in", tmp_path / "out", 1 << 28)
    assert (report.num_samples, report.findings) == (1000, {})
    sums = [hashlib.sha256(image).digest() for image in images]
    found = []
    for tar_path in sorted((tmp_path / "out").glob("*.tar")):
        with tarfile.open(tar_path) as tar:
            for one in tar:
                if one.name.endswith(".jpg"):
                    found.append(hashlib.sha256(tar.extractfile(one).read()).digest())  # type: ignore[union-attr]
    assert found == sums


class Kms(encryption.KmsClient):
    """Keys are written as they are."""

    def wrap_key(self, key_bytes: bytes, _: str) -> bytes:
        return base64.b64encode(key_bytes)

    def unwrap_key(self, wrapped_key: bytes, _: str) -> bytes:
        return base64.b64decode(wrapped_key)


@pytest.mark.parametrize("has_plain_footer", [False, True])
def test_encrypted_files_are_named(tmp_path: Path, has_plain_footer: bool) -> None:
    """pyarrow ends the process where it is asked for an encrypted column of a plain footer."""
    keys = encryption.EncryptionConfiguration(
        footer_key="footer", column_keys={"column": ["text"]}, plaintext_footer=has_plain_footer
    )
    factory = encryption.CryptoFactory(lambda _: Kms())
    properties = factory.file_encryption_properties(encryption.KmsConnectionConfig(), keys)
    table = pairs_table([("a", make_image(RNG, 20, 20), "text")])
    write_table(tmp_path / "in/0.parquet", table, encryption_properties=properties)
    assert build_index(tmp_path / "in", workers=1).findings == {"needs_convert": 1}
    with pytest.raises(DatasetError, match=r"0\.parquet: .* is encrypted, and no key can be given; decrypt"):
        converted(tmp_path / "in", tmp_path / "out")


def test_odd_rows_are_counted_and_keep_what_they_have(tmp_path: Path) -> None:
    jpeg = make_image(RNG, 40, 30)
    images = [{"bytes": jpeg, "path": None}, {"bytes": None, "path": "gone.jpg"}, {"bytes": jpeg, "path": None}]
    table = pa.table({"image": pa.array(images, IMAGE), "text": list("abc"), "key": ["a.b/c.d", "e", "e"]})
    write_table(tmp_path / "in/0.parquet", table)
    report = converted(tmp_path / "in", tmp_path / "out")
    assert (report.num_samples, report.findings) == (2, {"duplicate_key": 1, "missing_image": 1})
    with tarfile.open(tmp_path / "out/0-00000.tar") as tar:
        assert tar.getnames() == ["a.b/c_d.jpg", "a.b/c_d.txt", "a.b/c_d.json", "e.txt", "e.json"]


def test_keys_become_names_that_tars_have(tmp_path: Path) -> None:
    jpeg = make_image(RNG, 40, 30)
    keys = ["./a/1", "photos/", "b.1", "b_1", "k" * 1022, "../c", "d"]
    table = pairs_table([(key, jpeg, f"text {n}") for n, key in enumerate(keys)])
    write_table(tmp_path / "in/0.parquet", table)
    report = converted(tmp_path / "in", tmp_path / "out")
    assert report.findings == {"duplicate_key": 1, "unsafe_name": 4}
    assert [*samples_of(tmp_path / "out")] == ["a/1", "photos", "b_1", "000000005", "d"]
    assert report.num_samples == 5


def test_what_no_tar_can_hold_costs_no_other_member(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = make_image(RNG, 20, 20), make_image(RNG, 300, 300)
    monkeypatch.setattr("dataserver.dataset.conversion.tar_samples.MAX_MEMBER_BYTES", len(large) - 1)
    columns = {"left/right": pa.array([None, small], pa.binary()), "line\n": pa.array([None, small], pa.binary())}
    table = pairs_table([("a", large, "text"), ("b", small, "text")], **columns)
    write_table(tmp_path / "in/0.parquet", table)
    report = converted(tmp_path / "in", tmp_path / "out")
    assert (report.num_samples, report.findings) == (2, {"image_too_large": 1, "unsafe_name": 1})
    with tarfile.open(tmp_path / "out/0-00000.tar") as tar:
        assert tar.getnames() == ["a.txt", "a.json", "b.jpg", "b.left_right.jpg", "b.txt", "b.json"]


def test_the_same_source_gives_the_same_bytes(tars: Path, tmp_path: Path) -> None:
    write_table(tmp_path / "in/0.parquet", pairs_table(tar_pairs(tars / "00000.tar")))
    for name in "ab":
        converted(tmp_path / "in", tmp_path / name)
    assert (tmp_path / "a/0-00000.tar").read_bytes() == (tmp_path / "b/0-00000.tar").read_bytes()


def test_a_source_that_changed_is_converted_again_and_leaves_nothing_of_before(tars: Path, tmp_path: Path) -> None:
    rows = tar_pairs(tars / "00000.tar")
    write_table(tmp_path / "in/0.parquet", pairs_table(rows))
    write_table(tmp_path / "in/1.parquet", pairs_table(rows[:2]))
    assert converted(tmp_path / "in", tmp_path / "out", 8192).num_tars > 3
    write_table(tmp_path / "in/0.parquet", pairs_table(rows[:1]))
    report = converted(tmp_path / "in", tmp_path / "out", 8192)
    assert (report.num_converted, report.num_samples) == (1, 3)
    assert [path.name for path in sorted((tmp_path / "out").glob("0-*.tar"))] == ["0-00000.tar"]


def test_tars_of_a_run_that_ended_early_do_not_stay(tars: Path, tmp_path: Path) -> None:
    """It was killed before it noted them, or its source is damaged behind them."""
    rows = tar_pairs(tars / "00000.tar")
    path = write_table(tmp_path / "in/0.parquet", pairs_table(rows))
    converted(tmp_path / "in", tmp_path / "out", 8192)
    assert len(list((tmp_path / "out").glob("0-*.tar"))) > 3
    (tmp_path / "out" / STATE_FOLDER / "0.parquet.json").unlink()
    write_table(path, pairs_table(rows[:1]))
    converted(tmp_path / "in", tmp_path / "out", 8192)
    assert [path.name for path in (tmp_path / "out").glob("0-*.tar")] == ["0-00000.tar"]
    write_table(path, pairs_table(rows), row_group_size=5)
    data = bytearray(path.read_bytes())
    at = data.index(rows[7][1] or b"") - 4
    data[at : at + 4] = b"\xff" * 4
    path.write_bytes(data)
    with pytest.raises(DatasetError, match="cannot be read to its end"):
        converted(tmp_path / "in", tmp_path / "out", 8192)
    assert not list((tmp_path / "out").rglob("*.tar*"))


def test_what_is_killed_goes_on_and_ends_with_the_same_bytes(tmp_path: Path) -> None:
    rows = [(f"{n:04d}", make_image(RNG, 300, 200), "text") for n in range(60)]
    for n in range(40):
        write_table(tmp_path / f"in/{n:02d}.parquet", pairs_table(rows))
    command = [
        sys.executable,
        "-m",
        "dataserver",
        "convert",
        str(tmp_path / "in"),
        str(tmp_path / "out"),
        "--workers",
        "1",
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    notes = tmp_path / "out" / STATE_FOLDER
    while process.poll() is None and len(list(notes.glob("*.parquet.json"))) < 3:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    done = len(list(notes.glob("*.parquet.json")))
    assert 3 <= done < 40
    report = converted(tmp_path / "in", tmp_path / "out")
    assert (report.num_converted, report.num_samples) == (40 - done, 2400)
    converted(tmp_path / "in", tmp_path / "whole")
    names = sorted(path.name for path in (tmp_path / "whole").glob("*.tar"))
    assert sorted(path.name for path in (tmp_path / "out").glob("*.tar")) == names
    for name in names:
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_targets_that_are_not_free_are_refused(tars: Path, tmp_path: Path) -> None:
    source, target = tmp_path / "in", tmp_path / "out"
    write_table(source / "0.parquet", pairs_table(tar_pairs(tars / "00000.tar")))
    target.mkdir()
    (target / "mine").write_text("precious")
    with pytest.raises(DatasetError, match="is not empty"):
        converted(source, target)
    (target / "mine").unlink()
    converted(source, target)
    with pytest.raises(DatasetError, match=r"begun with other options .shard_bytes was '1073741824' and is '4096'"):
        converted(source, target, 4096)
    options = target / ".disttrain-convert" / "options.json"
    options.write_text(json.dumps(json.loads(options.read_text()) | {"version": 1}))  # of before clips and videos came
    with pytest.raises(DatasetError, match=r"a release that converts otherwise .version 1, .*name another target"):
        converted(source, target)
    for inner in (source, source / "sub", tmp_path):
        with pytest.raises(DatasetError, match="lie in each other"):
            converted(source, inner)


def test_sources_that_hold_nothing_or_too_much_are_refused(tars: Path, tmp_path: Path) -> None:
    source = tmp_path / "in"
    source.mkdir()
    with pytest.raises(DatasetError, match="holds no tar"):
        converted(source, tmp_path / "out")
    data = (tars / "00000.tar").read_bytes()
    (source / "0.tar.gz").write_bytes(gzip.compress(data))
    (source / "0.tar").write_bytes(data)
    with pytest.raises(DatasetError, match=r"several files would become 0\.tar"):
        converted(source, tmp_path / "out")
    (source / "0.tar.gz").unlink()
    (source / "0.tar").rename(source / "train-00000.tar")
    (source / "train.jsonl").write_text("")
    with pytest.raises(DatasetError, match=r"rows of train would become train-00000\.tar"):
        converted(source, tmp_path / "out")
    with pytest.raises(DatasetError, match="cannot convert"):
        converted(tmp_path / "gone", tmp_path / "out")


@pytest.mark.parametrize("compression", COMPRESS)
def test_damaged_and_cut_streams_leave_no_tar(tars: Path, tmp_path: Path, compression: str) -> None:
    source, target = tmp_path / "in", tmp_path / "out"
    source.mkdir()
    whole = COMPRESS[compression]((tars / "00000.tar").read_bytes())
    damaged = bytearray(whole)
    damaged[2:6] = b"\xff\xff\xff\xff"
    for data in (
        whole[:-9],
        whole[: len(whole) // 2],
        bytes(damaged),
        b"",
        bytes(9999),
        COMPRESS[compression](b"no tar" * 999),
    ):
        (source / f"0.tar{compression}").write_bytes(data)
        with pytest.raises(DatasetError, match=r"is cut|is damaged|is no compressed tar"):
            converted(source, target)
        assert not list(target.rglob("*.tar*"))
    (source / f"0.tar{compression}").write_bytes(whole + bytes(512))
    assert converted(source, target).num_tars == 1


@pytest.mark.parametrize("compression", COMPRESS)
def test_bombs_are_refused_before_they_fill_the_disk(
    tmp_path: Path, compression: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decompression, "MAX_FREE_BYTES", 1 << 20)
    monkeypatch.setattr(decompression, "MAX_RATIO", 100)
    (tmp_path / "in").mkdir()
    (tmp_path / f"in/0.tar{compression}").write_bytes(COMPRESS[compression](bytes(64 << 20)))
    with pytest.raises(DatasetError, match="more than 100 times as long"):
        converted(tmp_path / "in", tmp_path / "out")


def test_memory_of_a_stream_is_bounded(tars: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The header of an xz stream names a window of any size."""
    monkeypatch.setattr(decompression, "MAX_WINDOW_BYTES", 1 << 20)
    (tmp_path / "in").mkdir()
    (tmp_path / "in/0.tar.xz").write_bytes(lzma.compress((tars / "00000.tar").read_bytes()))
    with pytest.raises(DatasetError, match="needs too much memory"):
        converted(tmp_path / "in", tmp_path / "out")


def test_a_cut_parquet_leaves_no_tar(tars: Path, tmp_path: Path) -> None:
    path = write_table(tmp_path / "in/0.parquet", pairs_table(tar_pairs(tars / "00000.tar")))
    data = bytearray(path.read_bytes())
    data[40:400] = bytes(360)
    for broken in (data[:-20], data):
        path.write_bytes(broken)
        with pytest.raises(DatasetError, match="cannot be read to its end"):
            converted(tmp_path / "in", tmp_path / "out")
        assert not list((tmp_path / "out").rglob("*.tar*"))


def test_a_tar_that_does_not_hold_what_was_written_is_refused(
    tars: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_table(tmp_path / "in/0.parquet", pairs_table(tar_pairs(tars / "00000.tar")))
    monkeypatch.setattr("dataserver.dataset.conversion.tar_writer._sums", lambda _: [])
    with pytest.raises(DatasetError, match="does not hold what was written"):
        converted(tmp_path / "in", tmp_path / "out")
    assert not list((tmp_path / "out").rglob("*.tar*"))


def test_a_note_that_cannot_be_read_is_named(tars: Path, tmp_path: Path) -> None:
    write_table(tmp_path / "in/0.parquet", pairs_table(tar_pairs(tars / "00000.tar")))
    converted(tmp_path / "in", tmp_path / "out")
    note = tmp_path / "out" / convert_module.STATE_FOLDER / "0.parquet.json"
    note.write_text(json.dumps({"etag": 1}))
    with pytest.raises(DatasetError, match=r"0\.parquet\.json cannot be read"):
        converted(tmp_path / "in", tmp_path / "out")


@pytest.mark.parametrize("options", ["{", "7"])
def test_options_that_cannot_be_read_are_named(tars: Path, tmp_path: Path, options: str) -> None:
    write_table(tmp_path / "in/0.parquet", pairs_table(tar_pairs(tars / "00000.tar")))
    converted(tmp_path / "in", tmp_path / "out")
    (tmp_path / "out" / STATE_FOLDER / "options.json").write_text(options)
    with pytest.raises(DatasetError, match=r"options\.json cannot be read"):
        converted(tmp_path / "in", tmp_path / "out")


def test_the_command_says_what_it_did(tars: Path, tmp_path: Path) -> None:
    write_table(tmp_path / "in/0.parquet", pairs_table(tar_pairs(tars / "00000.tar")))
    command = [sys.executable, "-m", "dataserver", "convert", str(tmp_path / "in"), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=True)
    assert "  rows         10 became samples" in done.stdout
    assert done.stdout.endswith(f"dataserver index {tmp_path / 'out'}\n")
    refused = subprocess.run([*command, "--shard-mb", "0"], capture_output=True, text=True, timeout=250, check=False)
    assert refused.returncode == 2
    assert "--shard-mb is 0; give at least 1" in refused.stderr
