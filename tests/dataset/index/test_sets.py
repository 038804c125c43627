"""A dataset that grew still has the set of shards that a job was made with; other rules need no new hashes."""

import json
import shutil
import tracemalloc
from pathlib import Path

import pytest
from shards import write_pairs, write_tar, write_texts

from dataserver.assembly import load_tokenizer
from dataserver.dataset import Dataset, IndexRules, OnTokenError, TextOnly, TruncatedImages, build_index, count_tokens
from dataserver.dataset.index import rules as rules_module
from dataserver.dataset.index.sets import SETS_NAME
from dataserver.dataset.shards import hashing

BYTES = load_tokenizer("bytes")


class NoHash:
    """Stands for `hashlib`, whose hashes take no bytes."""

    @staticmethod
    def sha256() -> "NoHash":
        return NoHash()

    def update(self, _: bytes) -> None:
        pytest.fail("a shard is hashed")


def index(folder: Path, rules: IndexRules = IndexRules()) -> str:  # noqa: B008  it is frozen
    build_index(folder, workers=1, rules=rules)
    count_tokens(folder, BYTES)
    return Dataset.open(folder).fingerprint


def grow(folder: Path, name: str, text: bytes = b"new") -> None:
    write_tar(folder / name, [("k.txt", text)])


def names(dataset: Dataset | None) -> list[str]:
    return [] if dataset is None else [shard.name for shard in dataset.shards]


def test_each_set_that_a_dataset_had_is_opened_by_its_fingerprint(tmp_path: Path) -> None:
    folder = write_texts(tmp_path, 6, 3)
    first = index(folder)
    grow(folder, "00000-a.tar")  # between those that were there
    second = index(folder)
    grow(folder, "zz.tar", b"newer")
    third = index(folder)
    assert index(folder) == third
    dataset = Dataset.open(folder)
    assert [(one.fingerprint, len(one.names)) for one in dataset.earlier_sets()] == [(first, 2), (second, 3)]
    old = dataset.as_it_was(first)
    assert names(old) == ["00000.tar", "00001.tar"]
    assert old is not None
    assert old.fingerprint == first
    assert [old.document(1, row, BYTES.digest).texts[0].tolist() for row in range(3)] == [
        dataset.document(2, row, BYTES.digest).texts[0].tolist() for row in range(3)
    ]
    assert dataset.as_it_was(first) is old
    assert names(dataset.as_it_was(second)) == ["00000-a.tar", "00000.tar", "00001.tar"]
    assert dataset.as_it_was(third) is dataset
    assert dataset.as_it_was("0" * 64) is None
    assert dataset._earlier.keys() == {first, second}, "clients may ask for any number of others"


def test_fingerprints_that_are_asked_for_in_vain_take_no_memory(tmp_path: Path) -> None:
    """Any client may ask for any."""
    index(write_texts(tmp_path, 6, 3))
    dataset = Dataset.open(tmp_path)
    tracemalloc.start()
    try:
        for n in range(64):
            assert dataset.as_it_was(f"{n:0100000}") is None
        assert tracemalloc.get_traced_memory()[0] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_copy_elsewhere_has_them_too(tmp_path: Path) -> None:
    folder = write_texts(tmp_path / "a", 6, 3)
    first = index(folder)
    grow(folder, "new.tar")
    index(folder)
    shutil.copytree(folder, tmp_path / "b")
    index(tmp_path / "b")
    assert names(Dataset.open(tmp_path / "b").as_it_was(first)) == ["00000.tar", "00001.tar"]


def test_a_set_whose_shards_changed_is_gone(tmp_path: Path) -> None:
    folder = write_texts(tmp_path, 6, 3)
    first = index(folder)
    grow(folder, "a.tar")
    second = index(folder)
    grow(folder, "b.tar", b"newer")
    third = index(folder)
    grow(folder, "a.tar", b"changed")
    index(folder)
    dataset = Dataset.open(folder)
    assert names(dataset.as_it_was(first)) == ["00000.tar", "00001.tar"]
    assert dataset.as_it_was(second) is None
    assert dataset.as_it_was(third) is None
    (folder / "00001.tar").unlink()
    index(folder)
    assert Dataset.open(folder).as_it_was(first) is None


