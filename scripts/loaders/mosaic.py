"""MosaicML Streaming over a copy in its own format, two worker processes: `mosaic.py SHARDS COUNT DECODER`."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from streaming import MDSWriter, StreamingDataset
from streaming.base.util import clean_stale_shared_memory
from torch.utils.data import DataLoader

from loaders.common import DECODERS, U8, Files, joined, members, read
from loaders.reporting import BATCH, PREPARE, report


class Images(StreamingDataset):  # type: ignore[misc]
    """Patches of each image of the copy."""

    def __init__(self, folder: Path, decoder: str) -> None:
        super().__init__(local=str(folder), shuffle=False, batch_size=BATCH)
        self.decoder = decoder

    def __getitem__(self, at: int) -> U8:
        return DECODERS[self.decoder](super().__getitem__(at)["jpg"])


def copied(shards: Path) -> Path:
    """The images in MDS, beside the shards."""
    folder = shards.with_name("mosaic")
    if not folder.exists():
        files: Files = {}
        with MDSWriter(out=str(folder), columns={"jpg": "bytes"}, compression=None) as writer:
            for place in members(shards):
                writer.write({"jpg": read(files, place)})
    return folder


def collate(images: list[U8]) -> tuple[torch.Tensor, torch.Tensor]:
    """One tensor of all patches, and how many each image has."""
    patches, counts = joined(images)
    return torch.from_numpy(patches), torch.from_numpy(counts)


def batches(folder: Path, decoder: str) -> Iterator[int]:
    """Images of each batch, for ever."""
    clean_stale_shared_memory()
    options: dict[str, Any] = {"num_workers": 2, "collate_fn": collate, "persistent_workers": True, "drop_last": True}
    loader: DataLoader[U8] = DataLoader(Images(folder, decoder), BATCH, **options)
    while True:
        for _, counts in loader:
            yield len(counts)


if __name__ == "__main__":
    torch.set_num_threads(1)
    copy = copied(Path(sys.argv[1]))
    if sys.argv[3] != PREPARE:
        report(batches(copy, sys.argv[3]), int(sys.argv[2]))
