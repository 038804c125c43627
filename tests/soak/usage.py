"""What a server in another process holds: memory, threads, descriptors."""

import time
from dataclasses import dataclass

import grpc
import psutil
from serving.harness import FIXED_WINDOW

REST_S = 3
"""Longer than it takes until a stream that nobody reads is idle (`idle-timeout-s`)."""
SETTLING_S = 60
"""In which streams that were given up end, and give back what they held: on a busy machine not at once."""


@dataclass(frozen=True)
class Usage:
    """What a process holds."""

    rss: int
    threads: int
    files: int


@dataclass
class Server:
    """A server in another process."""

    process: psutil.Process
    address: str

    def connect(self) -> grpc.Channel:
        return grpc.insecure_channel(self.address, FIXED_WINDOW)

    def usage(self) -> Usage:
        return Usage(self.process.memory_info().rss, self.process.num_threads(), self.process.num_fds())

    def at_rest(self) -> Usage:
        """What it holds when it has given nothing back for `REST_S`."""
        least, end = self.usage(), time.monotonic() + REST_S
        while time.monotonic() < end:
            time.sleep(0.1)
            if (usage := self.usage()).rss < least.rss:
                least, end = usage, time.monotonic() + REST_S
        return least

    def settled(self, files: int, rss: int) -> Usage:
        """What it holds when it has so few files and less memory than that, or still holds after `SETTLING_S`."""
        end = time.monotonic() + SETTLING_S
        while ((usage := self.usage()).files > files or usage.rss >= rss) and time.monotonic() < end:
            time.sleep(0.1)
        return usage