def test_other_rules_make_other_sets(tmp_path: Path) -> None:
    folder = write_pairs(tmp_path, 6, 3)
    first = index(folder)
    index(folder, IndexRules(TextOnly.ALLOW))
    assert Dataset.open(folder).as_it_was(first) is None
    assert index(folder) == first


@pytest.mark.parametrize(
    "content", [b"", b"[]", b'{"version": 2, "sets": []}', b'{"version": 1, "sets": [3]}', b"\xff"]
)
def test_a_list_that_cannot_be_read_costs_the_old_sets_alone(tmp_path: Path, content: bytes) -> None:
    folder = write_texts(tmp_path, 6, 3)
    first = index(folder)
    (folder / SETS_NAME).write_bytes(content)
    grow(folder, "new.tar")
    second = index(folder)
    dataset = Dataset.open(folder)
    assert dataset.as_it_was(first) is None
    assert dataset.as_it_was(second) is dataset
    assert json.loads((folder / SETS_NAME).read_text())["sets"][0]["fingerprint"] == second


def test_a_list_that_lies_serves_nothing_wrong(tmp_path: Path) -> None:
    folder = write_texts(tmp_path, 6, 3)
    index(folder)
    lie = {"version": 1, "sets": [{"fingerprint": "1" * 64, "added": ["00000.tar"]}]}
    (folder / SETS_NAME).write_text(json.dumps(lie))
    assert Dataset.open(folder).as_it_was("1" * 64) is None


OTHERS = [
    IndexRules(TextOnly.ALLOW),
    IndexRules(truncated_images=TruncatedImages.ACCEPT),
    IndexRules(on_token_error=OnTokenError.SKIP),
]


@pytest.mark.parametrize("rules", OTHERS)
def test_a_change_of_rules_hashes_no_shard_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rules: IndexRules
) -> None:
    """And makes the index that a first pass by these rules would make."""
    folder = write_pairs(tmp_path / "a", 12, 4)
    write_tar(folder / "lone.tar", [("x.txt", b"lone")])
    shutil.copytree(folder, tmp_path / "b")
    expected = index(tmp_path / "b", rules)
    index(folder)
    with monkeypatch.context() as patch:
        patch.setattr(hashing, "hashlib", NoHash)
        patch.setattr("dataserver.dataset.index.indexing.digest_file", lambda _: pytest.fail("a sidecar is hashed"))
        assert build_index(folder, workers=1, rules=rules).num_built == 4
    assert Dataset.open(folder).fingerprint == expected
    assert build_index(folder, workers=1, rules=rules).num_built == 0


def test_nor_does_a_newer_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_pairs(tmp_path, 6, 3)
    expected = index(folder)
    for version in (rules_module.RULES_VERSION + 1, rules_module.RULES_VERSION):
        with monkeypatch.context() as patch:
            patch.setattr(rules_module, "RULES_VERSION", version)
            patch.setattr(hashing, "hashlib", NoHash)
            assert build_index(folder, workers=1).num_built == 2
    assert Dataset.open(folder).fingerprint == expected


def test_a_changed_shard_is_hashed_all_the_same(tmp_path: Path) -> None:
    folder = write_pairs(tmp_path, 6, 3)
    before = index(folder)
    shard = folder / "00000.tar"
    content = bytearray(shard.read_bytes())
    at = content.index(b"\xff\xd9")
    content[at - 1] ^= 1
    shard.write_bytes(bytes(content))
    rules = IndexRules(truncated_images=TruncatedImages.ACCEPT)
    found = index(folder, rules)
    shutil.copytree(folder, tmp_path / "again", ignore=shutil.ignore_patterns("*.index", "disttrain.*"))
    assert index(tmp_path / "again", rules) == found != before
