"""`dataserver warm`, and what a server compiles at its start."""

import logging
import time
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from dataserver.cli.arguments import MaybePath
from dataserver.planning.job.fields import SPECIAL_TOKENS, Sizing
from dataserver.planning.job.identity import parse_job
from dataserver.planning.kernels import cache
from dataserver.planning.planner import plan_step
from dataserver.planning.stream.gathering import pick_rows
from dataserver.planning.stream.grids import patch_grids
from dataserver.planning.stream.sizing import shard_table, size_samples

_log = logging.getLogger(__name__)
_GROUPS: Final = {"kind": "grouped", "max_degree": 2, "exchange": [{"degree": 2, "unit_ps": 1}]}
_SMALL: Final = {"memory": {"budget_bytes": 512, "unit_bytes": 1}}
_JOBS: Final[Sequence[tuple[dict[str, Any], dict[str, Any] | None]]] = (
    ({"pp": 2}, None),
    ({"pp": 2, **_SMALL}, None),
    ({}, {"kind": "colocated", "ranks_per_node": 1}),
    (_SMALL, _GROUPS),
)
"""Jobs that need all kernels between them: fields of the backbone, and the layout."""

_SIZINGS: Final[Sequence[dict[str, Any]]] = (
    {"rule": "qwen", "min_pixels": 3136, "max_pixels": 3136},
    {"rule": "naflex", "merge": 1},
)
"""Rules of sizing with kernels of their own."""


def warm(cache_dir: MaybePath = None) -> None:
    """Compile the kernels of the planner and of image scaling ahead of time, and print where they are cached.

    Servers and commands on this machine then do not wait for a compiler. If all kernels are cached, it does nothing.

    Args:
        cache_dir: Folder for the kernels; ~/.cache/disttrain by default. NUMBA_CACHE_DIR overrides it.
    """
    cache.use(cache_dir)
    if cache.folder() is None:
        raise ValueError(f"compiled kernels cannot be cached: {cache.tried()} cannot be written")
    compile_missing()
    print(f"the compiled kernels are cached in {cache.folder()}")


def compile_missing() -> None:
    """Compile the kernels that are not cached, and log it: a server does so before any client waits for it."""
    if cache.is_complete():
        return
    if cache.folder() is None:
        _log.warning(
            "compiled kernels cannot be cached, so every start compiles them: %s cannot be written; name another "
            "folder with --cache-dir",
            cache.tried(),
        )
    _log.info("%s", cache.COMPILING)
    began = time.monotonic()
    warm_up()
    cache.set_complete()
    _log.info("compiled the kernels in %.0f s", time.monotonic() - began)


def warm_up() -> None:
    """Plan tiny made-up jobs and scale tiny images: this loads or compiles all kernels."""
    from dataserver.assembly import content_digest

    content_digest()
    sides = np.array([1, 100])
    for sizing in _SIZINGS:
        patch_grids(sides, sides, Sizing.model_validate(sizing))
    for backbone, layout in _JOBS:
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
