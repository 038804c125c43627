"""AdamW against torch's own, and its state by name."""

import pytest
import torch
from torch import nn

from trainclient.training.config import OptimizerConfig
from trainclient.training.optimizer import Optimizer

CONFIG = OptimizerConfig(lr=0.01, warmup_steps=4, weight_decay=0.1)


def model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3)).to(dtype)


def give_gradients(module: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in module.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


def test_equals_torch() -> None:
    ours, theirs = model(torch.float64), model(torch.float64)
    optimizer = Optimizer(ours, CONFIG)
    matrices = [p for p in theirs.parameters() if p.dim() > 1]
    vectors = [p for p in theirs.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95))
    for step, factor in enumerate((0.25, 0.5, 0.75, 1.0, 1.0)):
        give_gradients(ours, step)
        give_gradients(theirs, step)
        optimizer.step(step)
        for group in reference.param_groups:
            group["lr"] = 0.01 * factor
        reference.step()
        assert all(p.grad is None for p in ours.parameters())
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-14, atol=0)


def test_bfloat16_trains_float32_copies() -> None:
    """Steps far below bfloat16's resolution add up."""
    module = model(torch.bfloat16)
    optimizer = Optimizer(module, OptimizerConfig(lr=1e-5, weight_decay=0))
    before = module[2].weight.detach().float().clone()
    for step in range(300):
        for parameter in module.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step(step)
    trained = optimizer.tensors("m")["m.2.weight"]
    assert trained.dtype == torch.float32
    assert torch.equal(module[2].weight, trained.to(torch.bfloat16))
    torch.testing.assert_close(before - trained, torch.full_like(before, 0.003), rtol=0.01, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_state_continues_exactly(dtype: torch.dtype) -> None:
    whole, resumed = model(dtype), model(dtype)
    first, second = Optimizer(whole, CONFIG), Optimizer(resumed, CONFIG)
    for step in range(3):
        give_gradients(whole, step)
        first.step(step)
    for name, tensor in second.tensors("m").items():
        tensor.copy_(first.tensors("m")[name])
    second.publish()
    for step in range(3, 6):
        for module, optimizer in ((whole, first), (resumed, second)):
            give_gradients(module, step)
            optimizer.step(step)
    for name, tensor in second.tensors("m").items():
        assert torch.equal(tensor, first.tensors("m")[name]), name
