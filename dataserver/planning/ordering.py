"""Order of the microbatches of one backbone rank."""

from collections.abc import Sequence

from dataserver.planning.samples import I64


def disttrain_order(forward_ns: Sequence[I64], backward_ns: Sequence[I64]) -> list[int]:
    """DistTrain's Algorithm 2 (inter-microbatch reordering, section 5.3) for 1F1B.

    The smallest microbatch goes first, so that all stages start early; the p - 1 next smallest go last, where their
    intervals cannot be filled; the others fill the intervals in which the first stage waits, each by the closest fit.
    The first interval, from the first forward to the first backward, takes p - 1 microbatches; interval i lasts as long
    as the slowest later stage works on microbatch i.

    Args:
        forward_ns: for each of the p stages int64 [l]: forward time of each microbatch.
        backward_ns: the same for backward.

    Returns:
        A permutation of range(l).
    """
    num_stages, count = len(forward_ns), len(forward_ns[0])
    size = [int(sum(f[m] for f in forward_ns)) for m in range(count)]
    both = [[int(f[m] + b[m]) for m in range(count)] for f, b in zip(forward_ns, backward_ns, strict=True)]
    ascending = sorted(range(count), key=lambda m: (size[m], m))
    if count <= num_stages or num_stages == 1:
        return ascending
    order, rear, middle = ascending[:1], ascending[1:num_stages], ascending[num_stages:]
    interval = sum(stage[order[0]] for stage in both[1:])
    for place in range(num_stages - 1):
        if middle:
            share = interval // (num_stages - 1 - place)
            order.append(_closest(middle, forward_ns[0], share))
            interval -= int(forward_ns[0][order[-1]])
    for number in range(1, count):
        if not middle:
            break
        follows = order[number]
        interval = max(stage[follows] for stage in both[1:]) - int(backward_ns[0][follows])
        order.append(_closest(middle, forward_ns[0], interval))
    return order + rear


def _closest(candidates: list[int], time_ns: I64, wanted: int) -> int:
    """Take the candidate whose time is closest to the wanted one."""
    best = min(candidates, key=lambda m: (abs(int(time_ns[m]) - wanted), m))
    candidates.remove(best)
    return best
