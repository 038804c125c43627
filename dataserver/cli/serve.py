"""`dataserver serve`."""

import logging
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from dataserver import process
from dataserver.cli import logs
from dataserver.cli.arguments import (
    Address,
    Addresses,
    MaybeInt,
    MaybeLogFormat,
    MaybePath,
    Pairs,
    Switch,
    given,
    named_paths,
    tokenizer_files,
    with_ranges,
)
from dataserver.cli.warm import compile_missing
from dataserver.dataset import usable_memory
from dataserver.images import silence_pillow_warnings
from dataserver.jobs import Catalog
from dataserver.planning.kernels import cache as kernel_cache
from dataserver.serving.allocator import cache_freed_memory
from dataserver.serving.budgets import Budgets, remark
from dataserver.serving.config import ServerConfig, load_config
from dataserver.serving.descriptors import allow_many_descriptors
from dataserver.serving.server import DataServer

_log = logging.getLogger(__name__)

SWITCH_S: Final = 0.0005
"""After so long a thread that runs Python hands the interpreter on if others wait for it. What serves one stream asks
for it some ten times in each microbatch, and at Python's own 5 ms waits as often behind a thread that plans."""
_ENDED: Final = 0
"""Takes the place of a signal's number when the server has ended."""


@with_ranges(ServerConfig)
def serve(
    dataset: Pairs = (),
    index_dir: Pairs = (),
    quarantine: Pairs = (),
    tokenizer: Pairs = (),
    listen: Address = None,
    metrics_listen: Address = None,
    peers: Addresses = None,
    config: MaybePath = None,
    insecure: Switch = False,
    max_streams: MaybeInt = None,
    idle_timeout_s: MaybeInt = None,
    stream_bytes: MaybeInt = None,
    prefetch_bytes: MaybeInt = None,
    no_shared_memory: Switch = False,
    decode_threads: MaybeInt = None,
    job_bytes: MaybeInt = None,
    cache_dir: MaybePath = None,
    zstd_level: MaybeInt = None,
    drain_grace_s: MaybeInt = None,
    log_format: MaybeLogFormat = None,
) -> None:
    """Serve balanced microbatches of indexed datasets over gRPC.

    On a new machine it first compiles the kernels of planning and decoding. Prints `listening on HOST:PORT` when it
    serves, and then where its metrics are. SIGTERM, Ctrl-C or the Drain call end it in order; a second signal ends it
    at once. Every flag is also a key of the YAML file (the repeated ones as maps: datasets, index_dirs, quarantines,
    tokenizers), and wins over it.

    Args:
        dataset: Dataset by the logical name that jobs use; may be repeated.
        index_dir: Folder of a dataset's index, where it does not lie beside the shards; may be repeated.
        quarantine: Quarantine list of a dataset, written by `dataserver lint`; may be repeated.
        tokenizer: Hugging Face tokenizers file by logical name; may be repeated. `bytes` is built in.
        listen: Address to serve on; 127.0.0.1:50051 by default, port 0 for a free one.
        metrics_listen: Address for metrics (Prometheus, HTTP, /metrics); none by default, port 0 for a free one.
        peers: Other servers of the fleet, with commas between them; a name may stand for several, and HOST:FIRST-LAST
            for a range of ports. Each step is then planned by one of them. This server may be among them, so that all
            get the same list.
        config: YAML file with the same names and settings.
        insecure: Permit an address that others can reach, though there is no encryption and no authentication yet.
        max_streams: Streams open at once, 64 by default; one more is refused.
        idle_timeout_s: Close streams idle for so many seconds, which frees their slots; 600 by default.
        stream_bytes: Largest microbatch in bytes; 256 MiB by default.
        prefetch_bytes: Bytes that all streams together use to work ahead; 1 GiB by default, less where memory is
            limited.
        no_shared_memory: Send bytes over the network also to clients of this user on this machine, which otherwise read
            them from shared memory (key `shared_memory: false`).
        decode_threads: Threads that decode images; one for each core by default, fewer where memory is limited.
        job_bytes: Bytes cached of jobs, such as plans; 1 GiB by default, less where memory is limited.
        cache_dir: Folder for statistics of datasets and compiled kernels; servers may share it; ~/.cache/disttrain by
            default.
        zstd_level: Zstandard level for clients that ask for compression; 1 by default.
        drain_grace_s: Seconds that open streams get to finish the microbatch in hand; 30 by default.
        log_format: Log on stderr: text, or json with one object a line; text by default.
    """
    flags = given(
        datasets=named_paths("dataset", dataset),
        index_dirs=named_paths("index-dir", index_dir),
        quarantines=named_paths("quarantine", quarantine),
        tokenizers=tokenizer_files(tokenizer),
        listen=listen,
        metrics_listen=metrics_listen,
        peers=None if peers is None else tuple(name.strip() for name in peers.split(",") if name.strip()),
        insecure=insecure or None,
        max_streams=max_streams,
        idle_timeout_s=idle_timeout_s,
        stream_bytes=stream_bytes,
        prefetch_bytes=prefetch_bytes,
        shared_memory=False if no_shared_memory else None,
        decode_threads=decode_threads,
        job_bytes=job_bytes,
        cache_dir=cache_dir,
        zstd_level=zstd_level,
        drain_grace_s=drain_grace_s,
        log_format=log_format,
    )
    allow_many_descriptors()
    silence_pillow_warnings()
    settings = load_config(config, flags)
    logs.use(settings.log_format)
    kernel_cache.use(settings.cache_dir)
    cache_freed_memory(settings.prefetch_bytes)
    _about_memory(settings)
    _serve(settings)


def _about_memory(settings: ServerConfig) -> None:
    """Say at start what the memory that there is does to this server."""
    taken = Budgets(settings.prefetch_bytes, settings.job_bytes)
    if (found := remark(taken, usable_memory())) is not None:
        _log.log(found[0], "%s", found[1])


def _serve(settings: ServerConfig) -> None:
    """Serve until the server ends; the first signal drains, a second one cuts."""
    sys.setswitchinterval(SWITCH_S)
    catalog = Catalog.open(settings)
    compile_missing()
    server = DataServer(settings, catalog)
    with _signals() as (numbers, wake):
        _announce(server.start(), server.metrics_address)
        for name, opened in catalog.datasets.items():
            _log.info("dataset %s: %d shards, fingerprint %s", name, len(opened.shards), opened.fingerprint)
        threading.Thread(target=_when_ended, args=(server, wake), name="ended").start()
        for count, _ in enumerate(iter(numbers, _ENDED)):
            if count == 0:
                server.drain(settings.drain_grace_s)
            else:
                server.cut()


def _announce(address: str, metrics_address: str | None) -> None:
    _print_line(f"listening on {address}")
    if metrics_address is not None:
        from dataserver.serving.metrics_endpoint import PATH

        _print_line(f"metrics on http://{metrics_address}{PATH}")


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


@contextmanager
def _signals() -> Iterator[tuple[Callable[[], int], Callable[[], object]]]:
    """A function that waits for the next signal that should end this process, and one that makes it return `_ENDED`.

    Python runs signal handlers in the main thread, which a signal delivered to another thread does not wake. The byte
    that Python writes for each signal does. It is acted upon in ordinary code, so that no lock is held there, as one
    might be where a handler interrupts.
    """
    reader, writer = socket.socketpair()
    with reader, writer:
        writer.setblocking(False)
        # Before the handlers: a signal in between still has its default action instead of being lost.
        before = signal.set_wakeup_fd(writer.fileno())
        handlers = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield lambda: reader.recv(1)[0], lambda: writer.send(bytes([_ENDED]))
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(before)
