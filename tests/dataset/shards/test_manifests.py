"""Manifests and plain folders as shards: the samples of a tar, findings, files that change, hostile names."""

import errno
import io
import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders.loose import write_folder, write_manifest
from hypothesis import given
from hypothesis import strategies as st
from shards import make_image, write_interleaved, write_pairs, write_tar

from dataserver.dataset import (
    Dataset,
    DatasetError,
    IndexRules,
    KeyEnd,
    StaleIndexError,
    build_index,
    compile_filter,
    lint,
)
from dataserver.dataset.errors import SampleError
from dataserver.dataset.shards import external
from dataserver.dataset.shards.conversations import conversation_document
from dataserver.dataset.shards.manifest import objects
from dataserver.dataset.shards.manifest.objects import json_elements, json_lines
from dataserver.dataset.shards.tar import scan_members
from dataserver.dataset.storage.etags import Etag
from dataserver.dataset.storage.local import LocalStorage

RNG = np.random.default_rng(11)
JPEGS = [make_image(RNG, 40 + n, 30) for n in range(5)]


def index(path: Path, **rules: Any) -> tuple[Dataset, dict[str, int]]:
    report = build_index(path, workers=1, rules=IndexRules(**rules))
    assert dict(lint(path).counts) == report.findings
    return Dataset.open(path, may_be_empty=True), dict(report.findings)


def details(path: Path) -> list[str]:
    return [finding.detail for finding in lint(path).findings]


def manifest(folder: Path, lines: list[Any], name: str = "data.jsonl") -> Path:
    (folder / "img").mkdir(parents=True)
    for n, jpeg in enumerate(JPEGS):
        (folder / f"img/{n}.jpg").write_bytes(jpeg)
    text = json.dumps(lines) if name.endswith(".json") else "".join(f"{json.dumps(line)}\n" for line in lines)
    (folder / name).write_text(text)
    return folder / name


@pytest.mark.parametrize("form", ["lines", "array", "members of a tar", "folder"])
@pytest.mark.parametrize("kind", ["pairs", "documents"])
def test_samples_are_those_of_a_tar(tmp_path: Path, form: str, kind: str) -> None:
    if kind == "pairs":
        write_pairs(tmp_path / "tars", 16, formats=("JPEG", "PNG"), parquet=False)
    else:
        write_interleaved(tmp_path / "tars", 8)
    (tar,) = (tmp_path / "tars").glob("*.tar")
    path = tmp_path / "other"
    if form == "folder":
        write_folder(tar, path / "sub")
    elif form == "array":
        path = path / "data.json"
        write_manifest(tar, path, as_array=True)
    else:
        path = path / "data.jsonl"
        write_manifest(tar, path, in_tar=form != "lines")
    expected, _ = index(tmp_path / "tars")
    found, findings = index(path)
    one, same = expected.shards[0], found.shards[0]
    assert findings == {}
    assert one.keys() == same.keys()
    assert [one.parts(n) for n in range(one.num_samples)] == [same.parts(n) for n in range(one.num_samples)]
    for name in ("image_offsets", "kinds", "image_width", "image_height", "text_bytes", "orientation"):
        assert np.array_equal(getattr(one.sizes(), name), getattr(same.sizes(), name)), name
    places = [(row, i) for row in range(one.num_samples) for i in range(np.diff(one.sizes().image_offsets)[row])]
    assert len(places) > 5
    for row, i in random.Random(3).sample(places, len(places)):
        assert expected.read(one.image(row, i)) == found.read(same.image(row, i))
    assert build_index(path, workers=1).num_built == 0


def test_filters_columns_and_captions_work_on_manifests(tmp_path: Path) -> None:
    lines = [{"image": f"img/{n}.jpg", "text": f"t{n}", "score": n / 4, "long": f"long {n}"} for n in range(5)]
    path = manifest(tmp_path, lines)
    dataset, findings = index(path)
    assert findings == {}
    (shard,) = dataset.shards
    condition = compile_filter("score > 0.3 and width < 44")
    assert shard.keep(condition).tolist() == [False, False, True, True, False]


