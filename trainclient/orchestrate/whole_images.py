"""How long the busiest rank takes where images are not cut: bounds over images that are drawn.

Of images, the largest first, some rank of r takes at least the largest; the smallest two of the first r + 1, since two
of these share a rank; the smallest three of the first 2 r + 1; and so on. All of these fall with r.
"""

from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dataserver.planning.job.fields import Cost
from trainclient.orchestrate.workload import Load

F64 = NDArray[np.float64]

AHEAD: Final = 2
"""Waves over which ranks even out: an encoder holds one more than lie in the stages behind it. With this number solved
and planned numbers of microbatches agree best (`scripts/bench_orchestration.py`, rows of estimates)."""
SHARING: Final = 8
"""Of up to so many images, and one more, that must share a rank it is counted what they take at least."""
DRAWN: Final = 4096
"""Images that are drawn, but for a minimum of `FEWEST_DRAWS` times as many as there are."""
FEWEST_DRAWS, MOST_DRAWS = 4, 64
SEED: Final = 20_250_329


def busiest_shares(load: Load, cost: Cost, waves: int, sequences: float, most: int) -> F64:
    """The part of a wave's work that the busiest of 1 to `most` ranks does. float64 [most], at least 1 / ranks.

    Args:
        load: what a sequence holds for the module.
        cost: what its items take.
        waves: of the step; ranks even out over no more.
        sequences: of a wave.
        most: at least 1.
    """
    count = max(1, round(load.items * sequences * min(waves, AHEAD)))
    return _shares(load, cost.linear_ps, cost.quadratic_fs, cost.window, count, most)


def drawn_items(load: Load, linear_ps: int, quadratic_fs: int, window: int | None, count: int) -> F64:
    """What `count` items take, the longest first, of several draws. float64 [draws, count]."""
    rates, rows = np.array(load.sizes, np.float64).T
    draws = min(MOST_DRAWS, max(FEWEST_DRAWS, DRAWN // count))
    times = linear_ps * rows / 1e3 + quadratic_fs * rows * np.minimum(rows, window or rows) / 1e6
    drawn = times[np.random.default_rng((SEED, count)).choice(len(times), (draws, count), p=rates / rates.sum())]
    return -np.sort(-drawn, axis=1)


@lru_cache(maxsize=4096)
def _shares(load: Load, linear_ps: int, quadratic_fs: int, window: int | None, count: int, most: int) -> F64:
    drawn = drawn_items(load, linear_ps, quadratic_fs, window, count)
    sums = np.concatenate([np.zeros((len(drawn), 1)), np.cumsum(drawn, axis=1)], axis=1)
    ranks = np.arange(1, most + 1)
    busiest = np.maximum(sums[:, -1:] / ranks, drawn[:, :1])
    for others in range(1, SHARING + 1):
        crowded = min(most, (count - 1) // others)  # so many ranks have others * ranks + 1 items between them
        last = others * ranks[:crowded] + 1
        together = sums[:, last] - sums[:, last - others - 1]
        busiest[:, :crowded] = np.maximum(busiest[:, :crowded], together)
    found: F64 = (busiest / sums[:, -1:]).mean(axis=0)
    return found
