"""Grouping of members into samples: webdataset as the oracle, every kind of sample, every finding."""

import io
import json
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import webdataset
from hypothesis import given, settings
from hypothesis import strategies as st
from shards import make_image, write_tar

from dataserver.dataset.errors import Findings
from dataserver.dataset.shards.groups import MAX_SAMPLE_MEMBERS
from dataserver.dataset.shards.hashing import HashingReader
from dataserver.dataset.shards.members import MAX_TEXT_BYTES
from dataserver.dataset.shards.samples import IMAGE, TEXT, Sample, read_samples
from dataserver.dataset.shards.tar import BLOCK, scan_members
from dataserver.images import FORMAT_NAMES

RNG = np.random.default_rng(0)
JPEG = make_image(RNG, 30, 20)
PNG = make_image(RNG, 31, 20, "PNG")
WEBP = make_image(RNG, 32, 20, "WEBP")
CAPTION = json.dumps({"caption": "from json", "width": 30, "nested": [1], "null": None}).encode()


def read(data: bytes) -> tuple[list[Sample], Findings]:
    findings = Findings()
    reader = HashingReader(io.BytesIO(data), len(data))
    return list(read_samples(scan_members(reader, findings), findings)), findings


@pytest.fixture
def read_tar(tmp_path: Path) -> Any:
    def run(*members: tuple[str, bytes]) -> tuple[list[Sample], dict[str, int]]:
        path = tmp_path / "0.tar"
        write_tar(path, members)
        samples, findings = read(path.read_bytes())
        return samples, dict(findings.counts)

    return run


def test_every_order_and_format_of_a_pair(read_tar: Any) -> None:
    samples, findings = read_tar(
        ("0.jpg", JPEG), ("0.json", CAPTION), ("0.txt", b"zero"),
        ("1.txt", b"one"), ("1.jpg", PNG),
        ("a/2.json", CAPTION), ("a/2.PNG", WEBP),
        ("README", b"ignored"), ("._3.jpg", b"ignored"), ("3.img", JPEG), ("3.cls", b"5"), ("3.txt", b"three"),
    )  # fmt: skip
    assert not findings
    assert [s.key for s in samples] == ["0", "1", "a/2", "3"]
    assert [s.texts for s in samples] == [("zero",), ("one",), ("from json",), ("three",)]
    assert all(s.kinds == (IMAGE, TEXT) for s in samples)
    assert [FORMAT_NAMES[s.images[0].format] for s in samples] == ["jpeg", "png", "webp", "jpeg"]
    assert [(s.images[0].width, s.images[0].height) for s in samples] == [(30, 20), (31, 20), (32, 20), (30, 20)]
    assert samples[0].scalars == {"caption": "from json", "width": 30}


def test_text_alone(read_tar: Any) -> None:
    samples, findings = read_tar(("0.txt", "gr\u00fc\u00df".encode()), ("0.json", b'{"score": 1.5}'))
    assert not findings
    assert (samples[0].kinds, samples[0].texts, samples[0].images) == ((TEXT,), ("gr\u00fc\u00df",), ())
    assert samples[0].scalars == {"score": 1.5}


def document(texts: list[Any], images: list[Any]) -> bytes:
    return json.dumps({"texts": texts, "images": images}).encode()


def test_interleaved_document(read_tar: Any) -> None:
    samples, findings = read_tar(
        ("d/0.1.jpg", PNG), ("d/0.0.jpg", JPEG),
        ("d/0.json", document(["a", None, None, "b", None], [None, "d/0.0.jpg", "0.1.jpg", None, "0.0.jpg"])),
    )  # fmt: skip
    assert not findings
    assert samples[0].kinds == (TEXT, IMAGE, IMAGE, TEXT, IMAGE)
    assert samples[0].texts == ("a", "b")
    assert [i.width for i in samples[0].images] == [30, 31, 30]


def test_document_of_text_only(read_tar: Any) -> None:
    samples, _ = read_tar(("0.json", document(["a", "b"], [None, None])))
    assert samples[0].kinds == (TEXT, TEXT)


GOOD = ("9.txt", b"good")
DEEP = b"[" * 100_000


