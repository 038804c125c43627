"""What the control groups of this process, of either version, limit it to."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

CGROUPS: Final = Path("/sys/fs/cgroup")
MEMBERSHIP: Final = Path("/proc/self/cgroup")


def limits(controller: str, first: str, second: str, cgroups: Path, membership: Path) -> Iterator[list[str]]:
    """Yield the words in some files of each control group that this process is in, from its own up.

    Args:
        controller: name of a controller.
        first: names of its files in version 1, with spaces between them.
        second: the same in version 2.
        cgroups: where the kernel shows control groups, of either version.
        membership: where it says in which of them this process is; what is not there limits nothing.
    """
    lines: list[str] = []
    with suppress(OSError):
        lines = membership.read_text("utf-8", errors="surrogateescape").split("\n")
    for _, controllers, path in (line.split(":", 2) for line in lines if line.count(":") >= 2):
        if controllers and controller not in controllers.split(","):
            continue
        top = cgroups / controller if controllers else cgroups  # a link, where the controller lies beside another one
        # A container may see its own group as the uppermost one, and not where it is named.
        own = top / path.lstrip("/")
        for folder in (own, *own.parents):
            with suppress(OSError, ValueError):
                names = (first if controllers else second).split()
                yield " ".join((folder / name).read_text("utf-8") for name in names).split()
            if folder == top:
                break
