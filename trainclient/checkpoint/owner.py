"""Who writes: one attempt of a run, by the process that publishes for all of its processes."""

import os
import socket
import uuid
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Self

from trainclient.processes import identity


@dataclass(frozen=True, slots=True)
class Owner:
    """One attempt of a run. All fields are text, which others only show or compare."""

    run: str
    """Name of the run that owns it."""
    attempt: str
    """32 hex digits of this start of the run; all its processes know them."""
    launch: str
    """The same for all attempts that one torchrun starts; empty if nothing says so."""
    host: str
    process: str
    """Identity of the process, as of `processes.identity`."""
    pid: str
    since: str
    """When the attempt began, by its machine's clock, in ISO 8601."""
    release: str
    """Version of this package that the owner runs."""

    @classmethod
    def here(cls, run: str, attempt: str = "", launch: str = "") -> Self:
        """This process, of an attempt that has a name already or gets one."""
        since = datetime.now(UTC).isoformat(timespec="seconds")
        host, pid = socket.gethostname()[:255], str(os.getpid())
        return cls(run, attempt or uuid.uuid4().hex, launch, host, identity(), pid, since, version("disttrain"))

    @property
    def is_of_the_future(self) -> bool:
        """Whether it began later than this machine's clock says."""
        try:
            return datetime.fromisoformat(self.since) > datetime.now(UTC)
        except (ValueError, TypeError):
            return False

    def __str__(self) -> str:
        clocks = " (later than this machine's clock: check both)" if self.is_of_the_future else ""
        run, attempt, host, pid, since = (_plain(x) for x in (self.run, self.attempt, self.host, self.pid, self.since))
        return f"run {run}, process {pid} on {host}, attempt {attempt[:8]}, since {since}{clocks}"


def _plain(text: str) -> str:
    """Text from a file, for a message."""
    return "".join(c if c.isprintable() else "?" for c in text[:255]) or "unknown"
