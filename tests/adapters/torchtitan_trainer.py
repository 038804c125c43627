"""The documentation's configuration in torchtitan's own Trainer, on CPUs: torchtitan_trainer.py SERVERS JOB OUT.

Its model of images needs kernels for GPUs, so a Llama trains on the texts of the samples alone, sharded with FSDP2.
"""

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from adapter_loops import torchtitan_on_cpu  # noqa: F401  before torchtitan
from adapters.examples import example
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn.attention.flex_attention import create_mask
from torch.nn.functional import scaled_dot_product_attention
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import MultiModalTokenizer
from torchtitan.config import DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.hf_datasets.multimodal.mm_collator import MultiModalCollator
from torchtitan.models.common.attention import FlexAttention
from torchtitan.models.llama3 import model_registry
from torchtitan.trainer import Trainer


def attend(
    self: Any, q: Tensor, k: Tensor, v: Tensor, *, attention_masks: Any, scale: float | None = None, **_: Any
) -> Any:
    """FlexAttention, which has no backward pass on CPUs, by the same mask as a matrix."""
    mask = create_mask(attention_masks.mask_mod, q.shape[0], 1, q.shape[1], k.shape[1], device="cpu")
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    found = scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return found.transpose(1, 2)


FlexAttention.forward = attend
UPDATES, MICROBATCHES, WORDS = 7, 10, 290
"""Of `pass_with_parity`, of a step on each rank, and tokens before the special ones."""


class TextTrainer(Trainer):
    """Hands the model what a text has."""

    images = 0

    def post_dataloading_process(self, input_dict: dict[str, Any], labels: Tensor) -> Any:
        if input_dict["grid_thw"] is not None:
            self.images += check_positions(input_dict)
        text = {name: input_dict[name] for name in ("input", "positions")}
        return super().post_dataloading_process(text, labels)


def check_positions(inputs: dict[str, Any]) -> int:
    """Three axes, as torchtitan's own collator makes them from the same batch; the number of images."""
    collator = SimpleNamespace(spatial_merge_size=2, patch_order="block")
    special = {f"{name}_token_id": inputs["special_tokens"][f"{name}_id"] for name in ("image", "video")}
    expected = MultiModalCollator._build_mrope_positions(
        collator, inputs["input"], inputs["grid_thw"], None, inputs["positions"], **special
    )
    end = int(inputs["positions"].nonzero()[-1, 1]) + 1  # padding follows
    assert (inputs["mrope_positions"] == expected)[:, :end].all()
    return len(inputs["grid_thw"])


def tokenizer(folder: Path) -> MultiModalTokenizer.Config:
    """Of as many words, and the special tokens behind them."""
    folder.mkdir(parents=True, exist_ok=True)
    found = Tokenizer(WordLevel({str(n): n for n in range(WORDS)}))
    special = {f"{name}_token": f"<{name}>" for name in MultiModalTokenizer.TOKEN_FIELDS}
    found.add_special_tokens(list(special.values()))
    found.save(str(folder / "tokenizer.json"))
    return MultiModalTokenizer.Config(**special)


def configuration(out: Path, assets: Path) -> Trainer.Config:
    ranks = int(os.environ["WORLD_SIZE"])
    model = model_registry("debugmodel", attn_backend="flex")
    model.state_dict_adapter = None
    return Trainer.Config(
        loss=CrossEntropyLoss.Config(global_vocab_size=2048),
        hf_assets_path=str(assets),
        dump_folder=str(out),
        tokenizer=tokenizer(assets),
        model_spec=model,
        optimizer=default_adamw(lr=1e-3, eps=1e-4),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=1, decay_ratio=0.0),
        training=TrainingConfig(
            steps=UPDATES,
            global_batch_size=MICROBATCHES * ranks,
            mixed_precision_param="float32",
            disable_cuda_graphs=True,
        ),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
        debug=DebugConfig(seed=0),
        metrics=MetricsProcessor.Config(log_freq=1),
        checkpoint=CheckpointManager.Config(enable=True, interval=1, last_save_model_only=False),
    )


def main(servers: str, job: str, out: Path) -> None:
    names: dict[str, Any] = {}
    exec(example("ServedDataLoader"), names)
    assets = out.with_name(f"tokenizer-{os.environ['RANK']}")
    trainer = TextTrainer(names["served"](configuration(out, assets), servers, job))
    for module in trainer.model_parts[0].modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo can only sum
    metrics, reported = trainer.metrics_processor, list[dict[str, Any]]()
    metrics.logger = SimpleNamespace(log=lambda found, _: reported.append(found), close=lambda: None)
    try:
        trainer.train()
        assert reported
        assert all(found["time_metrics/data_loading(s)"] > 0 for found in reported), "what ranks wait for data"
        assert trainer.step == UPDATES, "of a pass"
        assert trainer.images
        whole = {name: p.full_tensor().detach() for name, p in trainer.model_parts[0].named_parameters()}
        if os.environ["RANK"] == "0":
            torch.save(whole, out / "parameters.pt")
    finally:
        trainer.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
