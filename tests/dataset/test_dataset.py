"""Reading an indexed dataset: sizes, parts, columns and image bytes of generated and of real shards."""

import io
import json
import os
import re
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image, ImageOps
from shards import make_image, write_interleaved, write_pairs, write_tar, write_texts

from dataserver.dataset import (
    Dataset,
    DatasetError,
    ImageRef,
    ShardReadError,
    StaleIndexError,
    build_index,
    compile_filter,
    lint,
)
from dataserver.dataset.index.format import BATCH_ROWS
from dataserver.dataset.shards.sidecar_columns import MAX_COLUMNS
from dataserver.images import MAX_IMAGE_BYTES


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_pairs(tmp_path_factory.mktemp("pairs"), 40, 16, formats=("JPEG", "PNG", "WEBP"))
    build_index(folder, workers=1)
    return folder


def test_pairs_hold_what_the_tars_hold(pairs: Path) -> None:
    dataset = Dataset.open(pairs)
    assert [(s.name, s.num_samples) for s in dataset.shards] == [("00000.tar", 16), ("00001.tar", 16), ("00002.tar", 8)]
    for position, shard in enumerate(dataset.shards):
        sizes = shard.sizes()
        sidecar = pq.read_table(pairs / f"{position:05d}.parquet")
        assert shard.keys() == sidecar.column("key").to_pylist()
        assert sizes.text_offsets.tolist() == sizes.image_offsets.tolist() == list(range(shard.num_samples + 1))
        assert sizes.kinds.tolist() == [1, 0] * shard.num_samples
        assert sizes.image_width.tolist() == sidecar.column("width").to_pylist()
        assert sizes.image_height.tolist() == sidecar.column("height").to_pylist()
        with tarfile.open(pairs / shard.name) as tar:
            for row, key in enumerate(shard.keys()):
                text = tar.extractfile(f"{key}.txt").read()
                assert shard.parts(row).texts == (text.decode(),)
                assert sizes.text_bytes[row] == len(text)
                ref = shard.image(row, 0)
                assert dataset.read(ref) == tar.extractfile(f"{key}.jpg").read()
                assert ref.shard == position


def test_dtypes(pairs: Path) -> None:
    sizes = Dataset.open(pairs).shards[0].sizes()
    assert (sizes.text_offsets.dtype, sizes.image_offsets.dtype) == (np.int64, np.int64)
    assert (sizes.image_width.dtype, sizes.image_height.dtype, sizes.text_bytes.dtype) == (np.int32,) * 3


def test_sidecar_columns(pairs: Path) -> None:
    shard = Dataset.open(pairs).shards[0]
    sidecar = pq.read_table(pairs / "00000.parquet")
    assert shard.sidecar_columns == {
        "error_message": "string", "height": "int64", "original_height": "int64", "original_width": "int64",
        "punsafe": "double", "similarity": "double", "status": "string", "url": "string", "width": "int64",
    }  # fmt: skip
    for name in shard.sidecar_columns:
        assert shard.column(name).to_pylist() == sidecar.column(name).to_pylist()
    with pytest.raises(KeyError):
        shard.column("caption")


def test_json_columns_stand_in_for_a_missing_parquet(tmp_path: Path) -> None:
    image = make_image(np.random.default_rng(0), 30, 20)
    rows = [
        {"caption": "a", "exif": "{}", "n": 1, "f": 1, "s": "x", "b": True, "mixed": 1, "big": 1 << 70, "list": [1]},
        {"caption": "b", "n": 2, "f": 1.5, "s": None, "b": False, "mixed": "one", "nan": float("nan")},
        {"caption": "c"},
    ]
    members = [m for i, row in enumerate(rows) for m in ((f"{i}.jpg", image), (f"{i}.json", json.dumps(row).encode()))]
    write_tar(tmp_path / "0.tar", members)
    build_index(tmp_path, workers=1)
    shard = Dataset.open(tmp_path).shards[0]
    assert {name: shard.column(name).to_pylist() for name in shard.sidecar_columns} == {
        "b": [True, False, None],
        "big": [None, None, None],
        "f": [1.0, 1.5, None],
        "mixed": [1, None, None],
        "n": [1, 2, None],
        "nan": [None, None, None],
        "s": ["x", None, None],
    }
    assert shard.keep(compile_filter("width == 30 and n >= 1")).tolist() == [True, True, False]
    assert shard.column("height").to_pylist() == [20, 20, 20]


