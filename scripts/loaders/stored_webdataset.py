"""webdataset over shards in a store, one shuffled epoch, two workers: `stored_webdataset.py URLS`.

Shards stream through curl, as webdataset opens URLs by default; nothing is cached, as by default.
"""

import sys
from collections.abc import Iterator

import torch
import webdataset

from loaders.common import DECODERS
from loaders.reporting import BATCH, report_epoch
from loaders.webdataset_loader import collate

BUFFER = 1000
"""Samples that are mixed with each other."""


def batches(urls: str) -> Iterator[int]:
    """Images of each batch of one epoch."""
    dataset = (
        webdataset.WebDataset(urls, shardshuffle=100, nodesplitter=None)
        .shuffle(BUFFER)
        .to_tuple("jpg")
        .map_tuple(DECODERS["fast"])
        .batched(BATCH, collation_fn=collate, partial=True)
    )
    for _, counts in webdataset.WebLoader(dataset, batch_size=None, num_workers=2):
        yield len(counts)


if __name__ == "__main__":
    torch.set_num_threads(1)
    report_epoch(batches(sys.argv[1]))
