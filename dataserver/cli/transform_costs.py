"""What transforms of pixels cost an image: CPU time of this process and of those that run installed ones."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dataserver.cli.throughput import Maker, Sample
from dataserver.dataset import Dataset
from dataserver.images import TRANSFORM_WORDS, U8, DrawnTransform
from dataserver.planning.job.fields import InstalledPixels, InstalledTransform, Sizing, SpecModel
from dataserver.planning.stream.randomness import Operator, draws
from dataserver.transforms import Kind, TransformPool, parse_transform

Apply = Callable[[U8, InstalledPixels, Sequence[int]], U8]
"""A function that applies installed transforms: pixels, options and drawn words in, pixels out."""


@dataclass(frozen=True, slots=True)
class TransformCost:
    """CPU milliseconds of an image, on average."""

    without_ms: float
    with_ms: float
    handing_over_ms: float | None
    """The part of it that hands pixels to the processes of installed transforms and back, with nothing done to them;
    None where no transform is installed."""


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
    wanted: Sequence[SpecModel],
) -> TransformCost:
    """Make images on one thread: as they are, with the transforms, and handed over to installed ones without them.

    Each image has draws of its own; the pool runs the transforms that are installed.

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

    def made_ms(run: Sequence[SpecModel], by: Apply) -> float:
        nonlocal elsewhere_ns
        samples = list(_with_draws(chosen, run, by))
        elsewhere_ns, began = 0, time.process_time_ns()
        images = Maker(dataset, sizing).make(samples).num_images
        return (time.process_time_ns() - began + elsewhere_ns) / images / 1e6

    installed = [options for options in wanted if isinstance(options, InstalledPixels)]
    without_ms, with_ms = made_ms((), untouched), made_ms(wanted, transformed)
    return TransformCost(without_ms, with_ms, made_ms(installed, untouched) - without_ms if installed else None)


def _with_draws(samples: Sequence[Sample], wanted: Sequence[SpecModel], by: Apply) -> Iterator[Sample]:
    """The samples whose images are transformed."""
    number = 0
    for sample in samples:
        images = []
        for ref, item in sample.images:
            drawn = tuple(
                DrawnTransform(options, words_of(number, t), by if isinstance(options, InstalledPixels) else None)
                for t, options in enumerate(wanted)
            )
            images.append((ref, item._replace(drawn=drawn)))
            number += 1
        yield Sample(tuple(images))


def words_of(image: int, number: int = 0) -> tuple[int, ...]:
    """Draws for one of the transforms of an image."""
    words = draws(0, Operator.IMAGE_TRANSFORM, 0, 0, image, TRANSFORM_WORDS * (number + 1))
    return tuple(words.tolist()[-TRANSFORM_WORDS:])
