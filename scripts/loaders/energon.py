"""Megatron-Energon over a prepared copy, two worker processes: `energon.py SHARDS COUNT DECODER`."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.energon import (
    Cooker,
    DefaultTaskEncoder,
    WorkerConfig,
    basic_sample_keys,
    get_loader,
    get_train_dataset,
    stateless,
)

from loaders.common import DECODERS, joined
from loaders.reporting import BATCH, PREPARE, report

DATASET = "__module__: megatron.energon\n__class__: CrudeWebdataset\n"


@stateless  # type: ignore[untyped-decorator]
def cook(sample: dict[str, Any]) -> dict[str, Any]:
    """A sample with its patches."""
    return {**basic_sample_keys(sample), "patches": DECODERS[sys.argv[3]](sample["jpg"])}


class Encoder(DefaultTaskEncoder):  # type: ignore[misc]
    """Batches of patches from raw samples."""

    decoder = None
    cookers = (Cooker(cook),)

    @stateless  # type: ignore[untyped-decorator]
    def encode_sample(self, sample: dict[str, Any]) -> dict[str, Any]:
        """Return a sample as it was cooked."""
        return sample

    def batch(self, samples: list[dict[str, Any]]) -> tuple[torch.Tensor, torch.Tensor]:
        """One tensor of all patches, and how many each image has."""
        patches, counts = joined([sample["patches"] for sample in samples])
        return torch.from_numpy(patches), torch.from_numpy(counts)

    def encode_batch(self, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a batch as it was made."""
        return batch


def copied(shards: Path) -> Path:
    """The shards with what Energon wants beside them."""
    folder = shards.with_name("energon")
    if not (folder / ".nv-meta" / "dataset.yaml").exists():
        folder.mkdir(exist_ok=True)
        for shard in shards.glob("*.tar"):
            shutil.copy(shard, folder)
        tool = [str(Path(sys.executable).parent / "energon"), "prepare", str(folder), "--non-interactive"]
        options = ["--split-ratio", "1,0,0", "--force-overwrite", "--sample-type", "CrudeWebdataset"]
        subprocess.run([*tool, *options], check=True, stdout=subprocess.DEVNULL)
        (folder / ".nv-meta" / "dataset.yaml").write_text(DATASET)
    return folder


def batches(folder: Path) -> Iterator[int]:
    """Images of each batch, for ever."""
    dataset = get_train_dataset(
        str(folder),
        batch_size=BATCH,
        shuffle_buffer_size=None,
        max_samples_per_sequence=None,
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=2),
        task_encoder=Encoder(),
        repeat=True,
    )
    for _, counts in get_loader(dataset):
        yield len(counts)


if __name__ == "__main__":
    torch.set_num_threads(1)
    copy = copied(Path(sys.argv[1]))
    if sys.argv[3] != PREPARE:
        report(batches(copy), int(sys.argv[2]))
