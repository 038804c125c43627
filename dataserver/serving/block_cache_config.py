"""The caches of a server whose shards lie in a store: what it is configured with, and whether that is enough."""

import math
from collections.abc import Iterable, Mapping
from typing import Final

from dataserver.dataset import BLOCK_BYTES, BLOCKS, BlockFiles, Dataset
from dataserver.planning.job.fields import Stream
from dataserver.serving.config import ServerConfig

WINDOWS: Final = 1.25
"""A fleet's caches should hold so many shuffle windows together; with less, blocks go before all of them was served."""

DEFAULT_WINDOW: Final = int(Stream.model_fields["shuffle_window"].default)
"""Shards of the shuffle window of a job that says nothing else."""


def configure_blocks(config: ServerConfig) -> None:
    """Set how many blocks this process holds. Raises DatasetError if the folder for them cannot be used."""
    files = None
    if config.block_cache_dir is not None and config.block_cache_bytes:
        files = BlockFiles(config.block_cache_dir, config.block_cache_bytes)
    BLOCKS.configure(config.block_memory_bytes, files)


def start_remark(config: ServerConfig, datasets: Mapping[str, Dataset]) -> str | None:
    """Say if the caches are smaller than what jobs with the default shuffle window need, and what to set.

    Servers are counted as the entries of --peers, since no name is looked up yet; GetDiagnostics counts addresses.
    """
    return _remark(config, DEFAULT_WINDOW, default_window_bytes(datasets), max(1, len(config.peers)))


def job_remark(config: ServerConfig, stream: Stream, datasets: Iterable[Dataset], known_peers: int) -> str | None:
    """Say if the caches are smaller than what a job needs with its own shuffle window, and what to set."""
    window = stream.shuffle_window
    total = sum(window_bytes(dataset, window) for dataset in datasets if dataset.reads_ahead)
    return _remark(config, window, total, max(len(config.peers), 1 + known_peers))


def _remark(config: ServerConfig, window: int, total: int, num_servers: int) -> str | None:
    """What to say of caches for shuffle windows of so many shards, and bytes in all."""
    needed = needed_bytes(total, num_servers)
    if needed <= BLOCKS.capacity:
        return None
    what = "--block-cache-dir and --block-cache-bytes" if config.block_cache_dir is None else "--block-cache-bytes"
    of = f"each of {num_servers} servers" if num_servers > 1 else "this server"
    return (
        f"the caches of blocks hold {_gib(BLOCKS.capacity)} GiB, and a shuffle window of {window} shards has"
        f" {_gib(total)}: shards will be read from the store several times; {of} needs {_gib(needed)} GiB:"
        f" raise --block-memory-bytes, or set {what}"
    )


def default_window_bytes(datasets: Mapping[str, Dataset]) -> int:
    """Size of default shuffle windows of all datasets that lie in stores together."""
    return sum(window_bytes(dataset, DEFAULT_WINDOW) for dataset in datasets.values() if dataset.reads_ahead)


def window_bytes(dataset: Dataset, window: int) -> int:
    """Size of the largest shards of a dataset that a shuffle window may hold."""
    return sum(sorted((shard.header.shard_bytes for shard in dataset.shards), reverse=True)[:window])


def needed_bytes(total: int, num_servers: int) -> int:
    """What each of some servers needs for windows of so many bytes, with what chance adds to a server's share."""
    share = WINDOWS * total / num_servers
    return math.ceil(share * (1 + (3 / math.sqrt(max(1.0, share / BLOCK_BYTES)) if num_servers > 1 else 0)))


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):,.1f}"
