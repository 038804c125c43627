"""What is known of whole shards: enough to lay out the axes of nearly any job without looking at a single sample.

They depend on the tokenizer, the patch grids, and which samples are kept; not on `seq_len`, the share of
generation, weights, or anything of the execution. It holds sums, and the few samples that sums do not answer for: the
longest ones, which `seq_len` may cut. So the length of a shard on a job's axis is

    texts + images as the job counts them - what is cut off

in which the images of pairs are counted by size: the nominal tokens of a pair of t text tokens and i image tokens are
t + ((i + 4) (d - n) + (2 + q) n) // d, generation having the share n / d and q query tokens, while nothing is cut.

Where a stream generates images of documents, those of others depend on its `seq_len` and generation as well
(`DocumentTargets`): nominal tokens then stand for the tokens of each, cut, with the most that it may have among the
longest.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from dataserver.planning import I64, Bool
from dataserver.planning.job.fields import Sizing, Stream
from dataserver.planning.stream.columns import ShardColumns
from dataserver.planning.stream.documents import Split
from dataserver.planning.stream.gathering import picked_rows
from dataserver.planning.stream.item_sizes import (
    GENERATION_EXTRA,
    IMAGE_EXTRA,
    UNDERSTANDING_EXTRA,
    is_pair,
    item_marks,
    item_tokens,
)
from dataserver.planning.stream.samples import ranges, row_sums, sums_before
from dataserver.planning.stream.sizing import pair_tasks
from dataserver.planning.stream.targets import DocumentTargets, generation_share, mixed_tokens

T = TypeVar("T", bound=np.generic)

LISTED: Final = 128
"""Longest samples of a shard that are listed, of pairs and of others."""
BLOCK: Final = 256
"""Shards that are computed with at once, so that it takes little memory."""


@dataclass(frozen=True, slots=True, eq=False)
class Lists:
    """A list of integers for each of s shards, one after the other."""

    at: I64
    """int64 [s + 1]: where each list begins."""
    values: I64
    """Integers [sum of lengths], in as few bits as a file has them: take a `block` to compute with them."""

    def first(self) -> I64:
        """The first value of each list, 0 where it is empty. int64 [s]."""
        return self._picked(self.at[:-1])

    def last(self) -> I64:
        """The last value of each list, 0 where it is empty. int64 [s]."""
        return self._picked(self.at[1:] - 1)

    def sums(self, values: I64) -> I64:
        """Sum over each list of other values, int64 [sum of lengths]. int64 [s]."""
        return row_sums(values, self.at)

    def spread(self, of_shard: NDArray[T]) -> NDArray[T]:
        """A value of each shard, [s], for each entry of its list. [sum of lengths]."""
        return np.repeat(of_shard, np.diff(self.at))

    def block(self, first: int, end: int) -> "Lists":
        """The lists of the shards from `first` to before `end`, in int64."""
        at = self.at[first : end + 1]
        return Lists(at - at[0], self.values[at[0] : at[-1]].astype(np.int64))

    def take(self, shards: I64) -> "Lists":
        """The lists of some shards."""
        counts = np.diff(self.at)[shards]
        values = self.values[ranges(self.at[:-1][shards], counts)]
        return Lists(sums_before(counts), values)

    def _picked(self, at: I64) -> I64:
        full = np.diff(self.at) > 0
        found = np.zeros(len(full), np.int64)
        found[full] = self.values[at[full]]
        return found


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class ShardStatistics:
    """What is known of each of s shards. A pair has an image, no clip or video, and some text; the rest is `others`."""

    samples: I64
    """int64 [s]: number of samples."""
    null_drops: I64
    """int64 [s]: samples that the filter leaves out because a column is null."""
    images: I64
    """int64 [s]: of all samples."""
    pairs: I64
    """int64 [s]: number of pairs."""
    pair_text: I64
    """int64 [s]: text tokens of all pairs."""
    other_tokens: I64
    """int64 [s]: backbone tokens of all others, understood and not cut; or their nominal tokens."""
    other_fixed: I64
    """int64 [s]: most tokens beside its text that one of the others has."""
    other_image: I64
    """int64 [s]: most patches of an image of the others; 0 if none has images."""
    together: I64
    """int64 [s]: most patches of all images of a sample that has several."""
    several: I64
    """int64 [s]: most images of a sample; 0 if none has several."""
    pair_images: Lists
    """Tokens of the images of pairs, marks included, ascending, each once."""
    pair_image_counts: Lists
    """How many pairs have an image of that many tokens."""
    long_texts: Lists
    """Text tokens of the `LISTED` pairs that have most, descending."""
    long_images: Lists
    """Tokens of the images of those pairs."""
    long_others: Lists
    """Backbone tokens of the `LISTED` longest others, understood and not cut, descending."""

    def __len__(self) -> int:
        return len(self.samples)

    def block(self, first: int, end: int) -> "ShardStatistics":
        """The statistics of the shards from `first` to before `end`, with lists in int64."""
        return self._of_shards(slice(first, end), lambda lists: lists.block(first, end))

    def take(self, shards: I64) -> "ShardStatistics":
        """The statistics of some of its shards."""
        return self._of_shards(shards, lambda lists: lists.take(shards))

    def _of_shards(self, shards: slice | I64, lists_of: Callable[[Lists], Lists]) -> "ShardStatistics":
        parts = {field.name: getattr(self, field.name) for field in fields(self)}
        picked: dict[str, Any] = {
            name: lists_of(part) if isinstance(part, Lists) else part[shards] for name, part in parts.items()
        }
        return ShardStatistics(**picked)

    def unlisted_pair_text(self) -> I64:
        """Most text tokens that a pair which is not listed may have; 0 where all are. int64 [s]."""
        return np.where(np.diff(self.long_texts.at) < self.pairs, self.long_texts.last(), 0)

    def unlisted_other_tokens(self) -> I64:
        """Most tokens that one of the others which is not listed may have; 0 where all are. int64 [s]."""
        return np.where(np.diff(self.long_others.at) < self.samples - self.pairs, self.long_others.last(), 0)


def join_statistics(parts: Sequence[ShardStatistics]) -> ShardStatistics:
    """The statistics of all shards of several, in that order."""
    joined: dict[str, Any] = {}
    for field in fields(ShardStatistics):
        found = [getattr(part, field.name) for part in parts]
        if isinstance(found[0], Lists):
            counts = np.concatenate([np.diff(lists.at) for lists in found])
            at = sums_before(counts)
            joined[field.name] = Lists(at, np.concatenate([lists.values for lists in found]))
        else:
            joined[field.name] = np.concatenate(found)
    return ShardStatistics(**joined)


def row_statistics(
    sizing: Sizing,
    columns: ShardColumns,
    row: I64,
    null_drops: int = 0,
    split: Split | None = None,
    of_documents: DocumentTargets | None = None,
) -> ShardStatistics:
    """The statistics of one shard, some of whose rows are used, int64 [k]; of documents that are split, of parts."""
    picked = picked_rows(columns, row, split, sizing)
    text, at, sized = picked.text_tokens, picked.image_offsets, picked.sizes(columns, sizing)
    if of_documents is not None:
        sized = replace(sized, image_texts=picked.texts_before(columns))
    counts = np.diff(at)
    patches = sized.image_rows.astype(np.int64) * sized.image_columns
    tokens = item_tokens(sized, sizing) + item_marks(sized, sizing)
    fixed = UNDERSTANDING_EXTRA + row_sums(tokens + IMAGE_EXTRA, at)
    pair = is_pair(sized)
    several = counts > 1
    pair_text, pair_image = text[pair], fixed[pair] - UNDERSTANDING_EXTRA - IMAGE_EXTRA
    sizes, frequency = np.unique(pair_image, return_counts=True)
    longest = np.lexsort((pair_image, pair_text))[::-1][:LISTED]
    others = longest_others = fixed[~pair] + text[~pair]
    if of_documents is not None:
        targets, most = of_documents.find(sizing, sized), np.minimum(fixed + text, of_documents.seq_len)
        others = of_documents.nominal_tokens(targets, most)[~pair]
        longest_others = np.maximum(most, targets.most_tokens())[~pair]
    return ShardStatistics(
        samples=_one(len(picked.row)),
        null_drops=_one(null_drops),
        images=_one(len(patches)),
        pairs=_one(len(pair_text)),
        pair_text=_one(pair_text.sum()),
        other_tokens=_one(others.sum()),
        other_fixed=_one(fixed[~pair].max(initial=0)),
        other_image=_one(patches[np.repeat(~pair, counts)].max(initial=0)),
        together=_one(row_sums(patches, at)[several].max(initial=0)),
        several=_one(counts[several].max(initial=0)),
        pair_images=_list(sizes),
        pair_image_counts=_list(frequency),
        long_texts=_list(pair_text[longest]),
        long_images=_list(pair_image[longest]),
        long_others=_list(-np.sort(-longest_others)[:LISTED]),
    )


def axis_lengths(stream: Stream, statistics: ShardStatistics, are_chats: bool = False) -> tuple[I64, Bool]:
    """The length of each shard on its dataset's axis, and whether it is certain; otherwise look at its samples.

    Args:
        stream: the job's stream.
        statistics: of all shards of a dataset.
        are_chats: whether samples are conversations, which are not cut where a sequence ends.

    Returns:
        int64 [s], the sum of `units_of` over the shard's table, and bool [s].
    """
    starts = range(0, max(1, len(statistics)), BLOCK)
    parts = [_lengths(stream, statistics.block(i, min(i + BLOCK, len(statistics)))) for i in starts]
    lengths, certain = zip(*parts, strict=True)
    known: Bool = np.concatenate(certain)
    return np.concatenate(lengths), known & _all_fit(stream, statistics) if are_chats else known


def _all_fit(stream: Stream, statistics: ShardStatistics) -> Bool:
    """Whether every sample of a shard fits a sequence as it is, bool [s]; perhaps also where this says no."""
    found: list[Bool] = []
    for first in range(0, max(1, len(statistics)), BLOCK):
        block = statistics.block(first, min(first + BLOCK, len(statistics)))
        pairs = longest_pairs(stream, block.pair_images.last(), block.long_texts.first())
        found.append((block.long_others.first() <= stream.seq_len) & ((block.pairs == 0) | (pairs <= stream.seq_len)))
    return np.concatenate(found)


def _lengths(stream: Stream, statistics: ShardStatistics) -> tuple[I64, Bool]:
    certain = _fit(stream, statistics)
    if not stream.packing.enabled:
        return statistics.samples.copy(), certain
    share, images = generation_share(stream), statistics.pair_images
    certain &= statistics.unlisted_other_tokens() <= stream.seq_len
    certain &= longest_pairs(stream, images.last(), statistics.unlisted_pair_text()) <= stream.seq_len
    uncut = mixed_tokens(share, *_both(stream, images.values, np.zeros_like(images.values)))
    lengths = statistics.pair_text + images.sums(uncut * statistics.pair_image_counts.values) + statistics.other_tokens
    long, text, image = statistics.long_texts, statistics.long_texts.values, statistics.long_images.values
    understood, generated = _both(stream, image, text)
    cut = mixed_tokens(share, understood, generated)
    kept = mixed_tokens(share, np.minimum(understood, stream.seq_len), np.minimum(generated, stream.seq_len))
    lengths -= long.sums(cut - kept)
    others = statistics.long_others
    return lengths - others.sums(np.maximum(others.values - stream.seq_len, 0)), certain


def longest_pairs(stream: Stream, image: I64, text: I64) -> I64:
    """Tokens of pairs in the longest of the tasks that they may have, not cut. int64 [n].

    Args:
        stream: the job's stream.
        image: int64 [n], tokens of the image.
        text: int64 [n], tokens of the text.
    """
    if stream.contrastive_batch is not None:
        return text + UNDERSTANDING_EXTRA
    understood, generated = pair_tasks(stream)
    as_understood, as_generated = _both(stream, image, text)
    return np.maximum(as_understood * understood, as_generated * generated)


def _fit(stream: Stream, statistics: ShardStatistics) -> Bool:
    """Whether the images alone of every sample of a shard fit a sequence, as far as they may be understood."""
    if stream.contrastive_batch is not None:
        return np.ones(len(statistics), np.bool_)
    most = statistics.other_fixed
    if pair_tasks(stream)[0]:
        pairs = np.where(statistics.pairs > 0, statistics.pair_images.last() + UNDERSTANDING_EXTRA + IMAGE_EXTRA, 0)
        most = np.maximum(most, pairs)
    return most <= stream.seq_len


def _both(stream: Stream, image: I64, text: I64) -> tuple[I64, I64]:
    """Tokens of pairs that are understood, and that are generated; not cut."""
    return (
        image + UNDERSTANDING_EXTRA + IMAGE_EXTRA + text,
        text + GENERATION_EXTRA + stream.generation.query_tokens,
    )


def _one(value: int | np.int64) -> I64:
    return np.array([value], np.int64)


def _list(values: I64) -> Lists:
    return Lists(np.array([0, len(values)], np.int64), values.astype(np.int64))
