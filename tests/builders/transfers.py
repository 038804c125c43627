"""Jobs whose rows take time between modules and between stages."""

from fractions import Fraction
from math import ceil
from typing import Any

import numpy as np
from builders.jobs import job_data
from hypothesis import strategies as st

from dataserver.planning.job.fields import Transfer
from dataserver.planning.job.identity import Job, parse_job
from dataserver.planning.stream.samples import StepSamples
from dataserver.planning.stream.sizing import shard_table, size_samples

INTO, ONWARD, STAGES = ("vit", "llm"), ("llm", "dit"), ("llm", "llm")


def transfer(pair: tuple[str, str], latency_ns: int = 0, bytes_per_ns: Any = "1", row_bytes: int = 0) -> dict[str, Any]:
    source, target = pair
    return {
        "source": source,
        "target": target,
        "latency_ns": latency_ns,
        "bytes_per_ns": bytes_per_ns,
        "row_bytes": row_bytes,
    }


def with_transfers(data: dict[str, Any], *transfers: dict[str, Any]) -> Job:
    return parse_job({**data, "execution": {**data["execution"], "transfers": list(transfers)}})


def expected_ns(found: Transfer | None, rows: int) -> int:
    return 0 if found is None else found.latency_ns + ceil(rows * found.row_bytes / Fraction(found.bytes_per_ns))


@st.composite
def transfers_of(draw: st.DrawFn, pairs: list[tuple[str, str]]) -> list[dict[str, Any]]:
    """Between some of the pairs."""
    chosen = [p for p in pairs if draw(st.booleans())] or pairs[:1]
    return [
        transfer(
            p, draw(st.integers(0, 400_000)), draw(st.sampled_from(["0.7", "3", "50"])), draw(st.integers(0, 3000))
        )
        for p in chosen
    ]


def without_transfers(job: Job) -> Job:
    execution = job.spec.model_dump(mode="json", exclude_none=True)
    del execution["execution"]["transfers"]
    return parse_job(execution)


def one_image_each(job: Job, count: int) -> StepSamples:
    """Samples that are all alike."""
    sides = np.full((2, count), 112, np.int32)
    table = shard_table(job.stream, np.arange(count), np.full(count, 50), np.arange(count + 1), *sides)
    return size_samples(job.stream, 0, 0, table.row.astype(np.uint64), table)


def alike_data(dp: int, pp: int, *, generates: bool, cost: int = 6_000, **layout: Any) -> dict[str, Any]:
    """One encoder, or one generator, beside the backbone: all samples are understood, or all generated."""
    data = job_data(
        encoder=0 if generates else 1,
        backbone=(dp, pp),
        generator=int(generates),
        stream={
            "seq_len": 900,
            "sizing": {"max_patches": 64},
            "global_batch": dp,
            "packing": {"enabled": False},
            "generation": {"ratio": "1" if generates else "0", "query_tokens": 16},
        },
        execution={"layout": layout},
    )
    for module in data["execution"]["modules"]:
        linear_ps = 6_000 * pp if module["kind"] == "backbone" else cost
        module["cost"] = {"linear_ps": linear_ps, "quadratic_fs": 0}
    return data
