"""Conversations in sequences: which fit, and where one that does not is cut.

A conversation is served as its chat template renders it, without BOS and EOS around it, and without BOI and EOI around
its images; plans count these for other samples. So the text of a conversation counts that many tokens less, and
its sequence is as long as it is.
"""

from dataclasses import dataclass

import numpy as np

from dataserver.planning import I64, Bool
from dataserver.planning.job.fields import Sizing
from dataserver.planning.stream.columns import ShardColumns
from dataserver.planning.stream.item_sizes import IMAGE_EXTRA, UNDERSTANDING_EXTRA, item_marks, item_tokens
from dataserver.planning.stream.samples import SampleSizes, sums_before


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


def fit_chats(sizing: Sizing, seq_len: int, columns: ShardColumns, *, cut_at_turn: bool) -> FittedChats:
    """Fit the conversations of a shard into sequences of so many tokens; with `cut_at_turn` one that is too long is cut
    behind the last answer that fits, else it is left out."""
    assert columns.chats is not None
    chats, image_offsets, text = columns.chats, columns.image_offsets, columns.text_tokens.astype(np.int64)
    rows, sides, media = columns.grids(slice(None), image_offsets, sizing)
    sized = SampleSizes(text, image_offsets, rows, sides, **media)
    sizes = item_tokens(sized, sizing) + item_marks(sized, sizing)
    before = sums_before(sizes)
    images = np.diff(image_offsets)
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
