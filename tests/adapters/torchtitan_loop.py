"""The documentation's configuration, built and read as torchtitan's Trainer does.

The Trainer itself needs triton and an accelerator, so there is no model here. Arguments: servers, job, output.
"""

import sys
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from adapters.examples import example

# No build for CPUs is on package indexes. torchtitan's collator imports it, and what is called here needs none of it.
PARTS = ("", ".io", ".transforms", ".transforms.v2", ".transforms.v2.functional")
sys.modules |= {f"torchvision{part}": MagicMock() for part in PARTS}
from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.config import TrainingConfig  # noqa: E402
from torchtitan.hf_datasets.multimodal.mm_collator import MultiModalCollator  # noqa: E402

TOKENS = ("image", "video")
TOKENIZER = SimpleNamespace(TOKEN_FIELDS=TOKENS, image_id=290, video_id=291)


def check_positions(inputs: dict) -> int:
    """Three axes, as torchtitan's own collator makes them from the same batch; the number of images."""
    collator = SimpleNamespace(spatial_merge_size=2, patch_order="block")
    expected = MultiModalCollator._build_mrope_positions(
        collator, inputs["input"], inputs["grid_thw"], None, inputs["positions"], image_token_id=290, video_token_id=291
    )
    end = int(inputs["positions"].nonzero()[-1, 1]) + 1  # padding follows
    assert (inputs["mrope_positions"] == expected)[:, :end].all()
    return len(inputs["grid_thw"])


def main(servers: str, job: str, out: Path) -> None:
    dist.init_process_group("gloo")
    names: dict = {}
    exec(example("ServedDataLoader"), names)
    config = names["served"](SimpleNamespace(training=TrainingConfig()), servers, job)
    training = config.training
    loader = config.dataloader.build(
        dp_world_size=dist.get_world_size(), dp_rank=dist.get_rank(), tokenizer=TOKENIZER, seq_len=training.seq_len,
        local_batch_size=training.local_batch_size, snapshot_every_n_steps=None,
    )  # fmt: skip
    assert isinstance(loader, BaseDataLoader)
    done, saved = 0, sorted(out.glob("step-*/.metadata"))
    if saved:
        dcp.load({"dataloader": loader}, checkpoint_id=saved[-1].parent)
        done = int(saved[-1].parent.name.removeprefix("step-"))
    batches, images = iter(loader), 0
    while len(group := list(islice(batches, config.dataloader.batches_per_step))):
        assert len(group) == config.dataloader.batches_per_step, "it would give this step up"
        images += sum(check_positions(inputs) for inputs, _ in group if inputs["grid_thw"] is not None)
        done += 1
        dcp.save({"dataloader": loader}, checkpoint_id=out / f"step-{done}")
    assert images
    loader.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
