"""Folders that Energon prepared: splits, fields, and what such files can have wrong."""

import os
import shlex
from pathlib import Path

import numpy as np
import pytest
from shards import make_image, write_tar

from dataserver.dataset import Dataset, DatasetError, IndexRules, StaleIndexError, build_index, lint

RNG = np.random.default_rng(2)
JPEG, OTHER = make_image(RNG, 40, 30), make_image(RNG, 50, 30)


def prepared(root: Path, split: str, dataset: str = "", shards: int = 4) -> Path:
    for n in range(shards):
        members = [(f"{n}.jpg", JPEG), (f"{n}.seg.jpg", OTHER), (f"{n}.json", b'{"say": "hi", "caption": "c"}')]
        write_tar(root / f"parts/{n:03}.tar", members)
    (root / ".nv-meta").mkdir()
    (root / ".nv-meta/split.yaml").write_text(split)
    (root / ".nv-meta/sample_loader.py").write_text("raise SystemExit('it was run')")
    if dataset:
        (root / ".nv-meta/dataset.yaml").write_text(dataset)
    return root


SPLIT = """
exclude: [parts/001.tar]
split_parts:
  train: ["parts/{000..002}.tar"]
  val:
  - parts/003.tar
  test: []
"""


def names(path: Path) -> list[str]:
    build_index(path, workers=1, rules=IndexRules(allow_duplicates=True))
    return [shard.name for shard in Dataset.open(path).shards]


def test_a_split_is_a_dataset_and_that_of_training_goes_first(tmp_path: Path) -> None:
    root = prepared(tmp_path / "data", SPLIT)
    assert names(root) == ["parts/000.tar", "parts/002.tar"]
    assert names(tmp_path / "data#val") == ["parts/003.tar"]
    found = {(finding.shard, finding.kind) for finding in lint(tmp_path / "data#val").findings}
    found.discard(("parts/003.tar", "extra_image"))
    assert found == {(f"parts/00{n}.tar", "unread_file") for n in range(3)}
    with pytest.raises(DatasetError, match="has no split 'dev'; it has train, val, test: name"):
        Dataset.open(tmp_path / "data#dev")
    with pytest.raises(DatasetError, match=r"the split 'test' of .* has no shards"):
        Dataset.open(tmp_path / "data#test")


def test_messages_name_the_split_that_is_to_be_indexed_again(tmp_path: Path) -> None:
    prepared(tmp_path / "data", SPLIT)
    for named, shard in (("data#val", "parts/003.tar"), ("data", "parts/000.tar"), ("data/parts/001.tar", "001.tar")):
        with pytest.raises(StaleIndexError) as caught:
            Dataset.open(tmp_path / named)
        command = shlex.join(["dataserver", "index", str(tmp_path / named)])
        assert str(caught.value).endswith(f"{shard.rpartition('/')[2]}.index; run: {command}")
        build_index(Path(shlex.split(command)[-1]), workers=1)
        assert Dataset.open(tmp_path / named).shards[0].name == shard


def test_fields_say_which_text_and_which_image_a_sample_has(tmp_path: Path) -> None:
    fields = "sample_type: {__module__: megatron.energon, __class__: CaptioningSample}\nfield_map:\n"
    root = prepared(tmp_path / "data", SPLIT, f"{fields}  image: seg.jpg\n  caption: json[say]\n")
    names(root)
    shard = Dataset.open(root).shards[0]
    assert shard.sizes().image_width.tolist() == [50]
    assert shard.column("caption.energon").to_pylist() == ["hi"]
    plain = prepared(tmp_path / "plain", SPLIT, f"{fields}  image: jpg\n  caption: json[caption]\n")
    names(plain)
    assert Dataset.open(plain).shards[0].parts(0).texts == ("c",)


@pytest.mark.parametrize(
    ("split", "dataset", "message"),
    [
        ("split_parts: [", "", "cannot be read"),
        ("[]", "", "is no mapping"),
        ("split_parts: 3", "", "has no splits"),
        ("split_parts: {train: 3}", "", "has no splits"),
        (
            "split_parts: {train: [parts/009.tar, ../x.tar]}",
            "",
            "has 2 shards that are not there, the first is '../x.tar'",
        ),
        ("split_parts: {train: ['{0..999999999}.tar']}", "", "stands for more than"),
        ("split_parts: {train: ['{0..9}{0..99999}{0..99999}.tar']}", "", "stands for more than"),
        ("split_parts: {train: ['{0..99999}.tar', '{0..999999}.tar']}", "", "stands for more than 948576 files"),
        ("split_parts: {train: ['{9..8}.tar']}", "", r"\{9..8\} counts no files"),
        ("split_parts: {train: [parts/000.tar]}\nexclude: [parts/000.tar/7]", "", "excludes the sample"),
        (SPLIT, "field_map: {image: '../../etc'}", "maps a field to '../../etc'"),
        (SPLIT, "field_map: [image]", "has a field_map that is none"),
        (SPLIT, "a: &a [1]\nb: !!python/object/apply:os.system ['x']", "cannot be read"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, split: str, dataset: str, message: str) -> None:
    root = prepared(tmp_path / "data", split, dataset)
    with pytest.raises(DatasetError, match=message):
        build_index(root, workers=1)


def test_a_folder_whose_own_name_has_the_sign_is_itself(tmp_path: Path) -> None:
    write_tar(tmp_path / "a#b/0.tar", [("0.jpg", JPEG), ("0.txt", b"t")])
    assert names(tmp_path / "a#b") == ["0.tar"]


def test_meta_files_are_bounded_and_lie_in_the_dataset(tmp_path: Path) -> None:
    long = "x" * 1025
    root = prepared(tmp_path / "data", f"split_parts: {{train: [{long}]}}")
    with pytest.raises(DatasetError, match="has more than 1024 characters"):
        names(root)
    split = root / ".nv-meta/split.yaml"
    split.write_text("split_parts: {train: ['{0..700000}-{0..700000}']}")
    with pytest.raises(DatasetError, match="stands for more than"):
        names(root)
    split.unlink()
    os.mkfifo(split)
    with pytest.raises(DatasetError, match="FIFO"):
        names(root)
    split.unlink()
    (tmp_path / "outside.yaml").write_text(SPLIT)
    split.symlink_to(tmp_path / "outside.yaml")
    with pytest.raises(DatasetError, match="leaves the dataset"):
        names(root)
