"""MDS: files of MosaicML's own writer become tars with the same bytes; what lies or is a program does not."""

import hashlib
import io
import json
import pickle
import shutil
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from dataserver.dataset import Dataset, DatasetError, build_index
from dataserver.dataset.conversion import mds_samples
from dataserver.dataset.conversion.convert import ConversionReport, convert
from dataserver.dataset.conversion.decompression import MADE_BYTES, READ_BYTES, decompressed
from dataserver.dataset.conversion.mds_values import MdsColumn, checked, images_in
from dataserver.dataset.conversion.sources import find_sources
from dataserver.dataset.errors import Findings, SampleError
from dataserver.dataset.shards.modalities import ONLY_IMAGES, served_media

FILES = Path(__file__).with_name("mds_files")
EXPECTED = json.loads((FILES / "expected.json").read_text())
SIZES = "<u4"


def converted(source: Path, target: Path) -> ConversionReport:
    return convert(source, target, workers=1)


def members(folder: Path) -> dict[str, bytes]:
    """All members of all tars, by tar and name."""
    found = {}
    for path in sorted(folder.rglob("*.tar")):
        with tarfile.open(path) as tar:
            found |= {f"{path.relative_to(folder)}/{one.name}": tar.extractfile(one).read() for one in tar}  # type: ignore[union-attr]
    return found


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize("stored", ["plain", "zstd", "gz", "bz2", "br", "snappy"])
def test_samples_keep_their_bytes_and_columns(tmp_path: Path, stored: str) -> None:
    report = converted(FILES / stored, tmp_path)
    assert (report.num_sources, report.num_tars, report.num_samples, report.passed_over) == (3, 3, 5, ())
    assert report.findings == {"unusable_column": 6}
    details = sorted({found.detail.partition(":")[0] for _, found in report.details})
    assert details == ["blob", "embedding"]
    found = members(tmp_path)
    for n, (image, extra) in enumerate(EXPECTED["pairs"]):
        prefix = f"shard.0000{n // 2}-00000.tar/a/{n}_x"
        assert (sha256(found[f"{prefix}.jpg"]), sha256(found[f"{prefix}.extra.png"])) == (image, extra)
        assert found[f"{prefix}.txt"] == f"caption {n} é".encode()
        assert json.loads(found[f"{prefix}.json"]) == {
            "count": str(n), "digits": 10**20 + n, "half": float(n), "meta": {"tags": ["x", n]}, "price": 1.25,
            "ratio": 1.5 * n, "score": n / 4, "width": 40 + n,
        }  # fmt: skip
    assert len(found) == 20
    build_index(tmp_path, workers=1)
    dataset = Dataset.open(tmp_path)
    assert [shard.keys() for shard in dataset.shards] == [["a/0_x", "a/1_x"], ["a/2_x", "a/3_x"], ["a/4_x"]]
    assert sha256(dataset.read(dataset.shards[0].image(1, 0))) == EXPECTED["pairs"][1][0]
    assert dataset.shards[1].column("width").to_pylist() == [42, 43]


def test_a_second_run_leaves_what_is_done_and_the_details_are_the_same(tmp_path: Path) -> None:
    files = find_sources(FILES / "zstd")[0]
    assert pickle.loads(pickle.dumps(files)) == files, "they go to other processes"
    first = converted(FILES / "zstd", tmp_path / "a")
    second = converted(FILES / "zstd", tmp_path / "a")
    assert (second.num_converted, second.details) == (0, first.details)
    converted(FILES / "plain", tmp_path / "b")
    assert members(tmp_path / "a") == members(tmp_path / "b")


def test_splits_lists_and_conversations(tmp_path: Path) -> None:
    report = converted(FILES / "chats", tmp_path)
    assert (report.num_samples, report.findings) == (5, {})
    found = members(tmp_path)
    names = [name for name in found if name.startswith("train")]
    tar = "train/shard.00000-00000.tar"
    assert names == [f"{tar}/{name}" for name in (
        "000000000.json", "000000001.jpg", "000000001.json", "000000002.0.jpg", "000000002.1.jpg", "000000002.json",
    )]  # fmt: skip
    document = json.loads(found[names[-1]])
    assert [name for name in document["images"] if name] == ["000000002.0.jpg", "000000002.1.jpg"]
    assert document["id"] == 2
    photos = [sha256(data) for name, data in found.items() if name.startswith("val") and name.endswith("jpg")]
    assert photos == [photo for sample in EXPECTED["photos"] for photo in sample]


def test_raw_pixels_become_pngs_with_the_same_pixels(tmp_path: Path) -> None:
    report = converted(FILES / "pixels", tmp_path)
    assert (report.num_samples, report.findings) == (6, {"unreadable_header": 2})
    found = members(tmp_path)
    for name in [name for name in found if name.endswith("png")]:
        with Image.open(io.BytesIO(found[name])) as image:
            assert sha256(image.tobytes()) == EXPECTED["pixels"][found[name.replace("png", "txt")].decode()]
    assert sorted(n.partition("tar/")[2] for n in found if n.endswith("png")) == [f"00000000{n}.png" for n in range(4)]


