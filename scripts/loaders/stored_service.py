"""This service over shards in a store, one epoch: `stored_service.py BUCKET FOLDER`.

The server sends to its client over data connections, as to another machine, and keeps blocks in FOLDER and in memory.
"""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.data_connections import require_all_direct, require_none_left

from dataserver.allocator import cache_freed_memory
from loaders.reporting import BATCH, report_epoch
from loaders.service import MODULE, serve_command
from trainclient.client import DataClient

WINDOW = 4
"""Shards that are mixed with each other."""


def batches(address: str) -> Iterator[int]:
    """Images of each microbatch of one epoch."""
    stream = {
        "datasets": [{"name": "pairs"}],
        "seq_len": 2048,
        "global_batch": 4 * BATCH,
        "packing": {"enabled": False},
        "shuffle_window": WINDOW,
        "order_version": 2,
    }
    modules = [{"name": MODULE, "kind": "encoder"}, {"name": "llm", "kind": "backbone"}]
    execution = {"modules": modules, "microbatch": BATCH, "end": {"epochs": 1}}
    with DataClient(address, {"stream": stream, "execution": execution}, MODULE, 0) as client:
        for microbatch in client:
            yield len(microbatch.tensors["grid"])
        require_none_left(client)
        require_all_direct(address)


def main() -> None:
    """Start a server on a free port, and read from it."""
    cache_freed_memory()
    bucket, folder = sys.argv[1], Path(sys.argv[2])
    line = [*serve_command(f"{bucket}/shards"), "--no-shared-memory", "--block-cache-dir", str(folder)]
    server = subprocess.Popen(line, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        address = server.stdout.readline().split()[-1]
        report_epoch(batches(address))
    finally:
        server.kill()
        server.wait()


if __name__ == "__main__":
    main()