def test_a_changed_file_is_refused_until_it_is_indexed_again(tmp_path: Path) -> None:
    for path, file in (
        (manifest(tmp_path / "m", [{"image": f"img/{n}.jpg", "text": "t"} for n in range(5)]), "m/img/3.jpg"),
        (tmp_path / "f", "f/3.jpg"),
    ):
        if path == tmp_path / "f":
            write_tar(
                tmp_path / "0.tar",
                [(f"{n}.{e}", d) for n, j in enumerate(JPEGS) for e, d in [("jpg", j), ("txt", b"t")]],
            )
            write_folder(tmp_path / "0.tar", path)
        before, _ = index(path)
        refs = [before.shards[0].image(n, 0) for n in range(5)]
        other = JPEGS[3][:-9] + bytes(7) + b"\xff\xd9"
        state = (tmp_path / file).stat()
        (tmp_path / file).write_bytes(other)
        os.utime(tmp_path / file, ns=(state.st_atime_ns, state.st_mtime_ns))
        assert before.read(refs[2]) == JPEGS[2]
        with pytest.raises(
            StaleIndexError, match=r"3\.jpg has another content than when .* was indexed; run dataserver index"
        ):
            before.read(refs[3])
        report = build_index(path, workers=1)
        assert report.num_built == 1
        after = Dataset.open(path)
        assert after.fingerprint != before.fingerprint
        assert after.read(after.shards[0].image(3, 0)) == other
        (tmp_path / file).unlink()
        with pytest.raises(DatasetError, match="check the storage"):
            after.read(after.shards[0].image(3, 0))


def test_a_file_that_was_missing_is_taken_when_it_is_there(tmp_path: Path) -> None:
    path = manifest(tmp_path, [{"image": f"img/{n}.jpg", "text": "t"} for n in range(5)])
    (tmp_path / "img/2.jpg").unlink()
    dataset, findings = index(path)
    assert findings == {"missing_image": 1}
    assert "'img/2.jpg' is no file below" in details(path)[0]
    assert dataset.shards[0].num_samples == 4
    (tmp_path / "img/2.jpg").write_bytes(JPEGS[2])
    dataset, findings = index(path)
    assert (findings, dataset.shards[0].num_samples) == ({}, 5)


def test_paths_are_relative_to_the_root_that_is_named(tmp_path: Path) -> None:
    manifest(tmp_path / "elsewhere", [])
    (tmp_path / "data").mkdir()
    path = tmp_path / "data/data.jsonl"
    path.write_text(json.dumps({"image": "img/1.jpg", "text": "t"}))
    assert index(path)[1] == {"missing_image": 1}
    dataset, findings = index(path, images_root=tmp_path / "elsewhere")
    assert findings == {}
    assert dataset.read(dataset.shards[0].image(0, 0)) == JPEGS[1]


def test_names_never_leave_the_root(tmp_path: Path) -> None:
    (tmp_path / "secret.jpg").write_bytes(JPEGS[0])
    write_tar(tmp_path / "secret.tar", [("a.jpg", JPEGS[0])])
    names = [f"{tmp_path}/secret.jpg", "../secret.jpg", "img/../../secret.jpg", "link.jpg", "linked/secret.jpg", "",
             "http://x/y.jpg", "gone.jpg", "img", "img/0.jpg/x", "a" * 5000, "nul\0", 7, "itself.jpg", "pipe.jpg",
             "../secret.tar/a.jpg", "linked/secret.tar/a.jpg", "some.tar/none.jpg", "img/0.jpg.tar/x"]  # fmt: skip
    path = manifest(tmp_path / "in", [{"images": [name], "text": "words"} for name in names])
    write_tar(tmp_path / "in/some.tar", [("a.jpg", JPEGS[0])])
    (tmp_path / "in/link.jpg").symlink_to(tmp_path / "secret.jpg")
    (tmp_path / "in/linked").symlink_to(tmp_path)
    (tmp_path / "in/itself.jpg").symlink_to("itself.jpg")
    os.mkfifo(tmp_path / "in/pipe.jpg")
    dataset, findings = index(path)
    assert findings == {"missing_image": len(names)}
    assert dataset.shards[0].num_samples == 0


def test_a_folder_has_keys_findings_and_links_as_a_tar_has(tmp_path: Path) -> None:
    files = {
        "a.jpg": JPEGS[0], "a.txt": b"one", "a-b.jpg": JPEGS[1], "a-b.txt": b"two", "v1.5.jpg": JPEGS[2],
        "v1.5.txt": b"three", "v1.jpg": JPEGS[3], "v1.txt": b"four", "lone.jpg": JPEGS[4], "broken.jpg": b"P6 1 1",
        "broken.txt": b"x", "README.md": b"#", ".hidden.jpg": JPEGS[0], "long.txt": b"x" * (5 << 20),
        "long.jpg": JPEGS[0],
    }  # fmt: skip
    folder = tmp_path / "photos"
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    (folder / "link.jpg").symlink_to("a.jpg")
    (folder / "link.txt").write_text("x")
    dataset, findings = index(tmp_path, key=KeyEnd.LAST_DOT)
    assert dataset.shards[0].keys() == ["a", "a-b", "v1", "v1.5"]
    assert [dataset.shards[0].parts(n).texts[0] for n in range(4)] == ["one", "two", "four", "three"]
    expected = {"special_member": 1, "needs_special_member": 1, "missing_caption": 1, "unreadable_header": 1}
    assert findings == {**expected, "text_too_large": 1}
    folders, _ = index(folder)
    assert [shard.name for shard in folders.shards] == ["folder.images"]
    assert sorted(path.name for path in folder.glob("folder.images*"))[0] == "folder.images.files"


