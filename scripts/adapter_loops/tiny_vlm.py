"""A model of one weight, and its arguments: from samples, padded to the longest, and from a served microbatch."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data.dataloader import _BaseDataLoaderIter

from adapter_loops.measuring import Load, Meter
from adapter_loops.samples import IMAGE, Sample
from trainclient.adapters.full_model import FullModelMicrobatch


class TinyVLM(nn.Module):
    """Tells a meter what it is handed, which sleeps as long as a device would compute, with normalised pixels."""

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self._meter = meter

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor,
        patches: Tensor,
        image_sizes: Tensor,
        attention_mask: Tensor | None = None,
        step: int | None = None,
        **_: Any,
    ) -> dict[str, Tensor]:
        """The loss. Takes token ids and labels [B, T], patches [P, 588] and how many each image has."""
        del labels
        slots = input_ids.numel()
        tokens = slots if attention_mask is None else int(attention_mask.sum())
        self._meter.microbatch(Load(len(image_sizes), tokens, len(patches), slots, len(patches)), step)
        return {"loss": self.weight.sum()}


def collate(samples: list[Sample]) -> dict[str, Tensor]:
    """Return the arguments of the model, padded."""
    tokens = [torch.from_numpy(sample["tokens"]).long() for sample in samples]
    ids = nn.utils.rnn.pad_sequence(tokens, batch_first=True)
    mask = nn.utils.rnn.pad_sequence([torch.ones_like(one) for one in tokens], batch_first=True)
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": ids.masked_fill((mask == 0) | (ids == IMAGE), -100),
        "patches": torch.from_numpy(np.concatenate([sample["patches"] for sample in samples])),
        "image_sizes": torch.tensor([len(sample["patches"]) for sample in samples]),
    }


def inputs(microbatch: FullModelMicrobatch, device: torch.device) -> dict[str, Any]:
    """Arguments of the model: sequences are packed."""
    tensors = microbatch.tensors
    ids = tensors["token_ids"].astype(np.int64)
    ids[tensors["embedding_slots"]] = IMAGE
    arrays = {
        "input_ids": ids[None],
        "labels": tensors["labels"].astype(np.int64)[None],
        "position_ids": tensors["position_ids"].astype(np.int64)[None],
        "patches": tensors["patches"],
        "image_sizes": np.diff(tensors["cu_patches"]),
    }
    found: dict[str, Any] = {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}
    return {**found, "step": microbatch.backbone.step}


def time_loaders() -> Callable[[], float]:
    """Time every batch of torch's DataLoader from now on; returns what tells the seconds so far."""
    inner, total = _BaseDataLoaderIter.__next__, [0.0]

    def timed(iterator: Any) -> Any:
        began = time.perf_counter()
        try:
            return inner(iterator)
        finally:
            total[0] += time.perf_counter() - began

    _BaseDataLoaderIter.__next__ = timed  # type: ignore[assignment, method-assign]
    return lambda: total[0]
