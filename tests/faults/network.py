"""A machine of its own for a server: a network namespace whose link can be cut without a word to either side."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """A network namespace, joined to this one by one link."""

    name: str
    address: str
    """Where its servers listen, as seen from here."""

    @property
    def prefix(self) -> list[str]:
        """What to put before a command that is to run there."""
        return ["ip", "netns", "exec", self.name]

    def cut(self) -> None:
        """Take the link down on the far side: what is sent from now on is lost, and nobody is told."""
        _ip("-n", self.name, "link", "set", "dev", "far", "down")

    def join(self) -> None:
        """Mend the link."""
        _ip("-n", self.name, "link", "set", "dev", "far", "up")


def missing() -> str:
    """Why there can be no network namespace here; empty where there can."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        return "network namespaces need the command ip, and root"
    return subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True, check=False).stderr


@contextmanager
def machine() -> Iterator[Machine]:
    """A namespace that ends with the block."""
    name = f"faults{os.getpid()}"
    # A subnet that depends on the process, so that tests in several processes do not meet.
    net = f"10.{64 + os.getpid() // 256 % 64}.{os.getpid() % 256}"
    _ip("netns", "add", name)
    try:
        _ip("link", "add", name, "type", "veth", "peer", "name", "far", "netns", name)
        _ip("address", "add", f"{net}.1/24", "dev", name)
        _ip("link", "set", "dev", name, "up")
        _ip("-n", name, "address", "add", f"{net}.2/24", "dev", "far")
        _ip("-n", name, "link", "set", "dev", "far", "up")
        yield Machine(name, f"{net}.2")
    finally:
        # A namespace ends some time after its name, and would take the link's name with it.
        subprocess.run(["ip", "link", "delete", name], check=False, capture_output=True)
        _ip("netns", "delete", name)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
