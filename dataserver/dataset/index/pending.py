"""Indexes by other rules, while the dataset still has those that it was served with.

They lie in a hidden folder beside the indexes until all of them are made and accepted. So a command that is refused, or
killed, leaves the dataset as it was, and one that was killed continues with them.
"""

import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

from dataserver.dataset.errors import DatasetError
from dataserver.dataset.index.external_files import FILES_SUFFIX
from dataserver.dataset.index.joins import JOINED_SUFFIX
from dataserver.dataset.index.known import KNOWN_SUFFIX
from dataserver.dataset.index.numeric import NUMERIC_SUFFIX
from dataserver.dataset.shards.listing import INDEX_SUFFIX, ShardFile

PENDING_NAME: Final = ".disttrain-pending"
BESIDE: Final = (FILES_SUFFIX, JOINED_SUFFIX, NUMERIC_SUFFIX, KNOWN_SUFFIX)
"""What may lie beside an index, of the same shard."""


class PendingIndexes:
    """Holds the indexes of a dataset until all of them are made."""

    def __init__(self, folder: Path) -> None:
        """Hold them in the folder of the indexes."""
        self._folder = folder / PENDING_NAME

    def of(self, shard: ShardFile) -> ShardFile:
        """Return the shard with its index among those that wait."""
        return replace(shard, index_dir=self._folder)

    def publish(self, shards: Iterable[ShardFile]) -> None:
        """Put the indexes of shards where those belong that they replace. Raises DatasetError where that fails.

        An index comes first: what lies beside it is of another one then, and that shows.
        """
        try:
            for shard in shards:
                waiting, target = self.of(shard).index_path, shard.index_path
                waiting.replace(target)
                for suffix in BESIDE:
                    if waiting.with_suffix(suffix).exists():
                        waiting.with_suffix(suffix).replace(target.with_suffix(suffix))
                    else:
                        target.with_suffix(suffix).unlink(missing_ok=True)
        except OSError as error:
            raise DatasetError(
                f"cannot replace an index ({error}); make the folder writable and index again"
            ) from error
        self._remove_folders()

    def discard(self, shards: Iterable[ShardFile]) -> None:
        """Remove the indexes of shards that wait."""
        if not self._folder.is_dir():
            return
        for shard in shards:
            waiting = self.of(shard).index_path
            for suffix in (INDEX_SUFFIX, *BESIDE):
                waiting.with_suffix(suffix).unlink(missing_ok=True)
        self._remove_folders()

    def _remove_folders(self) -> None:
        for folder, _, _ in os.walk(self._folder, topdown=False):
            with suppress(OSError):  # what is not ours stays; and others index parts of the dataset meanwhile
                Path(folder).rmdir()
