"""Manifests: lines that name files below their folder, and all that a line can have wrong."""

import json
from pathlib import Path

import numpy as np
import pytest
from shards import make_image, write_tar

from dataserver.dataset import Dataset, DatasetError, build_index
from dataserver.dataset.conversion.convert import convert

RNG = np.random.default_rng(5)
JPEGS = [make_image(RNG, 50 + n, 40) for n in range(4)]


def folder(root: Path, lines: list[object], name: str = "data.jsonl") -> Path:
    """Images `img/0.jpg` and so on, and a manifest."""
    (root / "in/img").mkdir(parents=True)
    for n, jpeg in enumerate(JPEGS):
        (root / f"in/img/{n}.jpg").write_bytes(jpeg)
    spelled = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    (root / "in" / name).write_text("".join(f"{line}\n" for line in spelled))
    return root / "in"


def test_a_manifest_is_the_tar_of_its_lines(tmp_path: Path) -> None:
    lines = [
        {"image": "img/0.jpg", "text": "zero", "score": 0.5, "id": "x"},
        {"image": ["img/1.jpg"], "caption": "one", "key": "a.b"},
        {"images": ["img/2.jpg", None, "img/3.jpg"], "texts": [None, "between", None], "__key__": "doc"},
        {"file_name": "img/3.jpg", "text": "three", "conversations": [{"from": "human", "value": "hi"}]},
        "",
        {"text": "alone"},
    ]
    report = convert(folder(tmp_path, lines), tmp_path / "out", workers=1)
    assert (report.num_sources, report.num_samples, report.findings) == (1, 5, {})
    document = {"texts": [None, "between", None], "images": ["doc.0.jpg", None, "doc.2.jpg"]}
    members = [
        ("000000000.jpg", JPEGS[0]), ("000000000.txt", b"zero"), ("000000000.json", b'{"score": 0.5}'),
        ("a_b.jpg", JPEGS[1]), ("a_b.txt", b"one"),
        ("doc.0.jpg", JPEGS[2]), ("doc.2.jpg", JPEGS[3]), ("doc.json", json.dumps(document).encode()),
        ("000000003.jpg", JPEGS[3]), ("000000003.txt", b"three"),
        ("000000005.txt", b"alone"),
    ]  # fmt: skip
    write_tar(tmp_path / "tar/0.tar", members)
    build_index(tmp_path / "tar", workers=1)
    build_index(tmp_path / "out", workers=1)
    expected, found = (Dataset.open(tmp_path / name).shards[0] for name in ("tar", "out"))
    assert found.keys() == expected.keys() == ["000000000", "a_b", "doc", "000000003"]
    assert [found.parts(n) for n in range(4)] == [expected.parts(n) for n in range(4)]
    assert found.sizes().image_width.tolist() == expected.sizes().image_width.tolist()
    assert found.column("score").to_pylist() == [0.5, None, None, None]
    assert sorted(found.sidecar_columns) == ["id", "score"]
    assert (found.findings().counts, expected.findings().counts) == ({"orphan_text": 1}, {"orphan_text": 1})


def test_names_never_leave_the_folder_of_the_manifest(tmp_path: Path) -> None:
    (tmp_path / "secret.jpg").write_bytes(JPEGS[0])
    names = [f"{tmp_path}/secret.jpg", "../secret.jpg", "img/../../secret.jpg", "link.jpg", "linked/secret.jpg",
             "http://x/y.jpg", "", "gone.jpg", "img", "img/0.jpg/x", "a" * 5000, "nul\0", 7, "itself.jpg"]  # fmt: skip
    source = folder(tmp_path, [{"image": [name], "text": "words"} for name in names])
    (source / "link.jpg").symlink_to(tmp_path / "secret.jpg")
    (source / "linked").symlink_to(tmp_path)
    (source / "itself.jpg").symlink_to("itself.jpg")
    report = convert(source / "data.jsonl", tmp_path / "out", workers=1)
    assert (report.num_samples, report.findings) == (len(names), {"missing_image": len(names)})
    assert JPEGS[0] not in (tmp_path / "out/data-00000.tar").read_bytes()


def test_all_images_of_a_line_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dataserver.dataset.conversion.manifest_samples.MAX_LINE_BYTES", 3 * len(JPEGS[0]))
    source = folder(tmp_path, [{"images": ["img/0.jpg"] * 5, "text": "words"}, {"image": "img/0.jpg", "text": "words"}])
    report = convert(source, tmp_path / "out", workers=1)
    assert (report.num_samples, report.findings) == (2, {"image_too_large": 2})


def test_lines_that_cannot_be_used_are_counted(tmp_path: Path) -> None:
    long = json.dumps({"text": "x" * (5 << 20)})
    lines = ["{", "[1]", long, {"text": "good", "key": "k"}, {"text": "again", "key": "k"}, '{"text": "\\ud800"}']
    source = folder(tmp_path, lines)
    with (source / "data.jsonl").open("ab") as file:
        file.write(b"\xff\xfe{}\n" + b'{"text": "no newline", "image": "img/1.jpg"}')
    report = convert(source, tmp_path / "out", workers=1)
    assert report.num_samples == 2
    assert report.findings == {"bad_json": 2, "duplicate_key": 1, "not_utf8": 2, "text_too_large": 1}


def test_a_manifest_and_rows_of_one_name_are_refused(tmp_path: Path) -> None:
    source = folder(tmp_path, [{"text": "words"}])
    (source / "data.parquet").write_bytes(b"")
    with pytest.raises(DatasetError, match="several files would become data"):
        convert(source, tmp_path / "out", workers=1)


def test_a_manifest_is_converted_again_when_an_image_came_or_changed(tmp_path: Path) -> None:
    source = folder(tmp_path, [{"image": "img/0.jpg", "text": "a"}, {"image": "img/late.jpg", "text": "b"}])
    assert convert(source, tmp_path / "out", workers=1).findings == {"missing_image": 1}
    [tar] = (tmp_path / "out").glob("*.tar")
    (source / "img/late.jpg").write_bytes(JPEGS[1])
    assert convert(source, tmp_path / "out", workers=1).findings == {}
    assert JPEGS[1] in tar.read_bytes()
    (source / "img/0.jpg").write_bytes(JPEGS[3])
    convert(source, tmp_path / "out", workers=1)
    assert JPEGS[3] in (written := tar.read_bytes())
    before = tar.stat().st_mtime_ns
    convert(source, tmp_path / "out", workers=1)
    assert (tar.stat().st_mtime_ns, tar.read_bytes()) == (before, written)


def test_a_manifest_is_converted_again_when_a_link_out_of_it_became_a_file(tmp_path: Path) -> None:
    source = folder(tmp_path, [{"image": "img/link.jpg", "text": "a"}])
    (tmp_path / "outside.jpg").write_bytes(JPEGS[1])
    (source / "img/link.jpg").symlink_to(tmp_path / "outside.jpg")
    assert convert(source / "data.jsonl", tmp_path / "out", workers=1).findings == {"missing_image": 1}
    (source / "img/link.jpg").unlink()
    (source / "img/link.jpg").write_bytes(JPEGS[2])
    assert convert(source / "data.jsonl", tmp_path / "out", workers=1).findings == {}
