"""Documents as public datasets write them: the same samples as in our own form, and findings for entries that lie."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from assembly.test_prepared_views import open_run, tensors_of
from builders.parquets import IMAGE, write_table
from dataset.said import said_of
from hypothesis import given
from hypothesis import strategies as st
from shards import make_image, write_tar

from dataserver.dataset import Dataset, IndexRules, MissingImages, build_index, lint
from dataserver.dataset.conversion.convert import convert
from dataserver.dataset.errors import SampleError
from dataserver.dataset.index import format as index_format
from dataserver.dataset.index import indexing
from dataserver.dataset.index.format import lacks_formats
from dataserver.dataset.shards.documents import document_lists

RNG = np.random.default_rng(3)
JPEGS = {f"{n}f0a.jpg": make_image(RNG, 40 + n, 32) for n in range(5)}
A, B, C, D, E = JPEGS

OWN: dict[str, dict[str, Any]] = {
    "first": {"texts": [None, "One. Two.", None, None, "Three."], "images": [A, None, C, B, None]},
    "second": {"texts": ["Words alone. And more."], "images": [None]},
    "third": {"texts": ["Before.", None, "Under it."], "images": [None, D, None]},
    "fourth": {"texts": [None, " "], "images": [E, None]},
}
"""Lists, as OBELICS and OmniCorpus have them."""


def mmc4(sentences: list[Any], **images: Any) -> dict[str, Any]:
    """A document in the form of MMC4; each image has the number of its sentence."""
    infos = [{"image_name": f"{name}.jpg", "matched_text_index": at, "matched_sim": 0.3} for name, at in images.items()]
    return {"url": "http://a.b", "text_list": sentences, "image_info": infos, "similarity_matrix": [[0.1]]}


NUMBERED = {
    "first": mmc4(["One.", "Two.", "Three."], **{"0f0a": 0, "2f0a": 2, "1f0a": 2}),
    "second": mmc4(["Words alone.", "And more."]),
    "third": mmc4(["Before.", "Under it."], **{"3f0a": 1}),
    "fourth": mmc4([" "], **{"4f0a": 0}),
}
OBELICS = {
    key: {**document, "metadata": json.dumps([{"src": "http://a.b/c"}]), "general_metadata": json.dumps({"url": key})}
    for key, document in OWN.items()
}
OMNICORPUS = {
    key: {
        **document,
        "metadata": [None if name is None else {"img_url_sha": name, "width": 40} for name in document["images"]],
        "general_metadata": {"url": key, "id": key, "domain": ["a", "b"], "fluency_prob": 0.9},
    }
    for key, document in OWN.items()
}
FORMS = {"obelics": OBELICS, "omnicorpus": OMNICORPUS, "mmc4": NUMBERED}


def own_tar(folder: Path) -> Path:
    members = [(f"{key}.{name}", content) for key in OWN for name, content in JPEGS.items() if name in str(OWN[key])]
    for key, document in OWN.items():
        named = {**document, "images": [name and f"{key}.{name}" for name in document["images"]]}
        members.append((f"{key}.json", json.dumps(named).encode()))
    write_tar(folder / "0.tar", sorted(members, key=lambda member: list(OWN).index(member[0].partition(".")[0])))
    return folder


def tar(folder: Path, documents: Mapping[str, Any]) -> Path:
    """Members are called by the key, and the name that the document has for the image."""
    members = []
    for key, document in documents.items():
        members += [(f"{key}.{name}", content) for name, content in JPEGS.items() if name in json.dumps(document)]
        members.append((f"{key}.json", json.dumps(document).encode()))
    write_tar(folder / "0.tar", members)
    return folder


def manifest(folder: Path, documents: Mapping[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in JPEGS.items():
        (folder / name).write_bytes(content)
    lines = [json.dumps({**document, "key": key}) for key, document in documents.items()]
    (folder / "0.jsonl").write_text("\n".join(lines))
    return folder


def parquet(folder: Path, documents: Mapping[str, Any]) -> Path:
    """A list of images with their bytes: null where there is a text, or one for each entry of `image_info`."""
    rows = list(documents.values())
    names = [row.get("images", [info["image_name"] for info in row.get("image_info", ())]) for row in rows]
    images = [[name and {"bytes": JPEGS[name], "path": name} for name in of_row] for of_row in names]
    table = pa.Table.from_pylist([{k: v for k, v in row.items() if k != "images"} for row in rows])
    table = table.append_column("images", pa.array(images, pa.list_(IMAGE)))
    write_table(folder / "0.parquet", table.append_column("key", pa.array(list(documents))))
    return folder


WRITERS = {"tar": tar, "manifest": manifest, "parquet": parquet}


def samples(folder: Path) -> dict[str, Any]:
    """What each sample holds: kinds and texts, and the bytes of its images."""
    dataset = Dataset.open(folder, may_be_empty=True)
    return {key: (parts.kinds, parts.texts, images) for key, parts, _, images in said_of(dataset)}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("writer", WRITERS)
def test_each_form_is_read_as_our_own(tmp_path: Path, form: str, writer: str) -> None:
    own, other = own_tar(tmp_path / "own"), WRITERS[writer](tmp_path / "other", FORMS[form])
    reports = [build_index(folder, workers=1) for folder in (own, other)]
    assert {kind for report in reports for kind in report.findings} <= {"unusable_column"}
    assert samples(other) == samples(own)
    assert len(samples(own)) == len(OWN)
    if writer != "tar":
        convert(other, tmp_path / "converted", workers=1)
        build_index(tmp_path / "converted", workers=1)
        assert samples(tmp_path / "converted") == samples(own)


def test_tensors_are_those_of_our_own_form(tmp_path: Path) -> None:
    own, other = (open_run([folder], 1) for folder in (own_tar(tmp_path / "own"), tar(tmp_path / "tar", NUMBERED)))
    count = 0
    for (plan, view), (other_plan, other_view) in zip(own.views(), other.views(), strict=True):
        arrays, others = tensors_of(own.prepare(plan, view)), tensors_of(other.prepare(other_plan, other_view))
        assert arrays.keys() == others.keys()
        assert all(np.array_equal(array, others[name]) for name, array in arrays.items())
        count += sum(array.size for array in arrays.values())
    assert count > 1000


LIES = {
    "beyond": (mmc4(["a"], **{"0f0a": 1}), "bad_document", "matched_text_index '1'; a number below 1"),
    "negative": (mmc4(["a"], **{"0f0a": -1}), "bad_document", "matched_text_index '-1'"),
    "no number": (mmc4(["a"], **{"0f0a": None}), "bad_document", "matched_text_index 'None'"),
    "truth": (mmc4(["a", "b"], **{"0f0a": True}), "bad_document", "matched_text_index 'True'"),
    "no text": (mmc4(["a", None], **{"0f0a": 0}), "bad_document", "text_list 1 is a NoneType, no text"),
    "no name": (
        {"text_list": ["a"], "image_info": [{"matched_text_index": 0}]}, "bad_document", "position 0 needs one string",
    ),
    "no entry": ({"text_list": ["a"], "image_info": [7]}, "bad_document", "image_info 0"),
    "gone": (mmc4(["a"], gone=0), "missing_image", "gone.jpg"),
    "nothing": (mmc4([]), "empty_document", "neither images nor text"),
    "both null": ({"texts": ["a", None], "images": [A, None]}, "bad_document", "position 0 needs one string"),
    "both set": ({"texts": ["a"], "images": [A]}, "bad_document", "position 0 needs one string"),
    "lengths": ({"texts": ["a", None], "images": [None]}, "bad_document", "2 texts but 1 images"),
    "a URL": ({"texts": ["a", None], "images": [None, "http://a.b/c.jpg"]}, "missing_image", "http://a.b/c.jpg"),
}  # fmt: skip


@pytest.mark.parametrize("writer", ["tar", "manifest"])
def test_entries_that_lie_are_findings(tmp_path: Path, writer: str) -> None:
    documents = {key: document for key, (document, _, _) in LIES.items()}
    folder = WRITERS[writer](tmp_path, {**documents, "good": NUMBERED["first"]})
    build_index(folder, workers=1)
    assert list(samples(folder)) == ["good"]
    found = {finding.key: finding for finding in lint(folder).findings}
    assert found.keys() == LIES.keys()
    for key, (_, kind, detail) in LIES.items():
        assert found[key].kind == kind, key
        assert detail in found[key].detail, (key, found[key].detail)


def test_tables_need_an_image_for_each_entry(tmp_path: Path) -> None:
    documents = {"good": NUMBERED["first"], "beyond": mmc4(["a"], **{"0f0a": 1}), "more": mmc4(["a"], **{"0f0a": 0})}
    folder = parquet(tmp_path / "good", documents)
    rows = pa.parquet.read_table(folder / "0.parquet").to_pylist()
    rows[2]["images"] *= 2
    write_table(folder / "0.parquet", pa.Table.from_pylist(rows))
    build_index(folder, workers=1)
    assert list(samples(folder)) == ["good"]
    found = {finding.key: finding.detail for finding in lint(folder).findings if finding.kind == "bad_document"}
    assert found["more"] == "1 entries of image_info but 2 images"
    assert "matched_text_index '1'" in found["beyond"]


def test_tables_that_name_images_say_what_to_do(tmp_path: Path) -> None:
    """As the Hub has OBELICS and OmniCorpus: URLs, and no image."""
    urls = [[None if name is None else f"http://a.b/{name}" for name in row["images"]] for row in OBELICS.values()]
    texts = [row["texts"] for row in OBELICS.values()]
    write_table(tmp_path / "0.parquet", pa.table({"images": urls, "texts": texts}))
    report = build_index(tmp_path, workers=1)
    assert report.findings == {"missing_image": 4}
    detail = lint(tmp_path).findings[0].detail
    assert detail.startswith("column images holds no bytes, it is of type list")
    assert detail.endswith("write the images themselves into it, or name their files in a .jsonl")


def test_indexes_from_before_a_form_was_read_are_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tar(tmp_path, {**NUMBERED, "gone": LIES["gone"][0]})
    with monkeypatch.context() as patched:
        patched.setattr(indexing, "DOCUMENT_FORMS", "texts")
        build_index(folder, workers=1)
    assert build_index(folder, workers=1).num_built == 1
    assert build_index(folder, workers=1).num_built == 0


@given(st.lists(st.text("ab ", max_size=3), max_size=6), st.data())
def test_every_sentence_and_image_comes_once_and_in_order(sentences: list[str], data: st.DataObject) -> None:
    numbers = data.draw(st.lists(st.integers(0, len(sentences) - 1), max_size=6)) if sentences else []
    infos = [{"image_name": n, "matched_text_index": at} for n, at in enumerate(numbers)]
    lists = document_lists({"text_list": sentences, "image_info": infos})
    assert lists is not None
    expected: list[Any] = []  # a sentence after the other, each after its images
    for number, sentence in enumerate(sentences):
        expected += [n for n, at in enumerate(numbers) if at == number]
        both = bool(expected) and isinstance(expected[-1], str)
        expected = [*expected[:-1], f"{expected[-1]} {sentence}"] if both else [*expected, sentence]
    assert [text if name is None else name for text, name in zip(*lists, strict=True)] == [
        p for p in expected if p != ""
    ]
    assert all((text is None) != (name is None) for text, name in zip(*lists, strict=True))


@pytest.mark.parametrize("document", [{}, {"text_list": ["a"]}, {"text_list": "a", "image_info": []}, {"images": []}])
def test_other_objects_are_no_documents(document: dict[str, Any]) -> None:
    assert document_lists(document) is None


def test_a_lie_names_the_entry() -> None:
    with pytest.raises(SampleError, match="image_info 1 has the matched_text_index '9'"):
        document_lists(mmc4(["a"], **{"0f0a": 0, "1f0a": 9}))


DEAD = {
    "gone": {"texts": [None, "One.", None], "images": ["gone.jpg", None, A]},
    "null": {"texts": ["Two.", None, None], "images": [None, None, B]},
    "broken": {"texts": ["Three.", None], "images": [None, "broken.jpg"]},
    "alone": {"texts": [None], "images": ["gone.jpg"]},
    "whole": {"texts": [None, "Four."], "images": [C, None]},
    "both": {"texts": ["Five.", "Six."], "images": [None, A]},
}
DROPPED = {
    "gone": ((0, 1), ("One.",), [JPEGS[A]]),
    "null": ((0, 1), ("Two.",), [JPEGS[B]]),
    "broken": ((0,), ("Three.",), []),
    "whole": ((1, 0), ("Four.",), [JPEGS[C]]),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_documents_are_served_without_their_dead_images(
    tmp_path: Path, writer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(JPEGS, "broken.jpg", b"<html>404</html>")
    if writer == "parquet":  # a table has the bytes of an image, or none
        monkeypatch.setitem(JPEGS, "gone.jpg", None)
    folder = WRITERS[writer](tmp_path, DEAD)
    build_index(folder, workers=1)
    assert samples(folder) == {"whole": DROPPED["whole"]}
    fingerprint = Dataset.open(folder).fingerprint
    rules = IndexRules(missing_images=MissingImages.DROP)
    report = build_index(folder, workers=1, rules=rules)
    assert report.num_built == 1
    assert samples(folder) == DROPPED
    assert report.findings["dropped_image"] == 4
    assert Dataset.open(folder).fingerprint != fingerprint
    found = {(finding.key, finding.kind): finding.detail for finding in lint(folder).findings}
    assert {kind for key, kind in found if key == "alone"} == {"dropped_image", "empty_document"}
    assert found["both", "bad_document"] == "position 1 needs one string, in texts or in images"
    assert found["gone", "dropped_image"].startswith("position 0: ")
    assert found["null", "dropped_image"] == "position 1: no text and no image; the document does without it"
    assert "(unreadable_header)" in found["broken", "dropped_image"]
    assert build_index(folder, workers=1, rules=rules).num_built == 0


@pytest.mark.parametrize("known", ["READ_IMAGES", "DOCUMENT_FORMS"])
def test_documents_without_an_image_are_indexed_anew_when_more_is_read(
    tmp_path: Path, known: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = WRITERS["tar"](tmp_path, {name: DEAD[name] for name in ("null", "whole")})
    report = build_index(folder, workers=1, rules=IndexRules(missing_images=MissingImages.DROP))
    assert report.findings == {"dropped_image": 1}
    path = Dataset.open(folder).shards[0].file.index_path
    assert not lacks_formats(path)
    monkeypatch.setattr(index_format, known, "and more")
    assert lacks_formats(path)


def test_turns_keep_their_images(tmp_path: Path) -> None:
    """An answer about an image that is not there is no sample."""
    turns = [{"from": "human", "value": "<image> What?"}, {"from": "gpt", "value": "A cat."}]
    (tmp_path / "0.jsonl").write_text(json.dumps({"id": "a", "image": "gone.jpg", "conversations": turns}))
    report = build_index(tmp_path, workers=1, rules=IndexRules(missing_images=MissingImages.DROP))
    assert dict(report.findings) == {"missing_image": 1}
