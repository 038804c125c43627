"""Lightning's Trainer: `lightning.py LOADER SHARDS OUT SERVER`, in one process of `RANKS`.

LOADER is a decoder, for webdataset's pipeline over resampled shards in a LightningDataModule; or `served`.
"""

import sys
from pathlib import Path
from typing import Any

import torch
import webdataset
from lightning import LightningDataModule, LightningModule, Trainer
from torch import Tensor

from adapter_loops.job import SERVED, job
from adapter_loops.measuring import BATCH, RANKS, ROWS, STEPS, WORKERS, Meter
from adapter_loops.samples import sample
from adapter_loops.tiny_vlm import TinyVLM, collate, inputs, time_loaders
from dataserver.allocator import cache_freed_memory
from trainclient.adapters.full_model import FullModelMicrobatch, FullModelStream
from trainclient.adapters.lightning import ServedData, ServedModule


def trainer(**options: Any) -> Trainer:
    """What both have in common."""
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return Trainer(accelerator="cpu", devices=RANKS, strategy="ddp", max_epochs=-1, max_steps=STEPS, **quiet, **options)


class Module(LightningModule):  # type: ignore[misc]
    """The model as a module of Lightning."""

    def __init__(self, model: TinyVLM) -> None:
        super().__init__()
        self.model = model

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the cheapest optimizer there is."""
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        """Return the loss of a batch."""
        found: Tensor = self.model(**batch)["loss"]
        return found


class Shards(LightningDataModule):  # type: ignore[misc]
    """Samples of shards, shuffled and resampled."""

    def __init__(self, folder: Path, decoder: str) -> None:
        super().__init__()
        self.shards, self.decoder = sorted(map(str, folder.glob("*.tar"))), decoder

    def train_dataloader(self) -> Any:
        """Return batches of webdataset, without an end."""
        options = {"resampled": True, "shardshuffle": False, "nodesplitter": webdataset.split_by_node}
        dataset = (
            webdataset.WebDataset(self.shards, **options)
            .shuffle(200)
            .to_tuple("jpg", "txt")
            .map(lambda pair: sample(self.decoder, *pair))
            .batched(BATCH, collation_fn=collate, partial=False)
        )
        return webdataset.WebLoader(dataset, batch_size=None, num_workers=WORKERS)


class Served(ServedModule):
    """The model over the stream."""

    def __init__(self, model: TinyVLM) -> None:
        super().__init__()
        self.model = model

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the cheapest optimizer there is."""
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def loss_of(self, microbatch: FullModelMicrobatch, text_tokens: int) -> Tensor:
        """Return the loss of a microbatch."""
        del text_tokens
        found: Tensor = self.model(**inputs(microbatch, self.device))["loss"]
        return found


def served(server: str, out: Path) -> None:
    """Train on batches of the adapter."""
    cache_freed_memory()
    runner = trainer()
    with FullModelStream(server, job(), rank=runner.global_rank, world_size=runner.world_size) as stream:
        model = TinyVLM(Meter(out, lambda: stream.wait_s, job, inputs, trainer, Served, served))
        runner.fit(Served(model), ServedData(stream))


def own(shards: Path, out: Path, decoder: str) -> None:
    """Train on batches of webdataset."""
    model = TinyVLM(Meter(out, time_loaders(), sample, collate, trainer, Module, Shards, own))
    trainer(accumulate_grad_batches=ROWS).fit(Module(model), Shards(shards, decoder))


def main() -> None:
    """Run one loader on this rank."""
    loader, shards, out, server = sys.argv[1:]
    if loader == SERVED:
        served(server, Path(out))
    else:
        own(Path(shards), Path(out), loader)


if __name__ == "__main__":
    main()
