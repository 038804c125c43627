"""Small tensors on their way from the host to the device that computes."""

import torch
from torch import Tensor


def upload(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor on a device, without waiting for the device.

    CUDA copies only from page-locked memory without having the host wait; and a copy that also converts would convert
    into ordinary memory first. So what is neither is page-locked here, and converted where it arrives.

    Args:
        tensor: on the CPU or on the device.
        device: where it is needed.
        dtype: of the result; by default that of the tensor.
    """
    if device.type == "cuda" and tensor.device.type == "cpu" and not tensor.is_pinned():
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True).to(tensor.dtype if dtype is None else dtype)
