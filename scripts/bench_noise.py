"""Prints what diffusion noise costs on a CPU core, against numpy's words and normals that it took the place of.

CPU time of one thread, the median of interleaved rounds; the exit code is 1 if a row misses its target. Takes a few
seconds. On a GPU the noise is made there, and a host has nothing to do.
"""

import argparse
import sys
import time
from collections.abc import Callable
from statistics import median

import numpy as np
import torch
from benchmarks.rows import Row, report

from dataserver.allocator import cache_freed_memory
from dataserver.planning.stream.randomness import Operator, draws
from trainclient.models.noise import diffusion_noise, image_words

ROUNDS = 15
PATCH_DIM = 14 * 14 * 3
CASES = {
    "one image of 1,024 patches": [1024],
    "16 images of 4 to 256 patches": [4 * (k + 1) ** 2 // 4 for k in range(16)],
}
LEAST_RATIO = 1.5


def by_numpy(patches: list[int]) -> np.ndarray:
    """Noise of version 1: a stream of Philox 4x64-10 for each image, by Box and Muller in float64."""
    made = []
    for number, count in enumerate(patches):
        seed = int(draws(5, Operator.DIFFUSION_NOISE, 8, 1, number, 1)[0])
        words = draws(seed, Operator.DIFFUSION_NOISE, 8, 1, number, count * PATCH_DIM)
        uniform = (((words >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52).reshape(-1, 2)
        radius, angle = np.sqrt(-2 * np.log(uniform[:, 0])), 2 * np.pi * uniform[:, 1]
        made.append(np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1).reshape(-1, PATCH_DIM))
    return np.concatenate(made)


def by_torch(patches: list[int]) -> torch.Tensor:
    """Noise as the trainer makes it."""
    names = torch.tensor([[8, 1, number, 0] for number in range(len(patches))])
    words = image_words(5, Operator.DIFFUSION_NOISE, names)
    return diffusion_noise(words, torch.tensor(patches), PATCH_DIM)


def milliseconds(run: Callable[[list[int]], object], patches: list[int]) -> float:
    """CPU time of a call."""
    started = time.thread_time_ns()
    run(patches)
    return (time.thread_time_ns() - started) / 1e6


def main() -> int:
    """Measure both kinds of noise, and print the rows."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    torch.set_num_threads(1)
    cache_freed_memory()
    rows = []
    for name, patches in CASES.items():
        rounds = [(milliseconds(by_numpy, patches), milliseconds(by_torch, patches)) for _ in range(ROUNDS)]
        before, now = (median(times) for times in zip(*rounds, strict=True))
        rows.append(
            Row(name, f"{now:.1f} ms, numpy {before:.1f} ms: {before / now:.2f} x", f">= {LEAST_RATIO} x",
                before / now >= LEAST_RATIO)
        )  # fmt: skip
    return report(rows)


if __name__ == "__main__":
    sys.exit(main())
