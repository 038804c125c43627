"""The card of a dataset: what it holds, what is odd in it, and what filters would drop."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from dataserver.assembly import Tokenizer, chat_digest
from dataserver.dataset import (
    OWN,
    Dataset,
    DerivedColumns,
    Filter,
    Progress,
    Shard,
    ShardSizes,
    compile_filter,
    filter_parts,
    texts_key,
)
from dataserver.planning.job.fields import MICROSECONDS, InstalledTransform
from dataserver.planning.stream.captions import CHAT_PREFIX
from dataserver.planning.stream.samples import AUDIO, VIDEO, row_sums

_BITS: Final = 64


@dataclass(slots=True)
class Histogram:
    """How many values lie between powers of two."""

    name: str
    counts: NDArray[np.int64] = field(default_factory=lambda: np.zeros(_BITS + 1, np.int64))
    """int64 [65]: values of 0, then those from 2^(k - 1) to before 2^k."""
    total: int = 0
    smallest: int = 0
    largest: int = 0

    def add(self, values: NDArray[Any]) -> None:
        """Count values that are integers from 0 on."""
        if not len(values):
            return
        first = not self.number
        self.counts += np.bincount(np.frexp(values.astype(np.float64))[1], minlength=_BITS + 1)
        self.total += int(values.sum(dtype=np.int64))
        self.smallest = int(values.min()) if first else min(self.smallest, int(values.min()))
        self.largest = max(self.largest, int(values.max()))

    @property
    def number(self) -> int:
        """Number of values that were counted."""
        return int(self.counts.sum())

    @property
    def mean(self) -> float:
        """Mean of the values; 0 without any."""
        return self.total / max(self.number, 1)

    def bins(self) -> list[tuple[int, int, int]]:
        """First and last integer of each range between the smallest and the largest value, and how many lie in it."""
        found = np.flatnonzero(self.counts)
        if not len(found):
            return []
        return [
            (0, 0, int(self.counts[0])) if k == 0 else (1 << (k - 1), (1 << k) - 1, int(self.counts[k]))
            for k in range(int(found[0]), int(found[-1]) + 1)
        ]


@dataclass(frozen=True, slots=True)
class ColumnCard:
    """A column that filters can compare."""

    name: str
    types: tuple[str, ...]
    """Arrow's names, in the order in which shards have them."""
    num_nulls: int
    """Number of samples without a value."""
    made_by: str = ""
    """Name and version of the transform that made it; empty of a column of the index."""


@dataclass(frozen=True, slots=True)
class Drops:
    """What a filter, or one of the conditions that it joins by `and`, would drop."""

    text: str
    num_dropped: int
    num_null: int
    """Those among them for which a column that it compares is null."""


@dataclass(frozen=True, slots=True)
class DatasetCard:
    """All that `dataserver describe` shows of a dataset."""

    fingerprint: str
    num_shards: int
    num_bytes: int
    num_samples: int
    forms: Mapping[str, int]
    """Samples by their images: none, one, several; and those with clips or videos."""
    num_images: int
    tokens: Mapping[str, int]
    """Tokens of all texts, by caption."""
    histograms: tuple[Histogram, ...]
    columns: tuple[ColumnCard, ...]
    quarantined: int
    """Samples that the quarantine list leaves out."""
    transformed_out: int
    """Samples that transforms of metadata leave out."""
    filters: tuple[tuple[Drops, ...], ...]
    """For each filter what it drops, and then what each of its conditions drops alone, if it has several."""


def dataset_card(
    dataset: Dataset,
    tokenizer: Tokenizer,
    filters: Sequence[str],
    progress: Progress,
    transforms: Sequence[InstalledTransform] = (),
) -> DatasetCard:
    """Look at the index of each shard of a dataset; no shard is read.

    Args:
        dataset: the open dataset.
        tokenizer: whose tokens count; of conversations those that its chat template renders.
        filters: of jobs.
        progress: told of shards done, and of all.
        transforms: of metadata, whose columns count and may be named by filters.

    Raises:
        TokensMissingError: texts or captions are not counted for the tokenizer, or a transform was not applied; names
            the command.
        FilterError: a filter does not fit the dataset's columns.
    """
    found = _Card(dataset, tokenizer.digest, own_key(dataset, tokenizer), filters, transforms)
    for number, shard in enumerate(dataset.shards, 1):
        found.add(shard)
        progress(number, len(dataset.shards))
    return found.finished()


def own_key(dataset: Dataset, tokenizer: Tokenizer) -> str:
    """The caption that stands for samples' own texts: of conversations what the tokenizer's chat template renders.

    Raises:
        TokenizerError: a file of the tokenizer's folder cannot be used.
    """
    template = chat_digest(tokenizer, dataset.media) if dataset.are_chats else ""
    return CHAT_PREFIX + template if template else OWN


