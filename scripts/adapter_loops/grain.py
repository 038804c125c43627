"""Grain, batches of one shape: `grain.py LOADER SHARDS OUT SERVER`, in one process of `RANKS`.

LOADER is a decoder, for a source by number, threads that read it, and Grain's first-fit packing; or `served`.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

import grain

from adapter_loops.job import SERVED, job
from adapter_loops.measuring import RANKS, ROWS, SEQ_LEN, STEPS, WORKERS, Load, Meter
from adapter_loops.samples import MERGE, Images, sample
from dataserver.allocator import cache_freed_memory
from trainclient.adapters.grain import ServedDataset


def own(shards: Path, decoder: str) -> Any:
    """Batches of packed samples, without end."""
    images = grain.MapDataset.source(Images(shards, decoder)).seed(0).shuffle()[int(os.environ["RANK"]) :: RANKS]
    return grain.experimental.FirstFitPackIterDataset(
        images.repeat().to_iter_dataset(grain.ReadOptions(num_threads=WORKERS, prefetch_buffer_size=16)),
        length_struct={"tokens": SEQ_LEN, "patches": SEQ_LEN * MERGE},
        num_packing_bins=ROWS,
    )


def served(server: str) -> Any:
    """Return the dataset that reads from the adapter."""
    cache_freed_memory()
    return ServedDataset(server, job(), rank=int(os.environ["RANK"]), world_size=RANKS)


def train(batches: Any, meter: Meter, waited: list[float], samples: str, images: str) -> None:
    """Tell a meter what each batch holds; `samples` and `images` name its numbers of samples, 0 where there is none."""
    count, step = 0, 0
    while step < STEPS:
        began = time.perf_counter()
        batch = next(batches)
        waited[0] += time.perf_counter() - began
        step, count = int(batch.get("step", count // ROWS)), count + 1
        tokens, patches = batch[samples], batch[images]
        load = Load(int(patches.max()), int((tokens > 0).sum()), int((patches > 0).sum()), tokens.size, patches.size)
        meter.microbatch(load, step)


def main() -> None:
    """Run one loader on this rank."""
    loader, shards, out, server = sys.argv[1:]
    waited = [0.0]
    code = [job, served] if loader == SERVED else [Images, sample, own]
    meter = Meter(Path(out), lambda: waited[0], *code)
    if loader == SERVED:
        train(iter(served(server)), meter, waited, "sample_ids", "image_ids")
    else:
        train(iter(own(Path(shards), loader)), meter, waited, "tokens_segment_ids", "patches_segment_ids")


if __name__ == "__main__":
    main()
