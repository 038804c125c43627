"""What the Hub's own library writes and reads: the same images and texts as an index of the same files."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders.loose import members_of
from shards import make_image, write_pairs

from dataserver.dataset import Dataset, build_index

datasets = pytest.importorskip("datasets", reason="installed by scripts/setup")

RNG = np.random.default_rng(8)
JPEGS = [make_image(RNG, 40 + n, 30) for n in range(12)]


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    datasets.disable_progress_bars()


def ours(path: Path) -> Iterator[tuple[bytes, str]]:
    report = build_index(path, workers=1)
    assert report.findings == {}
    dataset = Dataset.open(path)
    for shard in dataset.shards:
        for row in range(shard.num_samples):
            yield dataset.read(shard.image(row, 0)), shard.parts(row).texts[0]


def theirs(tmp_path: Path, image: str, text: str, *names: str, **options: Any) -> list[tuple[bytes, str]]:
    found = datasets.load_dataset(*names, split="train", cache_dir=str(tmp_path / "cache"), **options)
    found = found.cast_column(image, datasets.Image(decode=False))
    rows = [(row[image], row[text]) for row in found]
    return [(one["bytes"] or Path(one["path"]).read_bytes(), str(words)) for one, words in rows]


@pytest.mark.parametrize("batch_size", [5, 1000])
def test_parquet_as_the_library_writes_it(tmp_path: Path, batch_size: int) -> None:
    images = [{"bytes": jpeg, "path": f"{n}.jpg"} for n, jpeg in enumerate(JPEGS)]
    table = datasets.Dataset.from_dict(
        {"image": images, "text": [f"text {n}" for n in range(12)]},
        features=datasets.Features({"image": datasets.Image(), "text": datasets.Value("string")}),
    )
    path = tmp_path / "data/train-00000-of-00001.parquet"
    path.parent.mkdir()
    table.to_parquet(path, batch_size=batch_size)
    expected = theirs(tmp_path, "image", "text", "parquet", data_files=str(path))
    assert [one for one, _ in expected] == JPEGS
    assert list(ours(path.parent)) == expected


def test_a_folder_of_images_with_its_metadata(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    lines = []
    for n, jpeg in enumerate(JPEGS):
        (folder / f"{n:02}.jpg").write_bytes(jpeg)
        lines.append(f'{{"file_name": "{n:02}.jpg", "text": "text {n}"}}\n')
    (folder / "metadata.jsonl").write_text("".join(lines))
    expected = theirs(tmp_path, "image", "text", "imagefolder", data_dir=str(folder))
    assert sorted(ours(folder)) == sorted(expected)
    assert len(expected) == 12


def test_tars_of_webdataset(tmp_path: Path) -> None:
    write_pairs(tmp_path / "data", 16, parquet=False)
    (tar,) = (tmp_path / "data").glob("*.tar")
    expected = theirs(tmp_path, "jpg", "txt", "webdataset", data_files=str(tar))
    assert list(ours(tmp_path / "data")) == expected
    assert len(expected) == sum(name.endswith(".jpg") for name in members_of(tar)) == 16
