"""Several processes that serve one address: how many, what each of them is told, and their ports.

The system hands a connection to one of the processes that listen on the address (SO_REUSEPORT). Each also listens on a
port of its own, at which the others, and other servers of the fleet, find it.
"""

import ctypes
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from dataserver.serving.budgets import LEAST_JOB_BYTES
from dataserver.serving.config import ConfigError, ServerConfig, Worker, joined, split_address
from dataserver.serving.places import Places

LOOPBACK: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 (no address to bind)
"""Where a process reaches one that listens on all addresses."""

_PR_SET_PDEATHSIG: Final = 1
"""Of Linux' prctl(2)."""


def sibling_addresses(config: ServerConfig) -> list[str]:
    """Where the other processes of the same address are; none if there is one process."""
    worker = config.worker
    if worker is None:
        return []
    host, _ = split_address(config.listen)
    here = LOOPBACK.get(host, host)
    return [joined(here, port) for number, port in enumerate(worker.ports) if number != worker.number]


def end_with_parent() -> None:
    """Have the system end this process in order when its parent is gone, however that ended."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


@contextmanager
def worker_configs(config: ServerConfig, count: int) -> Iterator[tuple[ServerConfig, ...]]:
    """What each process is told. Their ports are held, and their file of places is open, until the block ends.

    Raises:
        ConfigError: a port cannot be had.
    """
    host, port = split_address(config.listen)
    with ExitStack() as stack:
        if port:
            _held(stack, host, port, shared=False).close()  # a taken port is an error, not a second server
        public = _port(_held(stack, host, port))
        ports = [_port(_held(stack, host, port and port + 1 + number)) for number in range(count)]
        places = Places.file()
        stack.callback(os.close, places)
        metrics = config.metrics_listen
        if metrics is not None and split_address(metrics)[1] == 0:  # one that is started again has to find it again
            metrics_host, _ = split_address(metrics)
            with ExitStack() as briefly:
                metrics = joined(metrics_host, _port(_held(briefly, metrics_host, 0)))
        shared = {
            "listen": joined(host, public),
            "prefetch_bytes": config.prefetch_bytes // count,
            "job_bytes": max(LEAST_JOB_BYTES, config.job_bytes // count),
            "decode_threads": -(-config.decode_threads // count),
            "workers": 1,
            "cache_dir": None if config.cache_dir is None else config.cache_dir.absolute(),
            **{
                kind: _absolute(getattr(config, kind))
                for kind in ("datasets", "index_dirs", "quarantines", "tokenizers")
            },
        }
        yield tuple(
            config.model_copy(
                update={
                    **shared,
                    "metrics_listen": metrics if number == 0 else None,
                    "worker": Worker(number=number, ports=tuple(ports), places=places),
                }
            )
            for number in range(count)
        )


def _absolute(paths: dict[str, Path]) -> dict[str, Path]:
    return {name: path.absolute() for name, path in paths.items()}


def _held(stack: ExitStack, host: str, port: int, *, shared: bool = True) -> socket.socket:
    """A bound socket, which keeps others from the port and takes no connections."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        held = stack.enter_context(socket.socket(family, kind, protocol))
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, shared)
        held.bind(address)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {joined(host, port)}: {error.strerror or error}; choose another address with --listen "
            "(with --workers, as many ports behind it are needed)"
        ) from None
    return held


def _port(held: socket.socket) -> int:
    return int(held.getsockname()[1])
