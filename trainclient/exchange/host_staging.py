"""Rows go from device to device, or are staged in the memory of hosts while devices are new to their work.

Under NCCL a transfer is a kernel that runs until the other end takes part. Some of what a device does for the first
time it does only when all its kernels are over: it loads a kernel, gives kernels more memory of their own, or takes
memory from the driver. If two processes wait like this, each for a transfer that the other one has still to begin,
they wait for ever; it was seen. So in the first step rows go through the memory of hosts, and no kernel waits for
another process. Receives begin behind their headers at all times, so that none runs before its sender has begun.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class HostStaging:
    """Whether rows are staged in hosts at present; all processes change it between the same steps."""

    def __init__(self, device: torch.device) -> None:
        """Begin with the way from device to device, where rows are computed."""
        self.device = device
        self.by_host = False
        """Whether rows go through the memory of hosts."""
        self.loads_kernels = device.type == "cuda"
        """Whether the device may have to wait for all its kernels before it does something for the first time."""
        self.ahead = device.type != "cuda"
        """Whether receives of rows begin when they are posted, and not behind their headers."""
        # Receives wait for what their stream was given before. Nothing is computed on this one. All edges have the same
        # one: torch has 32 streams, and deals them out again when all are taken, also to communicators.
        self.aside = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @contextmanager
    def through_hosts(self, *, wanted: bool) -> Iterator[None]:
        """Have rows go through the memory of hosts meanwhile, if that is wanted and the device needs it.

        All messages must be over.
        """
        self.by_host = wanted and self.loads_kernels
        try:
            yield
        finally:
            self.by_host = False
