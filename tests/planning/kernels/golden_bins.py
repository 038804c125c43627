"""Results of every balancer and packer on fixed loads, as one digest; run as a program it prints it."""

import hashlib
import sys

import numpy as np

from dataserver.planning.balancing import BALANCERS, BinBudget, fewest_bytes, lower_peaks
from dataserver.planning.stream import packing


def digest() -> str:
    loads = np.arange(1, 97, dtype=np.int64) ** 3 * 2654435761 % 9973
    found = hashlib.sha256()
    for name in sorted(BALANCERS):
        for bins, capacity in ((8, 12), (8, None), (7, 14), (32, 3)):
            found.update(BALANCERS[name](loads, bins, capacity).astype("<i8").tobytes())
    for name, memory in (("lpt", 512), ("search", 700)):
        found.update(BALANCERS[name](loads, 8, 14, BinBudget(loads % 97, memory)).astype("<i8").tobytes())
    found.update(BALANCERS["padded"](loads, 8, None, BinBudget(loads // 97 + 5, 836)).astype("<i8").tobytes())
    found.update(packing.best_fit_decreasing(loads + 1, 20000).astype("<i8").tobytes())
    found.update(packing.balanced(loads + 1, loads + loads**2 // 5000, 20000, 26).astype("<i8").tobytes())
    traffic, node = loads[:64].reshape(8, 8), np.arange(8) // 2
    rank = fewest_bytes(traffic, node, node)
    found.update(rank.astype("<i8").tobytes())
    found.update(lower_peaks(rank, [(traffic, node), (traffic.T, node)], node, 10**6).astype("<i8").tobytes())
    return found.hexdigest()


if __name__ == "__main__":
    sys.stdout.write(digest())
