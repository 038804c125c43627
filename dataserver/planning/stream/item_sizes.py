"""Sizes of images and clips from metadata, and the tokens that they take in the backbone."""

from collections.abc import Sequence

import numpy as np

from dataserver.planning import I32, I64, U8, Bool
from dataserver.planning.job.fields import HOP, LEAST_FRAMES, SAMPLE_RATE, AudioSizing, Sizing, clip_positions
from dataserver.planning.stream.grids import image_layouts, patch_grids, stacked_grids
from dataserver.planning.stream.samples import AUDIO, SampleSizes, StepSamples, row_sums
from dataserver.planning.stream.tiles import LAYOUT, layout_tokens, mark_tokens

_DEFAULT_AUDIO = AudioSizing.model_construct()


def audio_sizing(sizing: Sizing) -> AudioSizing:
    """How clips are sized: as Qwen2-Audio's, where a job does not say."""
    return sizing.audio or _DEFAULT_AUDIO


def item_grids(
    offsets: I64, widths: I32, heights: I32, modality: U8 | None, sizing: Sizing, lone: Bool | None = None
) -> tuple[I32, I32, I32 | None]:
    """Rows and columns of each item, int32 [m] each: of an image its patches, of a clip 1 and its positions.

    Behind them, where images are cut into tiles, the layout of each, int32 [m, 6]; zeros of a clip.

    Args:
        offsets: int64 [n + 1]: first item of each sample.
        widths: int32 [m]: upright width of an image in pixels, samples of a clip's channel.
        heights: int32 [m]: upright height in pixels, samples of a clip in a second.
        modality: uint8 [m], as in `SampleSizes`.
        sizing: of both.
        lone: bool [m]: whether each is the only image of its sample; by default as `offsets` has it.
    """
    is_image = np.ones(len(widths), np.bool_) if modality is None else modality != AUDIO
    if lone is None:
        lone = np.repeat(row_sums(is_image, offsets) == 1, np.diff(offsets))
    layouts = _layouts(widths, heights, is_image, lone, sizing)
    if modality is None:
        return *_grids(widths, heights, layouts, sizing), layouts
    is_clip = ~is_image
    rows, columns = np.ones(len(widths), np.int32), np.empty(len(widths), np.int32)
    of_images = None if layouts is None else layouts[is_image]
    rows[is_image], columns[is_image] = _grids(widths[is_image], heights[is_image], of_images, sizing)
    positions = _positions(widths[is_clip].astype(np.int64), heights[is_clip].astype(np.int64), audio_sizing(sizing))
    columns[is_clip] = positions
    return rows, columns, layouts


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
    return np.where(sizes.image_modality == AUDIO, patches // audio_sizing(sizing).merge, of_images)


def item_marks(sizes: SampleSizes | StepSamples, sizing: Sizing) -> I64:
    """Tokens of text before and between the embeddings of each item, int64 [m] (`Sizing.marks`)."""
    found = mark_tokens(sizes.image_layout, len(sizes.image_rows), sizing)
    return found if sizes.image_modality is None else np.where(sizes.image_modality == AUDIO, 0, found)


def token_grids(sizes: SampleSizes | StepSamples, sizing: Sizing) -> tuple[I32, I32, int]:
    """Rows and columns of items for kernels, int32 [m] each, and by what their product is divided to have tokens."""
    if sizes.image_modality is None and sizes.image_layout is None:
        return sizes.image_rows, sizes.image_columns, sizing.merge**2
    tokens = item_tokens(sizes, sizing).astype(np.int32)
    return tokens, np.ones_like(tokens), 1


def has_audio(sizes: SampleSizes) -> Bool:
    """Samples with clips. bool [n]."""
    if sizes.image_modality is None:
        return np.zeros(len(sizes), np.bool_)
    found: Bool = row_sums(sizes.image_modality == AUDIO, sizes.image_offsets) > 0
    return found


def joined_layout(parts: Sequence[SampleSizes | StepSamples]) -> I32 | None:
    """The layouts of the images of several, one after the other; those of one job all have them, or none does."""
    found = [part.image_layout for part in parts if part.image_layout is not None]
    return np.concatenate(found) if found else None


def joined_modality(parts: Sequence[SampleSizes | StepSamples]) -> U8 | None:
    """The modalities of the items of several, one after the other."""
    if all(part.image_modality is None for part in parts):
        return None
    return np.concatenate(
        [np.zeros(len(p.image_rows), np.uint8) if p.image_modality is None else p.image_modality for p in parts]
    )
