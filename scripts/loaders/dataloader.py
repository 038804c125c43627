"""torch's DataLoader over an index of its own, two worker processes: `dataloader.py SHARDS COUNT DECODER`."""

import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

from loaders.common import DECODERS, U8, Files, joined, members, read
from loaders.reporting import BATCH, report


class Images(Dataset[U8]):
    """Patches of each image of the shards."""

    def __init__(self, folder: Path, decoder: str) -> None:
        self.places, self.decoder = members(folder), decoder
        self.files: Files = {}

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, i: int) -> U8:
        return DECODERS[self.decoder](read(self.files, self.places[i]))


def collate(images: list[U8]) -> tuple[torch.Tensor, torch.Tensor]:
    """One tensor of all patches, and how many each image has."""
    patches, counts = joined(images)
    return torch.from_numpy(patches), torch.from_numpy(counts)


def batches(folder: Path, decoder: str) -> Iterator[int]:
    """Images of each batch, for ever."""
    loader = DataLoader(
        Images(folder, decoder), BATCH, num_workers=2, collate_fn=collate, persistent_workers=True, drop_last=True
    )
    while True:
        for _, counts in loader:
            yield len(counts)


if __name__ == "__main__":
    torch.set_num_threads(1)
    report(batches(Path(sys.argv[1]), sys.argv[3]), int(sys.argv[2]))
