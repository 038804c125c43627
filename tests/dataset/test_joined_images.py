"""Images in joined tars: they are read where they lie, and only while they are what was indexed."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from builders.parquets import pairs_table, write_table
from shards import make_image, write_tar

from dataserver.dataset import (
    Dataset,
    DatasetError,
    IndexRules,
    SeveralImages,
    ShardReadError,
    StaleIndexError,
    build_index,
    lint,
)
from dataserver.images import fault_of

IMAGES = {(w, h): make_image(np.random.default_rng(w + h), w, h) for w, h in ((32, 32), (48, 32), (32, 48), (64, 16))}
A, B, C, D = IMAGES.values()


def index(folder: Path, *joins: Path, several: SeveralImages = SeveralImages.FIRST) -> Dataset:
    build_index(folder, workers=1, rules=IndexRules(several_images=several, joins=joins))
    return Dataset.open(folder)


def images(dataset: Dataset) -> dict[tuple[str, str], list[bytes]]:
    found = {}
    for shard in dataset.shards:
        offsets = shard.sizes().image_offsets
        for row, key in enumerate(shard.keys()):
            refs = [shard.image(row, i) for i in range(offsets[row + 1] - offsets[row])]
            found[shard.name, key] = dataset.read_all(refs) if refs else []
            assert [IMAGES[r.width, r.height] for r in refs] == found[shard.name, key]
    return found


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Texts in two shards; the images of the same keys lie in a folder beside, in another order, some of them lost."""
    for shard in ("0", "sub/1"):
        write_tar(tmp_path / "texts" / f"{shard}.tar", [(f"{n}.txt", f"text {shard} {n}".encode()) for n in range(3)])
    write_tar(tmp_path / "images" / "0.tar", [("2.jpg", C), ("0.dat", A), ("9.jpg", D), ("1.jpg", b"broken")])
    write_tar(tmp_path / "images" / "sub/1.tar", [("0.png", B)])
    return tmp_path / "texts"


def test_texts_and_images_lie_in_tars_of_their_own(texts: Path) -> None:
    joined = texts.with_name("images")
    dataset = index(texts, joined)
    assert images(dataset) == {("0.tar", "0"): [A], ("0.tar", "2"): [C], ("sub/1.tar", "0"): [B]}
    said = {(f.shard, f.key, f.kind) for f in lint(texts, judge=fault_of).findings}
    assert said == {
        ("0.tar", "1", "unreadable_header"),
        ("0.tar", "", "row_without_sample"),
        ("sub/1.tar", "", "sample_without_row"),
        ("sub/1.tar", "1", "orphan_text"),
        ("sub/1.tar", "2", "orphan_text"),
    }
    reverse = index(joined, texts)
    assert images(reverse) == {("0.tar", "2"): [C], ("0.tar", "0"): [A], ("sub/1.tar", "0"): [B]}


def test_images_of_the_shard_and_of_joined_tars_make_one_sample(tmp_path: Path) -> None:
    document = b'{"texts": [null, "words", null], "images": ["a.depth.png", null, "a.jpg"]}'
    write_tar(tmp_path / "d/0.tar", [("a.jpg", A), ("a.json", document), ("b.jpg", B), ("b.txt", b"b")])
    write_tar(tmp_path / "depth/0.tar", [("a.depth.png", C), ("b.depth.png", D)])
    write_tar(tmp_path / "more/0.tar", [("b.2.jpg", C)])
    joins = tmp_path / "depth", tmp_path / "more"
    assert images(index(tmp_path / "d", *joins)) == {("0.tar", "a"): [C, A], ("0.tar", "b"): [B]}
    assert lint(tmp_path / "d").counts == {"extra_image": 1, "sample_without_row": 1}
    every = index(tmp_path / "d", *joins, several=SeveralImages.ALL)
    assert images(every) == {("0.tar", "a"): [C, A], ("0.tar", "b"): [B, D, C]}, "words before numbers"


