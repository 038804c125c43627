"""A tiny MimoModel of megatron-core on CPUs. Importing it first, megatron-core finds what it asks for in vain."""

import sys
import typing
from contextlib import nullcontext
from unittest.mock import MagicMock

import torch
import typing_extensions
from torch import Tensor, nn

typing.override = typing_extensions.override  # from 0.18 on it is for Python 3.12
sys.modules["megatron.core.transformer.moe.ops.paged_stash"] = MagicMock()  # kernels in triton
torch.cuda.current_device = lambda: torch.device("cpu")
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.models.mimo.config.base_configs import MimoModelConfig  # noqa: E402
from megatron.core.models.mimo.model.base import MimoModel  # noqa: E402
from megatron.core.models.mimo.submodules.vision import VisionModalitySubmodules  # noqa: E402
from megatron.core.packed_seq_params import PackedSeqParams  # noqa: E402
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker  # noqa: E402
from megatron.core.transformer.spec_utils import ModuleSpec  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

CudaRNGStatesTracker.fork = lambda *_: nullcontext()
IMAGE, WIDTH, TOKENS = 290, 32, 256


class Vision(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(588, WIDTH)

    def forward(self, x: Tensor, imgs_sizes: Tensor, packed_seq_params: PackedSeqParams) -> Tensor:
        patches = (imgs_sizes // 14).prod(1).cumsum(0)
        assert packed_seq_params.cu_seqlens_q.tolist() == [0, *patches.tolist()]
        return self.linear(x[0]).unflatten(0, (-1, 4)).mean(1)


def config() -> TransformerConfig:
    return TransformerConfig(
        num_layers=2, hidden_size=WIDTH, num_attention_heads=4, use_cpu_initialization=True, hidden_dropout=0.0,
        attention_dropout=0.0, bias_dropout_fusion=False, masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
    )  # fmt: skip


def mimo(config: TransformerConfig) -> MimoModel:
    torch.manual_seed(0)
    text = {"config": config, "transformer_layer_spec": get_gpt_layer_local_spec(), "vocab_size": 320,
            "max_sequence_length": TOKENS, "position_embedding_type": "rope"}  # fmt: skip
    vision = ModuleSpec(VisionModalitySubmodules, submodules={"encoders": {"vit": ModuleSpec(Vision)}})
    model = MimoModel(MimoModelConfig(ModuleSpec(GPTModel, text), {"images": vision}, {"images": IMAGE}))
    _pass_mask(model)
    return model


def _pass_mask(model: MimoModel) -> None:
    """Hand its mask to the language model, as 0.16 does: 0.19 has packed attention in its place, which is for GPUs."""
    masks = []
    model.register_forward_pre_hook(lambda _, __, named: masks.append(named["attention_mask"]), with_kwargs=True)
    model.language_model.register_forward_pre_hook(
        lambda _, given, named: (given, {**named, "attention_mask": masks.pop()}), with_kwargs=True
    )
