"""Conversations in sequences: which fit, and where one that does not is cut.

A conversation is served as its chat template renders it, without BOS and EOS around it, and without BOI and EOI around
its images; plans count these for other samples. So the text of a conversation counts that many tokens less, and
its sequence is as long as it is.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataserver.planning import I32, I64, U8, Bool
from dataserver.planning.job.fields import Sizing
from dataserver.planning.stream.item_sizes import (
    IMAGE_EXTRA,
    UNDERSTANDING_EXTRA,
    VideoLengths,
    item_grids,
    item_marks,
    item_tokens,
)
from dataserver.planning.stream.samples import SampleSizes


@dataclass(frozen=True, slots=True, eq=False)
class ChatColumns:
    """What the index knows of n conversations with e answers beside their tokens, in row order."""

    targets: I64
    """int64 [n]: targets of the loss."""
    end_offsets: I64
    """int64 [n + 1]: first answer of each."""
    end_text: I64
    """int64 [e]: tokens up to the end of an answer, without those that stand for images."""
    end_images: I64
    """int64 [e]: images up to there."""
    end_targets: I64
    """int64 [e]: targets up to there."""


@dataclass(frozen=True, slots=True, eq=False)
class FittedChats:
    """How much of n conversations a sequence holds."""

    lengths: I64
    """int64 [n]: tokens of each as a whole."""
    fits: Bool
    """bool [n]: whether any of it does."""
    text: I64
    """int64 [n]: text tokens, as plans count them."""
    images: I64
    """int64 [n]: images, clips and videos, from the first on."""
    targets: I64
    """int64 [n]: targets of the loss."""


def around(num_images: I64) -> I64:
    """Tokens that plans count around the text and the images of a sample, int64 [n], beside those of both."""
    return UNDERSTANDING_EXTRA + IMAGE_EXTRA * num_images


def fit_chats(
    sizing: Sizing,
    seq_len: int,
    image_offsets: I64,
    widths: I32,
    heights: I32,
    text_tokens: NDArray[Any],
    chats: ChatColumns,
    cut_at_turn: bool,
    modality: U8 | None = None,
    video_lengths: VideoLengths | None = None,
) -> FittedChats:
    """Fit conversations into sequences.

    Args:
        sizing: of the job's stream.
        seq_len: the same.
        image_offsets: int64 [n + 1], first image of each.
        widths: int32 [m], upright width of each image, or as `item_grids`.
        heights: int32 [m], upright height of each image, or as `item_grids`.
        text_tokens: [n], as plans count them.
        chats: what else is known.
        cut_at_turn: cut one that is too long behind the last answer that fits; else it is left out.
        modality: uint8 [m], what each image is; None where all are images.
        video_lengths: of videos, where there are any.
    """
    rows, columns, media = item_grids(image_offsets, widths, heights, modality, sizing, lengths=video_lengths)
    sized = SampleSizes(text_tokens.astype(np.int64), image_offsets, rows, columns, **media)
    sizes = item_tokens(sized, sizing) + item_marks(sized, sizing)
    before = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
    images = np.diff(image_offsets)
    text = text_tokens.astype(np.int64)
    lengths = text + around(images) + before[image_offsets[1:]] - before[image_offsets[:-1]]
    fits = lengths <= seq_len
    whole = FittedChats(lengths, fits, text, images, chats.targets)
    if fits.all() or not cut_at_turn:
        return whole
    of = np.repeat(np.arange(len(text)), np.diff(chats.end_offsets))
    first = image_offsets[:-1][of]
    length = chats.end_text + before[first + chats.end_images] - before[first]
    fit = (length <= seq_len) & (chats.end_text >= around(chats.end_images))
    usable = np.flatnonzero(fit & (chats.end_targets > 0) & ~fits[of])
    last = np.full(len(text), -1, np.int64)
    np.maximum.at(last, of[usable], usable)
    cut = last >= 0
    at = last[cut]
    text, images, targets = text.copy(), images.copy(), chats.targets.copy()
    images[cut], targets[cut] = chats.end_images[at], chats.end_targets[at]
    text[cut] = chats.end_text[at] - around(chats.end_images[at])
    return FittedChats(lengths, fits | cut, text, images, targets)