def test_pickles_are_never_looked_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: object) -> None:
        raise AssertionError("a pickle was read")

    for name in ("loads", "load", "Unpickler"):
        monkeypatch.setattr(f"pickle.{name}", run)
    report = converted(FILES / "pickled", tmp_path / "out")
    assert (report.num_samples, report.findings) == (2, {"unusable_column": 1})
    assert "meta: a column of pickles, which are programs and are never run" in report.details[0][1].detail
    source = copied("pickled", tmp_path, lambda shard: shard["column_encodings"].__setitem__(0, "pkl"), both=True)
    report = converted(source, tmp_path / "as_image")
    assert (report.num_samples, report.findings) == (2, {"missing_image": 2, "unusable_column": 1})


def copied(name: str, root: Path, change: Callable[[dict[str, Any]], object], both: bool = False) -> Path:
    """A copy whose index says something else of its first shard; with `both`, the shard says so, too."""
    source = root / f"copy-{len(list(root.iterdir()))}"
    shutil.copytree(FILES / name, source)
    index = json.loads((source / "index.json").read_text())
    before = {key: json.dumps(index["shards"][0][key]) for key in ("column_names", "column_encodings")}
    change(index["shards"][0])
    if both:
        path = source / "shard.00000.mds"
        data = path.read_bytes()
        for key, text in before.items():
            after = json.dumps(index["shards"][0][key])
            data = data.replace(text.encode(), after.ljust(len(text)).encode())
        path.write_bytes(data)
    (source / "index.json").write_text(json.dumps(index))
    return source


LIES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "samples": (lambda shard: shard.update(samples=3), "declares 2 samples, its index 3"),
    "bytes": (lambda shard: shard["raw_data"].update(bytes=10**9), "its index says 1000000000"),
    "sha1": (lambda shard: shard["raw_data"]["hashes"].update(sha1="0" * 40), "its sha1 is not the one in its index"),
    "columns": (lambda shard: shard["column_names"].reverse(), "other columns than its index says"),
    "sizes": (lambda shard: shard["column_sizes"].__setitem__(-1, 4), "int of 4 bytes, 8 expected"),
    "size": (lambda shard: shard["column_sizes"].__setitem__(0, -1), "-1 where a count is required"),
    "version": (lambda shard: shard.update(version=1), "version 1; mds, version 2 is read"),
    "format": (lambda shard: shard.update(format="csv"), "its format is 'csv'"),
    "out": (lambda shard: shard["raw_data"].update(basename="../plain/shard.00000.mds"), "leaves the folder"),
    "root": (lambda shard: shard["raw_data"].update(basename="/etc/passwd"), "leaves the folder"),
    "gone": (lambda shard: shard["raw_data"].update(basename="gone.mds"), "'gone.mds' is not there"),
    "other": (lambda shard: shard["raw_data"].update(basename="index.json"), "'index.json' is not there"),
    "nothing": (lambda shard: shard.clear(), "KeyError"),
    "twice": (lambda shard: shard["column_names"].__setitem__(1, "blob"), "two columns have one name"),
}


@pytest.mark.parametrize("lie", LIES)
def test_an_index_that_lies_is_named_and_nothing_is_written(tmp_path: Path, lie: str) -> None:
    change, message = LIES[lie]
    source = copied("plain", tmp_path, change)
    with pytest.raises(DatasetError, match=message):
        converted(source, tmp_path / "out")
    assert not list((tmp_path / "out").rglob("shard.00000*.tar"))


def first_sizes(data: bytearray) -> int:
    """Where the sizes of the values of the first sample begin."""
    return int.from_bytes(data[4:8], "little")


def write_words(data: bytearray, at: int, *words: int) -> None:
    for n, word in enumerate(words):
        data[at + 4 * n : at + 4 * n + 4] = word.to_bytes(4, "little")


def write_config(data: bytearray, fill: bytes, begin: bytes) -> None:
    """Other columns in the shard, of any length."""
    at = 4 + 4 * (int.from_bytes(data[:4], "little") + 1)
    size = first_sizes(data) - at
    more = 200_000
    data[at : at + size] = begin.ljust(size + more, fill)
    for offset in range(4, at, 4):
        write_words(data, offset, int.from_bytes(data[offset : offset + 4], "little") + more)


