"""How much memory or how many GPUs a model is short of for a layout, found by solving for larger clusters."""

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from trainclient.orchestrate.choice import Problem, Solver, TooLargeError
from trainclient.orchestrate.cluster import MAX_GIGABYTES, Cluster

UNIT: Final = 10**8
"""Resolution in bytes of the memory that is found: a tenth of a gigabyte, as it is shown."""


def shortfall(problem: Problem, layout: str, solver: Solver) -> str:
    """Say by how much a model is too large for a layout on a cluster, and what would be enough.

    The least memory of as many GPUs, and the fewest GPUs of as much memory. What fits a cluster also fits one that has
    more of either, since a layout may leave GPUs idle: so none that is smaller would do.
    """
    cluster = problem.cluster

    def fits(larger: Cluster) -> bool:
        try:
            return bool(solver(replace(problem, cluster=larger)))
        except TooLargeError:
            return False

    has, sizes = cluster.memory_bytes // UNIT, cluster.larger()
    enough = _fewest(lambda n: fits(replace(cluster, memory_bytes=n * UNIT)), has, MAX_GIGABYTES * 10**9 // UNIT)
    number = _fewest(lambda n: fits(replace(cluster, gpus=sizes[n - 1])), 0, len(sizes))
    would = []
    if enough is not None:
        more = enough * UNIT - cluster.memory_bytes
        would.append(f"each would need {enough / 10:.1f} GB, {more / 1e9:.1f} more")
    if number is not None:
        gpus = sizes[number - 1]
        would.append(f"{gpus} of them would be needed, {gpus - cluster.gpus} more")
    return (
        f"{layout}: does not fit {cluster.gpus} {cluster.gpu} with {cluster.memory_bytes / 1e9:.1f} GB for modules: "
        + (", or ".join(would) or "neither more memory nor more of them would do")
    )


def remedy(problem: Problem) -> str:
    """What else makes a model fit."""
    batch = "the contrastive batch" if problem.network("tower") else "seq-len or the patches of images"
    return (
        f"Use as many GPUs as one of these layouts needs, or GPUs with the memory that it needs; or lower {batch}, or "
        "freeze a module"
    )


def _fewest(fits: Callable[[int], bool], least: int, most: int) -> int | None:
    """The smallest number above `least` and up to `most` that fits, as all larger ones then do; None if none does."""
    high = least
    while high == least or not fits(high):
        if high >= most:
            return None
        least, high = high, min(most, max(1, 2 * high))
    while high - least > 1:
        middle = (least + high) // 2
        least, high = (least, middle) if fits(middle) else (middle, high)
    return high
