"""A tiny MimoModel of megatron-core on CPUs, through our iterators and sample by sample: megatron_model.py SERVER."""

import sys
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from adapters.whole_jobs import one_pass
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.mimo.config.base_configs import MimoModelConfig
from megatron.core.models.mimo.model.base import MimoModel
from megatron.core.models.mimo.submodules.vision import VisionModalitySubmodules
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from trainclient.adapters.megatron import MegatronBatches, ServedIterator
from trainclient.adapters.qwen2_vl import Qwen2VLInputs
from trainclient.adapters.whole_rank import WholeRankStream

IMAGE, WIDTH = 290, 32
# megatron-core asks for GPUs where it needs none.
torch.cuda.current_device = lambda: "cpu"
CudaRNGStatesTracker.fork = lambda *_: nullcontext()


class Vision(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(588, WIDTH)

    def forward(self, x: Tensor, imgs_sizes: Tensor, packed_seq_params: PackedSeqParams) -> Tensor:
        patches = (imgs_sizes // 14).prod(1).cumsum(0)
        assert packed_seq_params.cu_seqlens_q.tolist() == [0, *patches.tolist()]
        return self.linear(x[0]).unflatten(0, (-1, 4)).mean(1)


def mimo() -> MimoModel:
    torch.manual_seed(0)
    config = TransformerConfig(
        num_layers=2, hidden_size=WIDTH, num_attention_heads=4, use_cpu_initialization=True, hidden_dropout=0.0,
        attention_dropout=0.0, bias_dropout_fusion=False, masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
    )  # fmt: skip
    text = {"config": config, "transformer_layer_spec": get_gpt_layer_local_spec(), "vocab_size": 320,
            "max_sequence_length": 256, "position_embedding_type": "rope"}  # fmt: skip
    vision = ModuleSpec(VisionModalitySubmodules, submodules={"encoders": {"vit": ModuleSpec(Vision)}})
    return MimoModel(MimoModelConfig(ModuleSpec(GPTModel, text), {"images": vision}, {"images": IMAGE}))


def gradients(model: MimoModel) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    return found


def train_on(model: MimoModel, batch: dict[str, Any], targets: int) -> float:
    losses, mask = model(**batch)
    loss = (losses * mask).sum() / targets
    loss.backward()
    return float(loss)


def served(model: MimoModel, server: str, ranks: int) -> float:
    """The loss of step 0, as Megatron's schedules read it on each rank."""
    loss = 0.0
    for rank in range(ranks):
        with WholeRankStream(server, one_pass(ranks), rank=rank, world_size=ranks) as stream:
            targets = next(iter(stream)).text_tokens
            batches = MegatronBatches(stream, modality="images", encoder="vit", image_token=IMAGE, dense_mask=True)
            iterator = ServedIterator(stream, batches, num_microbatches=10)
            loss += sum(train_on(model, next(iterator), targets) for _ in range(10))
    return loss


def one_by_one(model: MimoModel, server: str) -> float:
    """The same of each sample alone, without packing, padding or adapter."""
    loss, pixels = 0.0, Qwen2VLInputs(IMAGE, 1).pixels
    with WholeRankStream(server, one_pass(1), rank=0, world_size=1) as stream:
        step = next(iter(stream))
        for microbatch in step.microbatches:
            tensors = microbatch.tensors
            ids = tensors["token_ids"].astype(np.int64)
            ids[tensors["embedding_slots"]] = IMAGE
            image, starts = 0, tensors["embedding_slots"][np.cumsum(microbatch.rows) - microbatch.rows]
            for first, end in zip(tensors["cu_lengths"], tensors["cu_lengths"][1:], strict=False):
                length, labels = end - first, torch.from_numpy(tensors["labels"][first:end].astype(np.int64))[None]
                batch = {
                    "input_ids": torch.from_numpy(ids[first:end])[None], "labels": labels.clamp(0),
                    "position_ids": torch.arange(length)[None], "loss_mask": (labels >= 0).float(),
                    "attention_mask": torch.ones(1, 1, length, length).triu(1).bool(),
                }  # fmt: skip
                count = int(((starts >= first) & (starts < end)).sum())
                if count:
                    cu = torch.from_numpy(tensors["cu_patches"][image : image + count + 1].copy())
                    sizes = torch.from_numpy(tensors["grid"][image : image + count] * 14)
                    x = pixels(torch.from_numpy(tensors["patches"][cu[0] : cu[-1]].copy()))[None]
                    inputs = {
                        "x": x,
                        "imgs_sizes": sizes,
                        "packed_seq_params": PackedSeqParams(cu_seqlens_q=cu - cu[0]),
                    }
                    batch["modality_inputs"] = {"images": {"vit": inputs}}
                    image += count
                loss += train_on(model, batch, step.text_tokens)
    return loss


def main(server: str) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    model = mimo()
    expected, wanted = one_by_one(model, server), gradients(model)
    for ranks in (1, 2):
        assert abs(served(model, server, ranks) / expected - 1) < 1e-5
        for name, found in gradients(model).items():
            torch.testing.assert_close(found, wanted[name], rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
    assert all(float(g.abs().sum()) > 0 for g in wanted.values())
    sys.stdout.write(f"loss {expected}\n")


if __name__ == "__main__":
    main(sys.argv[1])
