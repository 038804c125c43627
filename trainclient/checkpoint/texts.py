"""Texts that processes tell each other, as tensors over gloo."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


def told(text: str, group: ProcessGroup) -> str:
    """What the first process says; all call it together, and what the others say is dropped."""
    data = _bytes(text)
    size = torch.tensor([len(data)])
    dist.broadcast(size, group_src=0, group=group)
    if group.rank() != 0:
        data = torch.zeros(int(size), dtype=torch.uint8)
    if int(size):
        dist.broadcast(data, group_src=0, group=group)
    return _text(data)


def gathered(text: str, group: ProcessGroup) -> list[str]:
    """What all processes say, by their ranks, on the first one; an empty list on the others."""
    data = _bytes(text)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(group.size())]
    dist.all_gather(sizes, torch.tensor([len(data)]), group=group)
    longest = max(1, *(int(size) for size in sizes))
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: len(data)] = data
    if group.rank() != 0:
        dist.gather(padded, None, group=group, group_dst=0)
        return []
    found = [torch.zeros(longest, dtype=torch.uint8) for _ in sizes]
    dist.gather(padded, found, group=group, group_dst=0)
    return [_text(text[: int(size)]) for text, size in zip(found, sizes, strict=True)]


def _bytes(text: str) -> Tensor:
    data = text.encode(errors="surrogateescape")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.zeros(0, dtype=torch.uint8)


def _text(data: Tensor) -> str:
    return bytes(data.numpy()).decode(errors="surrogateescape")
