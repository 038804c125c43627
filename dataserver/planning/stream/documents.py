"""Documents in parts: where one is split that is longer than a sequence, or has more items than a part may have.

A part takes items as long as they fit: with BOS and EOS around them they come to at most `seq_len` tokens, and to no
more images, clips and videos than the budgets say. An item that does not fit begins the next part. A text that is
longer than a whole part is split where its part is full; its rest begins the next one. With the rule `videos` a video
goes to the next part with the clip behind it, where only the first of both fits. So nothing is lost, nothing comes
twice, and parts follow from sizes alone: the index, the tokenizer and the stream.

A pair that may have to be generated stays whole, with its text cut, because a generator is asked for by the whole text.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from dataserver.planning import I64, U8, Bool, yield_point
from dataserver.planning.job.fields import DatasetSpec, SplitAt, Stream
from dataserver.planning.stream.item_sizes import UNDERSTANDING_EXTRA
from dataserver.planning.stream.samples import AUDIO, IMAGE, VIDEO, row_sums, sums_before
from dataserver.planning.stream.sizing import SampleTooLargeError, pair_tasks

TEXT_KIND = 0
"""Kind of a text in an index."""
MAX_PARTS = 2**24
"""Parts of the documents of a shard, by their tokens."""


@dataclass(frozen=True, slots=True)
class Split:
    """How the documents of a dataset of a stream are split."""

    rule: str
    seq_len: int
    budget: tuple[int | None, int | None, int | None]
    """Most images, clips and videos of a part."""
    pairs: bool
    """Whether pairs are split as well."""

    @classmethod
    def of(cls, stream: Stream, spec: DatasetSpec) -> Self | None:
        """The one of a dataset of a stream; None where its samples stay whole."""
        if spec.documents is None:
            return None
        both = zip(spec.documents.budget, stream.packing.budget, strict=True)
        images, clips, videos = (min((n for n in of if n is not None), default=None) for of in both)
        return cls(str(spec.documents.split), stream.seq_len, (images, clips, videos), not pair_tasks(stream)[1])

    def key(self) -> list[Any]:
        """What tells it from others."""
        return [self.rule, self.seq_len, list(self.budget), self.pairs]


class Parts(NamedTuple):
    """The p parts of some documents, document by document."""

    document: I64
    """int64 [p]: which document each is a part of."""
    text_tokens: I64
    """Text tokens of each part, int64 [p]."""
    image_offsets: I64
    """int64 [p + 1]: first image of each; images are in the order of the documents."""
    parts: I64
    """int64 [p, 4], as in `SampleSizes`."""


class Documents(NamedTuple):
    """The d documents that are split, with t texts and m images."""

    kinds: U8
    """uint8 [t + m]: `TEXT_KIND`, or anything else for an image, in document order."""
    text_offsets: I64
    """int64 [d + 1]: first text of each."""
    text_tokens: NDArray[Any]
    """Tokens of each text, integers [t]."""
    image_offsets: I64
    """int64 [d + 1]: first image of each."""
    image_tokens: I64
    """int64 [m]: what each takes of a sequence, with BOI, EOI and marks."""
    image_modality: U8 | None
    """uint8 [m]: as in `SampleSizes`."""


def split_documents(split: Split, documents: Documents) -> Parts:
    """Split documents. An item that no part holds is alone in one, which is then longer than a sequence; so are a video
    and its clip.

    Raises:
        SampleTooLargeError: they are so long that there would be more than `MAX_PARTS`.
    """
    line = _Line(split, documents)
    line.check_length()
    number = np.arange(len(documents.text_offsets) - 1)
    of, begins, ends = list[I64](), list[I64](), list[I64]()
    active, at = number, line.begins
    while len(active):  # a part of every document that has more
        yield_point()
        end = line.part_end(active, at)
        of.append(active)
        begins.append(at)
        ends.append(end)
        more = end < line.ends[active]
        active, at = active[more], end[more]
    document = np.concatenate([number[:0], *of])
    order = np.argsort(document, kind="stable")
    begin, end = (np.concatenate([number[:0], *found])[order] for found in (begins, ends))
    return line.parts(document[order], begin, end)


class _Line:
    """All items of all documents one after the other; positions are counted in tokens from the first on."""

    def __init__(self, split: Split, documents: Documents) -> None:
        self._capacity = split.seq_len - UNDERSTANDING_EXTRA
        offsets = documents.text_offsets + documents.image_offsets
        is_text = documents.kinds == TEXT_KIND
        lengths = np.empty(len(is_text), np.int64)
        lengths[is_text], lengths[~is_text] = documents.text_tokens, documents.image_tokens
        self._is_text = np.append(is_text, True)  # behind all others an empty one
        self._sums = sums_before(np.append(lengths, 0))
        self._texts = sums_before(np.append(lengths * is_text, 0))
        self._images = sums_before(~self._is_text)
        modality = documents.image_modality
        if modality is None:
            modality = np.full(len(documents.image_tokens), IMAGE, np.uint8)
        kind = np.full(len(self._is_text), -1)  # texts have no modality
        kind[~self._is_text] = modality
        self._counts = [(most, sums_before(kind == n)) for n, most in enumerate(split.budget) if most is not None]
        self._follows = np.zeros(len(self._is_text), np.bool_)  # clips that must not be parted from what is before them
        if split.rule == SplitAt.VIDEOS:
            self._follows[1:] = (kind[1:] == AUDIO) & (kind[:-1] == VIDEO)
            self._follows[offsets[:-1]] = False  # the first of a document
        self.begins, self.ends = self._sums[offsets[:-1]], self._sums[offsets[1:]]
        self._whole = np.zeros(len(self.begins), np.bool_) if split.pairs else _are_pairs(documents, modality)

    def check_length(self) -> None:
        """Refuse more tokens than `MAX_PARTS` hold."""
        tokens = int(self._sums[-1])
        if tokens // self._capacity > MAX_PARTS:
            raise SampleTooLargeError(
                f"its documents have {tokens:,} tokens, more than {MAX_PARTS:,} parts of seq_len "
                f"{self._capacity + UNDERSTANDING_EXTRA}: raise stream.seq_len, make smaller shards, or leave "
                "documents out"
            )

    def part_end(self, document: I64, at: I64) -> I64:
        """Where the parts end that begin at some positions, int64 [k], each in a document."""
        full = at + self._capacity
        # The first item that does not fit is the first one whose end lies behind.
        item = np.minimum(np.searchsorted(self._sums[1:], full, "right"), len(self._is_text) - 1)
        begin, behind = self._sums[item], self._sums[item + 1]
        is_split = self._is_text[item] & ((behind - begin > self._capacity) | (begin <= at))
        end = np.where(is_split, full, np.where(begin > at, begin, behind))
        first = np.searchsorted(self._sums[1:], at, "right")
        for most, counts in self._counts:
            too_many = np.searchsorted(counts, counts[first] + most + 1, "left") - 1  # the first item beyond
            end = np.minimum(end, self._sums[too_many])
        end = self._together(at, end)
        last = self.ends[document]
        found: I64 = np.where(self._whole[document], last, np.minimum(end, last))
        return found

    def _together(self, at: I64, end: I64) -> I64:
        """Ends of parts that begin at some positions, moved before the videos whose clips they would leave behind."""
        item = np.minimum(np.searchsorted(self._sums[1:], end, "right"), len(self._is_text) - 1)
        is_parted = self._follows[item] & (self._sums[item] == end)
        video = self._sums[item - 1]
        found: I64 = np.where(is_parted, np.where(video > at, video, self._sums[item + 1]), end)
        return found

    def parts(self, document: I64, begin: I64, end: I64) -> Parts:
        """What lies between positions, int64 [p] each, document by document."""
        (texts, images), (texts_end, images_end) = self._before(begin), self._before(end)
        first = np.searchsorted(document, document, "left")
        counts = np.bincount(document, minlength=len(self.begins))[document]
        numbers = np.arange(len(document)) - first
        found = np.stack([numbers, counts, texts - texts[first], images - images[first]], axis=1)
        offsets = np.concatenate([np.zeros(1, np.int64), images_end])
        return Parts(document, texts_end - texts, offsets, found)

    def _before(self, at: I64) -> tuple[I64, I64]:
        """Text tokens and images before positions."""
        item = np.minimum(np.searchsorted(self._sums[1:], at, "right"), len(self._is_text) - 1)
        return self._texts[item] + self._is_text[item] * (at - self._sums[item]), self._images[item]


def _are_pairs(documents: Documents, modality: U8) -> Bool:
    counts = np.diff(documents.image_offsets)
    others = row_sums(modality != IMAGE, documents.image_offsets)
    texts = row_sums(documents.text_tokens, documents.text_offsets)
    pairs: Bool = (counts == 1) & (others == 0) & (texts > 0)
    return pairs
