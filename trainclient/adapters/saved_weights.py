"""Which tensors a checkpoint was made of, so that a model that was loaded from it can be compared with them.

Frameworks load what fits and go on without the rest. Names in files are no help, since they may be other names than the
model's own, so each tensor of the model is noted by its own name with the CRC-32C of its bytes.
"""

from collections.abc import Mapping
from typing import Any

import torch
from crc32c import crc32c as crc32c_of
from torch import Tensor, nn

Digests = dict[str, tuple[str, int]]
"""Digests by tensor: its type, as in `float32`, and the CRC-32C of its bytes."""


class WeightDigests:
    """Notes the tensors of one model. Parameters that are not trained are read once."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._frozen = dict[str, tuple[int, tuple[str, int]]]()
        """Version and digest of each such parameter."""

    def now(self) -> Digests:
        """Digests of its state as it is now: 0.3 s for a GB, and the copies of tensors on a GPU."""
        frozen = {name: p for name, p in self._model.named_parameters(remove_duplicate=False) if not p.requires_grad}
        found = Digests()
        for name, tensor in tensors_of(self._model).items():
            version, digest = self._frozen.get(name, (-1, ("", 0)))
            known = name in frozen and version == frozen[name]._version
            found[name] = digest if known else digest_of(tensor)
        self._frozen = {name: (p._version, found[name]) for name, p in frozen.items() if name in found}
        return found


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """What is in memory of a model's state."""
    return {name: v for name, v in model.state_dict().items() if torch.is_tensor(v) and not v.is_meta}


def digest_of(tensor: Tensor) -> tuple[str, int]:
    """Its type, and the CRC-32C of its bytes."""
    array = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return str(tensor.dtype).removeprefix("torch."), crc32c_of(array.data)


def differing(model: nn.Module, saved: Mapping[str, Any]) -> list[str]:
    """Names of tensors that the model does not have as they were saved; it may have them in a wider type."""
    found, names = tensors_of(model), []
    for name in found.keys() | saved.keys():
        tensor, (dtype, crc) = found.get(name), saved.get(name, ("", -1))
        kind = getattr(torch, dtype, None)
        if tensor is None or not isinstance(kind, torch.dtype) or digest_of(tensor.to(kind)) != (dtype, crc):
            names.append(name)
    return sorted(names)
