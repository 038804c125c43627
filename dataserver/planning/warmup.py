"""Loads or compiles the planner's kernels before they are needed."""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from dataserver.planning.job.fields import SPECIAL_TOKENS
from dataserver.planning.job.identity import parse_job
from dataserver.planning.planner import plan_step
from dataserver.planning.stream.gathering import pick_rows
from dataserver.planning.stream.sizing import shard_table, size_samples

_GROUPS: Final = {"kind": "grouped", "max_degree": 2, "exchange": [{"degree": 2, "unit_ps": 1}]}
_SMALL: Final = {"memory": {"room_bytes": 512, "unit_bytes": 1}}
SHARES: Final[tuple[Sequence[tuple[dict[str, Any], dict[str, Any] | None]], ...]] = (
    [({"pp": 2}, None), ({"pp": 2, **_SMALL}, None)],
    [
        ({}, {"kind": "colocated", "ranks_per_node": 1}),
        (_SMALL, _GROUPS),
    ],
)
"""Jobs that need all kernels between them, in shares of about equal work: fields of the backbone, and the layout."""


def warm_up(*shares: int) -> None:
    """Plan a tiny step of made-up jobs of several layouts: the first real plan waits for no compiler.

    Takes about 0.4 s where the kernels are in the cache, some twenty seconds where they are compiled, and says so in
    the log.

    Args:
        shares: which of `SHARES`; all if none is given.
    """
    for share in shares or range(len(SHARES)):
        for backbone, layout in SHARES[share]:
            _plan(backbone, layout)


def _plan(backbone: dict[str, Any], layout: dict[str, Any] | None = None) -> None:
    """Plan a step of a job with the default policies but for its layout and some fields of its backbone."""
    from dataserver.planning.kernels.gathered import order_of_draws

    ids = dict.fromkeys(SPECIAL_TOKENS, 0)
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
                    {"name": "backbone", "kind": "backbone", "dp": 2, **backbone},
                    {"name": "generator", "kind": "generator", "dp": 2},
                ],
                **({} if layout is None else {"layout": layout}),
                "end": {"steps": 1},
            },
        }
    )
    row = np.arange(24, dtype=np.int64)
    side = (28 * (1 + row % 5)).astype(np.int32)
    order = order_of_draws(row.astype(np.uint64))
    table = pick_rows(shard_table(job.stream, row, 8 + row, np.arange(25, dtype=np.int64), side, side), order)
    plan_step(job, 0, size_samples(job.stream, 0, 0, row.astype(np.uint64), table))
