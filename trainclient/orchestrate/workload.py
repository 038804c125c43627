"""What a step asks of each module, from the sizes of samples."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from dataserver.planning.job.fields import ModelSize, TextError, parse_yaml
from trainclient.orchestrate.networks import Network

F64 = NDArray[np.float64]

MARKS: Final = 2
"""BOS and EOS of a sample, BOI and EOI of an image, BOS and BOI before an image to generate (`planning.sizing`)."""
MAX_COUNT: Final = 1 << 40
MAX_SIZES: Final = 100_000
MAX_FILE_BYTES: Final = 64 << 20


class WorkloadError(ValueError):
    """Sizes that no job could train on."""


@dataclass(frozen=True, slots=True)
class SampleSize:
    """Samples of one size."""

    count: int
    text_tokens: int
    patches: tuple[int, ...]
    """Number of patches of each image."""
    image_tokens: tuple[int, ...] = ()
    """Backbone tokens of each image, where images are cut into tiles; else they follow from the patches."""
    tile_patches: int = 0
    """Patches of a tile, which attend to each other alone; 0 where images are whole."""

    def tokens_of_images(self, merge: int) -> tuple[int, ...]:
        """Backbone tokens of each image."""
        return self.image_tokens or tuple(patches // merge**2 for patches in self.patches)


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


@dataclass(frozen=True, slots=True, eq=False)
class Load:
    """What a module has to do for a sequence, on average. It equals itself alone, so that hashing it takes no time."""

    items: float
    """Number of images, or of samples."""
    rows: float
    """Number of patches, or of tokens."""
    squares: float
    """The sum of the squares of its items' rows, which attention takes; windows leave fewer pairs."""
    largest: int
    """Rows of the largest item that there is."""
    sizes: tuple[tuple[float, int], ...]
    """How many items of a sequence have so many rows, for each number of rows."""


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
        items = rows = squares = 0.0
        largest, sizes = 0, dict[int, float]()
        for size in self.sizes:
            for weight, parts in self._items(network, size):
                share = each * weight * size.count / total
                items += share * len(parts)
                rows += share * sum(parts)
                squares += share * sum(n * min(n, network.window or n) for n in parts)
                largest = max(largest, *parts) if share and parts else largest
                for n in parts if share else ():
                    sizes[n] = sizes.get(n, 0.0) + share
        return Load(items, rows, squares, largest, tuple((sizes[n], n) for n in sorted(sizes)))

    @cached_property
    def lengths(self) -> F64:
        """Of sequences: share of all of them, tokens, and the sum of the squares of their samples' tokens.

        float64 [3, lengths].
        """
        if self.stream.packed:
            load = self._load(_TOKENS)
            return np.array([[1.0], [round(load.rows)], [round(load.squares)]])
        total, shares = sum(s.count for s in self.sizes), dict[int, float]()
        for size in self.sizes:
            for weight, (tokens,) in self._sequences(size):
                shares[tokens] = shares.get(tokens, 0.0) + weight * size.count / total
        found = sorted(shares)
        return np.array([[shares[n] for n in found], found, [n * n for n in found]], np.float64)

    def _generated(self, size: SampleSize) -> float:
        return self.stream.generation if len(size.patches) == 1 and size.text_tokens else 0.0

    def _sequences(self, size: SampleSize) -> list[tuple[float, tuple[int]]]:
        """Tokens of a sample in each of its tasks, with the chance of it."""
        chance, stream = self._generated(size), self.stream
        images = sum(n + MARKS for n in size.tokens_of_images(stream.merge))
        understood = min(stream.seq_len, MARKS + images + size.text_tokens)
        if stream.contrastive_batch is not None:
            understood = min(stream.seq_len, MARKS + size.text_tokens)
        generated = min(stream.seq_len, MARKS + stream.query_tokens + size.text_tokens)
        return [(w, (n,)) for w, n in ((1 - chance, understood), (chance, generated)) if w]

    def _tokens(self, size: SampleSize) -> float:
        return sum(weight * tokens for weight, (tokens,) in self._sequences(size))

    def _items(self, network: Network, size: SampleSize) -> Sequence[tuple[float, tuple[int, ...]]]:
        if not network.reads_images:
            return self._sequences(size)
        if network.modality is not None:
            return [(1.0, size.patches)]
        chance = self._generated(size)
        return [(chance if network.role.generates else 1 - chance, size.patches)]


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
        tokens = MARKS + sum(n + MARKS for n in size.tokens_of_images(stream.merge))
        if any(p % stream.merge**2 for p in size.patches):
            raise WorkloadError(
                f"a sample has {_images(size)}; multiples of merge^2 = {stream.merge**2} are required, since so many "
                "patches become one token: set --merge to what the sizes were made with, or correct the sizes"
            )
        if tokens > stream.seq_len and stream.contrastive_batch is None:
            raise WorkloadError(
                f"a sample has {_images(size)}, which take {tokens} tokens with the marks around them; seq-len is "
                f"{stream.seq_len}: raise it to {tokens}, or leave such samples out"
            )
        if stream.contrastive_batch is not None and (len(size.patches) != 1 or not size.text_tokens):
            raise WorkloadError(
                f"a sample has {len(size.patches)} images and {size.text_tokens} text tokens; towers need one image "
                "and some text of each: leave others out"
            )
    return Workload(tuple(sizes), stream)


