"""How fast this machine makes the images, clips and videos of a dataset: read and decoded by the functions that servers
use."""

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dataserver.assembly import DECODERS, Item, format_name
from dataserver.dataset import Dataset, ImageRef, Shard
from dataserver.planning.job.fields import MICROSECONDS, Sizing
from dataserver.planning.stream.item_sizes import VideoLengths, item_grids

READING: Final = "reading"
OTHER: Final = "other"
"""What is of no format that is known."""
WARM_SAMPLES: Final = 8
"""Made once before the clock starts: first calls import and compile."""
SAMPLES_PER_TASK: Final = 8
"""That a thread makes before it looks for other work; servers hand over as many images at once."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A sample: where its images, clips and videos lie, and what becomes of them."""

    images: tuple[tuple[ImageRef, Item], ...]


@dataclass(frozen=True, slots=True)
class Rate:
    """How fast some threads were."""

    threads: int
    images: float
    """Images, clips and videos that the threads decoded per second."""
    cores: float
    """Number of cores that the threads kept busy."""


@dataclass(slots=True)
class Decoded:
    """Images, clips or videos of one format, decoded by one thread."""

    images: int = 0
    invalid: int = 0
    num_bytes: int = 0
    pixels: int = 0
    """Pixels of the decoded images."""
    lasting_s: float = 0.0
    """How long clips and videos are."""
    seconds: float = 0.0
    """Seconds that the thread spent on decoding."""


@dataclass(slots=True)
class Made:
    """What one thread made, and the seconds that it took."""

    reading_s: float = 0.0
    by_format: dict[str, Decoded] = field(default_factory=dict)

    @property
    def stages_s(self) -> dict[str, float]:
        """Seconds of each stage by its name."""
        decoding_s = sum(decoded.seconds for decoded in self.by_format.values())
        return {READING: self.reading_s, "decoding": decoding_s}

    @property
    def seconds(self) -> float:
        """Seconds that all stages took together."""
        return sum(self.stages_s.values())

    @property
    def num_images(self) -> int:
        """Images, clips and videos, over all formats."""
        return sum(decoded.images for decoded in self.by_format.values())

    @property
    def lasting_s(self) -> float:
        """How long all clips and videos are."""
        return sum(decoded.lasting_s for decoded in self.by_format.values())


def sampled(dataset: Dataset, num_samples: int, sizing: Sizing) -> list[Sample]:
    """Samples spread evenly over all shards, in the order in which storage has them."""
    found = []
    for shard, row in spread_evenly(dataset, num_samples):
        refs = shard.images_of(row)
        found.append(Sample(tuple(zip(refs, _items(refs, sizing), strict=True))))
    return found


def images_of(samples: Sequence[Sample]) -> list[Sample]:
    """The samples with their images alone."""
    return [Sample(tuple(found for found in sample.images if found[0].is_image)) for sample in samples]


def spread_evenly(dataset: Dataset, num_samples: int) -> Iterator[tuple[Shard, int]]:
    """Shards and rows of at most so many samples, spread evenly over all shards, in the order in which they lie."""
    ends = np.cumsum([shard.num_samples for shard in dataset.shards])
    total = int(ends[-1])
    wanted = np.arange(min(num_samples, total)) * total // min(num_samples, total)
    for position in wanted.tolist():
        number = int(np.searchsorted(ends, position, side="right"))
        shard = dataset.shards[number]
        yield shard, position - int(ends[number]) + shard.num_samples


def _items(refs: Sequence[ImageRef], sizing: Sizing) -> list[Item]:
    """What a plan says of the items of a sample."""
    sides = np.array([ref.width for ref in refs], np.int32), np.array([ref.height for ref in refs], np.int32)
    modality = np.array([ref.modality for ref in refs], np.uint8)
    lengths = VideoLengths(
        np.array([ref.frames for ref in refs], np.int32), np.array([ref.microseconds for ref in refs], np.int64)
    )
    rows, columns, media = item_grids(np.array([0, len(refs)]), *sides, modality, sizing, lengths=lengths)
    layouts = media.get("image_layout")
    cut = [(0, 0)] * len(refs) if layouts is None else list(map(tuple, layouts[:, :2].tolist()))
    each = zip(rows.tolist(), columns.tolist(), cut, media["image_depths"].tolist(), strict=True)
    return [Item(high, wide, (), tiles, depth) for high, wide, tiles, depth in each]


class Maker:
    """Makes samples as servers do."""

    def __init__(self, dataset: Dataset, sizing: Sizing) -> None:
        self._dataset, self._sizing = dataset, sizing
        self._of_thread = threading.local()

    def make(self, samples: Sequence[Sample]) -> Made:
        """Make samples in this thread, and note what took how long.

        Raises:
            ShardReadError: storage failed.
        """
        made, clock = Made(), time.perf_counter
        for sample in samples:
            for ref, item in sample.images:
                began = clock()
                data = self._dataset.read(ref)
                made.reading_s += clock() - began
                self._decode(data, ref, item, made)
        return made

    def rate(self, samples: Sequence[Sample], threads: int) -> Rate:
        """How fast so many threads make samples.

        Raises:
            ShardReadError: storage failed.
        """
        began, cpu = time.perf_counter(), time.process_time()
        with ThreadPoolExecutor(threads, "bench") as pool:
            images = sum(made.num_images for made in pool.map(self.make, _tasks(samples)))
        seconds = time.perf_counter() - began
        return Rate(threads, images / seconds, (time.process_time() - cpu) / seconds)

    def _decode(self, data: bytes, ref: ImageRef, item: Item, made: Made) -> None:
        """Decode an item; clips and videos have memory of their own each time."""
        out = self._buffer()[: item.rows * item.columns] if ref.is_image else None
        began = time.perf_counter()
        valid = DECODERS[ref.modality](data, ref, item, self._sizing, out)
        seconds = time.perf_counter() - began
        decoded = made.by_format.setdefault(format_name(data, ref, OTHER), Decoded())
        decoded.images += 1
        decoded.invalid += not valid
        decoded.num_bytes += len(data)
        decoded.pixels += ref.width * ref.height if ref.is_image else 0
        decoded.lasting_s += _lasting_s(ref)
        decoded.seconds += seconds

    def _buffer(self) -> NDArray[np.uint8]:
        """Room for the largest image, one for each thread: servers use their buffers again as well."""
        if not hasattr(self._of_thread, "buffer"):
            shape = (self._sizing.max_patches, self._sizing.patch**2 * 3)
            self._of_thread.buffer = np.empty(shape, np.uint8)
        found: NDArray[np.uint8] = self._of_thread.buffer
        return found


def _lasting_s(ref: ImageRef) -> float:
    """Seconds of a clip or a video; 0 of an image."""
    if ref.is_image:
        return 0.0
    return ref.width / ref.height if ref.is_audio else ref.microseconds / MICROSECONDS


def _tasks(samples: Sequence[Sample]) -> Iterator[Sequence[Sample]]:
    for first in range(0, len(samples), SAMPLES_PER_TASK):
        yield samples[first : first + SAMPLES_PER_TASK]
