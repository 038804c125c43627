"""The tasks of a view: each reads some images, clips or videos, and decodes them to their rows of the view's tensor."""

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Final, NamedTuple

from numpy.typing import NDArray

from dataserver.assembly.decoders import DECODERS, Item
from dataserver.dataset import Dataset, ImageRef, Shard, ShardReadError, cannot_read, gave_up, printable
from dataserver.planning import Bool
from dataserver.planning.job.fields import Sizing
from dataserver.transforms import TransformUnavailableError

IMAGES_PER_TASK: Final = 8
"""Images that a thread decodes before it looks for other work. Handing them over one by one cost as much as a fifth of
decoding them."""
READ_AT_ONCE_BYTES: Final = 4 << 20
"""Images of a task that are no larger together are read one behind the other, and then decoded: decoding leaves none of
the interpreter's memory in the processor's caches, so that what comes next takes several times as long."""


class UnreadableError(ShardReadError):
    """Storage did not give the images of one shard, or the token ids of one sample."""

    def __init__(self, said: str, dataset: int, shard: int, row: int = -1) -> None:
        super().__init__(said)
        self.dataset = dataset
        """Position among the datasets of the job."""
        self.shard = shard
        """Position among the shards of the dataset."""
        self.row = row
        """Row of the sample whose token ids were wanted; -1 where images were."""


class Coming(NamedTuple):
    """Bytes that a store was asked for and that are not here, or did not come."""

    future: Future[bytes]
    where: tuple[int, int]
    """Positions of their dataset and shard."""
    path: Path

    def given_up(self) -> UnreadableError | None:
        """What to say if the store was asked for them for as long as it may be, now that the future is done."""
        error = None if self.future.cancelled() else self.future.exception()
        if not gave_up(error):
            return None
        said = UnreadableError(str(cannot_read(self.path, error)), *self.where)
        said.__cause__ = error
        return said


@dataclass(frozen=True, slots=True, eq=False)
class DecodeTask:
    """Reads and decodes some of a view's images; called, it returns the bytes that it read."""

    decoding: "Decoding"
    chosen: Sequence[int]

    def __call__(self) -> int:
        """Raises UnreadableError where storage fails."""
        return self.decoding.run(self.chosen)

    def coming(self) -> list[Coming]:
        """What it would wait for; nothing where all is here, or lies on a disk."""
        return self.decoding.coming(self.chosen)


@dataclass(frozen=True, slots=True, eq=False)
class Decoding:
    """What the tasks of a view share: of each of its k items, where it is stored and where its rows go."""

    sizing: Sizing
    sources: list[tuple[Dataset, Shard]]
    shards: list[tuple[int, int]]
    """Positions of these datasets and shards."""
    places: list[tuple[int, int]]
    """Rows of the shards' indexes, and the numbers of the images within their samples."""
    items: list[Item]
    out: list[NDArray[Any]] | None
    valid: Bool
    """bool [k]: what each task finds out."""

    def read_ahead(self, chosen: Sequence[int]) -> None:
        """Begin to read the images, where they lie in a store."""
        for dataset, of_dataset in groupby(chosen, lambda n: self.sources[n][0]):
            if dataset.reads_ahead:
                runs = groupby(of_dataset, lambda n: self.sources[n][1])
                dataset.read_ahead([ref for shard, of in runs for ref in shard.images([self.places[n] for n in of])])

    def coming(self, chosen: Sequence[int]) -> list[Coming]:
        """What is read ahead of some images and is not here."""
        found = []
        for where, of_shard in groupby(chosen, self.shards.__getitem__):
            numbers = list(of_shard)
            dataset, shard = self.sources[numbers[0]]
            if dataset.reads_ahead:
                refs = shard.images([self.places[n] for n in numbers])
                found += [Coming(future, where, shard.file.path) for future in dataset.coming(refs)]
        return found

    def run(self, chosen: Sequence[int]) -> int:
        """Read and decode some of the images; bytes that were read."""
        runs = []
        for positions, of_shard in groupby(chosen, self.shards.__getitem__):
            numbers = list(of_shard)
            dataset, shard = self.sources[numbers[0]]
            runs.append((positions, dataset, shard.images([self.places[n] for n in numbers])))
        refs = [ref for _, _, found in runs for ref in found]
        num_bytes = sum(ref.length for ref in refs)
        at_once = num_bytes <= READ_AT_ONCE_BYTES
        read = (data for run in runs for data in read_images(*run, at_once=at_once))
        encoded: Iterable[bytes] = list(read) if at_once else read
        for n, ref, data in zip(chosen, refs, encoded, strict=True):
            out = None if self.out is None else self.out[n]
            try:
                self.valid[n] = DECODERS[ref.modality](data, ref, self.items[n], self.sizing, out)
            except TransformUnavailableError as error:
                shard, row = self.sources[n][1], self.places[n][0]
                where = f"shard {shard.name}, sample {printable(shard.keys()[row])}"
                raise TransformUnavailableError(f"{where}: {error}") from None
        return num_bytes


def read_images(
    where: tuple[int, int], dataset: Dataset, refs: Sequence[ImageRef], *, at_once: bool
) -> Iterator[bytes]:
    """Yield images of one shard.

    Raises:
        UnreadableError: storage failed; says in which shard, by the positions `where` of dataset and shard.
    """
    try:
        yield from dataset.read_all(refs) if at_once else map(dataset.read, refs)
    except (ShardReadError, OSError) as error:
        raise UnreadableError(str(error), *where) from error
