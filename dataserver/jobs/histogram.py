"""How many samples of a dataset have which size: what `trainclient orchestrate` chooses layouts by."""

from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np

from dataserver.dataset import Dataset, DatasetError, compile_filter
from dataserver.jobs.shard_statistics import Rules, columns_of, rows_left
from dataserver.planning.stream.gathering import picked_rows
from dataserver.planning.stream.item_sizes import item_grids, item_marks, item_tokens
from dataserver.planning.stream.samples import SampleSizes

TEXT_BITS: Final = 5
"""Texts are counted with those whose tokens agree in so many leading binary digits, so within some percent."""

MOST_SIZES: Final = 20_000
"""Sizes that are told apart: more make the choice of a layout no better, and slower."""


class Size(NamedTuple):
    """What a sample takes."""

    text_tokens: int
    patches: tuple[int, ...]
    """Of each of its images."""
    image_tokens: tuple[int, ...] = ()
    """Backbone tokens of each image with the text between its parts, where images are cut into tiles; else they follow
    from the patches."""


def size_histogram(dataset: Dataset, rules: Rules, progress: Callable[[int, int], None]) -> Counter[Size]:
    """Samples by their sizes, of documents that are split parts; what filter and quarantine leave out is not counted.

    Raises:
        TokensMissingError: a shard is not counted for the tokenizer; names the command.
        DatasetError: an index cannot be read, or there are clips or videos.
    """
    compiled, found = compile_filter(rules.filter) if rules.filter else None, Counter[Size]()
    for number, shard in enumerate(dataset.shards, 1):
        columns = columns_of(shard, rules.tokenizer_digest, rules.captions)
        if columns.image_modality is not None:
            raise DatasetError(
                f"shard {shard.name} has audio or video, and layouts are chosen by texts and images alone; give "
                "--sizes of a dataset without these, or state the layout yourself"
            )
        kept = rows_left(shard, compiled, rules.quarantine, rules.tokenizer_digest, rules.captions)
        picked = picked_rows(columns, kept, rules.split, rules.sizing)
        pixels, ends = (columns.image_width[picked.images], columns.image_height[picked.images]), picked.image_offsets
        grids = item_grids(ends, *pixels, None, rules.sizing, picked.lone)
        sized = SampleSizes(picked.text_tokens, ends, *grids[:2], **grids[2])
        patches = (sized.image_rows.astype(np.int64) * sized.image_columns).tolist()
        tokens = item_tokens(sized, rules.sizing) + item_marks(sized, rules.sizing)
        of_images = [] if rules.sizing.tiles is None else tokens.tolist()
        for text, (first, end) in zip(picked.text_tokens.tolist(), pairwise(ends.tolist()), strict=True):
            found[Size(_leading(text), tuple(patches[first:end]), tuple(of_images[first:end]))] += 1
        progress(number, len(dataset.shards))
    return found


def thinned(found: Counter[Size], most: int = MOST_SIZES) -> Counter[Size]:
    """As many samples of at most so many sizes: some in the order of sizes stand for those around them.

    Those with the longest text, the largest image and the most patches stay, since memory goes by them.
    """
    if len(found) <= most:
        return found
    sizes = sorted(found)
    largest = {max(sizes, key=lambda s: s[0]), max(sizes, key=lambda s: max(s[1], default=0)),
               max(sizes, key=lambda s: sum(s[1]))}  # fmt: skip
    ends, number = np.cumsum([found[s] for s in sizes]), most - len(largest)
    total = int(ends[-1]) - len(largest)
    bounds = np.arange(number + 1) * total // number
    chosen = np.searchsorted(ends, (bounds[:-1] + bounds[1:]) // 2, side="right")
    left = Counter(largest)
    for at, count in zip(chosen.tolist(), np.diff(bounds).tolist(), strict=True):
        left[sizes[at]] += count
    return left


def _leading(tokens: int) -> int:
    """The leading binary digits of a number of tokens, rounded."""
    low = max(0, tokens.bit_length() - TEXT_BITS)
    return (tokens + (1 << low >> 1)) >> low << low