@pytest.mark.parametrize(
    ("kind", "members"),
    [
        ("missing_caption", [("0.jpg", JPEG)]),
        ("missing_caption", [("0.jpg", JPEG), ("0.txt", b" \n")]),
        ("missing_caption", [("0.jpg", JPEG), ("0.json", b'{"caption": null}')]),
        ("missing_caption", [("0.txt", b"")]),
        ("missing_image", [("0.json", CAPTION)]),
        ("missing_image", [("0.cls", b"3")]),
        ("missing_image", [("0.json", document([None], ["0.0.jpg"]))]),
        ("missing_image", [("0.0.jpg", JPEG), ("0.json", document([None], ["../../etc/0.0.jpg"]))]),
        ("unreadable_header", [("0.jpg", b"P6 2 2"), ("0.txt", b"x")]),
        ("unreadable_header", [("0.0.jpg", JPEG[:9]), ("0.json", document([None], ["0.0.jpg"]))]),
        ("not_utf8", [("0.jpg", JPEG), ("0.txt", b"\xff")]),
        ("not_utf8", [("0.jpg", JPEG), ("0.json", b'{"caption": "\\ud800"}')]),
        ("text_too_large", [("0.txt", b"x" * (MAX_TEXT_BYTES + 1))]),
        ("bad_document", [("0.json", document(["a"], []))]),
        ("bad_document", [("0.json", document([None], [None]))]),
        ("bad_document", [("0.json", document([7], [None]))]),
        ("empty_document", [("0.json", document([" "], [None]))]),
        ("too_many_members", [(f"0.{i}.txt", b"") for i in range(MAX_SAMPLE_MEMBERS + 1)]),
        (
            "too_many_members",
            [("0.0.jpg", JPEG), ("0.json", document([None] * 5000, ["0.0.jpg"] * 5000))],
        ),
    ],
)
def test_odd_samples_are_left_out(read_tar: Any, kind: str, members: list[tuple[str, bytes]]) -> None:
    samples, findings = read_tar(*members, GOOD)
    assert [s.key for s in samples] == ["9"]
    assert findings == {kind: 1}


def test_odd_samples_that_stay(read_tar: Any) -> None:
    samples, findings = read_tar(
        ("0.seg.png", PNG), ("0.jpg", JPEG), ("0.txt", b"x"), ("0.txt", b"second"), ("0.jpg", WEBP)
    )
    assert findings == {"extra_image": 1, "duplicate_member": 2}
    assert (samples[0].images[0].width, samples[0].texts) == (30, ("x",))


def test_first_of_a_repeated_key_is_kept(read_tar: Any) -> None:
    samples, findings = read_tar(("0.txt", b"first"), ("1.txt", b"x"), ("0.txt", b"later"))
    assert [(s.key, s.texts) for s in samples] == [("0", ("first",)), ("1", ("x",))]
    assert findings == {"duplicate_key": 1}


KEYS = ("a", "b", "c")
TYPES = ("jpg", "json", "txt")


def pairs_tar(tar_format: int, folder: str) -> tuple[bytes, dict[str, int]]:
    """A tar of three pairs, and where the data of each member ends."""
    contents = {"jpg": JPEG, "json": CAPTION, "txt": b"caption"}
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tar_format) as tar:
        for key in KEYS:
            for extension in TYPES:
                info = tarfile.TarInfo(f"{folder}{key}.{extension}")
                info.size, info.mtime = len(contents[extension]), 1.5 if tar_format == tarfile.PAX_FORMAT else 1
                tar.addfile(info, io.BytesIO(contents[extension]))
    with tarfile.open(fileobj=io.BytesIO(buffer.getvalue())) as tar:
        return buffer.getvalue(), {info.name: info.offset_data + info.size for info in tar}


