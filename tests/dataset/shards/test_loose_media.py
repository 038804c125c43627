"""Folders of clips and videos in files of their own: what a tar of the same files says, served or named."""

import os
from pathlib import Path

import numpy as np
import pytest
from audio.clips import clip
from dataset.said import Said, said_of
from shards import make_image, write_tar
from video.clips import video

from dataserver.dataset import Dataset, IndexRules, MediaMembers, StaleIndexError, build_index, lint

pytest.importorskip("soundfile", reason="the extra audio is not installed")
pytest.importorskip("av", reason="the extra video is not installed")
JPEG = make_image(np.random.default_rng(0), 40, 30)
BOTH = IndexRules(audio=MediaMembers.SERVE, video=MediaMembers.SERVE)
MP4 = video("h264", 3)
FILES = {
    "a.1.flac": clip(0.2, "flac"), "a.10.MP3": clip(0.3, "mp3"), "a.2.webm": video("vp9", 2), "a.jpg": JPEG,
    "a.txt": b"all", "b.mp4": MP4, "b.json": b'{"caption": "shown", "score": 0.5}', "c.wav": clip(0.1),
    "c.txt": b"heard", "d.wav": b"RIFFdamaged", "d.txt": b"out", "e.mp4": MP4[: len(MP4) // 2], "e.txt": b"out",
    "f.avi": b"RIFF\0\0\0\0AVI LIST", "f.txt": b"out", "g.m4a": b"\0\0\0\x20ftypM4A ", "g.txt": b"out",
    "h.jpg": JPEG, "h.txt": b"an image", "i.txt": b"an orphan", "j.flac": JPEG, "j.txt": b"an image too",
    "h.ts": b"export const text = 'no video';",
}  # fmt: skip


def write_files(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def said(folder: Path, rules: IndexRules) -> tuple[list[Said], dict[str, int], dict[str, str]]:
    """Every sample with its parts and bytes, all findings, and what they say by their keys."""
    build_index(folder, workers=1, rules=rules)
    dataset = Dataset.open(folder, may_be_empty=True)
    found = [finding for shard in dataset.shards for finding in shard.findings().details]
    return said_of(dataset), dict(lint(folder).counts), {one.key: f"{one.kind}: {one.detail}" for one in found}


@pytest.mark.parametrize("rules", [BOTH, IndexRules(audio=MediaMembers.SERVE), IndexRules()])
def test_a_folder_is_what_a_tar_of_its_files_is(tmp_path: Path, rules: IndexRules) -> None:
    write_tar(tmp_path / "tar/0.tar", sorted(FILES.items()))
    samples, kinds, _ = said(write_files(tmp_path / "loose", FILES), rules)
    expected, expected_kinds, _ = said(tmp_path / "tar", rules)
    if rules == BOTH:
        assert [key for key, *_ in samples] == ["a", "b", "c", "h", "j"]
        assert kinds == {"unreadable_header": 4, "orphan_text": 1}
    else:  # an ignored file is not looked into
        samples, expected = ([one for one in of if one[0] != "j"] for of in (samples, expected))
        expected_kinds, kinds = ({k: n for k, n in of.items() if k.startswith("un")} for of in (expected_kinds, kinds))
    assert samples == expected
    assert kinds == expected_kinds


def test_damaged_files_are_told_in_the_words_of_what_they_claim_to_be(tmp_path: Path) -> None:
    details = said(write_files(tmp_path / "in", FILES), BOTH)[2]
    assert details["d"].startswith("unreadable_header: d.wav: ")
    assert "WAV" in details["d"]
    assert "video" in details["e"] or "MP4" in details["e"]
    assert "image" not in details["d"] + details["e"] + details["f"] + details["g"]


def test_large_files_and_links_are_named(tmp_path: Path) -> None:
    folder = write_files(tmp_path / "in", {"a.flac": clip(0.1, "flac"), "a.txt": b"one", "b.txt": b"t", "c.txt": b"t"})
    for name in ("b.mp4", "c.wav"):
        with (folder / name).open("wb") as file:
            os.truncate(file.fileno(), 65 << 20)
    (folder / "l.mp4").symlink_to("b.mp4")
    samples, kinds, _ = said(folder, BOTH)
    assert len(samples) == 1
    assert kinds == {"audio_too_large": 1, "video_too_large": 1, "special_member": 1, "missing_caption": 1}


def test_folders_without_any_image_are_shards_and_what_changed_is_indexed_again(tmp_path: Path) -> None:
    write_files(tmp_path / "heard", {"a.flac": clip(0.1, "flac"), "a.txt": b"one"})
    write_files(tmp_path / "seen", {"a.mp4": MP4, "a.txt": b"two"})
    samples, kinds, _ = said(tmp_path, BOTH)
    assert (len(samples), kinds) == (2, {})
    assert [shard.name for shard in Dataset.open(tmp_path).shards] == ["heard/folder.images", "seen/folder.images"]
    (tmp_path / "heard/a.flac").write_bytes(clip(0.2, "flac"))
    with pytest.raises(StaleIndexError, match=r"heard/folder\.images"):
        Dataset.open(tmp_path)
    assert build_index(tmp_path, workers=1, rules=BOTH).num_built == 1


def test_loose_media_beside_tars_are_named(tmp_path: Path) -> None:
    write_tar(tmp_path / "0.tar", [("a.jpg", JPEG), ("a.txt", b"text")])
    write_files(tmp_path / "more", {"a.flac": clip(0.1, "flac")})
    build_index(tmp_path, workers=1, rules=BOTH)
    (finding,) = lint(tmp_path).findings
    assert (finding.kind, "more/" in str(finding), "clips or videos in files" in finding.detail) == (
        "unread_file", True, True,
    )  # fmt: skip


def test_folders_of_images_alone_have_the_bytes_that_they_had(tmp_path: Path) -> None:
    """So that their indexes and fingerprints stay."""
    write_files(tmp_path / "in", {"a.jpg": JPEG, "a.txt": b"one", "b.doc": b"", "c.md": b""})
    build_index(tmp_path / "in", workers=1)
    assert Dataset.open(tmp_path / "in").shards[0].header.shard_bytes == len(f'["a.jpg", {len(JPEG)}]\n["a.txt", 3]\n')
