"""Lance datasets, read by Lance's own reader: long, since pylance takes 220 MB and is no part of the setup."""

import io
import json
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from builders.parquets import IMAGE
from PIL import Image
from shards import make_image

from dataserver.dataset import Dataset, DatasetError, build_index
from dataserver.dataset.conversion import lance_samples
from dataserver.dataset.conversion.convert import convert
from dataserver.dataset.conversion.sources import find_sources

RNG = np.random.default_rng(4)
JPEGS = [make_image(RNG, 40 + n, 30) for n in range(10)]


def lance() -> Any:
    return pytest.importorskip("lance", reason="pip install '.[lance]'")


def table(images: pa.Array) -> pa.Table:
    columns = {"key": [f"k.{n}" for n in range(10)], "image": images, "text": [f"text {n}" for n in range(10)]}
    return pa.table({**columns, "score": np.arange(10) / 2, "captions": [["a", "b"]] * 10})


def images_in(folder: Path) -> dict[str, bytes]:
    found = {}
    for path in sorted(folder.rglob("*.tar")):
        with tarfile.open(path) as tar:
            found |= {one.name: tar.extractfile(one).read() for one in tar if one.name.endswith(".jpg")}  # type: ignore[union-attr]
    return found


def test_without_the_package_a_lance_dataset_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "in/p.lance/_versions").mkdir(parents=True)
    (tmp_path / "in/p.lance/data").mkdir()
    (tmp_path / "in/p.lance/_versions/1.manifest").write_bytes(b"")
    (tmp_path / "in/p.lance/data/0.lance").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "lance", None)
    with pytest.raises(DatasetError, match=r"pip install '\.\[lance\]'"):
        convert(tmp_path / "in", tmp_path / "out", workers=1)
    for path in (tmp_path / "in", tmp_path / "in/p.lance"):
        with pytest.raises(DatasetError, match=r"Lance .*dataserver convert SOURCE TARGET"):
            build_index(path, workers=1)


def test_what_lies_beside_a_lance_dataset_is_converted_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "p.lance"
    for name in ("_versions/1.manifest", "data/0.lance", "_transactions/0.txn", "more/0.tar", "notes.txt"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"")
    monkeypatch.setattr(lance_samples, "lance_fragments", lambda *_: [("_versions/1.manifest", 0, "{}", 1)])
    monkeypatch.chdir(root)
    for source in (root, Path()):
        files, passed_over = find_sources(source)
        assert [(file.name, file.stem) for file in files] == [
            ("_versions/1.manifest", "p-00000"),
            ("more/0.tar", "more/0"),
        ]
        assert passed_over == ("notes.txt",)


@pytest.mark.long
def test_rows_of_all_fragments_become_samples(tmp_path: Path) -> None:
    kinds = {
        "bytes": pa.array(JPEGS, pa.large_binary()),
        "struct": pa.array([{"bytes": jpeg, "path": "x.jpg"} for jpeg in JPEGS], IMAGE),
        "list": pa.array([[jpeg] for jpeg in JPEGS], pa.list_(pa.binary())),
    }
    for name, images in kinds.items():
        lance().write_dataset(table(images), str(tmp_path / f"in/{name}.lance"), max_rows_per_file=4)
        dataset = lance().dataset(str(tmp_path / f"in/{name}.lance"))
        dataset.delete("key = 'k.3'")
    report = convert(tmp_path / "in", tmp_path / "out", workers=2)
    assert (report.num_sources, report.num_tars, report.num_samples, report.findings) == (9, 9, 27, {})
    assert report.passed_over == ()
    expected = {f"k_{n}.jpg": jpeg for n, jpeg in enumerate(JPEGS) if n != 3}
    for name in kinds:
        convert(tmp_path / f"in/{name}.lance", tmp_path / name, workers=1)
        assert images_in(tmp_path / name) == expected, name
        assert sorted(path.name for path in (tmp_path / name).glob("*.tar")) == [
            f"{name}-0000{n}-00000.tar" for n in range(3)
        ]
    build_index(tmp_path / "bytes", workers=1)
    shard = Dataset.open(tmp_path / "bytes").shards[0]
    assert shard.keys() == ["k_0", "k_1", "k_2"]
    assert shard.column("score").to_pylist() == [0.0, 0.5, 1.0]
    with tarfile.open(tmp_path / "out/bytes-00000-00000.tar") as tar:
        assert json.loads(tar.extractfile("k_1.json").read())["captions"] == ["a", "b"]  # type: ignore[union-attr]
    assert convert(tmp_path / "in", tmp_path / "out", workers=1).num_converted == 0
    lance().dataset(str(tmp_path / "in/list.lance")).delete("key = 'k.5'")
    with pytest.raises(DatasetError, match="was begun with other options"):
        convert(tmp_path / "in", tmp_path / "out", workers=1)


@pytest.mark.long
def test_blobs_are_read_whole(tmp_path: Path) -> None:
    blob = lance().blob
    schema = pa.schema([blob.blob_field("image"), pa.field("text", pa.string())])
    columns = {"image": blob.blob_array(JPEGS), "text": [f"text {n}" for n in range(10)]}
    lance().write_dataset(pa.table(columns, schema=schema), str(tmp_path / "b.lance"), data_storage_version="2.2")
    report = convert(tmp_path / "b.lance", tmp_path / "out", workers=1)
    assert (report.num_samples, report.findings) == (10, {})
    assert [*images_in(tmp_path / "out").values()] == JPEGS


@pytest.mark.long
def test_damaged_lance_files_are_named(tmp_path: Path) -> None:
    pixels = np.random.default_rng(1).integers(0, 255, (300, 300, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG")
    images = pa.array([buffer.getvalue()] * 10, pa.large_binary())
    lance().write_dataset(table(images), str(tmp_path / "in/d.lance"), max_rows_per_file=5)
    for path in sorted((tmp_path / "in/d.lance/data").iterdir()):
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
        with pytest.raises(DatasetError, match=r"d\.lance, fragment \d: cannot be read to its end"):
            convert(tmp_path / "in", tmp_path / path.stem, workers=1)
        path.write_bytes(whole)
    next((tmp_path / "in/d.lance/_versions").glob("*.manifest")).write_bytes(b"no manifest")
    with pytest.raises(DatasetError, match="cannot be opened as a Lance dataset"):
        convert(tmp_path / "in", tmp_path / "out", workers=1)
