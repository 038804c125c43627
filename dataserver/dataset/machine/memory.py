"""How much memory this process may use."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from dataserver.dataset.machine.control_groups import CGROUPS, MEMBERSHIP, limits


class Memory(NamedTuple):
    """Memory that a process, and all others of its control group, may use together."""

    num_bytes: int
    whose: str
    """Name of what limits the memory, for messages."""


def usable_memory(cgroups: Path = CGROUPS, membership: Path = MEMBERSHIP) -> Memory:
    """The machine's memory, or less where a container may use less: beyond that the system kills its processes.

    Limits of the address space (`ulimit -v`) are not looked at: most of what a server maps it never touches.

    Args:
        cgroups: see `limits`.
        membership: likewise.
    """
    machine = Memory(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), "this machine's memory")
    groups = [Memory(found, "the limit of its control group") for found in _limits(cgroups, membership)]
    return min([machine, *groups])


def processes_within(each_bytes: int, memory: Memory) -> int:
    """How many processes that need so many bytes each there is memory for, beside this one; at least one."""
    return max(1, memory.num_bytes // each_bytes - 1)


def _limits(cgroups: Path, membership: Path) -> Iterator[int]:
    """What each control group of this process may use, where that is limited. Above `memory.high` it is slowed down."""
    for names in ("memory.max", "memory.high"):
        for words in limits("memory", "memory.limit_in_bytes", names, cgroups, membership):
            with suppress(ValueError):  # no limit: "max", or in version 1 a number beyond any memory
                (number,) = words
                yield int(number)
