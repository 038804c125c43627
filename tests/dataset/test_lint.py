"""Lint and quarantine lists: what is found, what is left out, and that the list's digest is its content's."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from shards import make_image, write_interleaved, write_tar

from dataserver.dataset import Dataset, DatasetError, Quarantine, QuarantineError, build_index, compile_filter, lint


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
    assert report.quarantine.num_samples == 0


def test_decoding_writes_a_quarantine_list(folder: Path, tmp_path: Path) -> None:
    progress: list[tuple[int, int]] = []
    path = tmp_path / "quarantine.jsonl"
    report = lint(folder, decode=True, quarantine_file=path, progress=lambda *call: progress.append(call))
    assert progress == [(4, 8), (8, 8)]
    assert [(f.shard, f.key) for f in report.findings if f.kind == "undecodable"] == [("0.tar", "0"), ("1.tar", "1")]
    assert report.counts["undecodable"] == 2
    assert path.read_text() == '["0.tar", "0"]\n["1.tar", "1"]\n'
    dataset = Dataset.open(folder, quarantine=path)
    assert dataset.quarantine is not None
    assert dataset.quarantine.digest == report.quarantine.digest
    shard = dataset.shards[0]
    assert dataset.fingerprint == Dataset.open(folder).fingerprint
    assert shard.keep().tolist() == [True] * 4
    assert shard.keep(quarantine=dataset.quarantine).tolist() == [False, True, True, True]
    kept = shard.keep(compile_filter("width > 100"), dataset.quarantine)
    assert kept.tolist() == [False] * 4


def test_good_documents_have_no_findings(tmp_path: Path) -> None:
    folder = write_interleaved(tmp_path, 6, 3)
    build_index(folder, workers=1)
    report = lint(folder, decode=True)
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
    with pytest.raises(DatasetError, match="cannot write"):
        Quarantine.from_samples([]).save(tmp_path / "file" / "list")
