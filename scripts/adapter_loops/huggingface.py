"""Hugging Face's Trainer: `huggingface.py LOADER SHARDS OUT SERVER`, in one process of `RANKS`.

LOADER is a decoder, for a data set of one's own with a collator; one with `+rebalanced`, whose batches are made by the
Trainer's BatchRebalanceSampler; or `served`.
"""

import sys
from pathlib import Path
from typing import Any

from torch.utils.data import ConcatDataset, Sampler
from transformers import Trainer, TrainingArguments
from transformers.trainer_pt_utils import BatchRebalanceSampler

from adapter_loops.job import SERVED, job
from adapter_loops.measuring import BATCH, RANKS, ROWS, STEPS, WORKERS, Meter
from adapter_loops.samples import Images, lengths, sample
from adapter_loops.tiny_vlm import TinyVLM, collate, inputs, time_loaders
from dataserver.allocator import cache_freed_memory
from trainclient.adapters.full_model import FullModelStream
from trainclient.adapters.huggingface import ServedTrainer

REBALANCED = "+rebalanced"


def arguments(out: Path, **options: Any) -> TrainingArguments:
    """What both have in common."""
    quiet: dict[str, Any] = {"save_strategy": "no", "logging_strategy": "no", "report_to": "none", "disable_tqdm": True}
    return TrainingArguments(str(out), max_steps=STEPS, use_cpu=True, **quiet, **options)


def own(images: ConcatDataset[Any], out: Path, model: TinyVLM, kind: type[Trainer]) -> None:
    """Train through the Trainer's DataLoader."""
    given = arguments(
        out,
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=ROWS,
        dataloader_num_workers=WORKERS,
        dataloader_pin_memory=False,
        remove_unused_columns=False,
    )
    kind(model, given, train_dataset=images, data_collator=collate).train()


class Rebalancing(Trainer):
    """A Trainer with batches of equal cost, as the Trainer makes them where it knows the lengths."""

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[Any]:
        data: Any = self.train_dataset if train_dataset is None else train_dataset
        return BatchRebalanceSampler(
            lengths=lengths(data.datasets[0]) * len(data.datasets),
            effective_batch_size=RANKS * ROWS * BATCH,
            dp_size=RANKS,
            grad_accum=ROWS,
            rank=self.args.process_index,
        )


def served(server: str, out: Path) -> None:
    """Train on batches of the adapter."""
    cache_freed_memory()
    given = arguments(out)
    with FullModelStream(server, job(), rank=given.process_index, world_size=given.world_size) as stream:
        model = TinyVLM(Meter(out, lambda: stream.wait_s, job, inputs, arguments, served))
        ServedTrainer(model, given, stream=stream, inputs=inputs).train()


def main() -> None:
    """Run one loader on this rank."""
    loader, shards, out, server = sys.argv[1:]
    if loader == SERVED:
        served(server, Path(out))
        return
    kind, code = Trainer, [Images, sample, collate, arguments, own]
    if loader.endswith(REBALANCED):
        kind, code = Rebalancing, [*code, Rebalancing, lengths]
    images: Any = Images(Path(shards), loader.removesuffix(REBALANCED))
    passes = RANKS * ROWS * BATCH * (STEPS + 2) // len(images) + 1
    own(ConcatDataset([images] * passes), Path(out), TinyVLM(Meter(Path(out), time_loaders(), *code)), kind)


if __name__ == "__main__":
    main()
