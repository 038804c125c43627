"""What a step asks of each module, from the sizes of samples."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dataserver.planning.job.fields import AudioSizing, Modality, ModelSize, Sizing
from dataserver.planning.stream.item_sizes import GENERATION_EXTRA, IMAGE_EXTRA, UNDERSTANDING_EXTRA, audio_sizing
from trainclient.orchestrate.networks import Network
from trainclient.orchestrate.sample_sizes import Item, SampleSize, WorkloadError

F64 = NDArray[np.float64]

_UNSIZED: Final = Sizing()


@dataclass(frozen=True, slots=True)
class Stream:
    """The part of a job's stream that decides how large sequences are."""

    global_batch: int
    """Sequences of a step; of a contrastive job, samples."""
    seq_len: int
    merge: int = 2
    fill: float = 0.97
    packed: bool = True
    generation: float = 0.0
    """Share of pairs that are generated."""
    query_tokens: int = 64
    contrastive_batch: int | None = None
    interleaved: bool = False
    """Whether documents are generated as well, each up to one of its images."""
    sizing: Sizing | None = None
    """Sizing by which samples were sized, whose `merge` is that of this; None where nobody says."""

    @property
    def audio(self) -> AudioSizing:
        """How clips are sized: as servers do where a job does not say."""
        return audio_sizing(self.sizing or _UNSIZED)

    def items(self, size: SampleSize) -> tuple[Item, ...]:
        """The items of a sample."""
        return size.items(self.merge, self.audio)


@dataclass(frozen=True, slots=True, eq=False)
class Load:
    """What a module has to do for a sequence, on average. It equals itself alone, so that hashing it takes no time."""

    items: float
    """Number of images, clips or videos, or of samples."""
    rows: float
    """Number of patches, positions, or tokens."""
    squares: float
    """The sum of the squares of its items' rows, which attention takes; windows, and frames of videos, leave fewer
    pairs."""
    largest: int
    """Rows of the largest item that there is."""
    sizes: tuple[tuple[float, int], ...]
    """How many items of a sequence have so many rows, for each number of rows."""
    tokens: float = 0.0
    """Number of backbone tokens that its items make up."""


@dataclass(frozen=True)
class Workload:
    """Samples and the stream that they make up; what follows from many sizes is found once."""

    sizes: tuple[SampleSize, ...]
    stream: Stream

    @cached_property
    def samples_per_sequence(self) -> float:
        """Samples of a packed sequence."""
        if not self.stream.packed:
            return 1.0
        total = sum(s.count for s in self.sizes)
        mean = sum(s.count * self._tokens(s) for s in self.sizes) / total
        return self.stream.fill * self.stream.seq_len / mean

    def load(self, network: Network) -> Load:
        """What a sequence holds for a module."""
        kind = network.kind, network.modality, network.window
        if kind not in self._loads:
            self._loads[kind] = self._load(network)
        return self._loads[kind]

    @cached_property
    def _loads(self) -> dict[tuple[str, str | None, int | None], Load]:
        return {}

    def _load(self, network: Network) -> Load:
        total, each = sum(s.count for s in self.sizes), self.samples_per_sequence
        items = rows = squares = tokens = 0.0
        largest, sizes = 0, dict[int, float]()
        for size in self.sizes:
            for weight, item in self._items(network, size):
                share = each * weight * size.count / total
                if share:
                    frame = item.rows // item.groups
                    items += share
                    rows += share * item.rows
                    squares += share * item.rows * min(frame, network.window or frame)
                    tokens += share * item.tokens
                    largest = max(largest, item.rows)
                    sizes[item.rows] = sizes.get(item.rows, 0.0) + share
        return Load(items, rows, squares, largest, tuple((sizes[n], n) for n in sorted(sizes)), tokens)

    @cached_property
    def lengths(self) -> F64:
        """Lengths of sequences: their share of all, tokens, and the sum of the squares of their samples' tokens.

        float64 [3, lengths].
        """
        if self.stream.packed:
            load = self._load(_TOKENS)
            return np.array([[1.0], [round(load.rows)], [round(load.squares)]])
        total, shares = sum(s.count for s in self.sizes), dict[int, float]()
        for size in self.sizes:
            for weight, tokens in self._sequences(size):
                shares[tokens] = shares.get(tokens, 0.0) + weight * size.count / total
        found = sorted(shares)
        return np.array([[shares[n] for n in found], found, [n * n for n in found]], np.float64)

    def _targets(self, size: SampleSize) -> list[tuple[int, int]]:
        """The images that a sample may be asked to generate, as servers have it (`planning.stream.targets`), each with
        the tokens of the sample up to it."""
        stream, items = self.stream, self.stream.items(size)
        if not stream.generation:
            return []
        asked = GENERATION_EXTRA + stream.query_tokens
        if len(items) == 1 and items[0].modality is Modality.IMAGE and size.text_tokens:
            return [(0, min(stream.seq_len, asked + size.text_tokens))]
        if not stream.interleaved:
            return []
        found, before = list[tuple[int, int]](), 0
        for number, (item, text) in enumerate(zip(items, size.image_texts, strict=True)):
            if text and item.modality is Modality.IMAGE and asked + text + before <= stream.seq_len:
                found.append((number, asked + text + before))
            before += item.tokens + IMAGE_EXTRA
        return found

    def _sequences(self, size: SampleSize) -> list[tuple[float, int]]:
        """Tokens of a sample in each of its tasks, with the chance of it."""
        stream, targets = self.stream, self._targets(size)
        chance = stream.generation if targets else 0.0
        images = sum(item.tokens + IMAGE_EXTRA for item in stream.items(size))
        understood = min(stream.seq_len, UNDERSTANDING_EXTRA + images + size.text_tokens)
        if stream.contrastive_batch is not None:
            understood = min(stream.seq_len, UNDERSTANDING_EXTRA + size.text_tokens)
        generated = [(chance / len(targets), tokens) for _, tokens in targets]
        return [(weight, tokens) for weight, tokens in [(1 - chance, understood), *generated] if weight]

    def _tokens(self, size: SampleSize) -> float:
        return sum(weight * tokens for weight, tokens in self._sequences(size))

    def _items(self, network: Network, size: SampleSize) -> Iterator[tuple[float, Item]]:
        """What a module gets of a sample, each with the chance of it."""
        if not network.reads_images:
            yield from ((weight, Item(Modality.TEXT, tokens, 1, tokens)) for weight, tokens in self._sequences(size))
            return
        targets, items = [number for number, _ in self._targets(size)], self.stream.items(size)
        chance = self.stream.generation if targets else 0.0
        if network.role.generates:
            yield from ((chance / len(targets), items[number]) for number in targets)
            return
        later = len(targets)  # targets behind an item: if one of these is drawn, the item is read
        for number, item in enumerate(items):
            later -= number in targets
            read = 1 - chance + (chance * later / len(targets) if targets else 0.0)
            if item.modality == network.reads:
                yield read, item