def test_a_parquet_joins_by_key_and_its_nan_is_null(tmp_path: Path) -> None:
    write_tar(tmp_path / "0.tar", [(f"{i}.txt", b"x") for i in range(3)])
    columns = {
        "key": ["2", "0", "0", "unknown"],
        "score": pa.array([2.0, float("nan"), 9.0, 7.0], pa.float32()),
        "tag": pa.array(["c", "a", "b", "d"]).dictionary_encode(),
        "list": [[1]] * 4,
        "u": pa.array([1] * 4, pa.uint8()),
    }
    pq.write_table(pa.table(columns), tmp_path / "0.parquet")
    build_index(tmp_path, workers=1)
    shard = Dataset.open(tmp_path).shards[0]
    found = {name: shard.column(name).to_pylist() for name in shard.sidecar_columns}
    assert found == {"score": [None, None, 2.0], "tag": ["a", None, "c"], "u": [1, None, 1]}


def test_sidecar_columns_are_bounded(tmp_path: Path) -> None:
    write_tar(
        tmp_path / "0.tar", [("0.txt", b"x"), ("0.json", json.dumps({f"c{i:03d}": i for i in range(300)}).encode())]
    )
    assert build_index(tmp_path, workers=1).findings == {"too_many_columns": 1}
    assert list(Dataset.open(tmp_path).shards[0].sidecar_columns) == [f"c{i:03d}" for i in range(MAX_COLUMNS)]


def test_a_parquet_that_unfolds_without_end(tmp_path: Path) -> None:
    write_tar(tmp_path / "0.tar", [(f"{i}.txt", b"x") for i in range(2000)])
    repeated = pa.DictionaryArray.from_arrays(np.zeros(2000, np.int32), ["x" * (1 << 20)])
    keys = [str(i) for i in range(2000)]
    pq.write_table(pa.table({"key": keys, "text": repeated}), tmp_path / "0.parquet")
    assert (tmp_path / "0.parquet").stat().st_size < 10 << 20
    assert build_index(tmp_path, workers=1).findings == {"unusable_column": 1}


def test_sizes_do_not_read_the_texts(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).bytes(200_000).hex()
    write_tar(tmp_path / "0.tar", [("0.txt", noise.encode())])
    build_index(tmp_path, workers=1)
    index = tmp_path / "0.tar.index"
    content = bytearray(index.read_bytes())
    frames = [match.start() for match in re.finditer(rb"\x04\x22\x4d\x18", content)]  # of LZ4
    largest = max(zip(frames, [*frames[1:], len(content)], strict=True), key=lambda frame: frame[1] - frame[0])
    content[largest[0]] ^= 0xFF
    mtime = index.stat().st_mtime
    index.write_bytes(content)
    os.utime(index, (mtime, mtime))
    shard = Dataset.open(tmp_path).shards[0]
    assert shard.sizes().text_bytes.tolist() == [len(noise)]
    with pytest.raises(StaleIndexError, match="remove it and index again"):
        shard.parts(0)


@pytest.mark.parametrize("kind", ["garbage", "no_key", "key_not_utf8"])
def test_a_bad_sidecar_is_a_finding(tmp_path: Path, kind: str) -> None:
    write_tar(tmp_path / "0.tar", [("0.txt", b"x"), ("0.json", b'{"score": 1}')])
    path = tmp_path / "0.parquet"
    if kind == "garbage":
        path.write_bytes(b"PAR1 garbage PAR1")
    elif kind == "no_key":
        pq.write_table(pa.table({"score": [2]}), path)
    else:
        text = pa.Array.from_buffers(pa.string(), 1, pa.array([b"\xff"], pa.binary()).buffers())
        pq.write_table(pa.table({"key": text, "score": [2]}), path)
    report = build_index(tmp_path, workers=1)
    assert report.findings == {"bad_sidecar": 1}
    assert Dataset.open(tmp_path).shards[0].column("score").to_pylist() == [1]


