"""Transfers of bytes between two processes, in one direction of the pipeline."""

from collections import deque

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


class PeerLostError(RuntimeError):
    """Another process ended, or did not answer in time."""


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
        try:
            work = dist.isend(message, peer, group=self._group)
        except RuntimeError as error:
            raise self._lost(peer, error) from error
        if work is None:
            raise PeerLostError(f"global rank {self.rank} is not a member of the group it sends in")
        self._pending.append((microbatch, peer, work, message))

    def receive(self, peer: int, num_bytes: int) -> Tensor:
        """Wait for the next message of a global rank, uint8 [num_bytes]."""
        message = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        try:
            dist.recv(message, peer, group=self._group)
        except RuntimeError as error:
            raise self._lost(peer, error) from error
        return message

    def release(self, microbatch: int | None = None) -> None:
        """Wait for the sends up to a microbatch (by default all) and let go of their buffers.

        Callers release what the other end must have taken already, so this does not wait in practice.
        """
        while self._pending and (microbatch is None or self._pending[0][0] <= microbatch):
            _, peer, work, _ = self._pending[0]
            try:
                work.wait()
            except RuntimeError as error:
                raise self._lost(peer, error) from error
            self._pending.popleft()

    def _lost(self, peer: int, error: RuntimeError) -> PeerLostError:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        return PeerLostError(
            f"global rank {self.rank} lost global rank {peer}: {reason}; see what that rank reported before it ended"
        )
