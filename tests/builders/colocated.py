"""Colocated jobs of every kind with the samples of a step."""

from typing import Any

import numpy as np
from builders.jobs import BALANCES, Data, compose_whole, dataset
from builders.samples import make_table
from hypothesis import strategies as st

from dataserver.planning.job.fields import BalancePolicy, PackingPolicy
from dataserver.planning.job.identity import Job, parse_job
from dataserver.planning.stream.samples import StepSamples
from dataserver.planning.stream.sizing import concatenate, size_samples

DATASETS = ("laion", "docs")
SEQ_LEN, MAX_PATCHES = 900, 256


def colocated_job(modules: list[Data], *, node: int = 2, **fields: Any) -> Job:
    """A job over both datasets; `fields` as of `compose`."""
    given = {
        "datasets": [dataset(name) for name in DATASETS],
        "seq_len": SEQ_LEN,
        "sizing": {"max_patches": MAX_PATCHES},
        "global_batch": 8,
        "layout": {"kind": "colocated", "ranks_per_node": node, "row_bytes": 512},
    }
    return parse_job(compose_whole(modules, **{**given, **fields}))


def samples_of(job: Job, counts: tuple[int, ...], seed: int, max_images: int) -> StepSamples:
    """So many samples of each dataset."""
    draw = np.random.default_rng(seed)
    tables = [make_table(job, draw, count, max_images) for count in counts]
    return concatenate(
        [size_samples(job.stream, d, 0, t.row.astype(np.uint64), t) for d, t in enumerate(tables) if len(t.row)]
    )


@st.composite
def colocated_steps(draw: st.DrawFn) -> tuple[Job, StepSamples]:
    """One or two encoders, none to two generators, any policies, padding and memory; and a step of such a job."""
    packed, microbatch, dp = draw(st.booleans()), draw(st.integers(1, 3)), draw(st.integers(1, 4))
    batch = dp * microbatch * draw(st.integers(1, 4))
    encoders, generators = draw(st.integers(1, 2)), draw(st.integers(0, 2))
    modules = [_module(draw, name, "encoder", dp, MAX_PATCHES) for name in ("vit", "vit-docs")[:encoders]]
    modules.append(_module(draw, "llm", "backbone", dp, SEQ_LEN, padded=not packed))
    modules[-1]["packing"] = draw(st.sampled_from(PackingPolicy))
    modules += [_module(draw, name, "generator", dp, MAX_PATCHES) for name in ("dit", "dit-docs")[:generators]]
    for module in modules:
        if module["name"].endswith("-docs"):
            module["datasets"] = ["docs"]
    ratio = "0.5" if generators else "0"
    job = colocated_job(
        draw(st.permutations(modules)),
        microbatch=microbatch,
        node=draw(st.integers(1, 4)),
        global_batch=batch,
        packing={"enabled": packed},
        generation={"ratio": ratio, "query_tokens": draw(st.integers(1, 64))},
    )
    counts = draw(st.integers(0, 2 * batch if packed else batch)), draw(st.integers(0, 2 * batch if packed else 0))
    return job, samples_of(job, counts, draw(st.integers(0, 2**32)), draw(st.integers(0, 4)))


def _module(draw: st.DrawFn, name: str, kind: str, dp: int, most: int, padded: bool = True) -> Data:
    balances = BALANCES if kind == "backbone" else list(BalancePolicy)
    module: Data = {"name": name, "kind": kind, "dp": dp, "balance": draw(st.sampled_from(balances))}
    module["cost"] = {
        "linear_ps": draw(st.integers(1, 10**6)),
        "quadratic_fs": draw(st.integers(0, 10**5)),
        "microbatch_ns": draw(st.sampled_from([0, 10_000])),
        "backward_percent": draw(st.sampled_from([0, 100, 233])),
    }
    if draw(st.booleans()):
        room = draw(st.integers(most, 3 * most))
        module["memory"] = {"budget_bytes": 7 * room, "unit_bytes": 7}
    module["padded"] = padded and draw(st.booleans())
    return module


MODULES = [
    {"name": "vit", "kind": "encoder", "dp": 4},
    {"name": "llm", "kind": "backbone", "dp": 4},
    {"name": "dit", "kind": "generator", "dp": 4},
]
STREAM = {"global_batch": 32, "generation": {"ratio": "0.4", "query_tokens": 16}}