def test_one_odd_value_leaves_filters_as_they_are(tmp_path: Path) -> None:
    """In .json members and in a parquet; what is not taken is counted, and lint names it."""
    widths: list[object] = [300, 200, "x", 1 << 70]
    members = [(f"{i}.json", json.dumps({"width": width}).encode()) for i, width in enumerate(widths)]
    texts = [(f"{i}.txt", b"x") for i in range(4)]
    write_tar(tmp_path / "0.tar", sorted(members + texts))
    write_tar(tmp_path / "1.tar", texts)
    columns = {
        "key": pa.array(list("0123"), pa.string_view()),
        "width": pa.array([300, 200, None, 1 << 63], pa.uint64()),
        "tags": [["a"]] * 4,
    }
    pq.write_table(pa.table(columns), tmp_path / "1.parquet")
    assert build_index(tmp_path, workers=1).findings == {"odd_values": 2, "unusable_column": 1}
    odd = "width: values that do not fit int64 and are null:"
    found = [(f.shard, f.kind, f.detail) for f in lint(tmp_path).findings if f.kind == "odd_values"]
    assert found == [
        ("0.tar", "odd_values", f"{odd} 2, the first is 'x' of sample 2"),
        ("1.tar", "odd_values", f"{odd} 1, the first is '9223372036854775808' of sample 3"),
    ]
    wide = compile_filter("width >= 256")
    assert [shard.keep(wide).tolist() for shard in Dataset.open(tmp_path).shards] == [[True, False, False, False]] * 2


def test_text_only_rows_of_several_batches(tmp_path: Path) -> None:
    count = 2 * BATCH_ROWS + 3
    folder = write_texts(tmp_path, count, count)
    build_index(folder, workers=1)
    shard = Dataset.open(folder).shards[0]
    with tarfile.open(folder / "00000.tar") as tar:
        expected = [tar.extractfile(info).read().decode() for info in tar]
    assert [shard.parts(row).texts for row in range(count)] == [(text,) for text in expected]
    assert [shard.parts(row).kinds for row in (0, count - 1)] == [(0,), (0,)]
    assert shard.sizes().image_offsets.tolist() == [0] * (count + 1)
    assert shard.keep(compile_filter("width > 0")).sum() == 0
    for row in (-1, count):
        with pytest.raises(IndexError):
            shard.parts(row)
    with pytest.raises(IndexError, match="has 0 images"):
        shard.image(0, 0)


def test_interleaved_documents(tmp_path: Path) -> None:
    folder = write_interleaved(tmp_path, 10, 5)
    build_index(folder, workers=1)
    dataset = Dataset.open(folder)
    for shard in dataset.shards:
        sizes = shard.sizes()
        with tarfile.open(folder / shard.name) as tar:
            for row, key in enumerate(shard.keys()):
                document = json.loads(tar.extractfile(f"{key}.json").read())
                parts = shard.parts(row)
                assert parts.kinds == tuple(int(text is None) for text in document["texts"])
                assert parts.texts == tuple(text for text in document["texts"] if text is not None)
                first = int(sizes.text_offsets[row] + sizes.image_offsets[row])
                assert tuple(sizes.kinds[first : first + len(parts.kinds)]) == parts.kinds
                names = [name for name in document["images"] if name is not None]
                stored = [dataset.read(shard.image(row, i)) for i in range(len(names))]
                assert stored == [tar.extractfile(name).read() for name in names]