@pytest.mark.parametrize("folder", ["", "f" * 120 + "/"], ids=["short names", "long names"])
@pytest.mark.parametrize("tar_format", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
def test_a_cut_costs_and_names_only_the_sample_that_it_cuts(tar_format: int, folder: str) -> None:
    """Within headers, long names, data and padding, and between members."""
    data, ends = pairs_tar(tar_format, folder)
    cuts = {*range(0, max(ends.values()), 61), *range(0, max(ends.values()), BLOCK), *ends.values()}
    for cut in sorted(cuts):
        samples, findings = read(data[:cut])
        whole = [key for key in KEYS if ends[f"{folder}{key}.txt"] <= cut]
        found = [s.key.removeprefix(folder) for s in samples]
        if found != whole:  # the first sample of a tar has none to be compared with, and its .txt left no trace
            assert (found, whole, samples[0].texts) == (["a"], [], ("from json",))
        assert findings.counts["cut_tar"] == 1
        (named,) = [o.key.removeprefix(folder) for o in findings.details if o.kind == "cut_tar"]
        assert named not in found
        within = [n for n, end in ends.items() if end - (len(JPEG) if n.endswith("jpg") else 0) < cut < end]
        assert not within or named == within[0].removeprefix(folder)[0]


def test_a_tar_without_its_end_marker_loses_nothing_else() -> None:
    data, ends = pairs_tar(tarfile.PAX_FORMAT, "")
    samples, findings = read(data[: max(ends.values())])
    assert [s.key for s in samples] == list(KEYS)
    assert [(o.key, o.kind) for o in findings.details] == [("", "cut_tar")]
    assert findings.details[0].detail.endswith("without an end-of-archive marker; the last sample before it is c")


def test_samples_that_need_a_link_or_a_sparse_file_are_left_out(tmp_path: Path) -> None:
    """As GNU tar stores files that share an inode, symlinks, and files with holes; none is served as text alone."""
    document = json.dumps({"texts": ["x", None], "images": [None, "3.jpg"]})
    for key in "01245":
        (tmp_path / f"{key}.txt").write_text("x")
    (tmp_path / "0.jpg").write_bytes(JPEG)
    (tmp_path / "1.jpg").hardlink_to(tmp_path / "0.jpg")
    (tmp_path / "2.jpg").symlink_to("0.jpg")
    (tmp_path / "3.jpg").hardlink_to(tmp_path / "0.jpg")
    (tmp_path / "3.json").write_text(document)
    with (tmp_path / "4.jpg").open("wb") as file:
        file.write(JPEG)
        file.truncate(1 << 20)
    (tmp_path / "5.cls").hardlink_to(tmp_path / "0.jpg")  # which the sample does not need
    names = sorted(path.name for path in tmp_path.iterdir())
    subprocess.run(["tar", "--sparse", "-cf", "s.tar", *names], cwd=tmp_path, check=True)
    samples, findings = read((tmp_path / "s.tar").read_bytes())
    assert [(s.key, s.kinds) for s in samples] == [("0", (IMAGE, TEXT)), ("5", (TEXT,))]
    special = [(o.key, o.kind) for o in findings.details if o.kind == "special_member"]
    assert special == [(key, "special_member") for key in "12345"]
    left_out = [o for o in findings.details if o.kind != "special_member"]
    assert [(o.key, o.kind) for o in left_out] == [(key, "needs_special_member") for key in "1234"]
    assert left_out[0].detail == (
        "1.jpg is a link, device or sparse file; store the file itself:"
        " tar --hard-dereference --dereference, without --sparse"
    )
    whole = ["tar", "--hard-dereference", "--dereference", "-cf", "s.tar", *names]
    subprocess.run(whole, cwd=tmp_path, check=True)
    samples, findings = read((tmp_path / "s.tar").read_bytes())
    assert ([s.key for s in samples], findings.counts) == (list("012345"), {})


keys = st.text("ab0/-_", min_size=1, max_size=4).filter(lambda key: not key.startswith("/") and not key.endswith("/"))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(keys, st.text("xyz.", max_size=3)), unique_by=lambda k: k[0], min_size=1, max_size=6))
def test_groups_as_webdataset_does(tmp_path_factory: pytest.TempPathFactory, raw: list[tuple[str, str]]) -> None:
    path = tmp_path_factory.mktemp("oracle") / "0.tar"
    with webdataset.TarWriter(str(path)) as writer:
        for number, (key, extra) in enumerate(raw):
            sample = {"__key__": key, "txt": f"text {number}", "jpg": JPEG}
            if extra.strip("."):
                sample[extra.strip(".") + ".bin"] = b"?"
            writer.write(sample)
    samples, findings = read(path.read_bytes())
    oracle = list(webdataset.WebDataset(str(path), shardshuffle=False, empty_check=False))
    assert [(s.key, s.texts[0].encode()) for s in samples] == [(o["__key__"], o["txt"]) for o in oracle]
    assert not findings.counts
