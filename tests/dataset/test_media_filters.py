"""Filters by the seconds and the number of clips and videos, from the index alone."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from audio.clips import clip
from shards import make_image, write_tar
from video.clips import video

from dataserver.dataset import Dataset, FilterError, MediaMembers, build_index, compile_filter
from dataserver.dataset.index.derived import DerivedColumns
from dataserver.dataset.index.rules import IndexRules

pytest.importorskip("soundfile", reason="the extra audio is not installed")
pytest.importorskip("av", reason="the extra video is not installed")
JPEG = make_image(np.random.default_rng(0), 40, 30)
BOTH = IndexRules(audio=MediaMembers.SERVE, video=MediaMembers.SERVE)
MEMBERS = [
    ("a.1.flac", clip(0.5, "flac", 22_050, 2)), ("a.2.wav", clip(2)), ("a.jpg", JPEG), ("a.txt", b"two clips"),
    ("b.mp4", video("h264", 12)), ("b.txt", b"1.2 s"),
    ("c.jpg", JPEG), ("c.txt", b"an image"),
    ("d.mp3", clip(1, "mp3")), ("d.webm", video("vp9", 6)), ("d.y.mp4", video("h264", 3)), ("d.txt", b"all"),
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("media")
    write_tar(found / "0.tar", MEMBERS)
    build_index(found, workers=1, rules=BOTH)
    return found


def left_of(folder: Path, text: str) -> str:
    dataset = Dataset.open(folder)
    wanted = compile_filter(text)
    wanted.check(dataset.shards)
    return "".join(
        key for shard in dataset.shards for key, stays in zip(shard.keys(), shard.keep(wanted), strict=True) if stays
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("clips == 0", "bc"), ("clips == 2", "a"), ("videos >= 1", "bd"), ("videos > 1", "d"),
        ("longest_clip_seconds <= 1", "d"), ("longest_clip_seconds <= 2", "ad"), ("shortest_clip_seconds < 0.51", "a"),
        ("shortest_clip_seconds == 0.5", "a"), ("longest_clip_seconds > 2", ""),
        ("clips == 0 or longest_clip_seconds <= 1", "bcd"), ("longest_clip_seconds is null", "bc"),
        ("longest_video_seconds < 1", "d"), ("0.2 < shortest_video_seconds <= 1.2", "bd"),
        ("longest_video_seconds in (1.2, 0.6)", "bd"), ("not longest_video_seconds >= 1", "acd"),
        ("clips == 1 and videos == 2 and width is null", "d"),
    ],
)  # fmt: skip
def test_what_filters_keep(folder: Path, text: str, expected: str) -> None:
    assert left_of(folder, text) == expected


def test_samples_without_a_clip_are_counted_as_dropped_for_a_null(folder: Path) -> None:
    (shard,) = Dataset.open(folder).shards
    assert shard.dropped_for_nulls(compile_filter("longest_clip_seconds <= 30")) == 2
    assert shard.dropped_for_nulls(compile_filter("clips == 0 or longest_clip_seconds <= 30")) == 0
    assert [shard.column(n).null_count for n in ("clips", "videos", "longest_video_seconds")] == [0, 0, 2]


def test_a_dataset_without_clips_or_videos_refuses_them_by_name(tmp_path: Path) -> None:
    write_tar(tmp_path / "0.tar", MEMBERS)
    build_index(tmp_path, workers=1, rules=IndexRules(video=MediaMembers.SERVE))
    shards = Dataset.open(tmp_path).shards
    assert left_of(tmp_path, "videos == 0 and width > 1") == "ac"
    with pytest.raises(FilterError, match="'clips', which no shard has; index with --audio serve to have it; the col"):
        compile_filter("clips >= 1").check(shards)
    build_index(tmp_path, workers=1)
    with pytest.raises(FilterError, match=r"'longest_video_seconds', .* --video serve .*are: height, width$"):
        compile_filter("longest_video_seconds < 3").check(Dataset.open(tmp_path).shards)


def test_a_column_of_the_same_name_stands_for_them_in_all_shards(tmp_path: Path) -> None:
    """So that filters of datasets that have such columns mean what they meant before."""
    texts = [("a.jpg", JPEG), ("a.txt", b"text"), ("b.wav", clip(0.1)), ("b.txt", b"more")]
    write_tar(tmp_path / "0.tar", texts)
    write_tar(tmp_path / "1.tar", [*texts, ("c.wav", clip(0.1)), ("c.txt", b"more")])
    pq.write_table(pa.table({"key": ["a", "b"], "clips": ["none", None]}), tmp_path / "0.parquet")
    build_index(tmp_path, workers=1, rules=IndexRules(audio=MediaMembers.SERVE))
    assert left_of(tmp_path, "clips == 'none'") == "a"
    assert left_of(tmp_path, "longest_clip_seconds > 0") == "bbc"
    first, second = Dataset.open(tmp_path).shards
    assert (first.column("clips").null_count, "clips" in second.columns) == (1, False)
    with pytest.raises(KeyError):
        second.column("clips")


def test_a_transforms_column_of_the_same_name_stands_for_them(folder: Path) -> None:
    (shard,) = Dataset.open(folder).shards
    derived = DerivedColumns(shard, {"tag 1 {}": pa.table({"clips": ["x", "y", "x", "x"]})})
    assert compile_filter("clips == 'y' and videos == 1").mask(derived).tolist() == [False, True, False, False]
