"""How many cores this process may keep busy."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from dataserver.dataset.machine.control_groups import CGROUPS, MEMBERSHIP, limits


def usable_cores(cgroups: Path = CGROUPS, membership: Path = MEMBERSHIP) -> int:
    """Cores that this process may run on, or fewer where a container's CPU limit leaves it less time than these have.

    Such a limit hides no core: with a thread for each, a process uses up its time early in each tenth of a second, and
    is stopped for the rest. Parts of a core count as one.

    Args:
        cgroups: see `limits`.
        membership: likewise.
    """
    cores = len(os.sched_getaffinity(0))
    return max(1, min([cores, *_limits(cgroups, membership)]))


def _limits(cgroups: Path, membership: Path) -> Iterator[int]:
    """Cores' worth of time that each control group of this process has, where it is limited; rounded up."""
    for words in limits("cpu", "cpu.cfs_quota_us cpu.cfs_period_us", "cpu.max", cgroups, membership):
        with suppress(ValueError, ZeroDivisionError):  # no limit, which is called "max" or -1
            quota, period = words
            if int(quota) > 0:
                yield -(-int(quota) // int(period))
