"""Texts, bytes and numbers whose lengths only the process that has them knows, told to the others over a group."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


def broadcast_bytes(data: bytes, group: ProcessGroup) -> bytes:
    """What the first process has; all call it together, and what the others give is dropped."""
    size = torch.tensor([len(data)])
    dist.broadcast(size, group_src=0, group=group)
    if not size:
        return b""
    told = _bytes(data) if group.rank() == 0 else torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(told, group_src=0, group=group)
    return told.numpy().tobytes()


def broadcast_text(text: str, group: ProcessGroup) -> str:
    """What the first process says; all call it together, and what the others say is dropped."""
    return broadcast_bytes(text.encode(errors="surrogateescape"), group).decode(errors="surrogateescape")


def gather_texts(text: str, group: ProcessGroup) -> list[str]:
    """What all processes say, by their ranks, on the first one; an empty list on the others."""
    data = _bytes(text.encode(errors="surrogateescape"))
    sizes, longest = _lengths(data, group)
    padded = torch.nn.functional.pad(data, (0, max(1, longest) - len(data)))
    found = [torch.empty_like(padded) for _ in sizes] if group.rank() == 0 else None
    dist.gather(padded, found, group=group, group_dst=0)
    several = zip(found or (), sizes, strict=False)
    return [told[:size].numpy().tobytes().decode(errors="surrogateescape") for told, size in several]


def all_gather_rows(own: Tensor, group: ProcessGroup) -> list[Tensor]:
    """The tensors of all processes by their ranks, `[..., n]` where each has an n of its own."""
    lengths, longest = _lengths(own, group)
    found = [own.new_empty(*own.shape[:-1], longest) for _ in lengths]
    dist.all_gather(found, torch.nn.functional.pad(own, (0, longest - own.shape[-1])), group=group)
    return [padded[..., :length] for padded, length in zip(found, lengths, strict=True)]


def _bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _lengths(own: Tensor, group: ProcessGroup) -> tuple[list[int], int]:
    """The last dimension of each process's tensor, and the largest of them."""
    found = [torch.empty(1, dtype=torch.int64, device=own.device) for _ in range(group.size())]
    dist.all_gather(found, torch.tensor([own.shape[-1]], device=own.device), group=group)
    lengths = [int(length) for length in found]
    return lengths, max(lengths)
