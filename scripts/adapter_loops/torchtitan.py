"""torchtitan's Trainer: `torchtitan.py LOADER SHARDS OUT SERVER`, in one process of `RANKS`.

LOADER is `plain`, for its own loader of image-text shards as its configurations set it up, each sample in a row of its
own; `packed`, for the same with its packer; or `served`. Its loader decodes with Pillow, by way of `datasets`.
"""

from adapter_loops import torchtitan_on_cpu  # noqa: F401  before torchtitan

# isort: split
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from loaders.common import BLOCK, MAX_BLOCKS, PATCH
from tokenizers import Tokenizer
from tokenizers.models import BPE
from torch import Tensor, nn
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.loss import BaseLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import default_adamw
from torchtitan.components.tokenizer import MultiModalTokenizer
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.hf_datasets.multimodal.mm_datasets import MMDataLoader
from torchtitan.protocols.model import BaseModel
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer

from adapter_loops.job import SERVED, full_job, job
from adapter_loops.measuring import BATCH, RANKS, ROWS, SEQ_LEN, STEPS, WORKERS, Load, Meter
from dataserver.allocator import cache_freed_memory
from trainclient.adapters.torchtitan import ServedDataLoader

PACKED = "packed"
LONGEST = 1536
"""Tokens of a row that has one sample: the longest has 1,474."""
BUFFER = 100
"""Samples among which torchtitan's packer chooses; each worker has so many."""
SPECIAL = {f"{name}_token": f"<{name}>" for name in MultiModalTokenizer.TOKEN_FIELDS}


class Model(BaseModel):  # type: ignore[misc]
    """Has one weight, and tells a meter what it is handed; the meter sleeps instead of the device."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseModel.Config):  # type: ignore[misc]
        """A configuration without anything to set."""

        def update_from_config(self, *, config: Any, **_: Any) -> None:
            """Take what the Trainer knows, and need none of it."""

        def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
            """Return the numbers that the Trainer reports."""
            del model, seq_len
            return 1, 1

    def __init__(self, config: Config) -> None:
        del config
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.meter: Meter | None = None
        self.padding = torch.zeros(1)

    def init_states(self, **_: Any) -> None:
        """Called when the weight is on its device."""
        nn.init.ones_(self.weight)

    def forward(
        self, tokens: Tensor, pixel_values: Tensor | None = None, grid_thw: Tensor | None = None, **_: Any
    ) -> Tensor:
        """The loss. Takes token ids [B, T], patches [I, P, ...], padded to the image that has most, and their grids."""
        images, patches, slots = 0, 0, 0
        if pixel_values is not None and grid_thw is not None:
            images, patches = len(grid_thw), int(grid_thw.prod(1).sum())
            slots = pixel_values.shape[0] * pixel_values.shape[1]
        count = int((~torch.isin(tokens, self.padding)).sum())
        assert self.meter is not None
        self.meter.microbatch(Load(images, count, patches, tokens.numel(), slots))
        return self.weight.sum()


class Loss(BaseLoss):  # type: ignore[misc]
    """Takes what the model returns for the loss."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseLoss.Config):  # type: ignore[misc]
        """A configuration without anything to set."""

    def __init__(self, config: Config, **_: Any) -> None:
        del config
        self.fn = lambda pred, _: pred


def tokenizer(folder: Path) -> MultiModalTokenizer.Config:
    """Configure a tokenizer of bytes, with special tokens behind them."""
    folder.mkdir()
    made = Tokenizer(BPE({chr(n): n for n in range(256)}, []))
    made.add_special_tokens(list(SPECIAL.values()))
    made.save(str(folder / "tokenizer.json"))
    return MultiModalTokenizer.Config(**SPECIAL)


def configuration(out: Path, rows: int, seq_len: int) -> Trainer.Config:
    """What both have in common."""
    assets = out / f"tokenizer-{os.environ['RANK']}"
    return Trainer.Config(
        loss=Loss.Config(),
        hf_assets_path=str(assets),
        dump_folder=str(out),
        tokenizer=tokenizer(assets),
        model_spec=ModelSpec("tiny", "tiny", Model.Config(), lambda model, **_: model, None, None, None),
        optimizer=default_adamw(lr=1e-3),
        training=TrainingConfig(
            local_batch_size=rows,
            global_batch_size=rows * ROWS * RANKS,
            seq_len=seq_len,
            steps=STEPS,
            disable_cuda_graphs=True,
        ),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
        metrics=MetricsProcessor.Config(log_freq=10 * STEPS),
        checkpoint=CheckpointManager.Config(enable=False),
    )


def own(shards: Path, out: Path, *, packing: int) -> Trainer.Config:
    """Its own loader: rows of one sample each, or of as many as its packer puts there."""
    config = configuration(out, *((1, SEQ_LEN) if packing else (BATCH, LONGEST)))
    config.dataloader = MMDataLoader.Config(
        dataset="cc12m-test",
        dataset_path=str(shards),
        num_workers=WORKERS,
        packing_buffer_size=packing,
        max_images_per_batch=128,
        patch_size=PATCH,
        temporal_patch_size=1,
        spatial_merge_size=2,
        min_pixels=BLOCK**2,
        max_pixels=MAX_BLOCKS * BLOCK**2,
        image_mean=(0.5, 0.5, 0.5),
        image_std=(0.5, 0.5, 0.5),
        build_mrope_positions=True,
    )
    return config


def served(server: str, out: Path) -> Trainer.Config:
    """Return the configuration that reads from the adapter."""
    config = configuration(out, 1, SEQ_LEN)
    text = json.dumps(full_job())
    config.dataloader = ServedDataLoader.Config(servers=server, job=text, batches_per_step=ROWS, frames=1, mrope=True)
    return config


def main() -> None:
    """Run one loader on this rank."""
    loader, shards, out, server = sys.argv[1], *map(Path, sys.argv[2:4]), sys.argv[4]
    if loader == SERVED:
        cache_freed_memory()
        config, code = served(server, out), [job, full_job, served]
    else:
        config, code = own(shards, out, packing=BUFFER if loader == PACKED else 0), [own]
    trainer = Trainer(config)
    times = trainer.metrics_processor.data_loading_times  # all of a run: it logs behind the last step
    (model,) = trainer.model_parts
    model.meter = Meter(out, lambda: sum(times), configuration, *code)
    model.padding = torch.tensor([0, trainer.tokenizer.pad_id])
    try:
        trainer.train()
    finally:
        trainer.close()


if __name__ == "__main__":
    main()
