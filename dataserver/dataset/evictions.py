"""What a cache drops for want of room, and what it has to make again: whether its limit is too small."""

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from time import monotonic
from typing import Final

SOON_S: Final = 600.0
"""What is made again this soon after it was dropped was still in use. Later it was not: a run may have resumed."""
MAX_REMEMBERED: Final = 4096
"""Keys of dropped values that are remembered, the newest."""


@dataclass(frozen=True, slots=True)
class EvictionCounts:
    """Totals of what one cache has evicted."""

    evicted: int = 0
    """Values that were dropped for want of room."""
    remade: int = 0
    """Values that were made again within `SOON_S` after that."""


class Evictions:
    """Counts for one cache, under whose lock it is called."""

    def __init__(self) -> None:
        self._dropped: OrderedDict[Hashable, float] = OrderedDict()
        """Keys with the time at which they were dropped, the newest last."""
        self._evicted = self._remade = 0

    @property
    def counts(self) -> EvictionCounts:
        """Totals of what the cache has evicted and made again so far."""
        return EvictionCounts(self._evicted, self._remade)

    def dropped(self, key: Hashable) -> None:
        """A value was dropped for want of room, or found none in the first place."""
        self._evicted += 1
        self._dropped[key] = monotonic()
        self._dropped.move_to_end(key)
        if len(self._dropped) > MAX_REMEMBERED:
            self._dropped.popitem(last=False)

    def made(self, key: Hashable) -> None:
        """A value was made that the cache did not have."""
        at = self._dropped.pop(key, None)
        if at is not None and monotonic() - at < SOON_S:
            self._remade += 1