def test_images_of_a_join_and_in_compressed_pages_are_told_apart(tmp_path: Path) -> None:
    table = pairs_table([(f"k{n}", image, f"words {n}") for n, image in enumerate((A, B, C))])
    for name, compression in (("packed", "zstd"), ("plain", "none")):
        write_table(tmp_path / name / "0.parquet", table, compression=compression)
        write_tar(tmp_path / "more" / "0.tar", [("k0.png", D), ("k2.png", B)])
        dataset = index(tmp_path / name, tmp_path / "more", several=SeveralImages.ALL)
        shard = ("0.parquet", "k0"), ("0.parquet", "k1"), ("0.parquet", "k2")
        assert images(dataset) == dict(zip(shard, ([A, D], [B], [C, B]), strict=True))


def test_a_fingerprint_covers_the_bytes_of_joined_images(texts: Path) -> None:
    joined = texts.with_name("images")
    before = index(texts, joined)
    path = joined / "sub/1.tar"
    data = bytearray(path.read_bytes())
    at = data.index(B) + len(B) - 40  # behind the header: all that the index holds of the image is the same
    data[at] ^= 1
    path.write_bytes(data)
    assert index(texts, joined).fingerprint != before.fingerprint


def test_a_joined_file_is_served_while_it_is_what_was_indexed(texts: Path) -> None:
    path = texts.with_name("images") / "sub/1.tar"
    index(texts, path.parent.parent)
    ref = Dataset.open(texts).shards[1].image(0, 0)
    data = path.read_bytes()
    os.utime(path, (1, 1))
    dataset = Dataset.open(texts)
    assert dataset.read(ref) == B, "other times, the same content"
    path.with_name("new").write_bytes(data)
    path.with_name("new").rename(path)
    assert dataset.read(ref) == B, "another file, the same content"
    changed = rf"{path}, which is joined to \S+1.tar, has another content .*; run .* --join"
    for other in (data.replace(B, B[::-1]), data[: len(data) // 2], b""):
        path.write_bytes(other)
        for _ in range(2):
            with pytest.raises(StaleIndexError, match=changed):
                dataset.read(ref)
    path.unlink()
    with pytest.raises(ShardReadError, match=rf"cannot read {path}, which is joined: .*No such file"):
        Dataset.open(texts).read(ref)
    path.write_bytes(data)
    assert dataset.read(ref) == B
    (texts / "sub/1.tar.joined").unlink()
    with pytest.raises(StaleIndexError, match=r"has images in other files, and .* does not say where"):
        Dataset.open(texts).read(ref)


def test_two_images_of_one_name_are_refused(texts: Path) -> None:
    write_tar(texts / "0.tar", [("0.jpg", A), ("0.txt", b"a")])
    write_tar(texts.with_name("images") / "0.tar", [("0.jpg", B)])
    with pytest.raises(DatasetError, match=r"bring the same member .jpg of sample '0'"):
        index(texts, texts.with_name("images"))


def test_where_images_lie_is_not_taken_from_the_note_of_another_index(texts: Path) -> None:
    """As after a kill between an index and its note: the note names another folder's files, with their right times."""
    first, second = texts.with_name("images"), texts.with_name("others")
    for folder, image in ((first, A), (second, B)):
        write_tar(folder / "0.tar", [("0.jpg", image)])
    index(texts, first)
    note = texts / "0.tar.joined"
    old = note.read_bytes()
    index(texts, second)
    note.write_bytes(old)
    for _ in range(2):
        with pytest.raises(StaleIndexError, match=r"belongs to another index.*run dataserver index"):
            Dataset.open(texts).read(Dataset.open(texts).shards[0].image(0, 0))
    report = build_index(texts, workers=1, rules=IndexRules(joins=(second,)))
    assert report.num_built == 1
    assert images(Dataset.open(texts))["0.tar", "0"] == [B]


def test_notes_of_the_first_version_are_of_no_known_index(texts: Path) -> None:
    joined = texts.with_name("images")
    fingerprint = index(texts, joined).fingerprint
    for note in texts.rglob("*.joined"):
        note.write_text(json.dumps(json.loads(note.read_text())["files"]))
    with pytest.raises(StaleIndexError, match=r"belongs to another index.*run dataserver index"):
        Dataset.open(texts).read(Dataset.open(texts).shards[0].image(0, 0))
    assert index(texts, joined).fingerprint == fingerprint
    assert images(Dataset.open(texts))["0.tar", "0"] == [A]
