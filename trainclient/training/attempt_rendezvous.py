"""The rendezvous of one attempt's processes, where torchrun has restarted the run.

torchrun keeps its store through restarts, so it still holds what earlier attempts wrote, down to the addresses of
processes that are gone; and its count of restarts differs between nodes. So each attempt agrees on a prefix of its own.
"""

import time
import uuid
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store

POLL_S = 0.1
_HELLO, _WELCOME, _THERE = "disttrain/hello", "disttrain/welcome", "disttrain/there"


def join_attempt(store: Store, rank: int, world_size: int, timeout_s: float) -> Store:
    """A store of this attempt alone, when all of its processes are there.

    Every process leaves a nonce under its rank, which replaces that of an earlier attempt. The first one welcomes all
    nonces that it sees, stale ones too, with the name of the attempt, until as many processes as there are have read
    theirs.

    Args:
        store: of all attempts.
        rank: of this process.
        world_size: processes of this attempt.
        timeout_s: longest wait for the others.

    Raises:
        RuntimeError: not all came in time.
    """
    if rank == 0:
        return PrefixStore(_host(store, world_size, timeout_s), store)
    nonce = uuid.uuid4().hex
    store.set(f"{_HELLO}/{rank}", nonce)
    store.set_timeout(timedelta(seconds=timeout_s))
    attempt = store.get(f"{_WELCOME}/{nonce}").decode()
    store.add(f"{_THERE}/{attempt}", 1)
    return PrefixStore(attempt, store)


def _host(store: Store, world_size: int, timeout_s: float) -> str:
    """Welcome the others; returns the name of the attempt."""
    attempt, deadline = uuid.uuid4().hex, time.monotonic() + timeout_s
    welcomed: dict[str, str] = {}
    while (there := store.add(f"{_THERE}/{attempt}", 0)) < world_size - 1:
        keys = [f"{_HELLO}/{rank}" for rank in range(1, world_size)]
        for key in (k for k in keys if store.check([k])):
            nonce = store.get(key).decode()
            if welcomed.get(key) != nonce:
                store.set(f"{_WELCOME}/{nonce}", attempt)
                welcomed[key] = nonce
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"only {there} of {world_size - 1} other processes came within {timeout_s:g} s; see what they report, "
                "or raise timeout_s"
            )
        time.sleep(POLL_S)
    return attempt
