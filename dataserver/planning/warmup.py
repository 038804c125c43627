"""Loads or compiles the planner's kernels before they are needed."""

import numpy as np

from dataserver.planning.identity import parse_job
from dataserver.planning.planner import plan_step
from dataserver.planning.sizing import shard_table, size_samples


def warm_up() -> None:
    """Plan a tiny step of a made-up job with the default policies: the first real plan then waits for no compiler.

    Takes about 0.3 s where numba has the kernels in its cache, some ten seconds where it compiles them, and says so in
    the log.
    """
    ids = dict.fromkeys(("bos", "eos", "boi", "eoi", "image", "query"), 0)
    job = parse_job(
        {
            "stream": {
                "datasets": [{"name": "warm-up", "fingerprint": "0" * 64}],
                "tokenizer": {"name": "none", "digest": "0" * 64, "vocab_size": 1, **ids},
                "seq_len": 256,
                "global_batch": 8,
                "generation": {"ratio": "0.5", "query_tokens": 16},
            },
            "execution": {
                "modules": [
                    {"name": "encoder", "kind": "encoder", "dp": 2},
                    {"name": "backbone", "kind": "backbone", "dp": 2, "pp": 2},
                    {"name": "generator", "kind": "generator"},
                ],
                "end": {"steps": 1},
            },
        }
    )
    row = np.arange(24, dtype=np.int64)
    side = (28 * (1 + row % 5)).astype(np.int32)
    table = shard_table(job.stream, row, 8 + row, np.arange(25, dtype=np.int64), side, side)
    plan_step(job, 0, size_samples(job.stream, 0, 0, row.astype(np.uint64), table))