_TOKENS: Final = Network("backbone", "backbone", ModelSize(1, 1, 1, 1, 1))
"""Loads of tokens depend on no model, but for its windows."""


def workload(sizes: Sequence[SampleSize], stream: Stream) -> Workload:
    """A workload whose samples fit the stream.

    Raises:
        WorkloadError: the stream or a sample cannot be.
    """
    if min(stream.global_batch, stream.merge) < 1 or stream.seq_len < 8 or not 0 < stream.fill <= 1:
        raise WorkloadError(
            f"global-batch is {stream.global_batch}, seq-len {stream.seq_len}, merge {stream.merge}, fill "
            f"{stream.fill}; at least 1, 8, 1, and a value in (0, 1] are required"
        )
    if not 0 <= stream.generation <= 1 or stream.query_tokens < 1:
        raise WorkloadError(
            f"generation is {stream.generation}, query-tokens {stream.query_tokens}; [0, 1] and 1 or more are required"
        )
    for size in sizes:
        _check(size, stream)
    return Workload(tuple(sizes), stream)


def _check(size: SampleSize, stream: Stream) -> None:
    """Raise WorkloadError where samples of a size fit no job with the stream."""
    items = stream.items(size)
    tokens = UNDERSTANDING_EXTRA + sum(item.tokens + IMAGE_EXTRA for item in items)
    if any(item.rows % stream.merge**2 for item in items if item.modality is not Modality.AUDIO):
        raise WorkloadError(
            f"a sample has {_images(size)}; multiples of merge^2 = {stream.merge**2} are required, since so many "
            "patches become one token: set --merge to what the sizes were made with, or correct the sizes"
        )
    if tokens > stream.seq_len and stream.contrastive_batch is None:
        raise WorkloadError(
            f"a sample has {_images(size)}, which take {tokens} tokens with the marks around them; seq-len is "
            f"{stream.seq_len}: raise it to {tokens}, or leave such samples out"
        )
    if stream.interleaved and len(size.image_texts) != len(items):
        raise WorkloadError(
            "images of documents are to be generated, and the sizes do not say which text stands before each: write "
            "them with the --interleaved of `dataserver sizes`, or leave --interleaved out"
        )
    pair = len(items) == 1 and items[0].modality is Modality.IMAGE and size.text_tokens
    if stream.contrastive_batch is not None and not pair:
        raise WorkloadError(
            f"a sample has {_images(size) if items else 'no image'} and {size.text_tokens} text tokens; towers need "
            "one image and some text of each: leave others out"
        )


def _images(size: SampleSize) -> str:
    """For people, such as `an image of 616 patches` or `3 images of 64 to 616 patches`."""
    least, most = min(size.patches), max(size.patches)
    if size.modality:
        return f"{len(size.patches)} images, clips or videos"
    if len(size.patches) == 1:
        return f"an image of {most} patches"
    return f"{len(size.patches)} images of {most if least == most else f'{least} to {most}'} patches"
