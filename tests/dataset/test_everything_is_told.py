"""Every member, row and file is served, a finding, or ignored as docs/datasets.md says; reasons name the cause."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from builders.parquets import pairs_table, write_table
from shards import make_image, write_tar

from dataserver.dataset import (
    Conversations,
    Dataset,
    DatasetError,
    IndexRules,
    KeyEnd,
    MetadataKeys,
    ShardReadError,
    build_index,
    lint,
    parse_captions,
)
from dataserver.dataset.index.format import TEXTS_KEY, read_findings
from dataserver.dataset.shards.hashing import HashingReader
from dataserver.dataset.shards.listing import list_shards
from dataserver.dataset.shards.unread import ARRAY, ODD_LINK
from dataserver.dataset.storage.local import LocalStorage

JPEG, OTHER = (make_image(np.random.default_rng(seed), 64, 48) for seed in (0, 1))
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22e\nsize 12345\n"


def pairs(*keys: str, image: bytes = JPEG) -> list[tuple[str, bytes]]:
    return [member for key in keys for member in ((f"{key}.jpg", image), (f"{key}.txt", b"words"))]


def found(folder: Path, rules: IndexRules = IndexRules()) -> list[tuple[str, str, str]]:  # noqa: B008  it is frozen
    """Shard, key and kind of each finding."""
    build_index(folder, workers=1, rules=rules)
    return [(one.shard, one.key, one.kind) for one in lint(folder).findings]


def details(folder: Path) -> list[str]:
    return [one.detail for one in lint(folder).findings]


def texts(folder: Path) -> dict[str, tuple[str, ...]]:
    """The texts of each sample, by key."""
    shards = Dataset.open(folder, may_be_empty=True).shards
    return {key: shard.parts(row).texts for shard in shards for row, key in enumerate(shard.keys())}


def write(path: Path, content: bytes = b"x") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def table(path: Path, keys: list[str], **columns: object) -> None:
    pq.write_table(pa.table({"key": keys, **columns}), path)


def test_equal_lists_of_other_images_are_no_copies(tmp_path: Path) -> None:
    for folder, image in (("a", JPEG), ("b", OTHER)):
        write(tmp_path / "manifests" / folder / "0.jpg", image)
        write(tmp_path / "manifests" / folder / "m.jsonl", b'{"image": "0.jpg", "text": "words"}\n')
        image = make_image(np.random.default_rng(len(image)), 16, 16, "BMP")  # of one size
        write(tmp_path / "folders" / folder / "0.bmp", image)
        write(tmp_path / "folders" / folder / "0.txt", b"words")
    for folder in ("manifests", "folders"):
        assert found(tmp_path / folder) == [], folder
        shutil.rmtree(tmp_path / folder / "b")
        shutil.copytree(tmp_path / folder / "a", tmp_path / folder / "b")
        with pytest.raises(DatasetError, match=r"2 shards at .* are copies of 1"):
            build_index(tmp_path / folder, workers=1)


def test_members_without_a_key_are_counted(tmp_path: Path) -> None:
    hidden = [(".DS_Store", b"x"), ("__MACOSX/._a.jpg", b"\0\5\x16\7")]
    write_tar(tmp_path / "0.tar", [*pairs("a"), *hidden, ("img0001", JPEG), ("sub/img0002", JPEG)])
    write_tar(tmp_path / "1.tar", [("img0003", JPEG)])
    assert found(tmp_path) == [("0.tar", "", "unused_part"), ("1.tar", "", "unused_part")]
    said = "2 members have no dot in their names and belong to no sample, the first is 'img0001'"
    assert details(tmp_path)[0] == f"{said}; members are called KEY.TYPE"


def test_joined_members_without_a_key_are_counted(tmp_path: Path) -> None:
    write_tar(tmp_path / "d/0.tar", pairs("a"))
    write_tar(tmp_path / "j/0.tar", [("a.more.txt", b"more"), ("b", b"lost")])
    assert found(tmp_path / "d", IndexRules(joins=(tmp_path / "j",))) == [("0.tar", "", "unused_part")]
    assert details(tmp_path / "d")[0].startswith("0.tar, which is joined: 1 members have no dot")


def test_images_that_a_document_does_not_name_are_counted(tmp_path: Path) -> None:
    document = json.dumps({"texts": ["words", None], "images": [None, "0.jpg"]}).encode()
    images = [(f"a.{n}.jpg", JPEG) for n in range(7)]
    write_tar(tmp_path / "0.tar", [*images, ("a.json", document), ("b.0.jpg", JPEG), ("b.json", document)])
    assert found(tmp_path) == [("0.tar", "a", "unused_part")]
    shown = ".1.jpg, .2.jpg, .3.jpg, .4.jpg and 2 more"
    assert details(tmp_path) == [f"its .json does not name {shown}; the document goes without"]


@pytest.mark.parametrize("extension", ["jxl", "heif", "jp2", "svg", "0.jxl"])
@pytest.mark.parametrize("has_pair", [False, True])
def test_a_text_beside_an_image_of_another_format_is_no_text_alone(
    tmp_path: Path, extension: str, has_pair: bool
) -> None:
    """Else a dataset of such images alone would be served as one of texts."""
    members = [(f"a.{extension}", b"\xff\x0a image"), ("a.txt", b"words"), ("b.json", b"{}"), (f"b.{extension}", b"")]
    write_tar(tmp_path / "0.tar", [*members, *(pairs("z") if has_pair else [])])
    assert found(tmp_path) == [("0.tar", key, "unreadable_header") for key in "ab"]
    assert details(tmp_path)[0] == f"its image .{extension} is of a format that is not read; convert it"
    assert [*texts(tmp_path)] == ["z"] * has_pair


def test_avif_of_the_general_brand_is_read(tmp_path: Path) -> None:
    avif = make_image(np.random.default_rng(0), 64, 48, "AVIF")
    general = avif.replace(b"ftypavif", b"ftypmif1", 1)
    heic = general.replace(b"avif", b"heic", 2)
    write_tar(tmp_path / "0.tar", [*pairs("a", image=general), *pairs("b", image=heic)])
    assert found(tmp_path) == [("0.tar", "b", "unreadable_header")]
    assert details(tmp_path)[0].startswith("b.jpg: it is HEIF")


@pytest.mark.parametrize(
    "name",
    [
        "1.tbz2",
        "1.txz",
        "1.tzst",
        "1.tar.Z",
        "1.zip",
        "1.7z",
        "1.JSONL",
        "1.ndjson",
        "1.jsonl.zst",
        "1.PARQUET",
        "1.parquet.gz",
        "1.arrow",
        "1.mds",
        "1.tfrecord",
        "sub/metadata.csv",
    ],
)
def test_files_that_look_like_shards_are_named(tmp_path: Path, name: str) -> None:
    write(tmp_path / name)
    with pytest.raises(DatasetError, match=rf"no .tar, .* \({name!r}: .*(unpack|rename|write)"):
        build_index(tmp_path, workers=1)
    write_tar(tmp_path / "0.tar", pairs("a"))
    assert found(tmp_path) == [(name, "", "unread_file")]


def test_loose_images_and_texts_that_no_shard_reads_are_named(tmp_path: Path) -> None:
    for folder in ("tars", "tables", "images"):
        for name in ("images/0.jpg", "images/0.txt", "texts/1.txt", "README.txt", "notes.md"):
            write(tmp_path / folder / name, JPEG if name.endswith("jpg") else b"words")
    write_tar(tmp_path / "tars/0.tar", pairs("a"))
    write_table(tmp_path / "tables/0.parquet", pairs_table([("0", JPEG, "words")]))
    assert found(tmp_path / "tars") == [("images/", "", "unread_file")]
    assert found(tmp_path / "tables") == [("images/", "", "unread_file")]
    assert found(tmp_path / "images") == [("texts/", "", "unread_file")]
    assert details(tmp_path / "images")[0].startswith("a folder with texts and without images")


def test_pairs_in_a_dataset_of_manifests_are_named(tmp_path: Path) -> None:
    for name in ("a/0.jpg", "a/0.txt", "b/0.jpg", "b/0.txt", "c/0.jpg", "c/train.txt"):
        write(tmp_path / name, (OTHER if name[0] == "b" else JPEG) if name.endswith("jpg") else b"words")
    write(tmp_path / "a/log.jsonl", b'{"text": "a line of a log makes all images nobody\'s"}\n')
    assert found(tmp_path) == [("a/", "", "unread_file"), ("b/", "", "unread_file")]


@pytest.mark.parametrize("name", ["0.parquet", "0.jsonl"])
def test_keys_that_are_no_texts_are_told(tmp_path: Path, name: str) -> None:
    write(tmp_path / "0.jpg", JPEG)
    pq.write_table(pa.table({"key": [7], "image": [JPEG], "text": ["words"]}), tmp_path / "0.parquet")
    if name == "0.jsonl":
        (tmp_path / "0.parquet").unlink()
        write(tmp_path / name, b'{"key": 7, "image": "0.jpg", "text": "words"}\n')
    found(tmp_path)
    assert list(texts(tmp_path)) == ["000000000"]
    assert any(said.startswith("key: keys of type int") for said in details(tmp_path))


def test_images_that_are_named_where_nobody_looks_are_told(tmp_path: Path) -> None:
    lines = [
        {"img_path": "x/0.JPG", "text": "a"},
        {"text": "b", "url": "http://a/0.jpg"},
        {"text": "c", "file": ".png"},
    ]
    write(tmp_path / "lines" / "0.jsonl", b"".join(json.dumps(line).encode() + b"\n" for line in lines))
    write_table(tmp_path / "tables" / "0.parquet", pa.table({"img_path": ["x/0.JPG", None], "text": ["a", "b"]}))
    for folder, name in (("lines", "0.jsonl"), ("tables", "0.parquet")):
        assert found(tmp_path / folder) == [(name, "", "lost_image")]
        assert details(tmp_path / folder)[0].startswith("1 samples without an image have an entry that names one")


def test_arrays_that_are_not_named_themselves_are_told(tmp_path: Path) -> None:
    """As of LLaVA, beside a folder of their images; objects, and lists beside images, are nothing of the kind."""
    for name, text in (("chat.json", b' [{"image": "images/0.jpg"}]'), ("info.json", b"{}"), ("images/0.json", b"[]")):
        write(tmp_path / name, text)
    with pytest.raises(
        DatasetError, match=r"\('chat.json': a JSON array is read where it is named itself; name FILE as"
    ):
        list_shards(tmp_path)
    write(tmp_path / "images/0.jpg", JPEG)
    assert dict(list_shards(tmp_path).unread).keys() == {"chat.json"}
    write(tmp_path / "0.jsonl", b"{}")
    assert not list_shards(tmp_path).unread


def test_files_of_json_that_cannot_be_looked_at_refuse_no_dataset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Links are followed to files of the dataset alone; those that lead nowhere and FIFOs are passed over."""
    folder = tmp_path / "d"
    for path in (folder / "locked.json", tmp_path / "outside.json", folder / ".hidden/list", folder / ".hidden/object"):
        write(path, b"{}" if path.name == "object" else b"[]")
    write(folder / "images/0.jpg", JPEG)
    links = {"gone": "none", "out": tmp_path / "outside.json", "away": tmp_path / "none"}
    links |= {"in": ".hidden/list", "in.object": ".hidden/object", "folder": "images", "linked.pipe": "pipe.json"}
    for name, target in links.items():
        (folder / f"{name}.json").symlink_to(target)
    os.mkfifo(folder / "pipe.json")
    assert dict(list_shards(folder).unread) == {"in.json": ARRAY, "locked.json": ARRAY, "out.json": ODD_LINK}

    def locked(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("dataserver.dataset.storage.local.check_regular", locked)  # root may open any file
    assert {name: why.split(" to ")[0] for name, why in list_shards(folder).unread} == {
        **dict.fromkeys(("in.json", "in.object.json", "locked.json"), "it cannot be opened"),
        "out.json": ODD_LINK.split(" to ")[0],
    }


def test_a_manifest_of_a_snapshot_of_the_hubs_cache_is_told(tmp_path: Path) -> None:
    """There all files are links out of the snapshot, which are refused, too, where they are named."""
    snapshot = tmp_path / "snapshots/1"
    write(tmp_path / "blobs/a", b'[{"image": "0.jpg"}]')
    write(snapshot / "images/0.jpg", JPEG)
    (snapshot / "llava.json").symlink_to("../../blobs/a")
    assert dict(list_shards(snapshot).unread) == {"llava.json": ODD_LINK}
    with pytest.raises(DatasetError, match="a link that leaves the dataset folder"):
        list_shards(snapshot / "llava.json")


@pytest.mark.parametrize("step", [1, -1])
def test_of_many_files_of_json_the_first_by_name_are_looked_at(
    step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In whatever order a folder is scanned."""
    for i in range(20):
        write(tmp_path / f"{i:02}.json", b"{}" if 0 < i < 19 else b"[]")
    write(tmp_path / "images/0.jpg", JPEG)
    scanned = sorted(LocalStorage().walk(tmp_path), key=lambda entry: entry.name)[::step]
    monkeypatch.setattr(LocalStorage, "walk", lambda _, __: iter(scanned))
    assert dict(list_shards(tmp_path).unread) == {"00.json": ARRAY}


def test_links_to_folders_are_findings(tmp_path: Path) -> None:
    write_tar(tmp_path / "outside/1.tar", pairs("b"))
    write_tar(tmp_path / "d/0.tar", pairs("a"))
    (tmp_path / "d/more").symlink_to(tmp_path / "outside")
    assert found(tmp_path / "d") == [("more", "", "unread_file")]


def test_links_to_folders_that_are_read_anyway_are_none(tmp_path: Path) -> None:
    write_tar(tmp_path / "v2/0.tar", pairs("a"))
    write_tar(tmp_path / ".old/0.tar", pairs("b"))
    (tmp_path / "latest").symlink_to("v2")
    assert found(tmp_path) == []
    (tmp_path / "hidden").symlink_to(".old")
    assert found(tmp_path) == [("hidden", "", "unread_file")]


def test_lists_beside_folders_of_images_are_no_lost_texts(tmp_path: Path) -> None:
    for name in ("classes.txt", "lists/train.txt", "lists/test.txt", "cats/0.txt"):
        write(tmp_path / name, b"words")
    write(tmp_path / "cats/0.jpg", JPEG)
    assert found(tmp_path) == []
    write(tmp_path / "lists/test_0.txt", b"words")
    assert found(tmp_path) == [("lists/", "", "unread_file")]


def test_members_that_tell_of_a_dataset_are_not_counted(tmp_path: Path) -> None:
    write_tar(tmp_path / "0.tar", [("README", b"x"), ("sub/LICENSE-MIT", b"x"), *pairs("a")])
    assert found(tmp_path) == []
    write_tar(tmp_path / "0.tar", [("version_0001", b"x"), *pairs("a")])
    assert found(tmp_path) == [("0.tar", "", "unused_part")]


def test_names_of_shards_may_have_spaces_and_joiners(tmp_path: Path) -> None:
    name = "n\u00a0a\u200dme\u00ad/\u3000.tar"
    write_tar(tmp_path / name, pairs("a"))
    assert found(tmp_path) == []
    assert [shard.name for shard in Dataset.open(tmp_path).shards] == [name]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (LFS, "a pointer of Git LFS: git lfs pull"),
        (b"\n<!DOCTYPE html>" + bytes(1000), "a page of a web server"),
        (b"<?xml version='1.0'?><Error/>", "XML, such as the error of a store"),
        (b"PAR1" + bytes(1000), "a Parquet file; call it NAME.parquet"),
        (b"\x04\x22\x4d\x18" + bytes(1000), "compressed with LZ4"),
        (b"7z\xbc\xaf\x27\x1c" + bytes(1000), "compressed with 7-Zip"),
    ],
)
def test_what_is_no_tar_is_told(tmp_path: Path, content: bytes, said: str) -> None:
    write_tar(tmp_path / "0.tar", pairs("a"))
    write(tmp_path / "1.tar", content)
    assert found(tmp_path) == [("1.tar", "", "corrupt_tar")]
    assert said in details(tmp_path)[0]


def test_halves_in_two_folders_name_each_other(tmp_path: Path) -> None:
    write_tar(tmp_path / "0.tar", [("images/1.jpg", JPEG), ("images/2.jpg", JPEG), ("texts/1.txt", b"one")])
    write_tar(tmp_path / "1.tar", [("texts/2.txt", b"two"), ("texts/3.txt", b"three"), ("a/3.jpg", JPEG)])
    write_tar(tmp_path / "2.tar", [("b/3.jpg", JPEG)])
    build_index(tmp_path, workers=1)
    said = {one.key: one.detail for one in lint(tmp_path).findings if one.kind == "orphan_text"}
    assert said["texts/1"].startswith("a text called 'texts/1', whose image is called 'images/1': folders are parts of")
    assert said["texts/2"].startswith("a text whose image is 'images/2' in 0.tar, in another folder, which is a part")
    assert "called 'a/3': folders" in said["texts/3"]


def test_byte_order_marks_of_parts_and_turns_are_taken_off(tmp_path: Path) -> None:
    document = json.dumps({"texts": ["\ufeffone", None], "images": [None, "0.jpg"]}).encode()
    turns = [{"from": "human", "value": "\ufeff<image>\nask"}, {"from": "gpt", "value": "\ufeffanswer"}]
    write_tar(tmp_path / "tars/0.tar", [("a.0.jpg", JPEG), ("a.json", document)])
    write(tmp_path / "lines/0.jpg", JPEG)
    write(tmp_path / "lines/0.jsonl", json.dumps({"key": "a", "image": "0.jpg", "conversations": turns}).encode())
    assert found(tmp_path / "tars") == found(tmp_path / "lines") == []
    assert texts(tmp_path / "tars") == {"a": ("one",)}
    assert texts(tmp_path / "lines") == {"a": ("human: ", "\nask\ngpt: answer")}
    assert found(tmp_path / "lines", IndexRules(conversations=Conversations.CHAT)) == []
    assert "\ufeff" not in "".join(texts(tmp_path / "lines")["a"])


def test_turns_in_a_tar_without_the_flag_say_which(tmp_path: Path) -> None:
    turns = {"conversations": [{"from": "human", "value": "<image>"}, {"from": "gpt", "value": "words"}]}
    write_tar(tmp_path / "0.tar", [("a.jpg", JPEG), ("a.json", json.dumps(turns).encode())])
    assert found(tmp_path) == [("0.tar", "a", "missing_caption")]
    assert details(tmp_path)[0].endswith("its .json has conversations: index with --conversations chat")
    assert found(tmp_path, IndexRules(conversations=Conversations.CHAT)) == []


def test_files_in_joined_folders_that_nobody_reads_are_named(tmp_path: Path) -> None:
    write_tar(tmp_path / "d/0.tar", pairs("a"))
    write_tar(tmp_path / "j/0.tar", [("a.more.txt", b"more")])
    for name in ("0.tar.gz", "m.jsonl", "0_stats.json", "notes.txt", "s/9.tar"):
        write(tmp_path / "j" / name)
    assert [
        (Path(name).name, key, kind) for name, key, kind in found(tmp_path / "d", IndexRules(joins=(tmp_path / "j",)))
    ] == [(name, "", "unread_file") for name in ("0.tar.gz", "m.jsonl", "9.tar")]


@pytest.mark.parametrize("joined", ["sidecar", "file", "table"])
def test_a_caption_in_a_column_is_the_text_of_a_pair_without_one(tmp_path: Path, joined: str) -> None:
    members = [("a.jpg", JPEG), *pairs("b"), ("c.jpg", JPEG), ("d.jpg", JPEG), ("d.txt", b"\xff"), ("e.jpg", b"bad")]
    write_tar(tmp_path / "d/0.tar", members)
    path = tmp_path / {"sidecar": "d/0.parquet", "file": "j/0.parquet", "table": "t.parquet"}[joined]
    path.parent.mkdir(exist_ok=True)
    columns = {"long": ["long a", "long b", " ", "long d", "long e"], "short": ["\ufeffshort a", "b", None, None, None]}
    table(path, ["a", "b", "c", "d", "e"], **columns)
    joins = {"sidecar": (), "file": (tmp_path / "j",), "table": (path,)}[joined]
    rules = IndexRules(captions=parse_captions(["b=parquet:long", "a=parquet:short"]), joins=joins)
    said = found(tmp_path / "d", rules)
    assert texts(tmp_path / "d") == {"a": ("short a",), "b": ("words",), "d": ("long d",)}
    lost = [("c", "missing_caption"), ("d", "unused_part"), ("e", "unreadable_header")]
    assert sorted((key, kind) for _, key, kind in said if key) == lost


def test_a_caption_in_a_column_finds_no_pair_by_a_last_part_that_several_have(tmp_path: Path) -> None:
    write_tar(tmp_path / "0.tar", [("x/1.jpg", JPEG), *pairs("y/1"), ("x/2.jpg", JPEG)])
    table(tmp_path / "0.parquet", ["1", "2"], long=["one", "two"])
    build_index(
        tmp_path,
        workers=1,
        rules=IndexRules(metadata_keys=MetadataKeys.LAST_PART, captions=parse_captions(["a=parquet:long"])),
    )
    assert texts(tmp_path) == {"y/1": ("words",), "x/2": ("two",)}


def test_an_index_from_before_columns_gave_texts_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rules = IndexRules(captions=parse_captions(["a=parquet:long"]))
    write_tar(tmp_path / "0.tar", [("a.jpg", JPEG), *pairs("b")])
    table(tmp_path / "0.parquet", ["a", "b"], long=["one", "two"])
    with monkeypatch.context() as patched:
        patched.setattr("dataserver.dataset.index.indexing.texts_of_columns", lambda *_: {})
        patched.setattr("dataserver.dataset.index.indexing.TEXTS_KEY", TEXTS_KEY + b" of none")
        build_index(tmp_path, workers=1, rules=rules)
    assert read_findings(tmp_path / "0.tar.index").counts["missing_caption"] == 1
    assert build_index(tmp_path, workers=1, rules=rules).num_built == 1
    assert [*texts(tmp_path)] == ["a", "b"]
    assert build_index(tmp_path, workers=1, rules=rules).num_built == 0


def test_other_rules_hash_no_shard_and_no_joined_file_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tar(tmp_path / "d/0.tar", [*pairs("a.b"), ("c.txt", b"words")])
    write_tar(tmp_path / "j/0.tar", [("a.1.jpg", OTHER), ("c.jpg", OTHER)])
    rules = IndexRules(joins=(tmp_path / "j",))
    build_index(tmp_path / "d", workers=1, rules=rules)
    fingerprint = Dataset.open(tmp_path / "d").fingerprint
    read = []
    monkeypatch.setattr(HashingReader, "_feed", lambda self, data: read.append(len(data)) if not self._known else None)
    assert build_index(tmp_path / "d", workers=1, rules=IndexRules(key=KeyEnd.LAST_DOT, joins=rules.joins)).num_built
    assert build_index(tmp_path / "d", workers=1, rules=rules).num_built == 1
    assert read == []
    assert Dataset.open(tmp_path / "d").fingerprint == fingerprint


def test_joined_images_are_found_where_dataset_and_joined_folder_moved_together(tmp_path: Path) -> None:
    write_tar(tmp_path / "old/d/0.tar", [("a.txt", b"words")])
    write_tar(tmp_path / "old/more/j/0.tar", [("a.jpg", OTHER)])
    build_index(tmp_path / "old/d", workers=1, rules=IndexRules(joins=(tmp_path / "old/more/j",)))
    (tmp_path / "old").rename(tmp_path / "new")

    def image() -> bytes:
        dataset = Dataset.open(tmp_path / "new/d")
        return dataset.read(dataset.shards[0].image(0, 0))

    assert image() == OTHER
    (tmp_path / "new/more/j").rename(tmp_path / "new/gone")
    with pytest.raises(ShardReadError, match=r"old/more/j/0\.tar, which is joined: .*No such file"):
        image()


def test_rows_that_repeat_a_key_are_counted(tmp_path: Path) -> None:
    write_tar(tmp_path / "0.tar", pairs("a", "b"))
    table(tmp_path / "0.parquet", ["a", "b", "b", "b"], score=[1.0, 2.0, 3.0, 4.0])
    assert found(tmp_path) == [("0.tar", "", "row_without_sample")]
    said = "2 of 4 rows of 0.parquet repeat the key of an earlier row, which counts, the first is 'b'"
    assert details(tmp_path) == [said]
    assert Dataset.open(tmp_path).shards[0].column("score").to_pylist() == [1.0, 2.0]


def test_a_parquet_without_any_key_says_so(tmp_path: Path) -> None:
    write_tar(tmp_path / "0.tar", pairs("a"))
    pq.write_table(pa.table({"key": pa.nulls(2, pa.string()), "score": [1.0, 2.0]}), tmp_path / "0.parquet")
    with pytest.raises(DatasetError, match=r"its column key is null in each row; write the keys of samples there"):
        build_index(tmp_path, workers=1)


def test_pointers_of_git_lfs_are_told(tmp_path: Path) -> None:
    for folder in ("tables", "sidecars", "images"):
        (tmp_path / folder).mkdir()
    write_table(tmp_path / "tables/0.parquet", pairs_table([("0", JPEG, "words")]))
    write(tmp_path / "tables/1.parquet", LFS)
    write_tar(tmp_path / "sidecars/0.tar", pairs("a"))
    write(tmp_path / "sidecars/0.parquet", LFS)
    write(tmp_path / "images/0.jpg", LFS)
    write(tmp_path / "images/0.txt", b"words")
    kinds = {"tables": "corrupt_parquet", "sidecars": "bad_sidecar", "images": "unreadable_header"}
    for folder, kind in kinds.items():
        assert [one for *_, one in found(tmp_path / folder)] == [kind]
        assert "a pointer of Git LFS" in details(tmp_path / folder)[0]


def test_values_that_are_no_images_in_a_column_of_images_are_counted(tmp_path: Path) -> None:
    photos = pa.table({"photo": [JPEG, b"no image", b"", None, b"junk"], "text": ["a", "b", "c", "d", "e"]})
    pq.write_table(photos, tmp_path / "0.parquet", compression="none")
    lost = [("0.parquet", f"{row:09d}", "orphan_text") for row in range(1, 5)]
    assert found(tmp_path) == [("0.parquet", "", "odd_values"), *lost]
    assert details(tmp_path)[0] == "photo: a column of images with 2 values that are none"


def test_captions_of_another_type_are_told(tmp_path: Path) -> None:
    write_tar(tmp_path / "tars/0.tar", [("a.jpg", JPEG), ("a.json", b'{"caption": ["one", "two"]}')])
    write(tmp_path / "lines/0.jpg", JPEG)
    write(tmp_path / "lines/0.jsonl", b'{"image": "0.jpg", "text": ["one", "two"]}')
    for folder, said in (
        ("tars", "; it is a list: these can be captions, index --caption 'NAME=json:caption[0]'"),
        ("lines", "; text is a list: these can be captions, index --caption 'NAME=json:text[0]'"),
    ):
        assert [kind for *_, kind in found(tmp_path / folder)] == ["missing_caption"]
        assert details(tmp_path / folder)[0].endswith(said)
        found(
            tmp_path / folder,
            IndexRules(captions=parse_captions([said.rpartition(" ")[2].strip("'").replace("NAME", "one")])),
        )
        assert [*texts(tmp_path / folder).values()] == [("one",)]
