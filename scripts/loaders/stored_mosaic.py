"""MosaicML Streaming over its copy in a store, one shuffled epoch, two workers: `stored_mosaic.py BUCKET FOLDER`.

Shards are downloaded to FOLDER, whole.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from streaming import StreamingDataset
from streaming.base.util import clean_stale_shared_memory
from torch.utils.data import DataLoader

from loaders.common import DECODERS, U8
from loaders.mosaic import collate
from loaders.reporting import BATCH, report_epoch


class Images(StreamingDataset):  # type: ignore[misc]
    """Patches of each image of the copy."""

    def __getitem__(self, at: int) -> U8:
        return DECODERS["fast"](super().__getitem__(at)["jpg"])


def batches(bucket: str, folder: Path) -> Iterator[int]:
    """Images of each batch of one epoch."""
    clean_stale_shared_memory()
    images = Images(remote=f"{bucket}/copy", local=str(folder), shuffle=True, batch_size=BATCH)
    for _, counts in DataLoader(images, BATCH, num_workers=2, collate_fn=collate):
        yield len(counts)


if __name__ == "__main__":
    torch.set_num_threads(1)
    report_epoch(batches(sys.argv[1], Path(sys.argv[2])))
