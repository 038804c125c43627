"""Frames, times and grids of videos as Qwen3-VL's processor of transformers has them."""

import random
from collections.abc import Iterator
from fractions import Fraction
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from builders.jobs import compose_whole, module
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor, smart_resize

from dataserver.planning.job.fields import FrameRule, Sizing, Timestamps, VideoSizing
from dataserver.planning.job.identity import Job, parse_job
from dataserver.planning.stream.item_sizes import VideoLengths, item_marks, item_tokens
from dataserver.planning.stream.samples import AUDIO, IMAGE, VIDEO
from dataserver.planning.stream.sizing import concatenate, shard_table, size_samples
from dataserver.planning.stream.video_frames import (
    frame_number,
    frame_rate,
    group_tenths,
    sampled_frames,
    timestamp_tokens,
)
from dataserver.planning.stream.video_grids import video_grids

FEW, MANY = 300, 40_000
RATES = [Fraction(rate) for rate in ("24", "25", "30", "60", "10", "12.5", "15", "29", "30000/1001", "24000/1001", "1")]
RELEASED = {"min_pixels": 4096, "max_pixels": 25_165_824}
TIMESTAMPS = {"before": [90], "digits": [*range(48, 58)], "point": [46], "after": [115, 62, 91], "end": [92]}


class Drawn(NamedTuple):
    """A video, and how it is read."""

    frames: int
    rate: Fraction
    width: int
    height: int
    rule: VideoSizing

    @property
    def microseconds(self) -> int:
        return round(self.frames / self.rate * 1_000_000)

    @property
    def fps(self) -> float:
        """As processors are told it."""
        return float(self.rate)


def videos(number: int, seed: int) -> Iterator[Drawn]:
    """Any videos: of a frame and of an hour, of whole seconds, tiny and long frames, bounds that are reached or not."""
    rng = random.Random(seed)
    for n in range(number):
        rate = rng.choice(RATES)
        frames = rng.choice([rng.randint(1, 40), rng.randint(1, 3_000), rng.randint(1, 60_000)])
        if n % 3 == 0:
            frames = max(1, round(rng.randint(1, 120) * rate))
        frames = min(frames, int(3_600 * rate))
        fields: dict[str, Any] = {"rule": "qwen3", "fps": rng.choice(["2", "2", "1", "0.3", "4", "24"])}
        if rng.random() < 0.3:
            fields["max_frames"] = rng.randint(4, 100)
        if rng.random() < 0.3:
            fields["min_frames"] = rng.randint(1, fields.get("max_frames", 768))
        if rng.random() < 0.5:
            fields["min_pixels"] = rng.choice([1, 4096, 128 * 32 * 32, 10**6])
            fields["max_pixels"] = min(fields["min_pixels"] * rng.choice([1, 7, 256, 1000]), 2**28)
        if rng.random() < 0.3:
            fields["max_frame_tokens"] = rng.choice([16, 256, 768])
        sides = rng.choice([(1920, 1080), (640, 480), (320, 320), (rng.randint(1, 90), rng.randint(1, 90)),
                            (rng.randint(32, 3000), rng.randint(32, 3000))])  # fmt: skip
        yield Drawn(frames, rate, *sides, VideoSizing.model_validate(fields))


def their_numbers(video: Drawn) -> list[int]:
    """Frames by `Qwen3VLVideoProcessor.sample_frames`."""
    rule = video.rule
    stub = SimpleNamespace(fps=2, min_frames=rule.least_frames, max_frames=rule.max_frames)
    metadata = SimpleNamespace(total_num_frames=video.frames, fps=video.fps)
    found = Qwen3VLVideoProcessor.sample_frames(stub, metadata, fps=rule.milli_fps / 1000)
    return np.asarray(found).tolist()


def our_numbers(video: Drawn) -> list[int]:
    wanted = sampled_frames(video.frames, video.microseconds, video.rule)
    return [frame_number(i, wanted, video.frames, FrameRule.QWEN3) for i in range(wanted)]


