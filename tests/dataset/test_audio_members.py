"""Clips in tars: parts of samples where the user asks for it, else one finding for each shard."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from audio.clips import clip
from audio.datasets import SERVED
from shards import make_image, write_tar

from dataserver.assembly import fault_of
from dataserver.dataset import Dataset, MediaMembers, build_index, lint
from dataserver.dataset.index.rules import IndexRules, written_rules
from dataserver.planning.stream.samples import AUDIO

pytest.importorskip("soundfile", reason="the extra audio is not installed")
JPEG = make_image(np.random.default_rng(0), 40, 30)


def opened(folder: Path, members: list[tuple[str, bytes]], rules: IndexRules = SERVED) -> Dataset:
    write_tar(folder / "0.tar", members)
    build_index(folder, workers=1, rules=rules)
    return Dataset.open(folder, may_be_empty=True)


def kinds(dataset: Dataset) -> dict[str, int]:
    return dict(dataset.shards[0].findings().counts)


def test_clips_come_behind_images_with_their_headers(tmp_path: Path) -> None:
    both = [("a.2.flac", clip(0.5, "flac", 22_050, 2)), ("a.10.wav", clip(0.25)), ("a.jpg", JPEG), ("a.txt", b"text")]
    dataset = opened(tmp_path, [*both, ("b.mp3", clip(1, "mp3")), ("b.txt", b"more")])
    shard = dataset.shards[0]
    assert [shard.parts(row).kinds for row in range(2)] == [(1, 1, 1, 0), (1, 0)]
    found = [(r.width, r.height, r.orientation, r.is_audio) for r in shard.images([(0, 0), (0, 1), (0, 2), (1, 0)])]
    assert found == [
        (40, 30, 1, False), (11_025, 22_050, 2, True), (4_000, 16_000, 1, True), (16_000, 16_000, 1, True),
    ]  # fmt: skip
    assert shard.sizes().image_modality.tolist() == [0, AUDIO, AUDIO, AUDIO]
    assert dataset.read(shard.image(0, 1)) == both[0][1]
    assert shard.column("width").to_pylist() == [40, None]
    assert kinds(dataset) == {}


def test_the_second_file_of_numbers_says_what_the_index_says(tmp_path: Path) -> None:
    expected = opened(tmp_path, [("a.wav", clip(0.1)), ("a.txt", b"text")]).shards[0].sizes()
    (tmp_path / "0.tar.disttrain.numeric").unlink(missing_ok=True)
    for file in tmp_path.glob("*.numeric"):
        file.unlink()
    found = Dataset.open(tmp_path).shards[0].sizes()
    assert found.image_modality.tolist() == expected.image_modality.tolist() == [AUDIO]


def test_documents_name_clips(tmp_path: Path) -> None:
    document = {"texts": ["what", None, None], "images": [None, "d.a.wav", "d.b.jpg"]}
    dataset = opened(tmp_path, [("d.a.wav", clip(0.1)), ("d.b.jpg", JPEG), ("d.json", json.dumps(document).encode())])
    assert dataset.shards[0].sizes().image_modality.tolist() == [AUDIO, 0]
    assert dataset.shards[0].column("width").to_pylist() == [40]
    assert dataset.shards[0].column("height").to_pylist() == [30]


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"RIFFnothing", "unreadable_header"),
        (bytes(65 << 20), "audio_too_large"),
        (b"", "unreadable_header"),
    ],
)
def test_clips_that_cannot_be_read_leave_their_sample_out(tmp_path: Path, content: bytes, kind: str) -> None:
    dataset = opened(tmp_path, [("a.wav", content), ("a.txt", b"text"), ("b.wav", clip(0.1)), ("b.txt", b"more")])
    assert kinds(dataset) == {kind: 1}
    assert dataset.shards[0].keys() == ["b"]


def test_lint_decodes_clips(tmp_path: Path) -> None:
    cut = clip(1, "flac")
    opened(tmp_path, [("a.flac", cut[: len(cut) // 2]), ("a.txt", b"text"), ("b.wav", clip(0.1)), ("b.txt", b"more")])
    report = lint(tmp_path, judge=fault_of)
    assert dict(report.counts) == {"undecodable": 1}
    assert "of 16000 samples" in report.findings[0].detail or "Error" in report.findings[0].detail


def test_without_the_rule_clips_are_one_finding_and_change_nothing_else(tmp_path: Path) -> None:
    texts = [("a.txt", b"text"), ("b.txt", b"more")]
    clips = [("a.wav", clip(0.1)), ("b.flac", clip(0.1, "flac"))]
    members = sorted([*texts, *clips])
    ignored = opened(tmp_path / "ignored", members, IndexRules())
    assert kinds(ignored) == {"unused_audio": 1}
    assert ignored.shards[0].findings().details[0].detail == (
        "2 members are audio; index with --audio serve to serve them"
    )
    assert [ignored.shards[0].parts(row).kinds for row in range(2)] == [(0,), (0,)]
    assert not ignored.shards[0].may_have_audio
    assert "audio" not in written_rules("alone", IndexRules(audio=MediaMembers.IGNORE))
    served = opened(tmp_path / "served", members)
    assert served.fingerprint != ignored.fingerprint
    assert served.shards[0].may_have_audio


def test_columns_of_parquet(tmp_path: Path) -> None:
    """As the Hub's `Audio` has them, beside images or alone, and in lists."""
    of = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    clips = [{"bytes": clip(0.1 * n, "flac"), "path": f"{n}.flac"} for n in range(1, 4)]
    columns = {
        "audio": pa.array(clips, of),
        "image": pa.array([{"bytes": JPEG, "path": None}, None, None], of),
        "more": pa.array([[], [clips[0], clips[1]], None], pa.list_(of)),
        "text": pa.array(["a", "b", "c"]),
    }
    pq.write_table(pa.table(columns), tmp_path / "0.parquet", compression="none", use_dictionary=False)
    build_index(tmp_path, workers=1, rules=SERVED)
    dataset = Dataset.open(tmp_path)
    sizes = dataset.shards[0].sizes()
    assert np.split(sizes.image_modality, sizes.image_offsets[1:-1])[0].tolist() == [0, AUDIO]
    assert np.diff(sizes.image_offsets).tolist() == [2, 3, 1]
    assert dataset.read(dataset.shards[0].image(0, 1)) == clips[0]["bytes"]
    assert dict(lint(tmp_path, judge=fault_of).counts) == {}
    build_index(tmp_path, workers=1)
    assert "unreadable_header" in kinds(Dataset.open(tmp_path, may_be_empty=True))


