"""A time that no placement can beat while components exchange nothing: what 1F1B itself costs beside the work.

With a generator, the last backbone stage runs the backward of microbatch k behind the forward of k + 1 + x, x being the
microbatches in flight beyond 1F1B. So a component has a path that follows one rank of that stage but goes from the
forward of some microbatch k through the generator to its backward. This detour takes G(k), forward and backward of k in
the generator, instead of the forwards of k + 1 to k + 1 + x and the backwards of k - 1 - x to k - 1, at most (1 + x) T
if no microbatch takes the stage longer than T. Detours that would overlap join: one through the generator's work on m
microbatches in a row skips m + x forwards and backwards. Where n of the m are wanted and at most x unwanted ones stand
between two of them, m + x <= (1 + x) n; where more do, two detours are possible. So any order of the microbatches takes

    forwards of the first microbatch before the stage + all work of the stage
    + the sum over k of max(0, G(k) - (1 + x) T) + backwards of the last microbatch behind the stage:

a generator that is slower than the backbone for some microbatches costs that time, however fast it is for the others.
Ranks whose sequences have images in k wait for G(k): all of the component if all sequences have, or one at least.
The first microbatch has no backwards to skip before it, the last no forwards behind it. As the slowest component takes
at least the mean over all ranks, the times of the sequences bound it, wherever they are.
"""

import numpy as np

from dataserver.planning import I64
from dataserver.planning.layouts.pipelined.placing import PlacementProblem, lower_bound_ns


def component_bound_ns(problem: PlacementProblem) -> int:
    """A time that `placing.makespan_ns` of no placement is below; at least `placing.lower_bound_ns`.

    It does not bound plans that spread images over the ranks of several components.

    Args:
        problem: with one encoder and one generator, each of one rank in a component, and no memory, padding or chunks.
    """
    if problem.num_waves < 2:
        return lower_bound_ns(problem)
    extra = int(problem.in_flight[problem.num_stages]) - 2
    forward, backward = _passes(problem.own, problem.percent)
    base_forward, base_backward = _passes(problem.base[:, None], problem.percent)
    longest = np.sort(problem.own[1])[-problem.slots :].sum() + problem.base[1]
    skipped = (1 + extra) * np.array([longest, longest * problem.percent[1] // 100])
    constant = base_forward + base_backward
    detour = np.where(problem.own[2] > 0, (forward + backward)[2] + constant[2], 0)  # without images nobody waits
    always = _over(detour, max(int(skipped.sum()), int(constant[2, 0])))
    stages = np.array([1, problem.num_stages - 1])
    first = stages @ _passed(problem, forward, base_forward) + _over(detour, int(skipped[0])) - always
    last = stages @ _passed(problem, backward, base_backward) + _over(detour, int(skipped[1])) - always
    # A rank's first and last microbatch hold something each, if only an empty slot.
    empty = problem.dp * problem.num_waves * problem.slots - problem.num_sequences
    slots = np.append(np.arange(problem.num_sequences), np.full(min(empty, 2 * problem.dp), problem.num_sequences))
    all_wait = not empty and bool((problem.own[2, :-1] > 0).all())
    total = (forward + backward)[1].sum() + always[:-1].sum() * (problem.ranks_per_component if all_wait else 1)
    total += _least_ends(first[slots], last[slots], problem.dp)
    bound = int(total) // problem.dp + problem.num_waves * int((base_forward + base_backward)[1, 0])
    return max(lower_bound_ns(problem), bound)


def _passed(problem: PlacementProblem, times: I64, base: I64) -> I64:
    """Time of each sequence in the encoder, if it has images there, and in a backbone stage. int64 [2, n]."""
    encoder = np.where(problem.own[0] > 0, times[0] + base[0], 0)
    return np.stack([encoder, times[1] + base[1]])


def _passes(times: I64, percent: I64) -> tuple[I64, I64]:
    """Forward and backward times in encoder, backbone and generator. int64 [3, n] each."""
    return times, times * percent[:, None] // 100


def _over(times: I64, limit: int) -> I64:
    """By how much each time is over a limit."""
    return np.maximum(times - limit, 0)


def _least_ends(first: I64, last: I64, count: int) -> int:
    """At most the least sum of `count` elements of `first` and the elements of `last` at `count` other places.

    Adding `shift` to one list and taking it from the other changes no such sum. Without the rule that both give equally
    many, the least sum is easy to find and no greater; the best shift makes the rule hold by itself.
    """
    low, high = -int(first.max() + last.max()) - 1, int(first.max() + last.max()) + 1
    found = []
    while low <= high:
        shift = (low + high) // 2
        cheaper = np.minimum(first + shift, last - shift)
        chosen = np.argsort(cheaper, kind="stable")[: 2 * count]
        found.append(int(cheaper[chosen].sum()))
        if (first + shift <= last - shift)[chosen].sum() > count:
            low = shift + 1
        else:
            high = shift - 1
    return max(found)
