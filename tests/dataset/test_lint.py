"""Lint and quarantine lists: what is found, what is left out, and that the list's digest is its content's."""

import json
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from shards import make_image, write_interleaved, write_tar

from dataserver.dataset import (
    KINDS,
    Dataset,
    DatasetError,
    IndexRules,
    Quarantine,
    QuarantineError,
    TextOnly,
    build_index,
    compile_filter,
    lint,
)
from dataserver.images import fault_of
from dataserver.outputs import OutputError


def damaged(image: bytes) -> bytes:
    """Cut the end of the pixels and keep the header."""
    return image[: len(image) * 7 // 8]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    images = [make_image(rng, 64, 48, kind) for kind in ("JPEG", "PNG", "WEBP", "JPEG")]
    for shard in range(2):
        members = []
        for i, image in enumerate(images):
            members += [(f"{i}.jpg", damaged(image) if i == shard else image), (f"{i}.txt", b"caption")]
        members += [("8.jpg", b"no image"), ("8.txt", b"x"), ("9.jpg", images[0]), ("3.txt", b"again")]
        write_tar(tmp_path / "data" / f"{shard}.tar", members)
    build_index(tmp_path / "data", workers=1)
    return tmp_path / "data"


INDEXED = [
    (f"{shard}.tar", key, kind)
    for shard in range(2)
    for key, kind in [("8", "unreadable_header"), ("9", "missing_caption"), ("3", "duplicate_key")]
]


def test_without_decoding(folder: Path) -> None:
    report = lint(folder)
    assert [(f.shard, f.key, f.kind) for f in report.findings] == INDEXED
    assert report.counts == {"duplicate_key": 2, "missing_caption": 2, "unreadable_header": 2}
    assert report.num_samples == 8
    assert report.num_unlisted == 0


def test_the_quarantine_list_holds_samples_that_are_left_out_or_invalid(folder: Path, tmp_path: Path) -> None:
    progress: list[tuple[int, int]] = []
    path = tmp_path / "quarantine.jsonl"
    report = lint(folder, None, fault_of, path, lambda *call: progress.append(call))
    assert progress == [(4, 8), (8, 8)]
    assert [(f.shard, f.key) for f in report.findings if f.kind == "undecodable"] == [("0.tar", "0"), ("1.tar", "1")]
    assert report.counts["undecodable"] == 2
    listed = [["0.tar", key] for key in "089"] + [["1.tar", key] for key in "189"]
    assert [json.loads(line) for line in path.read_text().splitlines()] == listed
    dataset = Dataset.open(folder, quarantine=path)
    assert dataset.quarantine is not None
    assert dataset.quarantine.digest == report.quarantine.digest
    shard = dataset.shards[0]
    assert dataset.fingerprint == Dataset.open(folder).fingerprint
    assert shard.keep().tolist() == [True] * 4
    assert shard.keep(quarantine=dataset.quarantine).tolist() == [False, True, True, True]
    kept = shard.keep(compile_filter("width > 100"), dataset.quarantine)
    assert kept.tolist() == [False] * 4


def test_a_quarantine_list_of_another_folder_is_refused(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "list"
    Quarantine.from_samples([("part/0.tar", "0"), ("part/1.tar", "1")]).save(path)
    with pytest.raises(QuarantineError, match=r"2 of the 2 shards .* not in the dataset .* 'part/0.tar' .* '0.tar'"):
        Dataset.open(folder, quarantine=path)
    assert Dataset.open(folder / "0.tar", quarantine=path).quarantine is not None
    Quarantine.from_samples([("0.tar", "1"), ("gone.tar", "1")]).save(path)
    assert Dataset.open(folder, quarantine=path).quarantine is not None
    assert "1 of the 2 shards on the quarantine list" in caplog.text


def test_without_a_quarantine_list_no_samples_are_collected(folder: Path) -> None:
    without, usual = lint(folder, wants_quarantine=False), lint(folder)
    assert usual.quarantine.num_samples > 0
    assert without.quarantine.num_samples == 0
    assert (without.findings, without.counts) == (usual.findings, usual.counts)


def test_what_belongs_to_no_sample_is_listed_and_not_quarantined(tmp_path: Path) -> None:
    write_tar(tmp_path / "d" / "0.tar", [("0.txt", b"x"), ("../1.txt", b"x")])
    (tmp_path / "d" / "0.parquet").write_bytes(b"no parquet")
    build_index(tmp_path / "d", workers=1)
    report = lint(tmp_path / "d", quarantine_file=tmp_path / "list")
    assert [(f.key, f.kind) for f in report.findings] == [("", "unsafe_name"), ("", "bad_sidecar")]
    assert (tmp_path / "list").read_bytes() == b""


@pytest.mark.parametrize("sidecar", ["parquet", "json"])
def test_an_image_that_only_the_sidecar_has_is_counted_and_the_text_served(tmp_path: Path, sidecar: str) -> None:
    """One sample in five lost its image; text-only samples without a size in the sidecar are as they should be."""
    rows = [{"key": str(i), "width": 40 if i != 3 else None, "height": 30 if i != 3 else None} for i in range(5)]
    image = make_image(np.random.default_rng(0), 40, 30)
    members = []
    for row in rows:
        members += [(f"{row['key']}.txt", b"caption")] + [(f"{row['key']}.jpg", image)] * (row["key"] not in "13")
        members += [(f"{row['key']}.json", json.dumps(row).encode())] * (sidecar == "json")
    write_tar(tmp_path / "0.tar", members)
    if sidecar == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "0.parquet")
    report = build_index(tmp_path, workers=1, rules=IndexRules(TextOnly.ALLOW))
    assert (report.num_samples, report.findings) == (5, {"lost_image": 1})
    (finding,) = lint(tmp_path).findings
    assert (finding.key, finding.kind) == ("1", "lost_image")
    assert "40 x 30 pixels" in finding.detail
    assert Dataset.open(tmp_path).shards[0].parts(1).kinds == (0,)


def test_the_documentation_explains_every_kind_under_its_effect() -> None:
    text = (Path(__file__).parents[2] / "docs" / "datasets.md").read_text()
    parts = re.split(r"^(Left out|Served|Invalid|Ignored)\b", text, flags=re.MULTILINE)
    explained = {
        kind: effect.lower()
        for effect, part in zip(parts[1::2], parts[2::2], strict=True)
        for row in re.findall(r"^\|(.*?)\|", part, re.MULTILINE)
        for kind in re.findall(r"`([a-z0-9_]+)`", row)
    }
    assert explained == dict(KINDS)


def test_a_dataset_without_a_usable_sample_can_be_checked(tmp_path: Path) -> None:
    write_tar(tmp_path / "0.tar", [("0.txt", b"")])
    build_index(tmp_path, workers=1)
    with pytest.raises(DatasetError, match="see what is wrong: dataserver lint"):
        Dataset.open(tmp_path)
    assert lint(tmp_path).counts == {"missing_caption": 1}


def test_good_documents_have_no_findings(tmp_path: Path) -> None:
    folder = write_interleaved(tmp_path, 6, 3)
    build_index(folder, workers=1)
    report = lint(folder, judge=fault_of)
    assert (report.findings, report.counts, report.num_samples) == ((), {}, 6)


pairs = st.lists(st.tuples(st.text(max_size=5), st.text(max_size=5)), max_size=8)


@given(pairs)
def test_the_digest_is_that_of_the_content(
    tmp_path_factory: pytest.TempPathFactory, raw: list[tuple[str, str]]
) -> None:
    samples = [(s.encode("utf-8", "replace").decode(), k.encode("utf-8", "replace").decode()) for s, k in raw]
    quarantine = Quarantine.from_samples(samples)
    path = tmp_path_factory.mktemp("quarantine") / "list"
    path.write_text("\n".join(json.dumps(pair) for pair in reversed(samples * 2)))
    assert Quarantine.load(path) == quarantine
    assert Quarantine.load(path).digest == quarantine.digest
    quarantine.save(path)
    assert Quarantine.load(path).digest == quarantine.digest
    assert quarantine.num_samples == len(set(samples))
    assert (
        Quarantine.from_samples(
            [
                *samples,
                (
                    "another",
                    "one",
                ),
            ]
        ).digest
        != quarantine.digest
    )


@pytest.mark.parametrize("line", ["x", "[]", '["a"]', '["a", 1]', '{"a": 1}', "[" * 100_000])
def test_bad_lists_name_the_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "list"
    path.write_text(f'["a", "b"]\n{line}\n')
    with pytest.raises(QuarantineError, match="line 2"):
        Quarantine.load(path)


def test_a_missing_list_and_an_unwritable_one(tmp_path: Path) -> None:
    with pytest.raises(QuarantineError, match="dataserver lint"):
        Quarantine.load(tmp_path / "missing")
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match=r"--quarantine-file \S+ cannot be written \(File exists\); name a file"):
        Quarantine.from_samples([]).save(tmp_path / "file" / "list")
