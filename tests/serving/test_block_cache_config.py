"""Caches that are smaller than shuffle windows in a store: what servers say at start, and of each job."""

import logging
from pathlib import Path
from typing import Any

import pytest
from benchmarks.range_server import State
from serving.harness import index, job_data, running
from shards import write_pairs
from stores import no_stores, stores

from dataserver.dataset import BLOCKS
from dataserver.planning.job.fields import Stream
from dataserver.serving.block_cache_config import DEFAULT_WINDOW, job_remark, needed_bytes, start_remark

__all__ = ["no_stores", "stores"]

SHARDS = 10


def job_of(window: int) -> dict[str, Any]:
    return job_data(datasets=[{"name": "pairs"}], generation={"ratio": "0"}, shuffle_window=window, end={"steps": 1})


def test_caches_are_measured_by_the_window_of_each_job(
    stores: tuple[State, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_pairs(tmp_path / "pairs", 2 * SHARDS, 2)
    stores[0].put_folder("/bucket/pairs", folder)
    url = index(Path("s3://bucket/pairs"))
    sizes = sorted((file.stat().st_size for file in folder.glob("*.tar")), reverse=True)
    window = DEFAULT_WINDOW + 1
    BLOCKS.configure(needed_bytes(sum(sizes[:DEFAULT_WINDOW]), 1))
    with caplog.at_level(logging.WARNING, "dataserver.serving"), running({"pairs": url}) as server:
        assert start_remark(server.server.config, server.catalog.datasets) is None
        server.create(job_of(DEFAULT_WINDOW))
        assert caplog.messages == []
        job_id = server.create(job_of(window)).job_id
        server.create(job_of(window))
        (said,) = caplog.messages
        assert said.startswith(f"job {job_id[:12]}, the caches of blocks hold ")
        assert f" a shuffle window of {window} shards has " in said
        assert "raise --block-memory-bytes, or set --block-cache-dir and --block-cache-bytes" in said
        BLOCKS.configure(needed_bytes(sum(sizes[:DEFAULT_WINDOW]), 1) - 1)
        at_start = start_remark(server.server.config, server.catalog.datasets)
        assert f" a shuffle window of {DEFAULT_WINDOW} shards has " in (at_start or "")


def test_caches_of_a_fleet_add_up(stores: tuple[State, str], tmp_path: Path) -> None:
    """Of servers that are named, and of those that a name was found to stand for."""
    stores[0].put_folder("/bucket/pairs", write_pairs(tmp_path / "pairs", 2 * SHARDS, 2))
    url = index(Path("s3://bucket/pairs"))
    with running({"pairs": url}, peers=["127.0.0.1:9", "127.0.0.1:10"]) as server:
        config, dataset = server.server.config, server.catalog.datasets["pairs"]
        total = sum(shard.header.shard_bytes for shard in dataset.shards)
        window = Stream.model_construct(shuffle_window=SHARDS)
        for known_peers, num_servers in ((0, 2), (1, 2), (4, 5)):
            BLOCKS.configure(needed_bytes(total, num_servers))
            assert job_remark(config, window, [dataset], known_peers) is None
            BLOCKS.configure(needed_bytes(total, num_servers) - 1)
            assert f"each of {num_servers} servers needs " in (job_remark(config, window, [dataset], known_peers) or "")
