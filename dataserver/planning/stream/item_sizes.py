"""Sizes of images, clips and videos from metadata, and the tokens that they take in the backbone."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from dataserver.planning import I32, I64, U8, Bool
from dataserver.planning.job.fields import (
    HOP,
    LEAST_FRAMES,
    SAMPLE_RATE,
    AudioSizing,
    Sizing,
    VideoSizing,
    clip_positions,
)
from dataserver.planning.stream.grids import image_layouts, patch_grids, stacked_grids
from dataserver.planning.stream.samples import AUDIO, IMAGE, VIDEO, SampleSizes, StepSamples, row_sums
from dataserver.planning.stream.tiles import LAYOUT, layout_tokens, mark_tokens
from dataserver.planning.stream.video_frames import sampled_frames, timestamp_tokens
from dataserver.planning.stream.video_grids import video_grids

UNDERSTANDING_EXTRA = 2
"""Tokens around the sample that is understood: BOS and EOS."""
IMAGE_EXTRA = 2
"""Tokens around each image: BOI and EOI."""
GENERATION_EXTRA = 2
"""Tokens beside text, images and queries of a sample that is generated: BOS, and BOI before the queries."""

_MEDIA = ("image_modality", "image_depths", "image_layout", "image_texts", "image_marks")
_DEFAULT_AUDIO = AudioSizing.model_construct()
_DEFAULT_VIDEO = VideoSizing.model_construct()


def audio_sizing(sizing: Sizing) -> AudioSizing:
    """How clips are sized: as Qwen2-Audio's, where a job does not say."""
    return sizing.audio or _DEFAULT_AUDIO


def video_sizing(sizing: Sizing) -> VideoSizing:
    """How videos are sized: as Qwen2-VL's, where a job does not say."""
    return sizing.video or _DEFAULT_VIDEO


def has_timestamps(sizing: Sizing) -> bool:
    """Whether text tells the time of each group of frames of videos."""
    return video_sizing(sizing).timestamps is not None


class VideoLengths(NamedTuple):
    """What is known of the time that videos take; zeros of other items."""

    frames: I32
    """Frames of each item, int32 [m]."""
    microseconds: I64
    """Microseconds of each item, int64 [m]."""

    def pick(self, items: I64 | slice) -> Self:
        """The lengths of some items."""
        return self._replace(frames=self.frames[items], microseconds=self.microseconds[items])


