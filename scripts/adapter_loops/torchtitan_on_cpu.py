"""torchtitan's Trainer where there is no GPU: what it asks of one, the CPU answers. Imported before torchtitan."""

import os
import sys
from collections import Counter
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch

OF_TORCHVISION = "torchvision._meta_registrations"
"""Shapes of operators registered by its build for GPUs alone; package indexes have no other."""

os.environ["HF_DATASETS_OFFLINE"] = "1"
_cpu: Any = torch.cpu
torch._dynamo.config.disable = True
torch._utils._get_available_device_type = lambda: "cpu"
_cpu.memory_stats = lambda *_: Counter()
_cpu.get_device_properties = lambda *_: SimpleNamespace(total_memory=1)
_cpu.empty_cache = _cpu.reset_peak_memory_stats = lambda: None
_cpu.current_device = lambda: 0
_cpu.get_device_name = lambda *_: "CPU"
torch.distributed.set_timeout = lambda *_: None  # type: ignore[attr-defined]  # of a later torch
sys.modules["torchtitan.distributed.minimal_async_ep.kernels"] = MagicMock()  # in triton
sys.modules[OF_TORCHVISION] = ModuleType(OF_TORCHVISION)
