"""Grouping of members into samples: webdataset as the oracle, every kind of sample, every oddity."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import webdataset
from hypothesis import given, settings
from hypothesis import strategies as st
from shards import make_image, write_tar

from dataserver.dataset.errors import Oddities
from dataserver.dataset.headers import FORMATS
from dataserver.dataset.samples import IMAGE, MAX_SAMPLE_MEMBERS, MAX_TEXT_BYTES, TEXT, Sample, read_samples
from dataserver.dataset.tar import HashingReader, scan_members

RNG = np.random.default_rng(0)
JPEG = make_image(RNG, 30, 20)
PNG = make_image(RNG, 31, 20, "PNG")
WEBP = make_image(RNG, 32, 20, "WEBP")
CAPTION = json.dumps({"caption": "from json", "width": 30, "nested": [1], "null": None}).encode()


def read(data: bytes) -> tuple[list[Sample], Oddities]:
    oddities = Oddities()
    reader = HashingReader(io.BytesIO(data), len(data))
    return list(read_samples(scan_members(reader, oddities), oddities)), oddities


@pytest.fixture
def read_tar(tmp_path: Path) -> Any:
    def run(*members: tuple[str, bytes]) -> tuple[list[Sample], dict[str, int]]:
        path = tmp_path / "0.tar"
        write_tar(path, members)
        samples, oddities = read(path.read_bytes())
        return samples, dict(oddities.counts)

    return run


def test_every_order_and_format_of_a_pair(read_tar: Any) -> None:
    samples, oddities = read_tar(
        ("0.jpg", JPEG), ("0.json", CAPTION), ("0.txt", b"zero"),
        ("1.txt", b"one"), ("1.jpg", PNG),
        ("a/2.json", CAPTION), ("a/2.PNG", WEBP),
        ("README", b"ignored"), ("._3.jpg", b"ignored"), ("3.img", JPEG), ("3.cls", b"5"), ("3.txt", b"three"),
    )  # fmt: skip
    assert not oddities
    assert [s.key for s in samples] == ["0", "1", "a/2", "3"]
    assert [s.texts for s in samples] == [("zero",), ("one",), ("from json",), ("three",)]
    assert all(s.kinds == (IMAGE, TEXT) for s in samples)
    assert [FORMATS[s.images[0].format] for s in samples] == ["jpeg", "png", "webp", "jpeg"]
    assert [(s.images[0].width, s.images[0].height) for s in samples] == [(30, 20), (31, 20), (32, 20), (30, 20)]
    assert samples[0].scalars == {"caption": "from json", "width": 30}


def test_text_alone(read_tar: Any) -> None:
    samples, oddities = read_tar(("0.txt", "gr\u00fc\u00df".encode()), ("0.json", b'{"score": 1.5}'))
    assert not oddities
    assert (samples[0].kinds, samples[0].texts, samples[0].images) == ((TEXT,), ("gr\u00fc\u00df",), ())
    assert samples[0].scalars == {"score": 1.5}


def document(texts: list[Any], images: list[Any]) -> bytes:
    return json.dumps({"texts": texts, "images": images}).encode()


def test_interleaved_document(read_tar: Any) -> None:
    samples, oddities = read_tar(
        ("d/0.1.jpg", PNG), ("d/0.0.jpg", JPEG),
        ("d/0.json", document(["a", None, None, "b", None], [None, "d/0.0.jpg", "0.1.jpg", None, "0.0.jpg"])),
    )  # fmt: skip
    assert not oddities
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
        ("unreadable_header", [("0.jpg", b"GIF89a"), ("0.txt", b"x")]),
        ("unreadable_header", [("0.0.jpg", JPEG[:9]), ("0.json", document([None], ["0.0.jpg"]))]),
        ("not_utf8", [("0.jpg", JPEG), ("0.txt", b"\xff")]),
        ("not_utf8", [("0.jpg", JPEG), ("0.json", b'{"caption": "\\ud800"}')]),
        ("bad_json", [("0.jpg", JPEG), ("0.txt", b"x"), ("0.json", b"{")]),
        ("bad_json", [("0.jpg", JPEG), ("0.txt", b"x"), ("0.json", b"[]")]),
        ("bad_json", [("0.jpg", JPEG), ("0.txt", b"x"), ("0.json", DEEP)]),
        ("bad_json", [("0.jpg", JPEG), ("0.txt", b"x"), ("0.json", b'{"a": ' + b"9" * 5000 + b"}")]),
        ("text_too_large", [("0.txt", b"x" * (MAX_TEXT_BYTES + 1))]),
        ("bad_document", [("0.json", document(["a"], []))]),
        ("bad_document", [("0.json", document([None], [None]))]),
        ("bad_document", [("0.json", document([7], [None]))]),
        ("empty_document", [("0.json", document([" "], [None]))]),
        ("too_many_scalars", [("0.txt", b"x"), ("0.json", json.dumps({str(i): i for i in range(1025)}).encode())]),
        ("too_many_members", [(f"0.{i}.txt", b"") for i in range(MAX_SAMPLE_MEMBERS + 1)]),
        (
            "too_many_members",
            [("0.0.jpg", JPEG), ("0.json", document([None] * 5000, ["0.0.jpg"] * 5000))],
        ),
    ],
)
def test_odd_samples_are_left_out(read_tar: Any, kind: str, members: list[tuple[str, bytes]]) -> None:
    samples, oddities = read_tar(*members, GOOD)
    assert [s.key for s in samples] == ["9"]
    assert oddities == {kind: 1}


def test_odd_samples_that_stay(read_tar: Any) -> None:
    samples, oddities = read_tar(
        ("0.seg.png", PNG), ("0.jpg", JPEG), ("0.txt", b"x"), ("0.txt", b"second"), ("0.jpg", WEBP)
    )
    assert oddities == {"extra_image": 1, "duplicate_member": 2}
    assert (samples[0].images[0].width, samples[0].texts) == (30, ("x",))


def test_first_of_a_repeated_key_is_kept(read_tar: Any) -> None:
    samples, oddities = read_tar(("0.txt", b"first"), ("1.txt", b"x"), ("0.txt", b"later"))
    assert [(s.key, s.texts) for s in samples] == [("0", ("first",)), ("1", ("x",))]
    assert oddities == {"duplicate_key": 1}


def test_the_sample_in_which_the_tar_is_cut_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "0.tar"
    write_tar(path, [("0.txt", b"x"), ("1.txt", b"caption of the image"), ("1.jpg", JPEG)])
    data = path.read_bytes()
    samples, oddities = read(data[: data.index(JPEG) + 100])
    assert [s.key for s in samples] == ["0"]
    assert oddities.counts == {"cut_tar": 1}
    assert oddities.details[0].key == "1"


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
    samples, oddities = read(path.read_bytes())
    oracle = list(webdataset.WebDataset(str(path), shardshuffle=False, empty_check=False))
    assert [(s.key, s.texts[0].encode()) for s in samples] == [(o["__key__"], o["txt"]) for o in oracle]
    assert not oddities.counts