def test_shards_of_other_formats_go_before_loose_images(tmp_path: Path) -> None:
    write_pairs(tmp_path, 4)
    manifest(tmp_path / "more", [{"image": "img/0.jpg", "text": "t"}])
    dataset, findings = index(tmp_path)
    assert ([shard.name for shard in dataset.shards], findings) == (
        ["00000.tar"],
        {"unread_file": 2},  # the manifest, and the folder of its images
    )


def test_turns_become_a_document(tmp_path: Path) -> None:
    llava = {"from": "human", "value": "<image>\nWhat is it?"}, {"from": "gpt", "value": "A cat."}
    chat = [
        {"role": "user", "content": [{"type": "text", "text": "See "}, {"type": "image"}, " and ", {"type": "image"}]},
        {"role": "assistant", "content": "two"},
    ]
    lines = [
        {"id": "7", "image": "img/0.jpg", "conversations": llava},
        {"images": ["img/1.jpg", "img/2.jpg"], "messages": chat},
        {"image": "img/3.jpg", "conversations": [{"from": "human", "value": "no mark"}]},
        {"conversations": [{"from": "human", "value": "text alone"}]},
        {"image": "img/3.jpg", "conversations": [{"from": "human", "value": "<image> <image>"}]},
        {"image": "img/3.jpg", "conversations": ["a string"]},
        {"image": "img/3.jpg", "conversations": [{"value": "nobody"}]},
        {"image": "img/3.jpg", "text": "goes first", "conversations": llava},
    ]
    dataset, findings = index(manifest(tmp_path, lines, "llava.json"))
    assert findings == {"bad_document": 3}
    (shard,) = dataset.shards
    parts = [shard.parts(n) for n in range(shard.num_samples)]
    assert [(part.kinds, part.texts) for part in parts] == [
        ((0, 1, 0), ("human: ", "\nWhat is it?\ngpt: A cat.")),
        ((0, 1, 0, 1, 0), ("user: See ", " and ", "\nassistant: two")),
        ((1, 0), ("human: no mark",)),
        ((0,), ("human: text alone",)),
        ((1, 0), ("goes first",)),
    ]
    assert dataset.read(shard.image(1, 1)) == JPEGS[2]


@given(st.lists(st.lists(st.sampled_from(["a", "<image>", " b\n"]), max_size=5), min_size=1, max_size=5))
def test_a_document_says_what_the_turns_say(turns: list[list[str]]) -> None:
    given_turns = [{"from": "r", "value": "".join(parts)} for parts in turns]
    names = [f"k.{n}.img" for n in range(sum(parts.count("<image>") for parts in turns))]
    texts, images = conversation_document(given_turns, names)
    left = iter(names)
    assert [name for name in images if name] == names
    assert all((text is None) != (name is None) for text, name in zip(texts, images, strict=True))
    whole = "".join(text if text is not None else "<image>" for text in texts)
    assert whole == "\n".join(f"r: {''.join(parts)}" for parts in turns)
    assert next(left, None) == (names[0] if names else None)
    if names:
        with pytest.raises(SampleError, match="bad_document"):
            conversation_document(given_turns, [*names, "one more"])
    else:
        assert conversation_document(given_turns, ["a", "b"]) == ([None, None, *texts], ["a", "b", *images])


def pieces(data: bytes, sizes: list[int]) -> Any:
    """A reader that gives a few bytes at a time."""
    at, turn = 0, 0

    def read(length: int) -> bytes:
        nonlocal at, turn
        taken = min(length, sizes[turn % len(sizes)])
        at, turn = at + taken, turn + 1
        return data[at - taken : at]

    return read


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=5,
)


@given(
    st.lists(st.dictionaries(st.text(max_size=4), JSON, max_size=3), max_size=6),
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
    st.sampled_from([None, 2]),
    st.booleans(),
)
def test_objects_are_those_that_json_reads_whatever_pieces_come(
    given_objects: list[dict[str, Any]], sizes: list[int], indent: int | None, is_ascii: bool
) -> None:
    text = json.dumps(given_objects, indent=indent, ensure_ascii=is_ascii)
    found = list(json_elements(pieces(text.encode("utf-8", "surrogatepass"), sizes)))
    expected = json.loads(text)
    assert [one for _, one in found if not isinstance(one, SampleError)] == expected
    lines = "".join(f"{json.dumps(one, ensure_ascii=is_ascii)}\n\n" for one in given_objects)
    numbered = list(json_lines(pieces(lines.encode(), sizes)))
    assert numbered == [(2 * n, one) for n, one in enumerate(expected)]


