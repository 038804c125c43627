"""Whether transforms of users give the same result again: each runs in two processes on samples of a dataset."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import Any, Final, TypeVar

import numpy as np

from dataserver.cli.throughput import spread_evenly
from dataserver.cli.transform_costs import as_pixels, words_of
from dataserver.dataset import (
    TEXT_TRANSFORM,
    TRANSFORM,
    Dataset,
    DatasetError,
    Shard,
    ShardFinding,
    ShardReadError,
    StaleIndexError,
    derive_table,
    printable,
)
from dataserver.images import DrawnTransform, ImageShape, decode_patches
from dataserver.planning.job.fields import InstalledTransform, Sizing
from dataserver.planning.stream.grids import patch_grid
from dataserver.transforms import Kind, TransformFailedError, TransformPool, TransformUnavailableError, parse_transform

MOST_SAMPLES: Final = 64
_DIFFERS: Final = "gave another result for the same arguments; let it depend on no clock, state or other chance"
_SIZING: Final = Sizing()
Result = TypeVar("Result")


def verify(dataset: Dataset, entries: Sequence[str]) -> Iterator[ShardFinding]:
    """Yield what is wrong with the transforms that entries NAME=VERSION:OPTIONS name, on samples spread evenly.

    Raises:
        ValueError: an entry is something else.
        TransformError: one is not installed, or cannot be imported.
        StaleIndexError: an index is not that of its shard.
        ShardReadError: storage failed.
    """
    wanted = [parse_transform(entry) for entry in entries]
    first, second = (TransformPool.of({one.name: one.version for one in wanted}) for _ in range(2))
    with closing(first), closing(second):
        first.check()
        for one in wanted:
            kind = first.installed[one.name].kind
            found = TEXT_TRANSFORM if kind is Kind.TEXT else TRANSFORM
            for shard, key, detail in _BY_KIND[kind](dataset, one, (first, second, second)):
                yield ShardFinding(shard.name, key, found, printable(detail))


Runs = tuple[TransformPool, ...]
"""Where a transform runs: once in one process, and twice in another one, which shows what it remembers."""
Found = Iterator[tuple[Shard, str, str]]
"""A shard, the key of a sample or nothing, and what is wrong."""


def _verify_pixels(dataset: Dataset, wanted: InstalledTransform, runs: Runs) -> Found:
    options = as_pixels(wanted)
    for shard, row in spread_evenly(dataset, MOST_SAMPLES):
        key = shard.keys()[row]
        for ref in shard.images_of(row):
            if not ref.is_image:
                continue
            grid = patch_grid(ref.width, ref.height, _SIZING)
            shape = ImageShape(ref.width, ref.height, ref.orientation, *grid, ref.may_be_truncated)
            out = np.empty((grid[0] * grid[1], _SIZING.patch**2 * 3), np.uint8)
            problems: list[str] = []

            def both(pixels: Any, _: Any, words: Any, problems: list[str] = problems) -> Any:
                problems += _compared(lambda pool: pool.pixels(pixels, options, words).tobytes(), runs, wanted)
                return pixels

            try:
                decode_patches(dataset.read(ref), shape, _SIZING, out, [DrawnTransform(options, words_of(0), both)])
            except TransformUnavailableError as error:
                yield shard, key, f"{error}; no further sample was tried"
                return
            yield from ((shard, key, problem) for problem in problems)


def _verify_texts(dataset: Dataset, wanted: InstalledTransform, runs: Runs) -> Found:
    for shard, row in spread_evenly(dataset, MOST_SAMPLES):
        texts = shard.parts(row).texts
        try:
            made = [pool.texts(texts, wanted) for pool in runs]
        except (TransformFailedError, TransformUnavailableError) as error:
            yield shard, shard.keys()[row], f"{error}; no further sample was tried"
            return
        failed = [f"the transform {wanted.name}={wanted.version}: {one.reason}" for one in made[0] if one.text is None]
        problems = failed or ([] if _are_same(made) else [f"{wanted.name}={wanted.version} {_DIFFERS}"])
        yield from ((shard, shard.keys()[row], problem) for problem in problems)


def _verify_metadata(dataset: Dataset, wanted: InstalledTransform, runs: Runs) -> Found:
    for shard in dict.fromkeys(shard for shard, _ in spread_evenly(dataset, MOST_SAMPLES)):
        try:
            made = [derive_table(shard.file, shard.header, shard.sidecar_columns, pool, wanted) for pool in runs]
        except (StaleIndexError, ShardReadError):
            raise
        except DatasetError as error:
            yield shard, "", f"{error}; no further shard was tried"
            return
        if not all(made[0].equals(other) for other in made[1:]):
            yield shard, "", f"{wanted.name}={wanted.version} {_DIFFERS}"


_BY_KIND: Final[dict[Kind, Callable[[Dataset, InstalledTransform, Runs], Found]]] = {
    Kind.PIXELS: _verify_pixels,
    Kind.TEXT: _verify_texts,
    Kind.METADATA: _verify_metadata,
}


def _are_same(made: Sequence[object]) -> bool:
    return all(made[0] == other for other in made[1:])


def _compared(make: Callable[[TransformPool], Result], runs: Runs, wanted: InstalledTransform) -> list[str]:
    """What is wrong with a call: why it fails, or that two processes differ."""
    try:
        same = _are_same([make(pool) for pool in runs])
    except TransformFailedError as error:
        return [str(error)]
    return [] if same else [f"{wanted.name}={wanted.version} {_DIFFERS}"]