def test_a_shard_without_usable_samples_among_others(tmp_path: Path) -> None:
    write_texts(tmp_path, 3, 3)
    write_tar(tmp_path / "00001.tar", [("0.txt", b"")])
    assert build_index(tmp_path, workers=1).findings == {"missing_caption": 1}
    empty = Dataset.open(tmp_path).shards[1]
    assert (empty.num_samples, empty.keys()) == (0, [])
    assert empty.sizes().text_offsets.tolist() == [0]
    assert empty.keep(compile_filter("width > 3")).shape == (0,)
    assert [(o.key, o.kind) for o in empty.findings().details] == [("0", "missing_caption")]


def test_one_shard_is_a_dataset(pairs: Path) -> None:
    assert [s.name for s in Dataset.open(pairs / "00001.tar").shards] == ["00001.tar"]


def test_reads_from_many_threads(pairs: Path) -> None:
    dataset = Dataset.open(pairs)
    jobs = [(shard, row) for shard in dataset.shards for row in range(shard.num_samples)] * 8
    with ThreadPoolExecutor(8) as executor:
        sizes = list(executor.map(lambda job: Image.open(io.BytesIO(dataset.read(job[0].image(job[1], 0)))).size, jobs))
        texts = list(executor.map(lambda job: job[0].parts(job[1]).texts[0], jobs))
    expected = [(int(s.sizes().image_width[r]), int(s.sizes().image_height[r])) for s, r in jobs]
    assert sizes == expected
    assert texts == [s.parts(r).texts[0] for s, r in jobs]


def test_a_cut_shard_is_a_stale_index_and_a_missing_one_is_storage_trouble(tmp_path: Path) -> None:
    folder = write_pairs(tmp_path, 4, 4)
    build_index(folder, workers=1)
    dataset = Dataset.open(folder)
    shard = folder / "00000.tar"
    refs = [dataset.shards[0].image(row, 0) for row in range(4)]
    content = shard.read_bytes()
    assert dataset.read(refs[0]) == content[refs[0].offset : refs[0].offset + refs[0].length]
    with shard.open("r+b") as file:
        file.truncate(refs[2].offset + 10)
    for ref in (refs[2], refs[0]):
        with pytest.raises(StaleIndexError, match=r"has \d+ bytes, its index describes \d+; run dataserver index"):
            dataset.read(ref)
    shard.unlink()
    with pytest.raises(ShardReadError, match="No such file"):
        dataset.read(refs[3])
    shard.write_bytes(content)
    assert dataset.read(refs[3]) == content[refs[3].offset : refs[3].offset + refs[3].length]


