"""Checks of what enters a module. Views come over a network, so nothing is trusted before it indexes memory.

Index tensors may lie on the CPU while the module runs on an accelerator: then a check costs no synchronisation, which
is why callers should leave them there.
"""

import torch
from torch import Tensor

from trainclient.upload import upload


def require_shape(name: str, tensor: Tensor, *shape: int) -> None:
    """Raise ValueError unless `tensor` has exactly `shape`, where -1 stands for any size."""
    fits = tensor.dim() == len(shape) and all(
        want in (-1, have) for want, have in zip(shape, tensor.shape, strict=True)
    )
    if not fits:
        wanted = ["any" if size == -1 else size for size in shape]
        raise ValueError(f"{name} has shape {list(tensor.shape)}; {wanted} is required")


def require_integers(name: str, tensor: Tensor) -> None:
    """Raise ValueError unless `tensor` holds integers."""
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise ValueError(f"{name} has dtype {tensor.dtype}; an integer dtype is required")


def checked_index(name: str, index: Tensor, bound: int, device: torch.device) -> Tensor:
    """`index` as int64 on `device`.

    Args:
        name: what the tensor is called in an error.
        index: integers [n], any device.
        bound: every entry must be in [0, bound).
        device: where the result is needed.

    Raises:
        ValueError: wrong rank or dtype, or an entry out of range.
    """
    require_integers(name, index)
    require_shape(name, index, -1)
    if index.numel():
        low, high = (int(value) for value in torch.aminmax(index))
        if low < 0 or high >= bound:
            raise ValueError(f"{name} holds values from {low} to {high}; they must lie in [0, {bound})")
    return upload(index, device, torch.int64)
