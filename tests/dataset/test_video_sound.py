"""The sound of videos in tars, tables, manifests and joined tars: a clip behind its video where users ask for it."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from audio.clips import clip, sound
from shards import make_image, write_tar
from video.clips import video
from video.datasets import SERVED
from video.heard import HEARD
from video.sounds import damaged, video_with_sound

from dataserver.assembly import fault_of
from dataserver.dataset import Conversations, Dataset, MediaMembers, build_index, lint
from dataserver.dataset.errors import DatasetError
from dataserver.dataset.index.flags import flags_of
from dataserver.dataset.index.rules import IndexRules
from dataserver.planning.stream.samples import AUDIO, IMAGE, VIDEO

pytest.importorskip("av", reason="the extra video is not installed")
pytest.importorskip("soundfile", reason="the extra audio is not installed")
JPEG = make_image(np.random.default_rng(0), 40, 30)
TONE = video_with_sound(sound(0.5, 44_100, 2), "aac", 44_100)
OPUS = video_with_sound(sound(0.25, 48_000), "opus")
MUTE = video("h264", 6)


def opened(folder: Path, members: list[tuple[str, bytes]], rules: IndexRules = HEARD) -> Dataset:
    write_tar(folder / "0.tar", members)
    build_index(folder, workers=1, rules=rules)
    return Dataset.open(folder, may_be_empty=True)


def items(dataset: Dataset, row: int = 0) -> list[int]:
    """The modality of each item of a sample."""
    shard = dataset.shards[0]
    first, end = shard.sizes().image_offsets[row : row + 2].tolist()
    return [shard.image(row, n).modality for n in range(end - first)]


def test_sound_is_a_clip_directly_behind_its_video(tmp_path: Path) -> None:
    named = [("a.1.mp4", TONE), ("a.2.mp4", MUTE), ("a.3.webm", OPUS), ("a.4.flac", clip(0.2, "flac")), ("a.jpg", JPEG)]
    dataset = opened(tmp_path, [*named, ("a.txt", b"text"), ("b.mp4", MUTE), ("b.txt", b"more")])
    assert items(dataset) == [IMAGE, VIDEO, AUDIO, VIDEO, VIDEO, AUDIO, AUDIO]
    assert items(dataset, 1) == [VIDEO]
    shard = dataset.shards[0]
    assert shard.parts(0).kinds == (1,) * 7 + (0,)
    shown, heard = shard.image(0, 1), shard.image(0, 2)
    assert (heard.width, heard.height, heard.orientation) == (22_050, 44_100, 2)
    assert (heard.offset, heard.length) == (shown.offset, shown.length)
    assert (heard.frames, heard.microseconds) == (0, 0)
    assert dataset.read(heard) == TONE
    assert fault_of(TONE, heard) is None
    assert dict(shard.findings().counts) == {}
    assert (dataset.has_audio, dataset.has_videos, dataset.has_sound) == (True, True, True)
    for file in tmp_path.glob("*.numeric"):
        file.unlink()
    assert items(Dataset.open(tmp_path)) == [IMAGE, VIDEO, AUDIO, VIDEO, VIDEO, AUDIO, AUDIO]


def test_documents_have_it_behind_the_video_that_they_name(tmp_path: Path) -> None:
    document = {"texts": ["one", None, "two", None], "images": [None, "a.x.mp4", None, "a.y.jpg"]}
    members = [("a.x.mp4", TONE), ("a.y.jpg", JPEG), ("a.json", json.dumps(document).encode())]
    dataset = opened(tmp_path, members)
    assert dataset.shards[0].parts(0).kinds == (0, 1, 1, 0, 1)
    assert items(dataset) == [VIDEO, AUDIO, IMAGE]


def test_columns_of_parquet_paths_of_manifests_and_joined_tars(tmp_path: Path) -> None:
    (tmp_path / "table").mkdir()
    table = {"video": [{"bytes": TONE, "path": "1.mp4"}, {"bytes": MUTE, "path": "2.mp4"}], "text": ["one", "two"]}
    pq.write_table(pa.table(table), tmp_path / "table" / "0.parquet", compression="zstd")
    lines = tmp_path / "lines"
    (lines / "clips").mkdir(parents=True)
    (lines / "clips" / "a.mp4").write_bytes(TONE)
    (lines / "clips" / "b.mp4").write_bytes(MUTE)
    objects = [{"video": f"clips/{name}.mp4", "text": name} for name in "ab"]
    (lines / "0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in objects))
    write_tar(tmp_path / "other" / "0.tar", [("a.mp4", TONE), ("b.mp4", MUTE)])
    joined = tmp_path / "joined"
    write_tar(joined / "0.tar", [("a.txt", b"one"), ("b.txt", b"two")])
    for folder, rules in (
        (tmp_path / "table", HEARD),
        (lines, HEARD),
        (joined, replace(HEARD, joins=(tmp_path / "other",))),
    ):
        build_index(folder, workers=1, rules=rules)
        dataset = Dataset.open(folder)
        assert [items(dataset, row) for row in (0, 1)] == [[VIDEO, AUDIO], [VIDEO]], folder
        heard = dataset.shards[0].image(0, 1)
        assert (heard.width, heard.height) == (22_050, 44_100)
        assert dataset.read(heard) == TONE


def test_sound_that_cannot_be_read_is_a_finding_and_damage_is_found_by_lint(tmp_path: Path) -> None:
    broken = damaged(video_with_sound(sound(1.0, 48_000)))
    unread = video_with_sound(name="ac3")
    members = [("a.mp4", unread), ("a.txt", b"text"), ("b.mp4", broken), ("b.txt", b"t"), ("c.mp4", TONE)]
    dataset = opened(tmp_path, [*members, ("c.txt", b"more")])
    assert dataset.shards[0].keys() == ["b", "c"]
    (finding,) = dataset.shards[0].findings().details
    assert (finding.key, finding.kind) == ("a", "unreadable_header")
    assert "its sound: its codec is ac3; AAC, MP3, Opus, Vorbis are read; or index with" in finding.detail
    report = lint(tmp_path, judge=fault_of)
    assert {(one.key, one.kind) for one in report.findings} == {("a", "unreadable_header"), ("b", "undecodable")}


def test_long_sound_is_told_as_that_of_clips_is(tmp_path: Path) -> None:
    long = video_with_sound(sound(0.5, 48_000), "opus", at=lambda t: t + 40 * 48_000 if t > 20_000 else t)
    dataset = opened(tmp_path, [("a.webm", long), ("a.txt", b"text")])
    assert dict(dataset.shards[0].findings().counts) == {"long_audio": 1}


def test_without_the_rule_nothing_changes(tmp_path: Path) -> None:
    members = [("a.mp4", TONE), ("a.txt", b"text")]
    ignored = opened(tmp_path / "ignored", members, SERVED)
    assert items(ignored) == [VIDEO]
    assert "sound" not in ignored.shards[0].header.rules
    assert not ignored.has_sound
    served = opened(tmp_path / "served", members)
    assert served.fingerprint != ignored.fingerprint
    assert flags_of(HEARD) == ["--audio", "serve", "--video", "serve", "--video-sound", "serve"]


def test_rules_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(DatasetError, match="add --video serve"):
        IndexRules(video_sound=MediaMembers.SERVE)
    with pytest.raises(DatasetError, match="do not go together"):
        IndexRules(video=MediaMembers.SERVE, video_sound=MediaMembers.SERVE, conversations=Conversations.CHAT)


def test_filters_count_sound_among_the_clips(tmp_path: Path) -> None:
    rules = replace(HEARD, audio=IndexRules().audio)
    members = [("a.mp4", TONE), ("a.txt", b"text"), ("b.mp4", MUTE), ("b.txt", b"more")]
    shard = opened(tmp_path, members, rules).shards[0]
    assert shard.column("clips").to_pylist() == [1, 0]
    assert shard.column("longest_clip_seconds").to_pylist() == [0.5, None]
