"""webdataset's pipeline in torch's DataLoader, two worker processes: `webdataset_loader.py SHARDS COUNT DECODER`."""

import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import webdataset

from loaders.common import DECODERS, U8, joined
from loaders.reporting import BATCH, report


def collate(images: list[tuple[U8]]) -> tuple[torch.Tensor, torch.Tensor]:
    """One tensor of all patches, and how many each image has."""
    patches, counts = joined([image for (image,) in images])
    return torch.from_numpy(patches), torch.from_numpy(counts)


def batches(folder: Path, decoder: str) -> Iterator[int]:
    """Images of each batch, for ever."""
    shards = sorted(map(str, folder.glob("*.tar")))
    dataset = (
        webdataset.WebDataset(shards, shardshuffle=False, nodesplitter=None)
        .to_tuple("jpg")
        .map_tuple(DECODERS[decoder])
        .batched(BATCH, collation_fn=collate, partial=False)
    )
    loader = webdataset.WebLoader(dataset, batch_size=None, num_workers=2, persistent_workers=True)
    while True:
        for _, counts in loader:
            yield len(counts)


if __name__ == "__main__":
    torch.set_num_threads(1)
    report(batches(Path(sys.argv[1]), sys.argv[3]), int(sys.argv[2]))
