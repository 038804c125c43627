"""Sizes of images and clips from metadata, and the tokens that they take in the backbone."""

from collections.abc import Sequence

import numpy as np

from dataserver.planning import I32, I64, U8, Bool
from dataserver.planning.job.fields import HOP, LEAST_FRAMES, SAMPLE_RATE, AudioSizing, Sizing, clip_positions
from dataserver.planning.stream.grids import patch_grids
from dataserver.planning.stream.samples import AUDIO, SampleSizes, StepSamples, row_sums

_DEFAULT_AUDIO = AudioSizing.model_construct()


def audio_sizing(sizing: Sizing) -> AudioSizing:
    """How clips are sized: as Qwen2-Audio's, where a job does not say."""
    return sizing.audio or _DEFAULT_AUDIO


def item_grids(widths: I32, heights: I32, modality: U8 | None, sizing: Sizing) -> tuple[I32, I32]:
    """Rows and columns of each item, int32 [m] each: of an image its patches, of a clip 1 and its positions.

    Args:
        widths: int32 [m]: upright width of an image in pixels, samples of a clip's channel.
        heights: int32 [m]: upright height in pixels, samples of a clip in a second.
        modality: uint8 [m], as in `SampleSizes`.
        sizing: of both.
    """
    if modality is None:
        return patch_grids(widths, heights, sizing)
    is_clip = modality == AUDIO
    rows, columns = np.ones(len(widths), np.int32), np.empty(len(widths), np.int32)
    rows[~is_clip], columns[~is_clip] = patch_grids(widths[~is_clip], heights[~is_clip], sizing)
    positions = _positions(widths[is_clip].astype(np.int64), heights[is_clip].astype(np.int64), audio_sizing(sizing))
    columns[is_clip] = positions
    return rows, columns


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
    if sizes.image_modality is None:
        return patches // sizing.merge**2
    merged = np.where(sizes.image_modality == AUDIO, audio_sizing(sizing).merge, sizing.merge**2)
    found: I64 = patches // merged
    return found


def token_grids(sizes: SampleSizes | StepSamples, sizing: Sizing) -> tuple[I32, I32, int]:
    """Rows and columns of items for kernels, int32 [m] each, and by what their product is divided to have tokens."""
    if sizes.image_modality is None:
        return sizes.image_rows, sizes.image_columns, sizing.merge**2
    tokens = item_tokens(sizes, sizing).astype(np.int32)
    return tokens, np.ones_like(tokens), 1


def has_audio(sizes: SampleSizes) -> Bool:
    """Samples with clips. bool [n]."""
    if sizes.image_modality is None:
        return np.zeros(len(sizes), np.bool_)
    found: Bool = row_sums(sizes.image_modality == AUDIO, sizes.image_offsets) > 0
    return found


def joined_modality(parts: Sequence[SampleSizes | StepSamples]) -> U8 | None:
    """The modalities of the items of several, one after the other."""
    if all(part.image_modality is None for part in parts):
        return None
    return np.concatenate(
        [np.zeros(len(p.image_rows), np.uint8) if p.image_modality is None else p.image_modality for p in parts]
    )