DAMAGES: dict[str, tuple[Callable[[bytearray], object], str]] = {
    "count": (lambda data: write_words(data, 0, 0xFFFFFFFF), "declares 4294967295 samples"),
    "first offset": (lambda data: write_words(data, 4, 0), "offsets do not follow each other"),
    "config": (lambda data: write_words(data, 4, 0xFFFFFFF0), "offsets do not follow each other"),
    "order": (lambda data: write_words(data, 8, 1), "offsets do not follow each other"),
    "end": (lambda data: write_words(data, 12, 0xFFFFFFFF), "its samples end at byte 4294967295"),
    "value": (lambda data: write_words(data, first_sizes(data), 0xFFFFFFFF), "its values would take"),
    "cut": (lambda data: data.__delitem__(slice(-5, None)), "it ends 5 bytes before it should"),
    "more": (lambda data: data.extend(b"more"), "more follows its last sample"),
    "empty": (lambda data: data.clear(), "it ends 4 bytes before it should"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_shard_is_named_and_the_others_are_done(tmp_path: Path, damage: str) -> None:
    change, message = DAMAGES[damage]
    source = copied("plain", tmp_path, lambda _: None)
    data = bytearray((source / "shard.00000.mds").read_bytes())
    change(data)
    (source / "shard.00000.mds").write_bytes(data)
    with pytest.raises(DatasetError, match=rf"shard\.00000\.mds.*{message}.*2 of 3 files are done"):
        converted(source, tmp_path / "out")
    names = sorted(path.name for path in (tmp_path / "out").glob("*.tar"))
    assert names == ["shard.00001-00000.tar", "shard.00002-00000.tar"]


@pytest.mark.parametrize(("fill", "begin", "error"), [(b"[", b"", "RecursionError"), (b" ", b"7", "TypeError")])
def test_columns_of_a_shard_that_are_a_trap_are_named(tmp_path: Path, fill: bytes, begin: bytes, error: str) -> None:
    source = copied("plain", tmp_path, lambda shard: shard["raw_data"].update(bytes=3856 + 200_000))
    data = bytearray((source / "shard.00000.mds").read_bytes())
    assert len(data) == 3856
    write_config(data, fill, begin)
    (source / "shard.00000.mds").write_bytes(data)
    with pytest.raises(DatasetError, match=rf"shard\.00000\.mds: its columns cannot be read .{error}"):
        converted(source, tmp_path / "out")


@pytest.mark.parametrize("stored", ["zstd", "gz", "bz2", "br", "snappy"])
def test_a_compressed_shard_that_is_cut_or_damaged_is_named(tmp_path: Path, stored: str) -> None:
    source = copied(stored, tmp_path, lambda _: None)
    path = next(source.glob("shard.00000*"))
    whole = path.read_bytes()
    for broken in (whole[:-30], whole[:600] + b"\xff" * 40 + whole[640:]):
        path.write_bytes(broken)
        with pytest.raises(DatasetError, match=r"shard\.00000\.mds"):
            converted(source, tmp_path / "out")
        assert not list((tmp_path / "out").glob("shard.00000*.tar"))


def test_lists_that_lie_and_samples_that_are_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "in"
    shutil.copytree(FILES / "chats/val", source)
    data = bytearray((source / "shard.00000.mds").read_bytes())
    at = first_sizes(data) + 8
    assert int.from_bytes(data[at : at + 4], "little") == 2
    for count in (1, 3, 0xFFFFFFFF):
        write_words(data, at, count)
        (source / "shard.00000.mds").write_bytes(data)
        with pytest.raises(DatasetError, match=r"'photos': a list of \d+ bytes declares"):
            converted(source, tmp_path / "out")
    monkeypatch.setattr(mds_samples, "MAX_LINE_BYTES", 10)
    report = converted(source, tmp_path / "none")
    assert (report.num_samples, report.findings) == (0, {"image_too_large": 2})


def test_shards_that_no_index_names_and_links_are_refused(tmp_path: Path) -> None:
    source = copied("plain", tmp_path, lambda _: None)
    with pytest.raises(DatasetError, match=r"one shard of an MDS dataset; name its folder"):
        converted(source / "shard.00001.mds", tmp_path / "out")
    index = (source / "index.json").read_text()
    (source / "index.json").unlink()
    with pytest.raises(DatasetError, match=r"shard\.00000\.mds is an MDS shard that no index\.json names"):
        converted(source, tmp_path / "out")
    (source / "index.json").write_text('{"shards": 1}')
    with pytest.raises(DatasetError, match=r"no index\.json names"):
        converted(source, tmp_path / "out")
    (source / "index.json").write_text("{")
    with pytest.raises(DatasetError, match="is no JSON"):
        converted(source, tmp_path / "out")
    (source / "index.json").write_text(index)
    (source / "shard.00000.mds").unlink()
    (source / "shard.00000.mds").symlink_to(FILES / "plain/shard.00000.mds")
    with pytest.raises(DatasetError, match="link that leaves the dataset"):
        converted(source, tmp_path / "out")


def test_a_compression_without_a_reader_is_named(tmp_path: Path) -> None:
    source = copied("zstd", tmp_path, lambda shard: shard.update(compression="lz4"))
    with pytest.raises(DatasetError, match="compressed with 'lz4', which is not read; write it with zstd"):
        converted(source, tmp_path / "out")


def test_index_names_the_format_and_the_command(tmp_path: Path) -> None:
    for stored in ("plain", "snappy"):
        with pytest.raises(DatasetError, match=r"MDS .*dataserver convert SOURCE TARGET"):
            build_index(FILES / stored, index_dir=tmp_path, workers=1)


def test_a_list_of_very_many_empty_images_is_not_taken_apart() -> None:
    column = MdsColumn("photos", "jpeg_array", None)
    for count, number in ((4096, 4096), (4097, 1)):
        found = images_in(column, count.to_bytes(4, "little") + bytes(4 * count), ONLY_IMAGES)
        assert len(found) == number
    assert isinstance(found[0], SampleError)
    assert (found[0].kind, found[0].detail) == ("too_many_members", "column photos: 4097 images, limit 4096")


def test_columns_of_bytes_bring_clips_and_videos() -> None:
    """Those that their names claim to be some, damaged ones too, and those that begin as some."""
    flac, mp4, media = b"fLaC and more", b"\0\0\0\x20ftypisom and more", served_media(audio=True, video=True)
    given: list[tuple[str, str, int | None]] = [("audio", "bytes", None), ("blob", "bytes", None)]
    for served, expected in ((media, [flac, mp4, b"junk", None]), (ONLY_IMAGES, [None] * 4)):
        audio, blob = checked(given, served)
        found = [images_in(audio, flac, served), images_in(blob, mp4, served), images_in(audio, b"junk", served)]
        assert [one for of in (*found, images_in(blob, b"junk", served)) for one in of] == expected
    findings = Findings()
    rows = mds_samples._Rows(checked(given, media), findings, media)
    sizes = b"".join(len(data).to_bytes(4, "little") for data in (flac, mp4))
    (members,) = rows.members(0, sizes + flac + mp4)
    assert list(members) == [
        ("000000000.flac", flac), ("000000000.blob.mp4", mp4), ("000000000.json", b"{}"),
    ]  # fmt: skip


def test_a_column_without_a_name_is_an_entry_like_others() -> None:
    findings = Findings()
    rows = mds_samples._Rows([MdsColumn("", "int", 8), MdsColumn("image", "jpeg", None)], findings, ONLY_IMAGES)
    image = io.BytesIO()
    Image.new("RGB", (8, 8)).save(image, "JPEG")
    sample = len(image.getvalue()).to_bytes(4, "little") + (7).to_bytes(8, "little") + image.getvalue()
    ((*members,),) = rows.members(0, sample)
    assert json.loads(dict(members)["000000000.json"]) == {"": 7}


def stored_blocks(data: bytes) -> bytes:
    """Blocks of DEFLATE with the bytes as they are."""
    cut = [data[at : at + 65535] for at in range(0, len(data), 65535)]
    sizes = [len(block).to_bytes(2, "little") + (len(block) ^ 0xFFFF).to_bytes(2, "little") for block in cut]
    return b"".join(b"\0" + size + block for size, block in zip(sizes, cut, strict=True))


def test_a_stream_goes_on_where_its_pieces_end_together() -> None:
    """A piece of the input that becomes exactly so many whole pieces of the output is not the end."""
    first, rest = bytes(range(256)) * (3 * MADE_BYTES // 256), b"rest" * 1000
    begin = stored_blocks(first)
    comment = b"c" * (READ_BYTES - len(begin) - 11) + b"\0"
    end = zlib.compressobj(wbits=-zlib.MAX_WBITS).flush()
    sums = (zlib.crc32(first + rest).to_bytes(4, "little"), len(first + rest).to_bytes(4, "little"))
    packed = b"\x1f\x8b\x08\x10" + bytes(5) + b"\xff" + comment + begin + stored_blocks(rest) + end + b"".join(sums)
    assert packed[:READ_BYTES].endswith(begin)
    stream = mds_samples._Stream(decompressed(io.BytesIO(packed), ".gz", "a"))
    assert stream.read(len(first)) + stream.read(len(rest)) == first + rest
    stream.check_end()


def test_a_shard_is_converted_again_where_its_index_says_something_else(tmp_path: Path) -> None:
    source = copied("plain", tmp_path, lambda _: None)
    converted(source, tmp_path / "out")
    assert converted(source, tmp_path / "out").num_converted == 0
    index = json.loads((source / "index.json").read_text())
    index["shards"][0]["samples"] = 3
    (source / "index.json").write_text(json.dumps(index))
    with pytest.raises(DatasetError, match="declares 2 samples, its index 3"):
        converted(source, tmp_path / "out")
