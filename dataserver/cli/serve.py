"""`dataserver serve`."""

import logging
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from dataserver.cli import logs
from dataserver.cli.arguments import (
    Address,
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
from dataserver.cli.warm import compile_all
from dataserver.jobs import Catalog
from dataserver.planning.warmup import warm_up
from dataserver.preprocessing import silence_pillow_warnings
from dataserver.serving.allocator import keep_freed_memory
from dataserver.serving.config import ServerConfig, load_config
from dataserver.serving.metrics_endpoint import PATH as METRICS_PATH
from dataserver.serving.server import DataServer

_log = logging.getLogger(__name__)

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
    config: MaybePath = None,
    insecure: Switch = False,
    max_streams: MaybeInt = None,
    idle_timeout_s: MaybeInt = None,
    stream_bytes: MaybeInt = None,
    prefetch_bytes: MaybeInt = None,
    decode_threads: MaybeInt = None,
    max_jobs: MaybeInt = None,
    job_bytes: MaybeInt = None,
    zstd_level: MaybeInt = None,
    drain_grace_s: MaybeInt = None,
    log_format: MaybeLogFormat = None,
) -> None:
    """Serve balanced microbatches of indexed datasets over gRPC.

    On a new machine it first compiles the planner's loops. Prints `listening on HOST:PORT` when it serves, and then
    where its metrics are. SIGTERM, Ctrl-C or the Drain call end it in order; a second signal ends it at once. Every
    flag is also a key of the YAML file (the repeated ones as maps: datasets, index_dirs, quarantines, tokenizers), and
    wins over it.

    Args:
        dataset: Dataset by the logical name that jobs use; may be repeated.
        index_dir: Folder of a dataset's index, where it does not lie beside the shards; may be repeated.
        quarantine: Quarantine list of a dataset, written by `dataserver lint`; may be repeated.
        tokenizer: Hugging Face tokenizers file by logical name; may be repeated. `bytes` is built in.
        listen: Address to serve on; 127.0.0.1:50051 by default, port 0 for a free one.
        metrics_listen: Address for metrics (Prometheus, HTTP, /metrics); none by default, port 0 for a free one.
        config: YAML file with the same names and settings.
        insecure: Permit an address that others can reach, though there is no encryption and no authentication yet.
        max_streams: Streams open at once, 64 by default; one more is refused.
        idle_timeout_s: Seconds until a stream that takes nothing ends, for its place; 600 by default.
        stream_bytes: Largest microbatch in bytes; 256 MiB by default.
        prefetch_bytes: Bytes that all streams together use to work ahead; 1 GiB by default.
        decode_threads: Threads that decode images; one for each core by default.
        max_jobs: Jobs kept in memory; 64 by default.
        job_bytes: Bytes kept of jobs, with sizes of samples and plans; 1 GiB by default.
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
        insecure=insecure or None,
        max_streams=max_streams,
        idle_timeout_s=idle_timeout_s,
        stream_bytes=stream_bytes,
        prefetch_bytes=prefetch_bytes,
        decode_threads=decode_threads,
        max_jobs=max_jobs,
        job_bytes=job_bytes,
        zstd_level=zstd_level,
        drain_grace_s=drain_grace_s,
        log_format=log_format,
    )
    keep_freed_memory()
    silence_pillow_warnings()
    settings = load_config(config, flags)
    logs.use(settings.log_format)
    catalog = Catalog.open(settings)
    _compile()
    server = DataServer(settings, catalog)
    with _signals() as (numbers, wake):
        print(f"listening on {server.start()}", flush=True)
        if server.metrics_address is not None:
            print(f"metrics on http://{server.metrics_address}{METRICS_PATH}", flush=True)
        for name, opened in catalog.datasets.items():
            _log.info("dataset %s: %d shards, fingerprint %s", name, len(opened.shards), opened.fingerprint)
        threading.Thread(target=_when_ended, args=(server, wake), name="ended").start()
        threading.Thread(target=warm_up, name="warm-up").start()
        for count, _ in enumerate(iter(numbers, _ENDED)):
            if count == 0:
                server.drain(settings.drain_grace_s)
            else:
                server.cut()


def _compile() -> None:
    """Compile what this machine has not compiled yet, before any client waits for it."""
    began = time.monotonic()
    try:
        compiled = compile_all(_log.info)
    except ValueError as error:
        _log.warning("%s; the first plans wait for their compiler", error)
        return
    if compiled:
        _log.info("compiled %d loops in %.0f s", len(compiled), time.monotonic() - began)


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
