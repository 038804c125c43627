"""How others balance a step's samples, written from their descriptions: baselines, not their code.

Each takes what every sample needs in the image encoder and in the backbone, int64 [n] each, and gives the rank of its
images and the rank of the sample, int64 [n] each: the same where samples are not moved between modules.
"""

import heapq
from collections.abc import Callable

import numpy as np

from dataserver.planning import I64

Sampler = Callable[[I64, I64, int], tuple[I64, I64]]
ROUNDS = 10
KEPT = 0.9
"""Groups that reach this share of either target are kept (the paper leaves the margin to its user)."""


def in_the_manner_of_omnibal(patches: I64, tokens: I64, ranks: int) -> tuple[I64, I64]:
    """Iterative sampling and filtering (arXiv 2407.20761, Algorithm 1).

    Samples are drawn at random into a group until it has the mean share of patches or of tokens; groups that come near
    a target are kept, the others go back and are drawn again. What is left at the end goes to the groups that are
    lightest in tokens.
    """
    draw, targets = np.random.default_rng(0), np.array([patches.sum(), tokens.sum()]) / ranks
    needs, pool, groups = np.stack([patches, tokens], axis=1), np.arange(len(patches)), list[list[int]]()
    for _ in range(ROUNDS):
        rest, group, total = list[int](), list[int](), np.zeros(2)
        for sample in draw.permutation(pool).tolist():
            group.append(sample)
            total = total + needs[sample]
            if (total >= targets * KEPT).any():
                fits = (total <= targets / KEPT).all() and len(groups) < ranks
                groups, rest = ([*groups, group], rest) if fits else (groups, rest + group)
                group, total = [], np.zeros(2)
        pool = np.array(rest + group, np.int64)
    groups += [[] for _ in range(ranks - len(groups))]
    rank = np.full(len(patches), -1, np.int64)
    for number, members in enumerate(groups):
        rank[members] = number
    rank = _lightest_first(tokens, rank, ranks, pool[np.argsort(-tokens[pool], kind="stable")])
    return rank, rank


def in_the_manner_of_veomni(patches: I64, tokens: I64, ranks: int) -> tuple[I64, I64]:
    """Longest first by the square of the length, each module for itself: the next one goes where least is so far."""
    of_images, of_samples = (
        _lightest_first(square, np.full(len(square), -1, np.int64), ranks, np.argsort(-square, kind="stable"))
        for square in (patches * patches, tokens * tokens)
    )
    return of_images, of_samples


def in_the_manner_of_transformers(patches: I64, tokens: I64, ranks: int) -> tuple[I64, I64]:
    """Runs of samples sorted by length, of such sizes that their padded costs, count x longest, are close."""
    del patches
    order, sizes = np.argsort(tokens, kind="stable"), np.bincount(np.arange(len(tokens)) % ranks, minlength=ranks)
    ordered = tokens[order]
    best, least = sizes, np.inf
    for _ in range(4 * len(tokens)):
        ends = np.cumsum(sizes)
        cost = np.where(sizes > 0, sizes * ordered[np.maximum(ends - 1, 0)], 0)
        if cost.max() < least:
            best, least = sizes, cost.max()
        changed = sizes.copy()
        changed[cost.argmax()] -= 1
        changed[cost.argmin()] += 1
        if changed.min() < 1:
            break
        sizes = changed
    rank = np.empty(len(tokens), np.int64)
    rank[order] = np.repeat(np.arange(ranks), best)
    return rank, rank


SAMPLERS: dict[str, Sampler] = {
    "in the manner of OmniBal": in_the_manner_of_omnibal,
    "in the manner of VeOmni": in_the_manner_of_veomni,
    "in the manner of transformers' BatchRebalanceSampler": in_the_manner_of_transformers,
}


def _lightest_first(loads: I64, rank: I64, ranks: int, samples: I64) -> I64:
    """Give samples one after the other to the rank with the least load; the others stay where they are."""
    total = np.zeros(ranks, np.int64)
    np.add.at(total, rank[rank >= 0], loads[rank >= 0])
    queue = [(int(load), number) for number, load in enumerate(total)]
    heapq.heapify(queue)
    for sample in samples.tolist():
        load, number = heapq.heappop(queue)
        rank[sample] = number
        heapq.heappush(queue, (load + int(loads[sample]), number))
    return rank
