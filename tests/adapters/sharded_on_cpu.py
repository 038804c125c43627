"""Has accelerate shard models on CPUs, too, and notes what their ranks do; import it before a Trainer is made.

Accelerate takes `fsdp=True` for FSDP2 on devices alone, and for DDP on CPUs. All that it does to shard is its own.
"""

from pathlib import Path
from typing import Any

import torch
from accelerate import state
from accelerate.utils import DistributedType
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from trainclient.adapters.full_model import FullModelMicrobatch
from trainclient.adapters.huggingface import ServedTrainer

_begin = state.AcceleratorState.__init__


def _begin_sharding(self: Any, *args: Any, fsdp_plugin: Any = None, **options: Any) -> None:
    _begin(self, *args, fsdp_plugin=fsdp_plugin, **options)
    if fsdp_plugin is not None:
        self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin


state.AcceleratorState.__init__ = _begin_sharding


class _Watcher(TrainerCallback):
    """Keeps the gradients of each step, and in which microbatches the encoder has run."""

    def __init__(self, trainer: ServedTrainer, file: Path) -> None:
        self._file = file
        self.found: dict[str, Any] = {"gradients": [], "had": [], "ran": [], "shards": []}
        make = trainer._inputs

        def noted(microbatch: FullModelMicrobatch, device: torch.device) -> dict[str, Any]:
            self.found["had"].append(bool(len(microbatch.rows)))
            self.found["ran"].append(False)
            return make(microbatch, device)

        trainer._inputs = noted
        trainer.model.model.visual.register_forward_pre_hook(self._note_run)

    def _note_run(self, *_: Any) -> None:
        self.found["ran"][-1] = True

    def on_train_begin(self, *_: Any, model: torch.nn.Module, **__: Any) -> None:
        for name, module in model.named_modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # gloo can only sum
                self.found["shards"].append(name)

    def on_pre_optimizer_step(self, *_: Any, model: torch.nn.Module, **__: Any) -> None:
        self.found["gradients"].append({name: _whole(p.grad) for name, p in model.named_parameters()})

    def on_train_end(self, *_: Any, **__: Any) -> None:
        torch.save(self.found, self._file)


def _whole(gradient: Tensor | None) -> Tensor | None:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else None if gradient is None else gradient.clone()


def watched(trainer: ServedTrainer) -> ServedTrainer:
    """The same trainer, which leaves `watched-RANK.pt` beside its output."""
    out = Path(trainer.args.output_dir)
    trainer.add_callback(_Watcher(trainer, out.with_name(f"watched-{trainer.args.process_index}.pt")))
    return trainer
