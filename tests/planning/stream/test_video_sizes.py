"""Grids and tokens of videos beside images and clips, and which modules plans give them to."""

import numpy as np
import pytest
from builders.jobs import compose_whole, module

from dataserver.planning.job.fields import Modality, VideoSizing
from dataserver.planning.job.identity import Job, parse_job
from dataserver.planning.layouts.shared.limits import with_modality
from dataserver.planning.plan.expectation import microbatch_loads
from dataserver.planning.planner import plan_step
from dataserver.planning.stream.gathering import pick_rows
from dataserver.planning.stream.item_sizes import VideoLengths, item_tokens
from dataserver.planning.stream.samples import AUDIO, IMAGE, VIDEO, ShardTable
from dataserver.planning.stream.sizing import concatenate, shard_table, size_samples
from dataserver.planning.stream.video_frames import frame_groups, sampled_frames

MODALITY = np.array([IMAGE, VIDEO, AUDIO, VIDEO, IMAGE], np.uint8)
VIDEO_SIZES = {"max_frames": 9, "min_pixels": 784, "max_pixels": 28 * 28 * 6}


def video_job(**changes: object) -> Job:
    modules = [
        module("encoder", dp=1),
        {"name": "eyes", "kind": "encoder", "modality": "video", "dp": 2},
        {"name": "ears", "kind": "encoder", "modality": "audio"},
        module("backbone", dp=2),
    ]
    sizing = {"patch": 14, "merge": 2, "max_patches": 256, "video": VIDEO_SIZES}
    fields = {
        "sizing": sizing,
        "generation": {"ratio": "0"},
        "global_batch": 4,
        "seq_len": 128,
        "packing": {"enabled": False},
    }
    return parse_job(compose_whole(**{"modules": modules, **fields, **changes}))


def table_of(job: Job) -> ShardTable:
    """An image and a video; a clip; a video and an image; text alone."""
    lengths = VideoLengths(np.array([0, 300, 0, 1, 0], np.int32), np.array([0, 10_000_000, 0, 40_000, 0], np.int64))
    return shard_table(
        job.stream,
        np.arange(4),
        np.array([5, 6, 7, 8]),
        np.array([0, 2, 3, 5, 5]),
        np.array([56, 112, 16_000, 84, 28], np.int32),
        np.array([28, 56, 16_000, 28, 28], np.int32),
        modality=MODALITY,
        lengths=lengths,
    )


def test_a_video_is_groups_of_rows_and_columns() -> None:
    table = table_of(video_job())
    assert table.image_depths is not None
    assert table.image_depths.tolist() == [1, 4, 1, 1, 1]  # 9 frames at most, and of these an even number
    assert table.image_rows.tolist() == [2, 4 * 2, 1, 2, 2]  # 112 x 56 pixels are scaled down to 4 blocks
    assert table.image_columns.tolist() == [4, 6, 50, 6, 2]
    assert item_tokens(table, video_job().stream.sizing).tolist() == [2, 12, 25, 3, 1]


def test_depths_follow_samples() -> None:
    job = video_job()
    table = table_of(job)
    picked = pick_rows(table, np.array([2, 0]))
    assert picked.image_modality is not None
    assert picked.image_depths is not None
    assert picked.image_modality.tolist() == [VIDEO, IMAGE, IMAGE, VIDEO]
    assert picked.image_depths.tolist() == [1, 1, 1, 4]
    both = [size_samples(job.stream, 0, 0, t.row.astype(np.uint64), t) for t in (picked, table)]
    joined = concatenate(both)
    assert joined.image_depths is not None
    assert joined.image_depths.tolist() == [1, 1, 1, 4, 1, 4, 1, 1, 1]
    alone = with_modality(table, Modality.VIDEO)
    assert alone.image_offsets.tolist() == [0, 1, 1, 2, 2]
    assert alone.image_depths is not None
    assert alone.image_depths.tolist() == [4, 1]


def test_plans_give_each_encoder_its_own_and_count_attention_within_groups() -> None:
    job = video_job()
    table = table_of(job)
    plan = plan_step(job, 0, size_samples(job.stream, 0, 0, table.row.astype(np.uint64), table))
    for name, number in (("vit", IMAGE), ("ears", AUDIO), ("eyes", VIDEO)):
        assert sorted(plan.arrangement(name).item.tolist()) == np.flatnonzero(number == MODALITY).tolist()
    eyes = job.spec.execution.module("eyes")
    found = microbatch_loads(eyes, plan) - eyes.cost.microbatch_ns
    whole = sum(
        groups * (size * eyes.cost.linear_ps // 1000 + size * size * eyes.cost.quadratic_fs // 10**6)
        for groups, size in ((4, 12), (1, 12))
    )
    assert found.sum() == pytest.approx(whole, abs=5)


@pytest.mark.parametrize(
    ("frames", "microseconds", "fields", "expected"),
    [
        (300, 10_000_000, {}, 20),
        (300, 10_000_000, {"max_frames": 7}, 6),
        (3, 100_000, {}, 2),
        (1, 40_000, {}, 1),
        (30, 333_333, {"fps": "60"}, 20),
        (30, 1_001_000, {"fps": "3"}, 4),
        (300, 1, {"rule": "uniform", "max_frames": 7}, 7),
        (5, 1, {"rule": "uniform", "max_frames": 7}, 5),
        (262_144, 3_600_000_000, {"fps": "240", "max_frames": 4096}, 4096),
    ],
)
def test_sampled_frames(frames: int, microseconds: int, fields: dict[str, object], expected: int) -> None:
    sizing = VideoSizing.model_validate(fields)
    assert sampled_frames(frames, microseconds, sizing) == expected
    assert frame_groups(frames, microseconds, sizing) == -(-expected // 2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rule": "uniform", "fps": "1"}, "has no use for fps"),
        ({"fps": "0"}, "more than 0 and at most 240"),
        ({"fps": "0.0001"}, "three digits"),
        ({"min_frames": 9, "max_frames": 8}, "less than min_"),
        ({"min_pixels": 10, "max_pixels": 9}, "less than min_"),
        ({"max_pixels": 2**31}, "allows frames of .* patches; at most"),
        ({"max_pixels": 2**27, "max_frames": 4096}, "2048 groups of frames of .* lower video.max_frames"),
    ],
)
def test_sizings_that_contradict_themselves_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        video_job(sizing={"video": fields})


def test_saying_the_defaults_is_saying_nothing() -> None:
    plain = video_job(sizing={})
    said = video_job(sizing={"video": {"rule": "qwen", "fps": 2, "min_frames": 4, "max_frames": 768}})
    assert plain.stream_id == said.stream_id
    assert plain.stream_id != video_job().stream_id


def test_padded_videos_are_refused() -> None:
    with pytest.raises(ValueError, match="frames of videos are not"):
        parse_job(
            compose_whole([{"name": "e", "kind": "encoder", "modality": "video", "padded": True}, module("backbone")])
        )
