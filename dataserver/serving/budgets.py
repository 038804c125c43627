"""What a server takes of the memory that it may use: by default, and with what an operator sets."""

import logging
from typing import Final, NamedTuple

from dataserver.dataset import Memory, usable_cores, usable_memory

MIB: Final = 1 << 20
PROCESS_BYTES: Final = 128 * MIB
"""A process without streams, with what its threads decode into."""
DECODING_BYTES: Final = 64 * MIB
"""So much memory beside a process for each decoding thread, which takes a few MiB for photographs, more for posters."""
LEAST_JOB_BYTES: Final = 64 * MIB
PLENTY_BYTES: Final = 1024 * MIB
"""What a server takes of each of its budgets where there is memory enough."""
LEAST_SHARE: Final = 5
"""One part in this many of the memory is for microbatches of streams, whatever an operator sets for others."""


class Budgets(NamedTuple):
    """Defaults of a configuration's keys of the same names."""

    prefetch_bytes: int
    job_bytes: int


def budgets(memory_bytes: int) -> Budgets:
    """What a server takes by default.

    A quarter of what it does not take itself is for jobs. Of the rest a third lets streams work ahead, and two thirds
    are for the microbatch that each of them may hold in any case.
    """
    spare = max(0, memory_bytes - PROCESS_BYTES)
    job_bytes = min(PLENTY_BYTES, max(LEAST_JOB_BYTES, spare // 4))
    return Budgets(min(PLENTY_BYTES, max(0, spare - job_bytes) // 3), job_bytes)


def microbatch_bytes(memory_bytes: int, taken: Budgets) -> int:
    """What is left for the microbatch that each stream may hold, for all streams together."""
    left = memory_bytes - PROCESS_BYTES - sum(taken)
    return max(left, memory_bytes // LEAST_SHARE)


def default_decode_threads() -> int:
    """One for each core that there is memory for."""
    return max(1, min(usable_cores(), (usable_memory().num_bytes - PROCESS_BYTES) // DECODING_BYTES))


def remark(taken: Budgets, memory: Memory) -> tuple[int, str] | None:
    """What an operator should know of a server's memory: level of the log and message; None where it has enough."""
    microbatches = microbatch_bytes(memory.num_bytes, taken)
    needed = PROCESS_BYTES + sum(taken) + microbatches
    found = f"{_mib(memory.num_bytes)} MiB, {memory.whose}"
    shares = (
        f"{_mib(PROCESS_BYTES)} for itself, {_mib(taken.prefetch_bytes)} to work ahead (--prefetch-bytes), "
        f"{_mib(taken.job_bytes)} for jobs (--job-bytes), {_mib(microbatches)} for microbatches of streams"
    )
    if needed > memory.num_bytes:
        return logging.WARNING, (
            f"this server may use {found}, and may need {_mib(needed)}: {shares}; give it more memory, or lower these "
            "flags, else the system may kill it"
        )
    if min(taken) < PLENTY_BYTES:
        return logging.INFO, f"of {found}, this server takes {shares}"
    return None


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / MIB:,.0f}"
