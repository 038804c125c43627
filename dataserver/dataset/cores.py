"""How many cores this process may keep busy."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

CGROUPS: Final = Path("/sys/fs/cgroup")
MEMBERSHIP: Final = Path("/proc/self/cgroup")


def usable_cores(cgroups: Path = CGROUPS, membership: Path = MEMBERSHIP) -> int:
    """Cores that this process may run on, or fewer where a container's CPU limit leaves it less time than these have.

    Such a limit hides no core: with a thread for each, a process uses up its time early in each tenth of a second, and
    is stopped for the rest. Parts of a core count as one.

    Args:
        cgroups: where the kernel shows control groups, of either version.
        membership: where it says in which of them this process is; what is not there limits nothing.
    """
    cores = len(os.sched_getaffinity(0))
    return max(1, min([cores, *_limits(cgroups, membership)]))


def _limits(cgroups: Path, membership: Path) -> Iterator[int]:
    """Cores' worth of time that each control group of this process has, where it is limited; rounded up."""
    lines: list[str] = []
    with suppress(OSError):
        lines = membership.read_text(errors="surrogateescape").split("\n")
    for _, controllers, path in (line.split(":", 2) for line in lines if line.count(":") >= 2):
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = cgroups / "cpu" if controllers else cgroups  # a link, where the controller lies beside another one
        # A container may see its own group as the uppermost one, and not where it is named.
        own = top / path.lstrip("/")
        for folder in (own, *own.parents):
            yield from _limit(folder, "cpu.cfs_quota_us cpu.cfs_period_us" if controllers else "cpu.max")
            if folder == top:
                break


def _limit(folder: Path, names: str) -> Iterator[int]:
    with suppress(OSError, ValueError, ZeroDivisionError):  # not there, or no limit, which is called "max" or -1
        quota, period = " ".join((folder / name).read_text() for name in names.split()).split()
        if int(quota) > 0:
            yield -(-int(quota) // int(period))
