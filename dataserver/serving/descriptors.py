"""How many files and connections a process may have open."""

import resource
from typing import Final

MAX_CONNECTIONS: Final = 1 << 16
"""However many descriptors there are."""


def allow_many_descriptors() -> None:
    """Raise this process's limit as far as it may: each stream, shared block and open shard takes one.

    The limit that a process begins with is often 1,024, for programs that call `select`, which a server does not.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def max_connections() -> int:
    """How many connections clients may have together: half of the descriptors, so that streams find some for files."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if limit == resource.RLIM_INFINITY else min(MAX_CONNECTIONS, limit // 2)