def test_paths_in_manifests(tmp_path: Path) -> None:
    (tmp_path / "a.flac").write_bytes(clip(0.2, "flac"))
    (tmp_path / "b.mp3").write_bytes(clip(0.2, "mp3"))
    (tmp_path / "c.jpg").write_bytes(JPEG)
    lines = [
        {"audio": "a.flac", "text": "one"},
        {"image": "c.jpg", "audio": ["a.flac", "b.mp3"], "text": "three"},
        {"image": "c.jpg", "audio": "gone.wav", "text": "none"},
        {"image": "c.jpg", "text": "an image"},
    ]
    (tmp_path / "0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    build_index(tmp_path, workers=1, rules=SERVED)
    dataset = Dataset.open(tmp_path)
    sizes = dataset.shards[0].sizes()
    assert np.diff(sizes.image_offsets).tolist() == [1, 3, 1]
    assert sizes.image_modality.tolist() == [AUDIO, 0, AUDIO, AUDIO, 0]
    assert dataset.read(dataset.shards[0].image(1, 2)) == (tmp_path / "b.mp3").read_bytes()
    assert kinds(dataset) == {"missing_image": 1}
    build_index(tmp_path, workers=1)
    assert np.diff(Dataset.open(tmp_path).shards[0].sizes().image_offsets).tolist() == [1, 1, 1]


def test_damaged_clips_that_a_manifest_names_are_told_as_clips(tmp_path: Path) -> None:
    (tmp_path / "a.wav").write_bytes(b"junk")
    with (tmp_path / "b.wav").open("wb") as file:
        file.truncate(65 << 20)
    (tmp_path / "c.jpg").write_bytes(b"junk")
    lines = [{"audio": "a.wav", "text": "t"}, {"audio": ["b.wav"], "text": "t"}, {"image": "c.jpg", "text": "t"}]
    (tmp_path / "0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    build_index(tmp_path, workers=1, rules=SERVED)
    found = Dataset.open(tmp_path, may_be_empty=True).shards[0].findings().details
    assert [one.kind for one in found] == ["unreadable_header", "audio_too_large", "unreadable_header"]
    assert "neither WAV" in found[0].detail
    assert "image" not in found[0].detail + found[1].detail
    assert "WAV" not in found[2].detail


def human(*texts: str) -> list[dict[str, str]]:
    return [{"from": "human" if n % 2 == 0 else "gpt", "value": text} for n, text in enumerate(texts)]


@pytest.mark.parametrize("table", [False, True])
def test_conversations_name_clips(tmp_path: Path, table: bool) -> None:
    """Where their marks stand, or before all texts; without a clip a mark is text."""
    tones = [clip(0.2, "flac"), clip(0.3, "flac", seed=2)]
    for n, tone in enumerate(tones):
        (tmp_path / f"{n}.flac").write_bytes(tone)
    (tmp_path / "c.jpg").write_bytes(JPEG)
    content = [{"type": "text", "text": "What? "}, {"type": "audio", "audio": "x"}, {"type": "image"}]
    rows = [
        (["0.flac"], [], human("<audio>What is heard?", "a tone")),
        (["0.flac", "1.flac"], ["c.jpg"], human("Is <audio> in <image>?", "no, <audio>")),
        (["1.flac", "0.flac"], ["c.jpg"], human("What is this?", "all")),
        ([], ["c.jpg"], human("<image> and <audio>", "yes")),
        (["1.flac"], ["c.jpg"], [{"role": "user", "content": content}]),
        (["0.flac"], [], human("<audio> <audio>", "two")),
        (["0.flac"], ["c.jpg"], human("<audio>", "one")),
    ]
    bytes_of = {name: (tmp_path / name).read_bytes() for name in ("0.flac", "1.flac", "c.jpg")}
    folder = tmp_path / "d"
    folder.mkdir()
    if table:
        columns = {"images": [i for _, i, _ in rows], "audio": [a for a, _, _ in rows]}
        arrays = {k: pa.array([[{"bytes": bytes_of[n]} for n in of] for of in v]) for k, v in columns.items()}
        turns = [json.dumps({"conversations": of}) for _, _, of in rows]
        pq.write_table(pa.table({**arrays, "json": turns}), folder / "0.parquet")
    else:
        lines = [{"audio": audio, "images": images, "conversations": of} for audio, images, of in rows]
        (folder / "0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    root = None if table else tmp_path
    build_index(folder, workers=1, rules=replace(SERVED, images_root=root))
    dataset = Dataset.open(folder)
    (shard,) = dataset.shards
    found, offsets = [], shard.sizes().image_offsets
    for row, count in enumerate(np.diff(offsets).tolist()):
        parts, texts = shard.parts(row), iter(shard.parts(row).texts)
        held = iter(shard.image(row, n) for n in range(count))
        whole = ""
        for kind in parts.kinds:
            if kind == 0:
                whole += next(texts)
                continue
            ref = next(held)
            name = next(name for name, data in bytes_of.items() if data == dataset.read(ref))
            assert ref.is_audio == name.endswith("flac")
            whole += f"[{name}]"
        found.append(whole)
    assert found == [
        "human: [0.flac]What is heard?\ngpt: a tone",
        "human: Is [0.flac] in [c.jpg]?\ngpt: no, [1.flac]",
        "[c.jpg][1.flac][0.flac]human: What is this?\ngpt: all",
        "human: [c.jpg] and <audio>\ngpt: yes",
        "user: What? [1.flac][c.jpg]",
        "[c.jpg]human: [0.flac]\ngpt: one",
    ]
    assert dict(shard.findings().counts) == {"bad_document": 1}
    assert "2 marks <audio> in the turns and 1 clips" in shard.findings().details[0].detail


def test_clips_without_a_place_are_findings_and_never_vanish(tmp_path: Path) -> None:
    (tmp_path / "a.flac").write_bytes(clip(0.2, "flac"))
    (tmp_path / "c.jpg").write_bytes(JPEG)
    turns = human("What is heard?", "a tone")
    lines = [
        {"images": ["c.jpg", None], "audio": [None, "a.flac"], "texts": [None, "words"]},
        {"audio": "a.flac", "texts": ["words"]},
        {"key": "named", "audio": ["a.flac", None], "texts": [None, "words"]},
        {"image": "c.jpg", "audio": "a.flac", "conversations": turns, "text": "a caption"},
    ]
    (tmp_path / "0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    build_index(tmp_path, workers=1, rules=SERVED)
    shard = Dataset.open(tmp_path).shards[0]
    assert shard.keys() == ["named", "000000003"]
    assert [shard.parts(row).kinds for row in range(2)] == [(1, 0), (1, 1, 0)]
    assert dict(shard.findings().counts) == {"bad_document": 2}
    assert "a document, whose places its first list fills, names audio (1 clips)" in shard.findings().details[0].detail


def test_unread_formats_are_findings_and_scores_are_not(tmp_path: Path) -> None:
    odd = [("a.m4a", b"\0\0\0\x20ftypM4A "), ("b.clip", b"0.31"), ("b.wav", clip(0.1))]
    texts = [("a.txt", b"text"), ("b.txt", b"more")]
    dataset = opened(tmp_path, sorted([*odd, *texts]))
    assert dataset.shards[0].keys() == ["b"]
    assert kinds(dataset) == {"unreadable_header": 1}


def test_damaged_clips_in_plain_columns_of_parquet(tmp_path: Path) -> None:
    heard = pa.array([clip(0.1, "flac"), b"damaged", None], pa.binary())
    pq.write_table(pa.table({"audio": heard, "text": pa.array(["a", "b", "c"])}), tmp_path / "0.parquet")
    build_index(tmp_path, workers=1, rules=SERVED)
    shard = Dataset.open(tmp_path).shards[0]
    assert [shard.parts(row).kinds for row in range(shard.num_samples)] == [(1, 0)]
    assert dict(shard.findings().counts) == {"unreadable_header": 1, "orphan_text": 1}
    assert "neither WAV" in shard.findings().details[0].detail


def test_unused_clips_are_counted_one_by_one(tmp_path: Path) -> None:
    members = [("a.1.wav", clip(0.1)), ("a.2.wav", clip(0.1)), ("a.txt", b"text")]
    dataset = opened(tmp_path, members, IndexRules())
    assert "2 members are audio" in dataset.shards[0].findings().details[0].detail


def test_clips_that_are_cut_are_counted(tmp_path: Path) -> None:
    long = [(f"{n}.flac", clip(seconds, "flac", 8000)) for n, seconds in enumerate((30, 30.01, 31))]
    dataset = opened(tmp_path, sorted([*long, *((f"{n}.txt", b"text") for n in range(3))]))
    assert dataset.shards[0].num_samples == 3
    assert kinds(dataset) == {"long_audio": 1}
    assert dataset.shards[0].findings().details[0].detail.startswith("2 clips are longer than 30 s")


def test_joined_tars_bring_clips(tmp_path: Path) -> None:
    heard = clip(0.2, "flac")
    write_tar(tmp_path / "joined/0.tar", [("a.flac", heard)])
    write_tar(tmp_path / "own/0.tar", [("a.jpg", JPEG), ("a.txt", b"text")])
    rules = replace(SERVED, joins=(tmp_path / "joined",))
    build_index(tmp_path / "own", workers=1, rules=rules)
    dataset = Dataset.open(tmp_path / "own")
    assert dataset.shards[0].sizes().image_modality.tolist() == [0, AUDIO]
    assert dataset.read(dataset.shards[0].image(0, 1)) == heard
