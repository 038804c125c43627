"""Clips and videos arrive: converted, a dataset is what it was where it lay, and what is damaged is named."""

import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from audio.clips import clip
from dataset.said import Said, said_of
from shards import make_image
from video.clips import video

from dataserver.dataset import Conversations, Dataset, DatasetError, IndexRules, MediaMembers, build_index
from dataserver.dataset.conversion.convert import convert
from dataserver.dataset.conversion.tar_samples import tar_sample
from dataserver.dataset.errors import Findings
from dataserver.dataset.shards.members import Member

pytest.importorskip("soundfile", reason="the extra audio is not installed")
pytest.importorskip("av", reason="the extra video is not installed")
JPEG = make_image(np.random.default_rng(0), 40, 30)
BOTH = IndexRules(audio=MediaMembers.SERVE, video=MediaMembers.SERVE)
CHATS = IndexRules(audio=MediaMembers.SERVE, video=MediaMembers.SERVE, conversations=Conversations.CHAT)
FILES = {
    "a.flac": clip(0.2, "flac"), "b.mp3": clip(0.3, "mp3"), "c.ogg": clip(0.1, "vorbis"), "d.opus": clip(0.1, "opus"),
    "e.wav": clip(0.1), "v.mp4": video("h264", 3), "w.webm": video("vp9", 2), "c.jpg": JPEG,
}  # fmt: skip
OF = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def said(folder: Path, rules: IndexRules) -> list[Said]:
    """Every sample of a folder that is indexed by rules."""
    build_index(folder, workers=1, rules=rules)
    return said_of(Dataset.open(folder, may_be_empty=True))