def item_grids(
    offsets: I64,
    widths: I32,
    heights: I32,
    modality: U8 | None,
    sizing: Sizing,
    lone: Bool | None = None,
    lengths: VideoLengths | None = None,
) -> tuple[I32, I32, dict[str, NDArray[Any]]]:
    """Rows and columns of each item, int32 [m] each, and what else `SampleSizes` has of items, by name.

    Where images are cut into tiles, the layout of each is among these, int32 [m, 6]; zeros of a clip or a video.

    Args:
        offsets: int64 [n + 1]: first item of each sample.
        widths: int32 [m]: upright width of an image or a frame in pixels, samples of a clip's channel.
        heights: int32 [m]: upright height in pixels, samples of a clip in a second.
        modality: uint8 [m], as in `SampleSizes`.
        sizing: of all.
        lone: bool [m]: whether each is the only image of its sample; by default as `offsets` has it.
        lengths: of videos.
    """
    is_image = np.ones(len(widths), np.bool_) if modality is None else modality == IMAGE
    if lone is None:
        lone = np.repeat(row_sums(is_image, offsets) == 1, np.diff(offsets))
    layouts = _layouts(widths, heights, is_image, lone, sizing)
    media = {name: a for name, a in (("image_modality", modality), ("image_layout", layouts)) if a is not None}
    if modality is None:
        return *_grids(widths, heights, layouts, sizing), media
    is_clip, is_video = modality == AUDIO, modality == VIDEO
    rows, columns = np.ones(len(widths), np.int32), np.empty(len(widths), np.int32)
    of_images = None if layouts is None else layouts[is_image]
    rows[is_image], columns[is_image] = _grids(widths[is_image], heights[is_image], of_images, sizing)
    positions = _positions(widths[is_clip].astype(np.int64), heights[is_clip].astype(np.int64), audio_sizing(sizing))
    columns[is_clip] = positions
    if lengths is None and is_video.any():
        raise ValueError("there are videos, and nothing says how long they are")
    if lengths is not None:
        of_videos = lengths.pick(np.flatnonzero(is_video))
        media["image_depths"] = depths = np.ones(len(widths), np.int32)
        sampled = _each(sampled_frames, of_videos, video_sizing(sizing))
        depths[is_video] = -(-sampled // video_sizing(sizing).temporal_patch)
        down, columns[is_video] = video_grids(widths[is_video], heights[is_video], sampled, sizing)
        rows[is_video] = down * depths[is_video]
        if has_timestamps(sizing):
            media["image_marks"] = marks = np.zeros(len(widths), np.int32)
            marks[is_video] = _each(timestamp_tokens, of_videos, video_sizing(sizing))
    return rows, columns, media


def _layouts(widths: I32, heights: I32, is_image: Bool, lone: Bool, sizing: Sizing) -> I32 | None:
    if sizing.tiles is None:
        return None
    found = np.zeros((len(widths), LAYOUT), np.int32)
    layouts = image_layouts(widths[is_image], heights[is_image], lone[is_image], sizing)
    if layouts is not None:
        found[is_image] = layouts
    return found


def _grids(widths: I32, heights: I32, layouts: I32 | None, sizing: Sizing) -> tuple[I32, I32]:
    return patch_grids(widths, heights, sizing) if layouts is None else stacked_grids(layouts, sizing)


def _each(count: Callable[[int, int, VideoSizing], int], lengths: VideoLengths, sizing: VideoSizing) -> I64:
    """What a function counts of each of many videos. int64 [k]."""
    each = zip(lengths.frames.tolist(), lengths.microseconds.tolist(), strict=True)
    return np.array([count(frames, microseconds, sizing) for frames, microseconds in each], np.int64)


def _positions(samples: I64, sample_rates: I64, sizing: AudioSizing) -> I64:
    """`clip_positions` of `clip_frames` of many clips."""
    if sizing.padded:
        return np.full(len(samples), clip_positions(sizing.max_frames), np.int64)
    at_rate = -(-samples * SAMPLE_RATE // sample_rates)
    frames = -(-at_rate // HOP)
    found: I64 = (np.clip(frames, LEAST_FRAMES, sizing.max_frames) - 1) // 2 + 1
    return found


def item_tokens(sizes: SampleSizes | StepSamples, sizing: Sizing) -> I64:
    """Backbone tokens of each item, int64 [m], when its sample is understood."""
    patches = sizes.image_rows.astype(np.int64) * sizes.image_columns
    layouts = sizes.image_layout
    of_images = patches // sizing.merge**2 if layouts is None else layout_tokens(layouts, sizing)
    if sizes.image_modality is None:
        return of_images
    others = np.where(sizes.image_modality == AUDIO, patches // audio_sizing(sizing).merge, patches // sizing.merge**2)
    return np.where(sizes.image_modality == IMAGE, of_images, others)


def item_marks(sizes: SampleSizes | StepSamples, sizing: Sizing) -> I64:
    """Tokens of text around the embeddings of each item, int64 [m] (`Sizing.marks`, `VideoSizing.timestamps`)."""
    found = mark_tokens(sizes.image_layout, len(sizes.image_rows), sizing)
    if sizes.image_modality is None:
        return found
    return np.where(sizes.image_modality == IMAGE, found, 0 if sizes.image_marks is None else sizes.image_marks)


def token_grids(sizes: SampleSizes | StepSamples, sizing: Sizing) -> tuple[I32, I32, int]:
    """Rows and columns of items for kernels, int32 [m] each, and by what their product is divided to have tokens."""
    if sizes.image_modality is None and sizes.image_layout is None:
        return sizes.image_rows, sizes.image_columns, sizing.merge**2
    tokens = item_tokens(sizes, sizing).astype(np.int32)
    return tokens, np.ones_like(tokens), 1


def has_others(sizes: SampleSizes) -> Bool:
    """Samples with clips or videos. bool [n]."""
    if sizes.image_modality is None:
        return np.zeros(len(sizes), np.bool_)
    found: Bool = row_sums(sizes.image_modality != IMAGE, sizes.image_offsets) > 0
    return found


def is_pair(sizes: SampleSizes) -> Bool:
    """Whole samples of exactly one image and some text. bool [n]."""
    pairs: Bool = (np.diff(sizes.image_offsets) == 1) & (sizes.text_tokens > 0)
    if sizes.are_whole is not None:
        pairs &= sizes.are_whole
    return pairs if sizes.image_modality is None else pairs & ~has_others(sizes)


def joined_media(parts: Sequence[SampleSizes | StepSamples]) -> dict[str, NDArray[Any]]:
    """What `picked_media` gives of the items of several, one after the other; what any has, by name."""
    found = dict[str, NDArray[Any]]()
    usual_values = {"image_modality": np.uint8(IMAGE), "image_depths": np.int32(1), "image_marks": np.int32(0)}
    for name, usual in usual_values.items():
        columns = [getattr(part, name) for part in parts]
        if any(column is not None for column in columns):
            counts = [len(part.image_rows) for part in parts]
            full = [np.full(n, usual) if c is None else c for c, n in zip(columns, counts, strict=True)]
            found[name] = np.concatenate(full)
    for name in ("image_layout", "image_texts"):  # a job's all have them, or none
        columns = [column for part in parts if (column := getattr(part, name, None)) is not None]
        if columns:
            found[name] = np.concatenate(columns)
    return found


def picked_media(sizes: SampleSizes | StepSamples, images: I64 | slice | Bool) -> dict[str, NDArray[Any]]:
    """Modality, depths, layouts, texts before some items and marks; those that are there, by name."""
    columns = {name: getattr(sizes, name, None) for name in _MEDIA}
    return {name: column[images] for name, column in columns.items() if column is not None}
