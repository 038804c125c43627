"""AdamW over one process's parameters, with state that is named as in the whole model."""

import torch
from torch import Tensor, nn

from trainclient.training.config import OptimizerConfig

_MOMENTS = ("exp_avg", "exp_avg_sq")


class Optimizer:
    """AdamW (arXiv 1711.05101) with linear warm-up; parameters below float32 have float32 copies that are trained.

    Every state tensor exists from the start, so that a checkpoint can be read into it.
    """

    def __init__(self, module: nn.Module, config: OptimizerConfig) -> None:
        self._config = config
        self._parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._trained = {name: _trained(p) for name, p in self._parameters.items()}
        decayed = [p for p in self._trained.values() if p.dim() > 1]
        plain = [p for p in self._trained.values() if p.dim() <= 1]
        groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": plain, "weight_decay": 0.0}]
        self._adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.epsilon,
        )
        for parameter in self._trained.values():
            self._adamw.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32),
                **{moment: torch.zeros_like(parameter) for moment in _MOMENTS},
            }

    def step(self, step: int) -> None:
        """Update the parameters with their gradients as update number `step` of the job, and drop the gradients."""
        config = self._config
        factor = min(1.0, (step + 1) / config.warmup_steps) if config.warmup_steps else 1.0
        for group in self._adamw.param_groups:
            group["lr"] = config.lr * factor
        for name, parameter in self._parameters.items():
            trained = self._trained[name]
            if trained is not parameter and parameter.grad is not None:
                trained.grad = parameter.grad.to(trained.dtype)
        self._adamw.step()
        self.publish()
        for name, parameter in self._parameters.items():
            parameter.grad = self._trained[name].grad = None

    def publish(self) -> None:
        """Round the trained copies into the module's parameters, where these are of a smaller type."""
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                if self._trained[name] is not parameter:
                    parameter.copy_(self._trained[name])

    def tensors(self, prefix: str) -> dict[str, Tensor]:
        """Parameters and state, by `prefix` and the parameter's name in the whole model."""
        found: dict[str, Tensor] = {}
        for name, parameter in self._trained.items():
            found[f"{prefix}.{name}"] = parameter.detach()
            for key, value in self._adamw.state[parameter].items():
                found[f"{prefix}.{name}/{key}"] = value
        return found


def _trained(parameter: nn.Parameter) -> Tensor:
    if parameter.dtype in (torch.float32, torch.float64):
        return parameter
    return parameter.detach().to(torch.float32, copy=True).requires_grad_()
