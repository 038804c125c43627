"""How fast this machine makes the images of a dataset: read and decoded by the functions that servers use."""

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dataserver.dataset import Dataset, ImageRef, Shard
from dataserver.images import DrawnTransform, ImageShape, decode_patches, sniff_format
from dataserver.planning.job.fields import Sizing
from dataserver.planning.stream.grids import image_layouts, patch_grid, stacked_grids

READING: Final = "reading"
WARM_SAMPLES: Final = 8
"""Made once before the clock starts: first calls import and compile."""
SAMPLES_PER_TASK: Final = 8
"""That a thread makes before it looks for other work; servers hand over as many images at once."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A sample: where its images lie, and what becomes of them."""

    images: tuple[tuple[ImageRef, ImageShape], ...]


@dataclass(frozen=True, slots=True)
class Rate:
    """How fast some threads were."""

    threads: int
    images: float
    """Images that the threads decoded per second."""
    cores: float
    """Number of cores that the threads kept busy."""


@dataclass(slots=True)
class Decoded:
    """Images of one format, decoded by one thread."""

    images: int = 0
    invalid: int = 0
    num_bytes: int = 0
    pixels: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class Made:
    """What one thread made, and the seconds that it took."""

    reading_s: float = 0.0
    by_format: dict[str, Decoded] = field(default_factory=dict)

    @property
    def stages_s(self) -> dict[str, float]:
        """Seconds by stage."""
        decoding_s = sum(decoded.seconds for decoded in self.by_format.values())
        return {READING: self.reading_s, "decoding": decoding_s}

    @property
    def seconds(self) -> float:
        """Seconds of all stages."""
        return sum(self.stages_s.values())

    @property
    def num_images(self) -> int:
        """Images, over all formats."""
        return sum(decoded.images for decoded in self.by_format.values())


def sampled(dataset: Dataset, num_samples: int, sizing: Sizing) -> list[Sample]:
    """Samples spread evenly over all shards, in the order in which storage has them."""
    found = []
    for shard, row in spread_evenly(dataset, num_samples):
        first, end = shard.sizes().image_offsets[row : row + 2].tolist()
        refs = [ref for ref in shard.images((row, i) for i in range(end - first)) if ref.is_image]
        found.append(Sample(tuple((ref, _shape(ref, sizing, lone=len(refs) == 1)) for ref in refs)))
    return found


def spread_evenly(dataset: Dataset, num_samples: int) -> Iterator[tuple[Shard, int]]:
    """Shards and rows of at most so many samples, spread evenly over all shards, in the order in which they lie."""
    ends = np.cumsum([shard.num_samples for shard in dataset.shards])
    total = int(ends[-1])
    wanted = np.arange(min(num_samples, total)) * total // min(num_samples, total)
    for position in wanted.tolist():
        number = int(np.searchsorted(ends, position, side="right"))
        shard = dataset.shards[number]
        yield shard, position - int(ends[number]) + shard.num_samples


def _shape(ref: ImageRef, sizing: Sizing, *, lone: bool) -> ImageShape:
    width, height, cut = np.array([ref.width], np.int32), np.array([ref.height], np.int32), (0, 0)
    layouts = image_layouts(width, height, np.array([lone]), sizing)
    if layouts is None:
        rows, columns = patch_grid(ref.width, ref.height, sizing)
    else:
        rows, columns = (int(side[0]) for side in stacked_grids(layouts, sizing))
        cut = int(layouts[0, 0]), int(layouts[0, 1])
    return ImageShape(ref.width, ref.height, ref.orientation, rows, columns, ref.may_be_truncated, cut)


class Maker:
    """Makes samples as servers do."""

    def __init__(self, dataset: Dataset, sizing: Sizing, drawn: tuple[DrawnTransform, ...] = ()) -> None:
        self._dataset, self._sizing, self._drawn = dataset, sizing, drawn
        self._of_thread = threading.local()

    def make(self, samples: Sequence[Sample]) -> Made:
        """Make samples in this thread, and note what took how long.

        Raises:
            ShardReadError: storage failed.
        """
        made, clock = Made(), time.perf_counter
        for sample in samples:
            for ref, shape in sample.images:
                began = clock()
                data = self._dataset.read(ref)
                made.reading_s += clock() - began
                self._decode(data, shape, made)
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

    def _decode(self, data: bytes, shape: ImageShape, made: Made) -> None:
        out = self._buffer()[: shape.rows * shape.columns]
        began = time.perf_counter()
        valid = decode_patches(data, shape, self._sizing, out, self._drawn)
        seconds = time.perf_counter() - began
        decoded = made.by_format.setdefault(sniff_format(data) or "other", Decoded())
        decoded.images += 1
        decoded.invalid += not valid
        decoded.num_bytes += len(data)
        decoded.pixels += shape.width * shape.height
        decoded.seconds += seconds

    def _buffer(self) -> NDArray[np.uint8]:
        """Room for the largest image, one for each thread: servers use their buffers again as well."""
        if not hasattr(self._of_thread, "buffer"):
            shape = (self._sizing.max_patches, self._sizing.patch**2 * 3)
            self._of_thread.buffer = np.empty(shape, np.uint8)
        found: NDArray[np.uint8] = self._of_thread.buffer
        return found


def _tasks(samples: Sequence[Sample]) -> Iterator[Sequence[Sample]]:
    for first in range(0, len(samples), SAMPLES_PER_TASK):
        yield samples[first : first + SAMPLES_PER_TASK]