def their_grid(video: Drawn, frames: int, block: int) -> tuple[int, int]:
    """Height and width of frames by `smart_resize`, with the cap of `Qwen3VLVideoProcessor.resize`."""
    rule = video.rule
    most = rule.max_pixels
    if rule.max_frame_tokens is not None:
        least = int(rule.min_pixels * 1.05)
        most = max(min(rule.max_frame_tokens * block * block, rule.max_pixels // frames), least) * frames
    return smart_resize(frames, video.height, video.width, 2, block, rule.min_pixels, most)


def compare(number: int, seed: int) -> None:
    texts = 0
    for video in videos(number, seed):
        numbers = our_numbers(video)
        assert numbers == their_numbers(video), video
        times = Qwen3VLProcessor._calculate_timestamps(None, np.array(numbers), video.fps, 2)
        tenths = group_tenths(video.frames, video.microseconds, video.rule)
        assert [f"{n // 10}.{n % 10}" for n in tenths] == [f"{time:.1f}" for time in times], video
        told = video.rule.model_copy(update={"timestamps": Timestamps.model_validate(TIMESTAMPS)})
        count = timestamp_tokens(video.frames, video.microseconds, told)
        assert count == sum(len(f"<{time:.1f}sec ") for time in times)
        texts += len(times)
        if len(numbers) >= 2 and max(video.width, video.height) <= 150 * min(video.width, video.height):
            sizing = Sizing(patch=16, merge=2, video=video.rule)
            sides = np.array([video.width], np.int32), np.array([video.height], np.int32)
            rows, columns = video_grids(*sides, np.array([len(numbers)]), sizing)
            assert (int(rows[0]) * 16, int(columns[0]) * 16) == their_grid(video, len(numbers), 32), video
            assert rows[0] * columns[0] <= sizing.of_frames.max_patches, video
    assert texts > 10 * number


def test_frames_times_and_grids_are_those_of_the_processor() -> None:
    compare(FEW, 1)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_frames_times_and_grids_are_those_of_the_processor_for_many_videos() -> None:
    compare(MANY, 2)


def test_halves_and_whole_numbers_are_as_doubles_have_them() -> None:
    """Videos of up to 600 frames, of rates at which times lie halfway between two tenths of a second."""
    halves = 0
    for rate in (Fraction(10), Fraction(20), Fraction(30)):
        for frames in range(1, 600, 29):
            video = Drawn(frames, rate, 64, 64, VideoSizing(rule=FrameRule.QWEN3, fps="10", max_frames=4096))
            numbers = our_numbers(video)
            assert numbers == their_numbers(video)
            times = Qwen3VLProcessor._calculate_timestamps(None, numbers.copy(), video.fps, 2)
            found = group_tenths(frames, video.microseconds, video.rule)
            assert [f"{n / 10:.1f}" for n in found] == [f"{time:.1f}" for time in times], video
            pairs = zip(numbers[::2], numbers[1::2], strict=False)
            halves += sum((20 * (a + b) / (2 * rate)) % 2 == 1 for a, b in pairs)
    assert halves > 200


def test_a_rate_is_the_simplest_that_a_duration_allows() -> None:
    for rate in RATES:
        assert all(abs(frame_rate(n, round(n / rate * 1e6)) / rate - 1) < 1e-3 for n in (1, 2, 7))
        assert frame_rate(5_000, round(5_000 / rate * 1e6)) == rate
    assert frame_rate(100, 3_333_333) == 30
    assert frame_rate(1, 1) > 0
    assert frame_rate(262_144, 1) > 0


def timed_job(**video: Any) -> Job:
    modules = [module("encoder", dp=1), {"name": "eyes", "kind": "encoder", "modality": "video"}, module("backbone")]
    rule = {"rule": "qwen3", "min_pixels": 1, "max_pixels": 4 * 56 * 56, "timestamps": TIMESTAMPS}
    sizing = {"patch": 14, "merge": 2, "max_patches": 256, "video": {**rule, **video}}
    fields = {"sizing": sizing, "generation": {"ratio": "0"}, "global_batch": 4, "seq_len": 512}
    return parse_job(compose_whole(**{"modules": modules, **fields}))


def test_tokens_of_timestamps_follow_samples() -> None:
    job = timed_job()
    lengths = VideoLengths(np.array([0, 300, 0, 1], np.int32), np.array([0, 30_000_000, 0, 40_000], np.int64))
    table = shard_table(
        job.stream, np.arange(3), np.array([5, 6, 7]), np.array([0, 2, 3, 4]),
        np.array([56, 112, 16_000, 56], np.int32), np.array([28, 56, 16_000, 28], np.int32),
        modality=np.array([IMAGE, VIDEO, AUDIO, VIDEO], np.uint8), lengths=lengths,
    )  # fmt: skip
    # 60 frames of 30 seconds: 30 groups; those from 9.95 s on have a digit more
    tenths = group_tenths(300, 30_000_000, job.stream.sizing.video)  # type: ignore[arg-type]
    assert len(tenths) == 30
    expected = [0, 30 * 7 + sum(n >= 100 for n in tenths) + 30, 0, 8]
    assert item_marks(table, job.stream.sizing).tolist() == expected
    assert table.nominal.tolist() == [
        2 + text + sum(t + m + 2 for t, m in zip(tokens, marks, strict=True))
        for text, tokens, marks in (
            (5, item_tokens(table, job.stream.sizing)[:2].tolist(), expected[:2]),
            (6, item_tokens(table, job.stream.sizing)[2:3].tolist(), [0]),
            (7, item_tokens(table, job.stream.sizing)[3:].tolist(), [8]),
        )
    ]
    samples = size_samples(job.stream, 0, 0, table.row.astype(np.uint64), table)
    assert samples.tokens.tolist() == table.nominal.tolist()
    joined = concatenate([samples, samples])
    assert joined.image_marks is not None
    assert joined.image_marks.tolist() == expected * 2


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rule": "qwen"}, "rule qwen has no use for timestamps"),
        (
            {"rule": "uniform", "timestamps": None, "max_frame_tokens": 9},
            "rule uniform has no use for max_frame_tokens",
        ),
        ({"positions_per_second": 2}, "times as text, and positions_per_second as positions"),
        ({"timestamps": {**TIMESTAMPS, "digits": [1, 2]}}, "at least 10 items"),
        ({"timestamps": {**TIMESTAMPS, "end": [999_999]}}, r"sizing\.video\.timestamps has the id 999999"),
        ({"min_frames": 9, "max_frames": 8}, "less than min_"),
        (
            {"min_pixels": 2**31, "max_pixels": 2**31, "max_frame_tokens": 1},
            "allows frames of 3382286745 pixels; at most 2147483648",
        ),
    ],
)
def test_what_contradicts_itself_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        timed_job(**fields)


def test_the_rule_has_the_bounds_of_released_models() -> None:
    rule = Sizing.model_validate({"patch": 16, "video": {"rule": "qwen3"}}).video
    assert rule is not None
    assert {name: getattr(rule, name) for name in RELEASED} == RELEASED
    assert rule == VideoSizing.model_validate({"rule": "qwen3", **RELEASED})
    assert timed_job().stream_id != timed_job(timestamps=None).stream_id
