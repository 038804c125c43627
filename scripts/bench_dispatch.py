#!/usr/bin/env python
"""Balances the same sampled mini-batches by `trainclient.dispatch` and by what other projects do to them.

Every rank has sampled as many samples of some images and text. Printed is the load of the busiest rank over the mean,
of the image encoder (patches) and of the backbone (tokens), and the time that it takes to decide. The baselines are
written from their descriptions (`benchmarks/samplers.py`).
"""

import argparse
import sys
from collections.abc import Iterator

import numpy as np
from benchmarks.calibration import timed
from benchmarks.rows import Row, report, spread
from benchmarks.samplers import SAMPLERS, Sampler

from dataserver.planning import I64
from dataserver.planning.balancing import bin_loads
from trainclient.dispatch import Arrangement, arrange

SAMPLES = 16
"""Samples that each rank draws."""
RANKS = (8, 64, 512)
SEEDS = 5
MARGIN = 1.001
"""How much worse the dispatcher's may be of two arrangements that are as good as equal."""


def sampled(ranks: int, seed: int) -> tuple[I64, I64]:
    """Patches and tokens of the samples of all ranks: a third are text alone, the others have one to four images."""
    draw, count = np.random.default_rng([ranks, seed]), ranks * SAMPLES
    images = np.where(draw.random(count) < 1 / 3, 0, draw.integers(1, 5, count))
    patches = images * np.clip(draw.lognormal(6, 0.7, count), 64, 4096).astype(np.int64)
    return patches, patches // 4 + np.clip(draw.lognormal(5, 1, count), 8, 4096).astype(np.int64)


def imbalance(loads: I64, rank: I64, ranks: int) -> float:
    """Load of the busiest rank over the mean."""
    found = bin_loads(loads, rank, ranks)
    return float(found.max() / found.mean())


def dispatched(patches: I64, tokens: I64, ranks: int) -> tuple[I64, I64]:
    """The rank of each sample's images, and of each sample."""
    found = []
    for loads in (patches, tokens):
        cut = [part.tolist() for part in np.split(loads, ranks)]
        found.append(arrange(cut).rank)
    return found[0], found[1]


def as_sampled(patches: I64, tokens: I64, ranks: int) -> tuple[I64, I64]:
    """Every sample where it was sampled."""
    del patches, tokens
    rank = Arrangement.as_sampled([SAMPLES] * ranks).rank
    return rank, rank


WAYS: dict[str, Sampler] = {"dispatcher": dispatched, "as sampled": as_sampled, **SAMPLERS}


def rows(seeds: int, sizes: tuple[int, ...]) -> Iterator[Row]:
    """Rows of every number of ranks."""
    for ranks in sizes:
        steps = [sampled(ranks, seed) for seed in range(seeds)]
        found: dict[str, list[tuple[float, float, float]]] = {}
        for name, way in WAYS.items():
            way(*steps[0], ranks)  # compiles
            for patches, tokens in steps:
                (of_images, of_samples), ms = timed(way, patches, tokens, ranks)
                of_both = imbalance(patches, of_images, ranks), imbalance(tokens, of_samples, ranks)
                found.setdefault(name, []).append((*of_both, ms))
        best = [min(np.median([value[i] for value in each]) for each in found.values()) for i in range(2)]
        for name, values in found.items():
            encoder, backbone, taken = ([value[i] for value in values] for i in range(3))
            shown = f"encoder {spread(encoder, '.3f')}, backbone {spread(backbone, '.3f')}, {spread(taken, '.1f')} ms"
            ours = name == next(iter(WAYS))
            target = f"max / mean as the best of all: {best[0]:.3f}, {best[1]:.3f}" if ours else ""
            least = [float(np.median(ratios)) for ratios in (encoder, backbone)]
            reached = all(a <= b * MARGIN for a, b in zip(least, best, strict=True)) if ours else None
            yield Row(f"{ranks} ranks x {SAMPLES}: {name}", shown, target, reached)


def main() -> int:
    """Measure the balance, and print the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=SEEDS, help=f"steps of each size (default {SEEDS})")
    parser.add_argument("--ranks", type=int, nargs="*", default=RANKS, help=f"numbers of ranks (default {RANKS})")
    arguments = parser.parse_args()
    return report(rows(arguments.seeds, tuple(arguments.ranks)))


if __name__ == "__main__":
    sys.exit(main())
