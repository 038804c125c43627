"""Modality parity: sequences with images in a number that all ranks of the backbone can share evenly."""

from collections.abc import Callable

import numpy as np

from dataserver.planning import I64, Bool, yield_point
from dataserver.planning.balancing import bin_loads
from dataserver.planning.stream.packing import number_by_first


def even_images(sequence: I64, tokens: I64, has: Bool, capacity: int, dp: int, slots: int, most: int) -> I64 | None:
    """The same samples in sequences that give the ranks equally many with images, if a way is found.

    Samples with images gather in fewer sequences, or spread over more, whichever takes fewer changes; each of them
    goes where one without is about as long, which goes back for it.

    Args:
        sequence: int64 [n], of each sample.
        tokens: int64 [n], of each sample.
        has: bool [n], whether it has images.
        capacity: tokens of a sequence.
        dp: ranks.
        slots: sequences of a microbatch.
        most: sequences that there may be.

    Returns:
        int64 [n], numbered by their first samples; None where no way is found.
    """
    count = len(np.unique(sequence[has]))
    if not count or (count % dp == 0 if slots == 1 else count >= dp):
        return sequence
    wanted = [count // dp * dp, -(-count // dp) * dp]
    for target in sorted((t for t in wanted if 0 < t <= most), key=lambda t: abs(t - count)):
        found: _Sequences | None = _Sequences(sequence, tokens, has, capacity)
        change: Callable[[_Sequences], bool] = _gather if target < count else _spread
        for _ in range(abs(target - count)):
            yield_point()
            if found is not None and not change(found):
                found = None
        if found is not None and found.count <= most:
            return number_by_first(found.sequence)
    return None


class _Sequences:
    """Samples in sequences, under change."""

    def __init__(self, sequence: I64, tokens: I64, has: Bool, capacity: int) -> None:
        self.sequence, self.tokens, self.has, self.capacity = sequence.copy(), tokens, has, capacity

    @property
    def count(self) -> int:
        """Number of sequences in use."""
        return len(np.unique(self.sequence))

    @property
    def images(self) -> I64:
        """Samples with images in each sequence."""
        return np.bincount(self.sequence[self.has], minlength=int(self.sequence.max()) + 1)

    @property
    def free_tokens(self) -> I64:
        """Tokens that each sequence could still take."""
        return self.capacity - bin_loads(self.tokens, self.sequence, len(self.images))

    def exchange(self, some: I64, others: I64) -> bool:
        """Exchange the two samples, one of each, that fit in each other's place and differ least in length."""
        if not len(some) or not len(others):
            return False
        tokens, free = self.tokens, self.free_tokens
        others = others[np.argsort(tokens[others], kind="stable")]
        near = np.searchsorted(tokens[others], tokens[some])
        best = None
        for offset in (-1, 0):
            mine = others[np.clip(near + offset, 0, len(others) - 1)]
            longer = tokens[some] - tokens[mine]
            fits = (longer <= free[self.sequence[mine]]) & (-longer <= free[self.sequence[some]])
            away = np.where(fits, np.abs(longer), self.capacity + 1)
            at = int(away.argmin())
            if fits[at] and (best is None or away[at] < best[0]):
                best = int(away[at]), int(some[at]), int(mine[at])
        if best is not None:
            _, a, b = best
            self.sequence[a], self.sequence[b] = self.sequence[b], self.sequence[a]
        return best is not None


def _gather(found: _Sequences) -> bool:
    """Rid one more sequence of images: those of its samples go to others that have some."""
    images, before = found.images, found.sequence.copy()
    held = bin_loads(found.tokens[found.has], found.sequence[found.has], len(images))
    with_some = np.flatnonzero(images)
    for emptied in with_some[np.argsort(held[with_some], kind="stable")].tolist():
        elsewhere = (images[found.sequence] > 0) & (found.sequence != emptied)
        for sample in np.flatnonzero(found.has & (found.sequence == emptied)).tolist():
            if found.exchange(np.array([sample]), np.flatnonzero(elsewhere & ~found.has)):
                elsewhere = (images[found.sequence] > 0) & (found.sequence != emptied)
                continue
            roomiest = np.where((images > 0) & (np.arange(len(images)) != emptied), found.free_tokens, -1)
            if roomiest.max() < found.tokens[sample]:
                break
            found.sequence[sample] = int(roomiest.argmax())
        else:
            return True
        found.sequence = before.copy()
    return False


def _spread(found: _Sequences) -> bool:
    """Have one more sequence with images: one of several samples with some goes to a sequence that has none."""
    images = found.images
    several = np.flatnonzero(found.has & (images[found.sequence] > 1))
    if found.exchange(several, np.flatnonzero(images[found.sequence] == 0)):
        return True
    if len(several):
        found.sequence[several[found.tokens[several].argmax()]] = len(images)
    return bool(len(several))
