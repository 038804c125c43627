"""AdamW over one process's parameters, with state that is named as in the whole model."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trainclient.training.gradients import scale_gradients
from trainclient.training.optimizer_config import OptimizerConfig
from trainclient.training.schedule import ModuleRates

_MOMENTS = ("exp_avg", "exp_avg_sq")


class Optimizer:
    """AdamW (arXiv 1711.05101); parameters below float32 have float32 copies that are trained.

    Every state tensor exists from the start, so that a checkpoint can be read into it.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], config: OptimizerConfig, rates: Mapping[str, ModuleRates]
    ) -> None:
        """Train parameters, each at its rates; both by the parameters' names in the whole model."""
        self._rates = rates
        self._frozen = {name: p for name, p in parameters.items() if not p.requires_grad}
        self._parameters = {name: p for name, p in parameters.items() if p.requires_grad}
        self._trained = {name: _trained(p) for name, p in self._parameters.items()}
        self._clip = config.clip
        self._fused = fused = _on_gpu(self._trained.values())
        self._adamw = torch.optim.AdamW(
            self._groups() or [{"params": []}],
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.epsilon,
            # On a GPU one kernel for all tensors; on a CPU the rounding stays that of earlier runs.
            fused=fused or None,
        )
        for parameter in self._trained.values():
            self._adamw.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device if fused else None),
                **{moment: torch.zeros_like(parameter) for moment in _MOMENTS},
            }

    def step(
        self, step: int, gradients: Mapping[str, Tensor], norm: Tensor | None = None, finite: Tensor | None = None
    ) -> None:
        """Update the parameters as update number `step` of the job; on a GPU without waiting for it.

        Args:
            step: counts from 0.
            gradients: of every parameter that is trained by its name, float32 or float64 as it is trained. Those that
                are to be clipped change.
            norm: of the gradients of all processes, float64 scalar; without it nothing is clipped.
            finite: bool scalar; where it is false nothing is updated.
        """
        if not self._trained:
            return
        clipped = norm is not None and self._clip > 0
        factor = (self._clip / norm).clamp(max=1.0) if norm is not None and clipped else None
        if self._fused:  # as torch's gradient scaler has it skip and scale
            self._adamw.grad_scale = None if factor is None else factor.reciprocal().to(torch.float32)  # type: ignore[attr-defined]
            self._adamw.found_inf = None if finite is None else (~finite).to(torch.float32)  # type: ignore[attr-defined]
        elif finite is not None and not bool(finite):
            return
        elif factor is not None and float(factor) < 1:
            scale_gradients(gradients.values(), float(factor))
        for group in self._adamw.param_groups:
            group["lr"] = group["rates"].lr(step)
        for name, trained in self._trained.items():
            trained.grad = gradients[name]
        self._adamw.step()
        for trained in self._trained.values():
            trained.grad = None
        self.publish()

    def publish(self) -> None:
        """Round the trained copies into the module's parameters, where these are of a smaller type."""
        smaller = [name for name, parameter in self._parameters.items() if self._trained[name] is not parameter]
        if smaller:
            with torch.no_grad():
                torch._foreach_copy_([self._parameters[n] for n in smaller], [self._trained[n] for n in smaller])

    def tensors(self) -> dict[str, Tensor]:
        """Parameters and state, by the parameter's name in the whole model; of frozen ones no state."""
        found = {name: parameter.detach() for name, parameter in self._frozen.items()}
        for name, parameter in self._trained.items():
            found[name] = parameter.detach()
            for key, value in self._adamw.state[parameter].items():
                found[f"{name}/{key}"] = value
        return found

    def _groups(self) -> list[dict[str, Any]]:
        """The matrices of each module, which decay, and its vectors, which do not."""
        found: dict[tuple[ModuleRates, bool], list[Tensor]] = {}
        for name, trained in self._trained.items():
            found.setdefault((self._rates[name], trained.dim() > 1), []).append(trained)
        return [
            {"params": params, "rates": rates, "weight_decay": rates.weight_decay if decays else 0.0}
            for (rates, decays), params in found.items()
        ]


def _on_gpu(tensors: Iterable[Tensor]) -> bool:
    return any(tensor.is_cuda for tensor in tensors)


def _trained(parameter: nn.Parameter) -> Tensor:
    if parameter.dtype in (torch.float32, torch.float64):
        return parameter
    return parameter.detach().to(torch.float32, copy=True).requires_grad_()
