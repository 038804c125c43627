"""Folders of images and arrays of JSON: converted, they are the same samples as where they were."""

import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
from shards import make_image

from dataserver.cli.convert import convert as convert_command
from dataserver.dataset import Dataset, DatasetError, IndexRules, KeyEnd, build_index
from dataserver.dataset.conversion.convert import convert

RNG = np.random.default_rng(9)
JPEGS = [make_image(RNG, 40 + n, 30) for n in range(4)]


def samples(folder: Path, rules: IndexRules | None = None) -> dict[str, tuple[tuple[str, ...], bytes]]:
    """Texts and first image of each sample, by key without what stands for a name."""
    build_index(folder, workers=1, **({} if rules is None else {"rules": rules}))
    dataset = Dataset.open(folder)
    return {
        key: (shard.parts(row).texts, dataset.read(shard.image(row, 0)))
        for shard in dataset.shards
        for row, key in enumerate(shard.keys())
    }


def write_folder(root: Path) -> Path:
    (root / "sub").mkdir(parents=True)
    for n, name in enumerate(("b", "a.1", "a.2", "sub/c")):
        (root / f"{name}.jpg").write_bytes(JPEGS[n])
        (root / f"{name}.txt").write_text(f"text {name}")
    (root / "b.json").write_text('{"score": 0.5}')
    (root / "a.1.mask.png").write_bytes(b"no image")
    (root / "notes.md").write_text("")
    (root / ".hidden.jpg").write_bytes(JPEGS[0])
    return root


@pytest.mark.parametrize("key", KeyEnd)
def test_a_folder_of_images_is_the_same_samples_in_tars(tmp_path: Path, key: KeyEnd) -> None:
    source, target = write_folder(tmp_path / "in"), tmp_path / "out"
    report = convert(source, target, workers=1)
    assert (report.num_sources, report.num_tars, report.findings) == (2, 2, {})
    assert report.passed_over == ("notes.md",)
    with tarfile.open(target / "images-00000.tar") as tar:
        assert tar.getnames() == [
            "a.1.jpg", "a.1.txt", "a.1.mask.png", "a.2.jpg", "a.2.txt", "b.jpg", "b.json", "b.txt"
        ]  # fmt: skip
    rules = IndexRules(key=key)
    assert samples(source, rules) == samples(target, rules)
    assert len(samples(target, rules)) == (4 if key is KeyEnd.LAST_DOT else 2)  # `a` has no text
    before = {path: path.stat().st_mtime_ns for path in target.rglob("*.tar")}
    assert convert(source, target, workers=1).num_converted == 0
    (source / "b.txt").write_text("another text")
    assert convert(source, target, workers=1).num_converted == 1
    changed = [path.name for path, mtime_ns in before.items() if path.stat().st_mtime_ns != mtime_ns]
    assert changed == ["images-00000.tar"]
    assert samples(target, rules)["b"][0] == ("another text",)


def test_files_that_no_tar_should_have_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "in"
    source.mkdir()
    (tmp_path / "secret.jpg").write_bytes(JPEGS[0])
    (source / "link.jpg").symlink_to(tmp_path / "secret.jpg")
    (source / "line\n.jpg").write_bytes(JPEGS[1])
    (source / "large.jpg").write_bytes(JPEGS[2])
    (source / "long.txt").write_bytes(b"x" * (5 << 20))
    (source / "good.jpg").write_bytes(make_image(RNG, 8, 8))
    monkeypatch.setattr("dataserver.dataset.conversion.loose_samples.MAX_MEMBER_BYTES", len(JPEGS[2]) - 1)
    with pytest.raises(DatasetError, match="link that leaves the dataset"):
        convert(source, tmp_path / "out", workers=1)
    (source / "link.jpg").unlink()
    (source / "link.jpg").symlink_to("good.jpg")
    report = convert(source, tmp_path / "out", workers=1)
    counts = {"image_too_large": 1, "special_member": 1, "text_too_large": 1, "unsafe_name": 1}
    assert (report.num_samples, report.findings) == (1, counts)
    assert {finding.kind: finding.key for _, finding in report.details}["special_member"] == "link"