@pytest.mark.parametrize("how", ["replaced", "overwritten"])
def test_a_shard_that_changes_while_it_is_open_is_compared_with_its_index(
    tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_pairs(tmp_path, 4, 4)
    build_index(folder, workers=1)
    dataset = Dataset.open(folder)
    refs = [dataset.shards[0].image(row, 0) for row in range(4)]
    path, stat = folder / "00000.tar", (folder / "00000.tar").stat()
    content = path.read_bytes()
    images = [dataset.read(ref) for ref in refs]

    def change(new: bytes) -> None:
        target = folder / "new" if how == "replaced" else path
        with target.open("r+b" if target.exists() else "wb") as file:
            file.write(new)
        os.utime(target, (stat.st_mtime - 3600,) * 2)
        target.replace(path)

    change(content[: refs[0].offset] + bytes(refs[0].length) + content[refs[0].offset + refs[0].length :])
    caplog.clear()
    with ThreadPoolExecutor(4) as executor:
        results = [executor.submit(dataset.read, ref) for ref in refs * 2]
    for result in results:
        with pytest.raises(StaleIndexError, match=r"changed while it was served.*run dataserver index"):
            result.result()
    assert len(caplog.records) == 1, "the content is compared once"
    change(content)
    assert [dataset.read(ref) for ref in refs] == images


def test_an_index_written_anew_is_not_mixed_with_the_open_one(tmp_path: Path) -> None:
    write_tar(tmp_path / "0.tar", [("0.txt", b"first")])
    build_index(tmp_path, workers=1)
    dataset = Dataset.open(tmp_path)
    write_tar(tmp_path / "0.tar", [("0.txt", b"other")])
    (tmp_path / "0.tar.index").unlink()
    build_index(tmp_path, workers=1)
    with pytest.raises(StaleIndexError, match="open it again"):
        dataset.shards[0].parts(0)
    assert Dataset.open(tmp_path).shards[0].parts(0).texts == ("other",)


def test_an_absurd_reference_is_refused_before_allocating(pairs: Path) -> None:
    with pytest.raises(ShardReadError, match="limit"):
        Dataset.open(pairs).read(ImageRef(0, 0, MAX_IMAGE_BYTES + 1, 1, 1, 1))


def test_finding_details_are_bounded_and_counts_exact(tmp_path: Path) -> None:
    count = 6000
    members = [(f"{i:06d}{'k' * 900}.txt", b"") for i in range(count)]
    write_tar(tmp_path / "0.tar", [*members, ("x.txt", b"good")])
    assert build_index(tmp_path, workers=1).findings == {"missing_caption": count}
    report = lint(tmp_path)
    assert report.counts == {"missing_caption": count}
    assert 4000 < len(report.findings) < 5000
    assert report.num_unlisted == count - len(report.findings)


def test_a_missing_index_names_the_command(tmp_path: Path) -> None:
    folder = write_texts(tmp_path, 3, 3)
    with pytest.raises(DatasetError) as caught:
        Dataset.open(folder, tmp_path / "elsewhere")
    assert f"run: dataserver index {folder} --index-dir {tmp_path / 'elsewhere'}" in str(caught.value)


@pytest.fixture(scope="module")
def laion(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    indexes = tmp_path_factory.mktemp("laion")
    report = build_index(shared_data / "laion-mini", indexes, workers=1)
    assert (report.num_shards, report.num_samples, report.findings) == (9, 1760, {"unread_file": 1})
    return Dataset.open(shared_data / "laion-mini", indexes)


def test_laion_mini_counts(laion: Dataset) -> None:
    magics = {"jpeg": 0, "png": 0, "webp": 0}
    rotated = transposed = 0
    for shard in laion.shards:
        sizes = shard.sizes()
        stored = zip(shard.column("width").to_pylist(), shard.column("height").to_pylist(), strict=True)
        for row, size in enumerate(stored):
            ref = shard.image(row, 0)
            image = Image.open(io.BytesIO(laion.read(ref)))
            magics[{"MPO": "jpeg"}.get(image.format, image.format.lower())] += 1
            rotated += ref.orientation != 1
            transposed += size != (ref.width, ref.height)
            assert image.size == size
            assert (sizes.image_width[row], sizes.image_height[row]) == (ref.width, ref.height)
    assert magics == {"jpeg": 1590 + 59 + 18, "png": 12, "webp": 81}
    assert rotated == 1
    assert transposed <= 1


def test_laion_mini_texts_are_the_captions(laion: Dataset, shared_data: Path) -> None:
    for shard in laion.shards:
        table = pq.read_table(shared_data / "laion-mini" / shard.name.replace(".tar", ".parquet"))
        captions = dict(zip(table.column("key").to_pylist(), table.column("caption").to_pylist(), strict=True))
        for row, key in enumerate(shard.keys()):
            assert shard.parts(row).texts == (captions[key],)
        assert set(shard.column("status").to_pylist()) == {"success"}


def test_interleaved_mini(shared_data: Path, tmp_path: Path) -> None:
    folder = shared_data / "interleaved-mini"
    report = build_index(folder, tmp_path, workers=1)
    assert (report.num_shards, report.num_samples, report.findings) == (4, 300, {})
    dataset = Dataset.open(folder, tmp_path)
    assert sum(len(shard.sizes().image_width) for shard in dataset.shards) == 866
    for shard in dataset.shards:
        for row in range(0, shard.num_samples, 10):
            ref = shard.image(row, 0)
            upright = ImageOps.exif_transpose(Image.open(io.BytesIO(dataset.read(ref))))
            assert upright.size == (ref.width, ref.height)