def _images(size: SampleSize) -> str:
    """For people, such as `an image of 616 patches` or `3 images of 64 to 616 patches`."""
    least, most = min(size.patches), max(size.patches)
    if len(size.patches) == 1:
        return f"an image of {most} patches"
    return f"{len(size.patches)} images of {most if least == most else f'{least} to {most}'} patches"


def read_sizes(path: Path) -> tuple[SampleSize, ...]:
    """Sizes of samples from a JSON or YAML file: `samples`, each with `count` (by default 1), `text_tokens`, `patches`.

    Where images are cut, the file has `tile_patches`, and samples `image_tokens`.

    Raises:
        WorkloadError: the file cannot be read, or holds something else.
    """
    try:
        with path.open("rb") as file:
            text = file.read(MAX_FILE_BYTES + 1)
        if len(text) > MAX_FILE_BYTES:
            raise WorkloadError(f"{path} has more than {MAX_FILE_BYTES} bytes; count samples of like size together")
        data = json.loads(text) if path.suffix == ".json" else parse_yaml(text)
    except OSError as error:
        raise WorkloadError(f"{path} cannot be read: {error.strerror}") from None
    except WorkloadError:
        raise
    except (ValueError, RecursionError, TextError) as error:
        raise WorkloadError(f"{path} cannot be used: {error}") from None
    entries = data.get("samples") if isinstance(data, dict) else None
    if not isinstance(entries, list) or not 1 <= len(entries) <= MAX_SIZES:
        raise WorkloadError(
            f"{path} holds no list `samples` of 1 to {MAX_SIZES} sizes, each as {{count: 10, text_tokens: 40, patches: "
            "[256]}; `dataserver sizes` writes such a file"
        )
    tile = data.get("tile_patches", 0)
    if type(tile) is not int or not 0 <= tile <= MAX_COUNT:
        raise WorkloadError(f"{path}: tile_patches is {tile!r:.40}; an integer is required")
    return tuple(_size(entry, f"{path}, samples[{number}]", tile) for number, entry in enumerate(entries))


def _size(entry: Any, where: str, tile: int) -> SampleSize:
    found: Mapping[str, Any] = entry if isinstance(entry, dict) else {}
    unknown = sorted(map(str, found.keys() - {"count", "text_tokens", "patches", "image_tokens"}))
    count, tokens, patches = found.get("count", 1), found.get("text_tokens", 0), found.get("patches", [])
    of_images = found.get("image_tokens", [])
    are_lists = isinstance(patches, list) and isinstance(of_images, list) and len(of_images) in (0, len(patches))
    numbers = [count, tokens, *patches, *of_images] if are_lists else [None]
    if unknown or not all(type(n) is int and 0 <= n <= MAX_COUNT for n in numbers) or count < 1 or 0 in patches:
        raise WorkloadError(
            f"{where} is {entry!r:.200}; count (1 or more), text_tokens and patches (a list) are required, all "
            "integers; image_tokens, where given, are one for each of the patches"
        )
    if not tokens and not patches:
        raise WorkloadError(f"{where} has neither text nor images; leave it out")
    return SampleSize(count, tokens, tuple(patches), tuple(of_images), tile)
