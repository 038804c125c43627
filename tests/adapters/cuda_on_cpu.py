"""Training loops that want CUDA, where there is none: what they ask of it, the CPU answers.

Devices named `cuda` become `cpu`; streams, events and counters of memory do nothing.
"""

from contextlib import nullcontext
from typing import Any
from unittest.mock import MagicMock

import torch
from torch.overrides import TorchFunctionMode

NOTHING = ("check_error", "empty_cache", "reset_peak_memory_stats", "set_device", "set_rng_state", "synchronize")
ZERO = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "device_memory_used")


def _on_cpu(value: Any) -> Any:
    named = isinstance(value, str | torch.device) and str(value).split(":")[0] == "cuda"
    return torch.device("cpu") if named else value


class _Everywhere(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        return func(*map(_on_cpu, args), **{name: _on_cpu(value) for name, value in (kwargs or {}).items()})


def pretend() -> None:
    """From now on, for the rest of the process; nothing is compiled."""
    cuda = torch.cuda
    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: torch.device("cpu"),
        "get_device_capability": lambda *_: (8, 0),
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "Stream": MagicMock,
        "Event": MagicMock,
        "current_stream": lambda *_: MagicMock(),
        "stream": lambda *_: nullcontext(),
        "memory_stats": lambda *_: MagicMock(),
    }
    answers |= {name: lambda *_, **__: None for name in NOTHING} | {name: lambda *_: 0 for name in ZERO}
    for name, answer in answers.items():
        setattr(cuda, name, answer)
    torch._dynamo.config.disable = True
    _Everywhere().__enter__()