def write_manifest(folder: Path, lines: list[dict[str, Any]]) -> Path:
    folder.mkdir()
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    (folder / "0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def names_in(folder: Path) -> list[str]:
    return [name for path in sorted(folder.glob("*.tar")) for name in tarfile.open(path).getnames()]


def turns(*texts: str) -> list[dict[str, str]]:
    return [{"from": "human" if n % 2 == 0 else "gpt", "value": text} for n, text in enumerate(texts)]


LINES: list[dict[str, Any]] = [
    {"audio": "a.flac", "text": "one"},
    {"image": "c.jpg", "audio": ["a.flac", "b.mp3", "c.ogg"], "video": "w.webm", "text": "all", "key": "x.y"},
    {"videos": ["v.mp4", "w.webm"], "audio_path": "d.opus", "text": "videos", "score": 0.5},
    {"images": ["c.jpg", None, "a.flac", "v.mp4"], "texts": [None, "words", None, None]},
    {"image": "c.jpg", "text": "an image"},
    {"audio": ["e.wav", "a.flac"], "image": "c.jpg", "conversations": turns("<audio>, <image> or <audio>?", "one")},
    {"video": "v.mp4", "conversations": turns("What is seen?", "colours")},
]  # fmt: skip


def test_a_manifest_is_what_it_was(tmp_path: Path) -> None:
    source = write_manifest(tmp_path / "in", LINES)
    report = convert(source, tmp_path / "out", workers=1)
    assert (report.num_samples, report.findings) == (len(LINES), {})
    expected = [(key.replace(".", "_"), *rest) for key, *rest in said(source, BOTH)]
    assert said(tmp_path / "out", BOTH) == expected
    assert len(expected) == len(LINES)
    assert {"x_y.jpg", "x_y.audio.0.flac", "x_y.audio.1.mp3", "x_y.audio.2.ogg", "x_y.video.mkv"} <= set(
        names_in(tmp_path / "out")
    )
    assert convert(source, tmp_path / "out", workers=1).num_converted == 0
    (source / "d.opus").write_bytes(clip(0.3, "opus"))
    assert convert(source, tmp_path / "out", workers=1).num_converted == 1


def test_conversations_are_the_same_chats(tmp_path: Path) -> None:
    source = write_manifest(tmp_path / "in", LINES[5:])
    convert(source, tmp_path / "out", workers=1)
    expected = said(source, CHATS)
    assert said(tmp_path / "out", CHATS) == expected
    assert [len(sizes) for _, _, sizes, _ in expected] == [3, 1]


def test_what_a_manifest_names_wrongly_is_named(tmp_path: Path) -> None:
    (tmp_path / "secret.wav").write_bytes(FILES["e.wav"])
    lines = [
        {"audio": "../secret.wav", "text": "out of the folder"},
        {"audio": "gone.wav", "text": "gone"},
        {"video": "cut.mp4", "text": "cut"},
        {"video": "large.mp4", "text": "large"},
        {"audio": "junk.wav", "text": "junk"},
        {"images": ["c.jpg", None], "texts": [None, "words"], "audio": "a.flac"},
    ]
    source = write_manifest(tmp_path / "in", lines)
    (source / "cut.mp4").write_bytes(FILES["v.mp4"][:300])
    (source / "junk.wav").write_bytes(b"junk")
    with (source / "large.mp4").open("wb") as file:
        file.truncate(65 << 20)
    report = convert(source, tmp_path / "out", workers=1)
    assert report.findings == {"missing_image": 2, "video_too_large": 1, "unused_part": 1}
    details = [finding.detail for _, finding in report.details]
    assert any("places its first list fills, names audio (1 clips)" in detail for detail in details)
    build_index(tmp_path / "out", workers=1, rules=BOTH)
    (shard,) = Dataset.open(tmp_path / "out").shards
    found = shard.findings()
    assert found.counts["unreadable_header"] == 2, "the cut video and what is no clip"
    assert [shard.parts(row).kinds for row, key in enumerate(shard.keys()) if key == "000000005"] == [(1, 0)]
    assert FILES["e.wav"] not in (tmp_path / "out/0-00000.tar").read_bytes()


def test_entries_stay_entries_where_clips_or_videos_are_ignored(tmp_path: Path) -> None:
    lines = [{"image": "c.jpg", "video": "v123", "text": "an id"}, {"audio": "a.flac", "text": "a clip"}]
    source = write_manifest(tmp_path / "in", lines)
    report = convert(source, tmp_path / "out", workers=1, video=MediaMembers.IGNORE)
    assert report.findings == {}
    build_index(tmp_path / "out", workers=1, rules=BOTH)
    assert Dataset.open(tmp_path / "out").shards[0].column("video").to_pylist() == ["v123", None]
    assert convert(source, tmp_path / "out", workers=1, video=MediaMembers.IGNORE).num_converted == 0
    with pytest.raises(DatasetError, match=r"other options .ignored was \"\['video'\]\" and is 'None'"):
        convert(source, tmp_path / "out", workers=1)


def test_tables_are_what_they_were(tmp_path: Path) -> None:
    clips = [{"bytes": FILES[name], "path": name} for name in ("a.flac", "b.mp3", "c.ogg")]
    columns = {
        "image": pa.array([{"bytes": JPEG, "path": None}, None, None], OF),
        "audio": pa.array([clips[0], clips[1], None], OF),
        "video": pa.array([FILES["v.mp4"], None, FILES["w.webm"]], pa.binary()),
        "more": pa.array([[], [clips[2], clips[0]], None], pa.list_(OF)),
        "text": pa.array(["a", "b", "c"]),
        "audio_path": pa.array(["x", "y", "z"]),
    }
    (tmp_path / "in").mkdir()
    pq.write_table(pa.table(columns), tmp_path / "in/0.parquet")
    report = convert(tmp_path / "in", tmp_path / "out", workers=1)
    assert (report.num_samples, report.findings) == (3, {})
    expected = said(tmp_path / "in", BOTH)
    assert said(tmp_path / "out", BOTH) == expected
    assert [len(sizes) for _, _, sizes, _ in expected] == [3, 3, 1]
    assert Dataset.open(tmp_path / "out").shards[0].column("audio_path").to_pylist() == ["x", "y", "z"]


def test_damaged_clips_and_names_in_tables(tmp_path: Path) -> None:
    """A damaged one stays what its column says; a column of names is none of clips, and stays."""
    columns = {
        "audio": pa.array([FILES["e.wav"], b"junk", None], pa.binary()),
        "video": pa.array(["1.mp4", "2.mp4", "3.mp4"]),
        "text": pa.array(["a", "b", "c"]),
    }
    (tmp_path / "in").mkdir()
    pq.write_table(pa.table(columns), tmp_path / "in/0.parquet")
    assert convert(tmp_path / "in", tmp_path / "out", workers=1).findings == {}
    assert "000000001.wav" in names_in(tmp_path / "out")
    build_index(tmp_path / "out", workers=1, rules=IndexRules(audio=MediaMembers.SERVE))
    (shard,) = Dataset.open(tmp_path / "out").shards
    assert (shard.keys(), dict(shard.findings().counts)) == (
        ["000000000"], {"orphan_text": 1, "unreadable_header": 1},
    )  # fmt: skip
    assert shard.column("video").to_pylist() == ["1.mp4"]


def test_loose_files_are_what_they_were(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for name, content in FILES.items():
        (tmp_path / "in" / name).write_bytes(content)
        (tmp_path / "in" / f"{name[0]}.txt").write_text(f"text {name[0]}")
    (tmp_path / "in/m.wav").write_bytes(b"junk")
    with (tmp_path / "in/large.mp4").open("wb") as file:
        file.truncate(65 << 20)
    report = convert(tmp_path / "in", tmp_path / "out", workers=1)
    assert (report.findings, report.passed_over) == ({"video_too_large": 1}, ())
    expected = said(tmp_path / "in", BOTH)
    assert said(tmp_path / "out", BOTH) == expected
    assert [key for key, *_ in expected] == ["a", "b", "c", "d", "e", "v", "w"]


@pytest.mark.parametrize(
    ("content", "modality", "name"),
    [
        *((FILES[name], 1, f"k.{name[2:]}") for name in ("a.flac", "b.mp3", "c.ogg", "d.opus", "e.wav")),
        (FILES["v.mp4"], 2, "k.mp4"), (FILES["w.webm"], 2, "k.mkv"), (FILES["w.webm"], 1, "k.webm"),
        (video("ts", 3), 2, "k.ts"),
        (FILES["a.flac"], 0, "k.flac"), (JPEG, 1, "k.jpg"), (b"junk", 0, "k.img"), (b"junk", 1, "k.wav"),
        (b"junk", 2, "k.mp4"), (b"", 1, "k.wav"),
    ],
)  # fmt: skip
def test_members_are_named_by_what_they_are(content: bytes, modality: int, name: str) -> None:
    ending = ("img", "clip", "video")[modality]
    members = [Member(ending, 0, len(content), content, key="k", modality=modality)]
    assert tar_sample(members, Findings())[0] == (name, content)