def test_files_beyond_those_of_one_shard_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_folder(tmp_path / "in")
    monkeypatch.setattr("dataserver.dataset.shards.external.MAX_EXTERNAL", 6)
    report = convert(source, tmp_path / "out", workers=1)
    assert (report.num_sources, report.findings) == (2, {"missing_image": 2})
    assert {finding.detail for _, finding in report.details} == {"beyond the 6 files of one shard; split it"}


def test_an_array_of_json_is_converted_where_it_is_named(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "coco").mkdir()
    for n, jpeg in enumerate(JPEGS):
        (tmp_path / f"coco/{n}.jpg").write_bytes(jpeg)
    rows = [{"image": f"{n}.jpg", "caption": f"text {n}", "score": n} for n in range(4)]
    (tmp_path / "in/llava.json").write_text(json.dumps(rows))
    (tmp_path / "in/lines.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    for name, target in (("llava.json", "a"), ("lines.jsonl", "b")):
        report = convert(tmp_path / "in" / name, tmp_path / target, workers=1, images_root=tmp_path / "coco")
        assert (report.num_samples, report.findings) == (4, {})
    array, lines = ((tmp_path / name).read_bytes() for name in ("a/llava-00000.tar", "b/lines-00000.tar"))
    assert array == lines
    assert [image for _, image in samples(tmp_path / "a").values()] == JPEGS
    convert(tmp_path / "in/lines.jsonl", tmp_path / "c", workers=1)
    with pytest.raises(DatasetError, match=r"other options .images_root was 'None' and is '.*coco'"):
        convert(tmp_path / "in/lines.jsonl", tmp_path / "c", workers=1, images_root=tmp_path / "coco")
    folder = write_folder(tmp_path / "folder")
    report = convert(folder, tmp_path / "e", workers=1, images_root=tmp_path / "coco")
    assert (report.num_samples, report.findings) == (3, {}), "only manifests have paths"
    assert convert(folder, tmp_path / "e", workers=1, images_root=tmp_path / "coco").num_converted == 0
    (tmp_path / "in/llava.json").write_text('[{"image": "0.jpg", "caption": "a"}, ')
    report = convert(tmp_path / "in/llava.json", tmp_path / "d", workers=1, images_root=tmp_path / "coco")
    assert (report.num_samples, report.findings) == (1, {"bad_json": 1})


@pytest.mark.parametrize("limit", ["MAX_SAMPLE_MEMBERS", "MAX_RUN_BYTES"])
def test_frames_that_share_their_first_dot_are_not_held_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    (tmp_path / "in").mkdir()
    for n, jpeg in enumerate(JPEGS):
        (tmp_path / f"in/frame.{n:05d}.jpg").write_bytes(jpeg)
        (tmp_path / f"in/frame.{n:05d}.txt").write_text(f"text {n}")
    assert convert(tmp_path / "in", tmp_path / "whole", shard_bytes=1, workers=1).num_tars == 1
    monkeypatch.setattr(f"dataserver.dataset.conversion.loose_samples.{limit}", 7)
    assert convert(tmp_path / "in", tmp_path / "out", shard_bytes=1, workers=1).num_tars == 4
    with tarfile.open(tmp_path / "out/images-00001.tar") as tar:
        assert tar.getnames() == ["frame.00001.jpg", "frame.00001.txt"]
    rules = IndexRules(key=KeyEnd.LAST_DOT)
    assert samples(tmp_path / "out", rules) == samples(tmp_path / "in", rules)


def test_links_to_folders_are_told_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_folder(tmp_path / "in")
    (source / "more").symlink_to(tmp_path)
    convert_command(source, tmp_path / "out", workers=1)
    said = capsys.readouterr().out
    assert "passed over  1 other files: 'notes.md'\n" in said
    assert "passed over  1 links to folders (convert these folders themselves): 'more/'\n" in said
    (tmp_path / "links").mkdir()
    (tmp_path / "links/more").symlink_to(source)
    with pytest.raises(
        DatasetError, match=r"clip or video \(links to folders are not followed: 'more/'\); name a folder"
    ):
        convert(tmp_path / "links", tmp_path / "none", workers=1)
