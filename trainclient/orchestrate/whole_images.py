"""How long the busiest rank takes where images are not cut: bounds over images that are drawn.

Of images, the largest first, some rank of r takes at least the largest; the smallest two of the first r + 1, since two
of these share a rank; the smallest three of the first 2 r + 1; and so on. All of these fall with r.
"""

from functools import lru_cache
from typing import Final

import numpy as np

from dataserver.planning import I64
from dataserver.planning.job.fields import Cost
from trainclient.orchestrate.workload import F64, Load

AHEAD: Final = 2
"""Waves over which ranks even out: an encoder holds one more than lie in the stages behind it. Fitted: with this number
solved and planned numbers of microbatches agree best for choices of the rows `tiles` and `requests` of
`scripts/bench_orchestration.py --only estimates`. Its rows `held out` were not looked at for that."""
SHARING: Final = 8
"""Where up to so many images, and one more, must share a rank, the least that they take is counted."""
DRAWN: Final = 4096
"""Images that are drawn, but for a minimum of `FEWEST_DRAWS` times as many as there are."""
FEWEST_DRAWS, MOST_DRAWS = 4, 64
MOST_DRAWN: Final = 16_384
"""Most images that are drawn: with more none is drawn, and each length has as many as expected: time and memory have a
limit."""
SEED: Final = 20_250_329

ItemCost = tuple[int, int, int | None]
"""What the time of an item follows from: `linear_ps`, `quadratic_fs` and `window` of a `Cost`."""


def item_cost(cost: Cost) -> ItemCost:
    """The part of a cost that says how long an item takes."""
    return cost.linear_ps, cost.quadratic_fs, cost.window


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
    return _shares(load, item_cost(cost), count, most)


def busiest_share_of(load: Load, cost: Cost, sequences: float, ranks: I64) -> F64:
    """The same for a single wave of so many sequences and only these numbers of ranks. float64 [ranks]."""
    count = max(1, round(load.items * sequences))
    return _shares_of(load, item_cost(cost), count, ranks)


def drawn_items(load: Load, cost: ItemCost, count: int) -> F64:
    """What `count` items take, the longest first, of several draws. float64 [draws, count]."""
    times, parts = _item_times(load, cost)
    draws = min(MOST_DRAWS, max(FEWEST_DRAWS, DRAWN // count))
    drawn = times[np.random.default_rng((SEED, count)).choice(len(times), (draws, count), p=parts)]
    return -np.sort(-drawn, axis=1)


@lru_cache(maxsize=4096)
def _shares(load: Load, cost: ItemCost, count: int, most: int) -> F64:
    return _shares_of(load, cost, count, np.arange(1, most + 1))


def _shares_of(load: Load, cost: ItemCost, count: int, ranks: I64) -> F64:
    if count > MOST_DRAWN:
        return _expected_shares(load, cost, count, ranks)
    drawn = drawn_items(load, cost, count)
    sums = np.concatenate([np.zeros((len(drawn), 1)), np.cumsum(drawn, axis=1)], axis=1)
    busiest = np.maximum(sums[:, -1:] / ranks, drawn[:, :1])
    for others in range(1, SHARING + 1):
        crowded = others * ranks < count  # so many ranks have others * ranks + 1 items between them
        last = others * ranks[crowded] + 1
        together = sums[:, last] - sums[:, last - others - 1]
        busiest[:, crowded] = np.maximum(busiest[:, crowded], together)
    found: F64 = (busiest / sums[:, -1:]).mean(axis=0)
    return found


def _expected_shares(load: Load, cost: ItemCost, count: int, ranks: I64) -> F64:
    """The same of very many images, taking those next to each other by length as equal. float64 [ranks]."""
    times, parts = _item_times(load, cost)
    order = np.argsort(-times)
    times, longer = times[order], np.cumsum(parts[order])  # the part of images that take no less
    none_longer = np.append(1.0, np.maximum(0.0, 1 - longer)) ** count
    whole = count * float(parts[order] @ times)
    busiest = np.maximum(whole / ranks, times @ (none_longer[:-1] - none_longer[1:]))
    for others in range(1, SHARING + 1):
        crowded = others * ranks < count
        smallest = np.searchsorted(longer, others * ranks[crowded] / count).clip(max=len(times) - 1)
        busiest[crowded] = np.maximum(busiest[crowded], (others + 1) * times[smallest])
    found: F64 = busiest / whole
    return found


def _item_times(load: Load, cost: ItemCost) -> tuple[F64, F64]:
    """What an item of each size takes, and their parts of all items. Two float64 [sizes].

    Where a cost has none, since what was measured depends on microbatches alone, all items count alike.
    """
    linear_ps, quadratic_fs, window = cost
    rates, rows = np.array(load.sizes, np.float64).T
    times = linear_ps * rows / 1e3 + quadratic_fs * rows * np.minimum(rows, window or rows) / 1e6
    times = times if times.any() else np.ones(len(rows))
    return times, rates / rates.sum()