class _Card:
    """Collects a card shard by shard."""

    def __init__(
        self,
        dataset: Dataset,
        tokenizer_digest: str,
        own: str,
        filters: Sequence[str],
        transforms: Sequence[InstalledTransform],
    ) -> None:
        self._dataset, self._digest, self._own = dataset, tokenizer_digest, own
        self._transforms = {transform.key(): f"{transform.name} {transform.version}" for transform in transforms}
        self._made_by = dict[str, str]()
        self._filters = [self._parts(text) for text in filters]
        self._dropped = [np.zeros((len(parts), 2), np.int64) for parts in self._filters]
        names = (
            "text tokens",
            "learned tokens of a conversation",
            "images of a sample",
            "image width",
            "image height",
            "bytes of an image",
            "seconds of a clip",
            "seconds of a video",
        )
        self._histograms = tuple(map(Histogram, names))
        self._forms, self._nulls, self._tokens = Counter[str](), Counter[str](), Counter[str]()
        self._types: dict[str, dict[str, None]] = {}
        self._quarantined = self._transformed_out = self._images = 0

    def _parts(self, text: str) -> list[Filter]:
        parts = filter_parts(text)
        whole = compile_filter(text)
        shards = self._dataset.shards
        whole.check([shards[0].derived([*self._transforms])] if self._transforms and shards else shards)
        return [whole, *(parts if len(parts) > 1 else ())]

    def add(self, shard: Shard) -> None:
        """Add what a shard holds."""
        sizes = shard.sizes()
        modality = np.zeros(len(sizes.image_width), np.uint8) if sizes.image_modality is None else sizes.image_modality
        is_image, is_clip, is_video = (modality == number for number in (0, AUDIO, VIDEO))
        images, clips, videos = (row_sums(of, sizes.image_offsets) for of in (is_image, is_clip, is_video))
        alone = (clips == 0) & (videos == 0)
        self._images += int(is_image.sum())
        self._forms.update(
            {
                "text alone": int(((images == 0) & alone).sum()),
                "one image": int(((images == 1) & alone).sum()),
                "several images": int(((images > 1) & alone).sum()),
                "with audio": int((clips > 0).sum()),
                "with video": int((videos > 0).sum()),
            }
        )
        own, learned = self._tokens_of(shard, sizes)
        seconds = -(-sizes.image_width[is_clip] // sizes.image_height[is_clip])
        lengths = np.zeros(len(modality), np.int64) if sizes.image_microseconds is None else sizes.image_microseconds
        of_images = (values[is_image] for values in (sizes.image_width, sizes.image_height, shard.image_bytes()))
        columns: list[NDArray[Any]] = [own, learned, images, *of_images, seconds, -(-lengths[is_video] // MICROSECONDS)]
        for histogram, values in zip(self._histograms, columns, strict=True):
            histogram.add(values)
        self._tokens[OWN] += int(own.sum())
        for name in self._dataset.captions if self._own == OWN else ():
            self._tokens[name] += int(shard.tokens.counts(texts_key(self._digest, name)).sum(dtype=np.int64))
        derived = self._add_columns(shard)
        if self._dataset.quarantine is not None:
            self._quarantined += int((~self._dataset.quarantine.mask(shard)).sum())
        for parts, dropped in zip(self._filters, self._dropped, strict=True):
            for n, part in enumerate(parts):
                mask = ~part.mask(derived)
                dropped[n] += int(mask.sum()), int((mask & part.nulls(derived)).sum())

    def _add_columns(self, shard: Shard) -> DerivedColumns:
        """Count types and nulls of the columns of a shard, those of transforms as well, and return them."""
        derived = shard.derived([*self._transforms])
        self._transformed_out += int((~derived.stays).sum())
        for name in derived.known_columns | derived.columns.keys():
            self._nulls[name] += derived.column(name).null_count if name in derived.columns else shard.num_samples
            if name in derived.columns:
                self._types.setdefault(name, {})[derived.columns[name]] = None
        for name, key in derived.made_by.items():
            self._made_by[name] = self._transforms[key]
        return derived

    def _tokens_of(self, shard: Shard, sizes: ShardSizes) -> tuple[NDArray[Any], NDArray[Any]]:
        """Text tokens of each sample, and those that are learned of each conversation."""
        key = texts_key(self._digest, self._own)
        if self._own == OWN:
            return row_sums(shard.tokens.counts(key), sizes.text_offsets), np.zeros(0, np.int64)
        tokens, chats = shard.tokens.chat_counts(key)
        return tokens - chats.images, chats.targets

    def finished(self) -> DatasetCard:
        """The card of all shards."""
        shards = self._dataset.shards
        return DatasetCard(
            fingerprint=self._dataset.fingerprint,
            num_shards=len(shards),
            num_bytes=sum(shard.header.shard_bytes for shard in shards),
            num_samples=sum(shard.num_samples for shard in shards),
            forms={form: n for form, n in self._forms.items() if n},
            num_images=self._images,
            tokens=dict(self._tokens),
            histograms=tuple(h for h in self._histograms if h.largest),
            columns=tuple(
                ColumnCard(name, tuple(self._types[name]), self._nulls[name], self._made_by.get(name, ""))
                for name in sorted(self._types)
            ),
            quarantined=self._quarantined,
            transformed_out=self._transformed_out,
            filters=tuple(
                tuple(Drops(f.text, *row) for f, row in zip(parts, dropped.tolist(), strict=True))
                for parts, dropped in zip(self._filters, self._dropped, strict=True)
            ),
        )
