"""Transfers of bytes between two processes, in one direction of the pipeline."""

import re
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

_PLACE = re.compile(r"^\[[^\]]*\]\s*")
"""Where in its own source a backend raised an error."""


class PeerLostError(RuntimeError):
    """Another process ended, or did not answer in time."""


@contextmanager
def contact(peers: str) -> Iterator[None]:
    """Turn what a backend raises when the other end is gone into PeerLostError."""
    try:
        yield
    except RuntimeError as error:
        reason = _PLACE.sub("", str(error)).split(". ")[0].splitlines()
        raise PeerLostError(
            f"lost contact to {peers} ({reason[0] if reason else type(error).__name__}); see what the process that "
            "ended first has reported"
        ) from error


class Channel:
    """Sends and receives of uint8 tensors in a process group that carries one direction only.

    Receives block, sends do not: their buffers are kept until `release`. Messages between two processes arrive in
    order. A failure names the process at the other end.
    """

    def __init__(self, group: ProcessGroup, rank: int, device: torch.device) -> None:
        self.rank = rank
        self.device = device
        self._group = group
        self._pending: deque[tuple[int, int, dist.Work, Tensor]] = deque()

    def send(self, peer: int, message: Tensor, microbatch: int) -> None:
        """Begin to send a uint8 tensor [n] to a global rank; `microbatch` is when its buffer may be released."""
        with contact(f"rank {peer}"):
            work = dist.isend(message, peer, group=self._group)
        if work is None:
            raise ValueError(f"rank {self.rank} cannot send in a group that it is no member of")
        self._pending.append((microbatch, peer, work, message))

    def receive(self, peer: int, num_bytes: int) -> Tensor:
        """Wait for the next message of a global rank, uint8 [num_bytes]."""
        message = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        with contact(f"rank {peer}"):
            dist.recv(message, peer, group=self._group)
        return message

    def release(self, microbatch: int | None = None) -> None:
        """Wait for the sends up to a microbatch (by default all) and release their buffers.

        Callers release what the other end must have taken already, so this does not wait in practice.
        """
        while self._pending and (microbatch is None or self._pending[0][0] <= microbatch):
            _, peer, work, _ = self._pending[0]
            with contact(f"rank {peer}"):
                work.wait()
            self._pending.popleft()
