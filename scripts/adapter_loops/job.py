"""The job of ranks that train through an adapter."""

from typing import Any

from adapter_loops.measuring import PATCH_COST, RANKS, ROWS, SEQ_LEN, STEPS, TOKEN_COST

SERVED = "served"
"""Given instead of a decoder: read from a server."""


def full_job() -> dict[str, Any]:
    """Return the job for frameworks that update behind a constant number of microbatches: with the default fill all
    steps have as many of them as rows, and none ends with padding."""
    return job("0.97")


def job(fill: str = "0.98") -> dict[str, Any]:
    """Whole ranks, whose costs are those of the meter."""
    return {
        "stream": {
            "datasets": [{"name": "pairs"}],
            "seq_len": SEQ_LEN,
            "global_batch": RANKS * ROWS,
            "packing": {"fill": fill},
        },
        "execution": {
            "modules": [
                {
                    "name": "vision",
                    "kind": "encoder",
                    "dp": RANKS,
                    "cost": {"linear_ps": PATCH_COST * 1000, "quadratic_fs": 0},
                },
                {
                    "name": "llm",
                    "kind": "backbone",
                    "dp": RANKS,
                    "cost": {"linear_ps": TOKEN_COST * 1000, "quadratic_fs": 0},
                },
            ],
            "identity_routing": True,
            "end": {"steps": STEPS + 3},
        },
    }