@pytest.mark.parametrize(
    ("text", "whole", "kind"),
    [
        (b'[{"a":1},{"a":', 1, "bad_json"),
        (b'[{"a":1} {"a":2}]', 1, "bad_json"),
        (b'{"a":1}', 0, "bad_json"),
        (b"", 0, "bad_json"),
        (b'[{"a":1}', 1, "bad_json"),
        (b'[{"a":1},{"a":"\xff"}]', 0, "not_utf8"),
        (b'[{"a":1},' + b"[" * 100_000, 1, "bad_json"),
        (b'[{"a":1}, 7, {"a":3}]', 2, "bad_json"),
        (b'[{"a":1},{"a":"' + b"x" * (9 << 20), 1, "bad_json"),
    ],
)
def test_arrays_that_are_damaged_give_what_is_whole(text: bytes, whole: int, kind: str) -> None:
    found = [one for _, one in json_elements(pieces(text, [1 << 20]))]
    assert [one["a"] for one in found if isinstance(one, dict)] == [1, 3][:whole]
    assert [one.kind for one in found if isinstance(one, SampleError)] == [kind]


def test_a_line_of_a_million_characters_and_more_takes_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "MAX_TEXT_BYTES", 1000)
    monkeypatch.setattr(objects, "READ_BYTES", 100)
    data = b'{"a":1}\n{"b":"' + b"x" * 10_000 + b'"}\n{"a":2}'
    found = [one for _, one in json_lines(pieces(data, [100]))]
    assert [getattr(one, "kind", one) for one in found] == [{"a": 1}, "text_too_large", {"a": 2}]


def test_an_edited_text_of_a_folder_is_indexed_again(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(JPEGS[0])
    (tmp_path / "a.txt").write_text("one")
    dataset, _ = index(tmp_path)
    before = dataset.fingerprint
    (tmp_path / "a.txt").write_text("two")
    with pytest.raises(StaleIndexError, match=r"another content of a\.txt"):
        Dataset.open(tmp_path)
    assert build_index(tmp_path, workers=1).num_built == 1
    assert Dataset.open(tmp_path).fingerprint != before
    (tmp_path / "a.txt").touch()
    Dataset.open(tmp_path)


def test_a_moved_folder_is_read_where_it_lies(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old/a.jpg").write_bytes(JPEGS[0])
    (tmp_path / "old/a.txt").write_text("one")
    index(tmp_path / "old")
    (tmp_path / "old").rename(tmp_path / "new")
    dataset = Dataset.open(tmp_path / "new")
    image = dataset.shards[0].image(0, 0)
    assert dataset.read(image) == JPEGS[0]
    (tmp_path / "outside.jpg").write_bytes(JPEGS[0])
    (tmp_path / "new/a.jpg").unlink()
    (tmp_path / "new/a.jpg").symlink_to(tmp_path / "outside.jpg")
    with pytest.raises(DatasetError, match="leaves the dataset"):
        dataset.read(image)


def test_a_damaged_tar_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tar(tmp_path / "x.tar", [("a.jpg", JPEGS[0]), ("b.jpg", JPEGS[1])])
    os.truncate(tmp_path / "x.tar", 900)
    scans = []
    monkeypatch.setattr(external, "scan_members", lambda *given: scans.append(given) or scan_members(*given))
    files = external.ExternalFiles(tmp_path, 0)
    for _ in range(3):
        with pytest.raises(SampleError, match="cannot be read"):
            files.read("x.tar/a.jpg")
    assert len(scans) == 1


def test_a_file_whose_state_storage_does_not_tell_is_not_taken_as_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def etag(self: LocalStorage, path: str) -> Etag:
        raise OSError(errno.EIO, "bad disk")

    files = external.ExternalFiles(tmp_path, 0)
    monkeypatch.setattr(LocalStorage, "etag", etag)
    with pytest.raises(OSError, match="bad disk"):
        files.note_unusable("a.jpg")
    assert files.parts == []


@pytest.mark.parametrize("more", [b' {"b": 1}', b"[]", b" " * (2 << 20) + b"x"])
def test_what_follows_an_array_is_a_finding(more: bytes) -> None:
    found = [one for _, one in json_elements(io.BytesIO(b'[{"a": 1}]' + more).read)]
    assert found[0] == {"a": 1}
    assert "more follows the end of the array" in str(found[1])
    assert [one for _, one in json_elements(io.BytesIO(b"[]" + b" \n" * (1 << 20)).read)] == []
