"""How many files and connections a process may have open."""

import resource


def allow_many_descriptors() -> None:
    """Raise this process's limit as far as it may: each stream, shared block and open shard takes one.

    The limit that a process begins with is often 1,024, for programs that call `select`, which a server does not.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
