"""AdamW against torch's own, and its state by name."""

import pytest
import torch
from builders.jobs import module as job_module
from torch import nn

from dataserver.planning.job.fields import ModuleSpec
from trainclient.training import optimizer as optimizer_module
from trainclient.training.optimizer import Optimizer
from trainclient.training.optimizer_config import GroupOptions, OptimizerConfig
from trainclient.training.schedule import ModuleRates, module_rates

CONFIG = OptimizerConfig(lr=0.01, warmup_steps=4, weight_decay=0.1)


def model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3)).to(dtype)


def compose_job(*encoders: str) -> list[ModuleSpec]:
    """Modules of a job with these encoders."""
    kinds = {**dict.fromkeys(encoders, "encoder"), "llm": "backbone"}
    return [ModuleSpec(**job_module(kind, name=name)) for name, kind in kinds.items()]


def rates(config: OptimizerConfig) -> dict[str, ModuleRates]:
    """Of the model's parameters: the first layer is module `a` of a job, the rest `b`."""
    found = module_rates(config, compose_job("a", "b"))
    names = [name for name, _ in model(torch.float32).named_parameters()]
    return {name: found["a" if name.startswith("0.") else "b"] for name in names}


def optimizer_of(module: nn.Module, config: OptimizerConfig) -> Optimizer:
    return Optimizer(dict(module.named_parameters()), config, rates(config))


def gradients(module: nn.Module) -> dict[str, torch.Tensor]:
    """In the type in which parameters are trained."""
    found = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    return {name: g.to(torch.promote_types(g.dtype, torch.float32)) for name, g in found.items()}


def give_gradients(module: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in module.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


def test_equals_torch() -> None:
    ours, theirs = model(torch.float64), model(torch.float64)
    optimizer = optimizer_of(ours, CONFIG)
    matrices = [p for p in theirs.parameters() if p.dim() > 1]
    vectors = [p for p in theirs.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95))
    for step, factor in enumerate((0.25, 0.5, 0.75, 1.0, 1.0)):
        give_gradients(ours, step)
        give_gradients(theirs, step)
        optimizer.step(step, gradients(ours))
        for group in reference.param_groups:
            group["lr"] = 0.01 * factor
        reference.step()
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-14, atol=0)


@pytest.mark.parametrize("fused", [False, True], ids=["as on a CPU", "as on a GPU"])
def test_gradients_are_clipped_and_updates_left_out_as_the_sums_of_all_processes_say(
    fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizer_module, "_on_gpu", lambda _: fused)
    ours, theirs = model(torch.float32), model(torch.float32)
    optimizer, reference = (optimizer_of(m, CONFIG.model_copy(update={"clip": 0.5})) for m in (ours, theirs))
    for step, norm in enumerate((0.25, 0.5, 2.0, 4.0)):
        give_gradients(ours, step)
        give_gradients(theirs, step)
        before = {name: tensor.clone() for name, tensor in optimizer.tensors().items()}
        own = gradients(ours)
        infinite = {name: torch.full_like(g, torch.inf) for name, g in own.items()}
        optimizer.step(step, infinite, torch.tensor(torch.inf).double(), torch.tensor(data=False))
        assert all(torch.equal(before[name], tensor) for name, tensor in optimizer.tensors().items())
        optimizer.step(step, own, torch.tensor(norm).double(), torch.tensor(data=True))
        reference.step(step, {name: g * min(1.0, 0.5 / norm) for name, g in gradients(theirs).items()})
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_bfloat16_trains_float32_copies() -> None:
    """Steps far below bfloat16's resolution add up."""
    module = model(torch.bfloat16)
    optimizer = optimizer_of(module, OptimizerConfig(lr=1e-5, weight_decay=0))
    before = module[2].weight.detach().float().clone()
    for step in range(300):
        for parameter in module.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step(step, gradients(module))
    trained = optimizer.tensors()["2.weight"]
    assert trained.dtype == torch.float32
    assert torch.equal(module[2].weight, trained.to(torch.bfloat16))
    torch.testing.assert_close(before - trained, torch.full_like(before, 0.003), rtol=0.01, atol=0)


def test_modules_have_rates_of_their_own() -> None:
    """As torch's own groups, with the schedule's factors written out."""
    own = {"a": GroupOptions(lr_factor=0.5, weight_decay=0.3, warmup_steps=0), "b": GroupOptions(lr=0.04)}
    config = OptimizerConfig(lr=0.01, warmup_steps=2, schedule="linear", decay_steps=2, min_ratio=0.1, modules=own)
    ours, theirs = model(torch.float64), model(torch.float64)
    optimizer = optimizer_of(ours, config)
    groups = [
        {"params": [theirs[0].weight], "weight_decay": 0.3},
        {"params": [theirs[0].bias], "weight_decay": 0.0},
        {"params": [theirs[2].weight], "weight_decay": 0.1},
        {"params": [theirs[2].bias, *theirs[1].parameters()], "weight_decay": 0.0},
    ]
    reference = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95))
    for step, (a, b) in enumerate([(0.005, 0.02), (0.005, 0.04), (0.005, 0.04), (0.00275, 0.022), (0.0005, 0.004)]):
        give_gradients(ours, step)
        give_gradients(theirs, step)
        optimizer.step(step, gradients(ours))
        for group, lr in zip(reference.param_groups, (a, a, b, b), strict=True):
            group["lr"] = lr
        reference.step()
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-13, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_state_continues_exactly(dtype: torch.dtype) -> None:
    whole, resumed = model(dtype), model(dtype)
    first, second = (
        optimizer_of(whole, CONFIG),
        optimizer_of(resumed, CONFIG),
    )
    for step in range(3):
        give_gradients(whole, step)
        first.step(step, gradients(whole))
    for name, tensor in second.tensors().items():
        tensor.copy_(first.tensors()[name])
    second.publish()
    for step in range(3, 6):
        for module, optimizer in ((whole, first), (resumed, second)):
            give_gradients(module, step)
            optimizer.step(step, gradients(module))
    for name, tensor in second.tensors().items():
        assert torch.equal(tensor, first.tensors()[name]), name


def test_the_rates_of_a_resumed_run_are_those_of_its_configuration() -> None:
    """Moments and counts of updates go on; nothing that a checkpoint holds brings the old rate back."""
    before, theirs = model(torch.float64), model(torch.float64)
    reference = torch.optim.AdamW(theirs.parameters(), lr=0.01, betas=(0.9, 0.95), weight_decay=0.0)
    config = OptimizerConfig(lr=0.01, warmup_steps=0, weight_decay=0.0)
    old = optimizer_of(before, config)
    for step in range(3):
        give_gradients(before, step)
        give_gradients(theirs, step)
        old.step(step, gradients(before))
        reference.step()
    after = model(torch.float64)
    new = optimizer_of(after, OptimizerConfig(lr=0.0005, warmup_steps=0, weight_decay=0.0))
    for name, tensor in new.tensors().items():
        tensor.copy_(old.tensors()[name])
    new.publish()
    reference.param_groups[0]["lr"] = 0.0005
    give_gradients(after, 3)
    give_gradients(theirs, 3)
    new.step(3, gradients(after))
    reference.step()
    for ours, expected in zip(after.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)
