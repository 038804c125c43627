"""Which shards of a dataset a machine works through, where several share it out."""

from collections.abc import Sequence
from typing import Final, NamedTuple

from dataserver.dataset.errors import DatasetError
from dataserver.dataset.shards.listing import ShardFile


class Part(NamedTuple):
    """One of several machines that index the same dataset: every `of_all`-th shard, from the one of its number on."""

    number: int
    of_all: int

    def of(self, shards: Sequence[ShardFile]) -> tuple[ShardFile, ...]:
        """The shards of this machine. Raises DatasetError if there are none."""
        found = tuple(shards[self.number :: self.of_all])
        if not found:
            raise DatasetError(f"--shards {self.number}/{self.of_all}: there are {len(shards)} shards; use fewer parts")
        return found


WHOLE: Final = Part(0, 1)
