"""`dataserver serve`, whose flags are the fields of `ServerConfig` (`dataserver/serving/config.py`)."""

import faulthandler
import logging
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from dataserver import process
from dataserver.allocator import cache_freed_memory
from dataserver.cli import logs
from dataserver.cli.config_flags import with_flags
from dataserver.cli.end_signals import ENDED, end_signals
from dataserver.cli.warm import compile_missing
from dataserver.dataset import usable_memory
from dataserver.images import silence_pillow_warnings
from dataserver.jobs import Catalog
from dataserver.planning.kernels import cache as kernel_cache
from dataserver.serving.block_cache_config import configure_blocks, start_remark
from dataserver.serving.budgets import Budgets, remark
from dataserver.serving.config import ConfigError, ServerConfig, load_config
from dataserver.serving.descriptors import allow_many_descriptors
from dataserver.serving.server import DataServer

if TYPE_CHECKING:
    from dataserver.web.server_pages import ServerPages

_log = logging.getLogger(__name__)

SWITCH_S: Final = 0.0005
"""After so long a thread that runs Python hands the interpreter on if others wait for it. What serves one stream asks
for it some ten times in each microbatch, and at Python's own 5 ms waits as often behind a thread that plans."""


@with_flags(ServerConfig)
def serve(config: Path | None, flags: Mapping[str, Any]) -> None:
    """Serve balanced microbatches of indexed datasets over gRPC.

    On a new machine it first compiles the kernels of planning and decoding. It prints `listening on HOST:PORT` when it
    is ready, then the addresses of its metrics, health checks and web pages. SIGTERM, Ctrl-C or the RPC Drain let it
    finish open microbatches and end; a second signal ends it at once. On SIGUSR1 it writes what each thread is doing to
    stderr. Every flag is also a key of the YAML file; those that may be repeated are maps there: datasets, index_dirs,
    quarantines, tokenizers, transforms.
    """
    settings = load_config(config, flags)
    logs.use(settings.log_format)
    _serve(opened(settings))


def opened(settings: ServerConfig) -> DataServer:
    """A server of this process that does not listen yet; its datasets are open, and nothing is left to compile.

    Raises:
        DatasetError: a dataset cannot be opened.
        SecurityError: a certificate, a token file or the policy cannot be used.
    """
    allow_many_descriptors()
    silence_pillow_warnings()
    kernel_cache.use(settings.cache_dir)
    cache_freed_memory(settings.prefetch_bytes)
    _about_memory(settings)
    sys.setswitchinterval(SWITCH_S)
    configure_blocks(settings)
    catalog = Catalog.open(settings)
    if (found := start_remark(settings, catalog.datasets)) is not None:
        _log.warning("%s", found)
    catalog.transforms.check()
    server = DataServer(settings, catalog)  # refuses certificates, tokens and policies before what may take a minute
    compile_missing()
    for name, dataset in catalog.datasets.items():
        _log.info("dataset %s: %d shards, fingerprint %s", name, len(dataset.shards), dataset.fingerprint)
    return server


def pages_of(server: DataServer) -> "ServerPages | None":
    """The pages of a server that serves; None without --web-listen.

    Raises:
        ConfigError: their address cannot be bound.
    """
    if server.config.web_listen is None:
        return None
    from dataserver.web.server_pages import ServerPages  # which takes a while to load

    try:
        return ServerPages(server, server.config.web_listen)
    except ConfigError:
        server.stop()
        raise


def _about_memory(settings: ServerConfig) -> None:
    """Say at start what the memory that there is does to this server."""
    taken = Budgets(settings.prefetch_bytes, settings.job_bytes)
    if (found := remark(taken, usable_memory())) is not None:
        _log.log(found[0], "%s", found[1])


def _serve(server: DataServer) -> None:
    """Serve until the server ends; the first signal drains, a second one cuts."""
    faulthandler.register(signal.SIGUSR1, 2, all_threads=True)  # the descriptor: sys.stderr may be another file
    with end_signals() as (numbers, wake), ExitStack() as stack:
        _announce(server.start(), server)
        if (pages := pages_of(server)) is not None:
            stack.callback(pages.close)
            _print_line(f"pages on {pages.url}")
        ending = threading.Thread(target=_when_ended, args=(server, wake), name="ended")
        ending.start()
        for count, _ in enumerate(iter(numbers, ENDED)):
            if count == 0:
                server.drain(server.config.drain_grace_s)
            else:
                server.cut()
        ending.join()  # a signal may have shown the end before `wake` has done with its socket


def _announce(address: str, server: DataServer) -> None:
    _print_line(f"listening on {address}")
    for what, where in (("metrics", server.metrics_url), ("health", server.health_address)):
        if where is not None:
            _print_line(f"{what} on {where}")


def _print_line(line: str) -> None:
    """Print in one write. Unbuffered (PYTHONUNBUFFERED), `print` writes the end of a line apart, and where output and
    log go to one file, other processes' lines come between.

    Where nobody reads the output any more, it goes to the log: that is no reason not to serve.
    """
    try:
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
    except OSError as error:
        process.drop_output()
        _log.warning("%s (the output cannot be written: %s)", line, error.strerror)


def _when_ended(server: DataServer, wake: Callable[[], object]) -> None:
    server.wait()
    wake()
