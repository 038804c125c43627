"""What transforms of pixels cost an image: CPU time of this process and of those that run them."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from dataserver.cli.throughput import Maker, Sample
from dataserver.dataset import Dataset
from dataserver.images import U8, DrawnTransform
from dataserver.planning.job.fields import InstalledPixels, InstalledTransform, Sizing
from dataserver.transforms import Kind, TransformPool, parse_transform

WORDS: Final = (1 << 62, 1 << 61, 1 << 63, 1 << 60)
"""Draws of each image."""


@dataclass(frozen=True, slots=True)
class TransformCost:
    """CPU milliseconds of an image, on average."""

    without_ms: float
    with_ms: float
    handing_over_ms: float
    """The part of it that hands pixels to other processes and back, with nothing done to them."""


def pixel_transforms(entries: Sequence[str]) -> tuple[TransformPool, tuple[InstalledPixels, ...]]:
    """The installed transforms of pixels that entries NAME=VERSION:OPTIONS name.

    Raises:
        ValueError: an entry is something else.
        TransformError: one is not installed, is of another kind, or cannot be imported.
    """
    wanted = [parse_transform(entry) for entry in entries]
    pool = TransformPool.of({one.name: one.version for one in wanted}, kinds=(Kind.PIXELS,))
    pool.check()
    return pool, tuple(map(as_pixels, wanted))


def as_pixels(wanted: InstalledTransform) -> InstalledPixels:
    """The same as a job names it among its transforms of pixels."""
    return InstalledPixels(kind="installed", **wanted.model_dump())


def transform_cost(
    dataset: Dataset,
    sizing: Sizing,
    chosen: Sequence[Sample],
    pool: TransformPool,
    wanted: Sequence[InstalledPixels],
) -> TransformCost:
    """Make images three times on one thread: as they are, with the transforms, and handed over without them.

    Raises:
        ShardReadError: storage failed.
        TransformUnavailableError: a transform took too long.
    """
    elsewhere_ns = 0

    def transformed(pixels: U8, options: InstalledPixels, words: Sequence[int]) -> U8:
        return handed_over("pixels", pixels, options, words)

    def untouched(pixels: U8, options: InstalledPixels, words: Sequence[int]) -> U8:
        return handed_over("nothing", pixels, options, words)

    def handed_over(kind: str, pixels: U8, options: InstalledPixels, words: Sequence[int]) -> U8:
        nonlocal elsewhere_ns
        asked: dict[str, Any] = {"kind": kind, "shape": list(pixels.shape), "words": list(words)}
        data = np.ascontiguousarray(pixels).data.cast("B")
        made = pool.call(pool.installed[options.name], options, asked, data, pool.timeout_s, len(data))
        elsewhere_ns += made.cpu_ns
        return made.data.reshape(pixels.shape)

    found = []
    for by in (None, transformed, untouched):
        drawn = () if by is None else tuple(DrawnTransform(options, WORDS, by) for options in wanted)
        elsewhere_ns, began = 0, time.process_time_ns()
        images = Maker(dataset, sizing, drawn).make(chosen).num_images
        found.append((time.process_time_ns() - began + elsewhere_ns) / images / 1e6)
    return TransformCost(found[0], found[1], found[2] - found[0])
