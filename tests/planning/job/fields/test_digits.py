"""Limits, defaults and extremes of jobs, written out once more."""

from dataclasses import astuple
from typing import Any

import numpy as np
import pytest
from builders.jobs import job_data, make_job
from builders.samples import make_samples

from dataserver.planning.costs.model import forward_ns
from dataserver.planning.job.fields import PLAN_LIMITS, SINGLE_STEP, most_forward_ns, most_units
from dataserver.planning.job.fields.transfers import MAX_BYTES_PER_NS
from dataserver.planning.job.fields.values import MAX_INTEGER
from dataserver.planning.job.identity import JobSpecError, parse_job
from dataserver.planning.job.limits import PlanLimitError, check_contents, check_step, limits_of, most_microbatches
from dataserver.planning.planner import plan_step

LIMITS = (131_072, 131_072, 262_144, 16_384, 2_097_152, 1_048_576, 16_777_216, 8_192, 134_217_728, 2**62)
"""Sequences, samples, images, microbatches, operations, passes, pairs of ranks, grouped sequences, work of components,
and the largest integer, of all plan versions."""


def test_limits_of_a_step_in_digits() -> None:
    job = make_job(stream={"global_batch": 4}, backbone=(2, 2))
    assert astuple(limits_of(job.spec.execution)) == LIMITS
    assert {version: astuple(limits) for version, limits in PLAN_LIMITS.items()} == dict.fromkeys((5, 6, 7, 8), LIMITS)
    assert (SINGLE_STEP, MAX_INTEGER, MAX_BYTES_PER_NS) == (4, 9_007_199_254_740_991, 1_000_000)
    check_step(job.spec)
    check_contents(job.spec, 131_072, 262_144)
    for samples, images, text in ((131_073, 0, "131,073"), (0, 262_145, "262,145")):
        with pytest.raises(PlanLimitError, match=text):
            check_contents(job.spec, samples, images)
    # 1 encoder rank and 2 x 2 of the backbone: 5 blocks, forward and backward.
    assert most_microbatches(job.spec.execution) == 16_384
    assert most_microbatches(make_job(stream={"global_batch": 64}, backbone=(64, 2)).spec.execution) == 2_097_152 // 258
    assert plan_step(job, 0, make_samples(job, 4)).num_microbatches >= 1


def test_the_size_of_a_step_in_digits() -> None:
    memory = {"memory": {"budget_bytes": 1 << 20, "unit_bytes": 1}}

    def size(kind: str, **changes: Any) -> dict[str, int]:
        data = job_data(stream={"global_batch": 48}, encoder=6, backbone=(6, changes.pop("pp", 1)), generator=6)
        data["execution"]["layout"] = {"kind": kind, **changes.pop("layout", {})}
        data["execution"]["modules"][0] |= changes
        spec = parse_job(data).spec
        return spec.execution.layout.step_size(spec.stream, spec.execution)

    plain = {"step_sequences": 48, "step_microbatches": 8, "step_operations": 2 * 8 * 18, "step_passes": 48 * 3}
    assert size("pipelined") == plain
    assert size("pipelined", pp=2) == plain | {"step_operations": 2 * 8 * 24, "step_passes": 48 * 4}
    chunked = {"schedule": "interleaved", "chunks": 3}
    assert size("pipelined", pp=2, layout=chunked) == plain | {"step_operations": 6 * 8 * 24, "step_passes": 48 * 12}
    assert size("pipelined", **memory) == plain | {"component_work": 48}
    assert size("pipelined", **memory, dp=4) == plain | {"step_operations": 2 * 8 * 16, "component_work": 48 * 3}
    assert size("colocated") == plain | {"rank_pairs": 2 * 36}


def test_a_job_that_leaves_all_out_has_these_defaults() -> None:
    job = parse_job(job_data())
    stream, execution = job.spec.model_dump(mode="json")["stream"], job.spec.model_dump(mode="json")["execution"]
    found = {k: v for k, v in stream.items() if k not in ("datasets", "tokenizer", "seq_len", "global_batch")}
    assert found == {
        "sizing": {
            "patch": 14,
            "merge": 2,
            "max_patches": 1024,
            "quality": "fast",
            "rule": None,
            "min_pixels": None,
            "max_pixels": None,
            "side": None,
            "shortest_edge": None,
            "background": None,
            "resampling": None,
            "audio": None,
            "video": None,
            "tiles": None,
            "marks": None,
        },
        "packing": {"enabled": True, "fill": "0.97", "max_images": None, "max_clips": None, "max_videos": None},
        "generation": {"ratio": "0", "query_tokens": 64, "interleaved": None},
        "shuffle_window": 8,
        "seed": 0,
        "order_version": 1,
        "content_version": 2,
        "contrastive_batch": None,
        "transforms": None,
        "continues": None,
    }
    dataset = {k: v for k, v in stream["datasets"][0].items() if k not in ("name", "fingerprint")}
    absent = {"caption": None, "captions": None, "conversations": None, "documents": None}
    absent |= {"metadata_transforms": None, "text_transforms": None, "transformed": None}
    assert dataset == {"weight": "1", "filter": "", "quarantine": "", **absent}
    assert (execution["microbatch"], execution["plan_version"]) == (1, 8)
    backbone = job.spec.execution.backbone
    assert (backbone.dp, backbone.tp, backbone.pp, backbone.sp, backbone.padded) == (1, 1, 1, 1, False)
    assert (backbone.balance, backbone.packing, backbone.memory) == ("lpt", "balanced", None)
    layout = job.spec.execution.layout.model_dump()
    assert (layout["kind"], layout["schedule"], layout["order"], layout["chunks"]) == ("pipelined", "1f1b", "search", 1)
    costs = [(m.cost.microbatch_ns, m.cost.linear_ps, m.cost.quadratic_fs) for m in job.spec.execution.modules]
    assert costs[0] == (320_000, 3_179_430, 413_989)
    colocated = parse_job(job_data(execution={"layout": {"kind": "colocated"}})).spec.execution.layout.model_dump()
    assert colocated == {"kind": "colocated", "ranks_per_node": 8, "row_bytes": 8192}


def test_extremes_in_digits() -> None:
    """512 tokens, 64 queries, images of 1024 patches; four make a token."""
    cost = {"microbatch_ns": 5, "linear_ps": 3_000, "quadratic_fs": 2_000_000}
    data = job_data(generator=1, stream={"global_batch": 4})
    for module in data["execution"]["modules"]:
        module["cost"] = cost
    spec = parse_job(data).spec
    encoder, backbone, generator = spec.execution.modules
    padded = encoder.model_copy(update={"padded": True})
    units = [most_units(spec.stream, m, 3) for m in (encoder, backbone, generator, padded)]
    assert units == [3 * 512 * 4, 3 * 512, 3 * (512 // 66) * 1024, 3 * (512 // 3) * 1024]
    times = [most_forward_ns(spec.stream, m, 3) for m in (encoder, backbone, generator, padded)]
    assert times == [u * 3 + u * n * 2 for u, n in zip(units, (1024, 512, 1024, 1024), strict=True)]
    alone = parse_job(data | {"stream": data["stream"] | {"packing": {"enabled": False}}}).spec
    assert most_units(alone.stream, generator, 3) == 3 * 1024
    just = parse_job(data | {"stream": data["stream"] | {"seq_len": 7 * 66 - 1}}).spec  # one token less than for seven
    assert most_units(just.stream, generator, 3) == 3 * 6 * 1024
    short = parse_job(data | {"stream": data["stream"] | {"seq_len": 8}}).spec
    assert [most_units(short.stream, m, 3) for m in (padded, generator)] == [3 * 2 * 1024, 3 * 1024]
    assert forward_ns(backbone.cost, np.array([0, 1, 10])).tolist() == [0, 5, 230]


@pytest.mark.parametrize(
    ("path", "fine", "wrong"),
    [
        (("seq_len",), (8, 2**16), (7, 2**22 + 1)),
        (("shuffle_window",), (1, 4096), (0, 4097)),
        (("packing", "fill"), ("0.1", "1"), ("0", "1.000000000000001")),
        (("generation", "ratio"), ("0",), ("1.1",)),
        (("sizing", "max_patches"), (4, 2**20), (3, 2**20 + 1)),
        (("seed",), (0, 2**53 - 1), (-1, 2**53)),
        (("tokenizer", "query"), (299,), (300,)),
        (("contrastive_batch",), (), (1,)),
    ],
)
def test_streams_at_their_limits(path: tuple[str, ...], fine: tuple[Any, ...], wrong: tuple[Any, ...]) -> None:
    def parsed(value: Any) -> None:
        data = job_data(encoder=0)
        inner = data["stream"]
        for key in path[:-1]:
            inner[key] = dict(inner.get(key, {}))
            inner = inner[key]
        inner[path[-1]] = value
        parse_job(data)

    for value in fine:
        parsed(value)
    for value in wrong:
        with pytest.raises(JobSpecError, match=path[-1]):
            parsed(value)


def test_queries_that_just_fit_a_sequence() -> None:
    generation = {"ratio": "0.5", "query_tokens": 61}
    assert make_job(stream={"seq_len": 64, "generation": generation}, generator=1)
    with pytest.raises(JobSpecError, match="62 query tokens and 3 more do not fit seq_len 64"):
        make_job(stream={"seq_len": 64, "generation": generation | {"query_tokens": 62}}, generator=1)
    assert make_job(stream={"seq_len": 64, "generation": {"query_tokens": 62}})


def test_memory_in_units() -> None:
    def memory(**fields: int) -> Any:
        data = job_data(execution={"layout": {"kind": "colocated"}})
        data["execution"]["modules"][0]["memory"] = fields
        found = parse_job(data).spec.execution.modules[0].memory
        assert found is not None
        return found.units, found.step_units

    assert memory(budget_bytes=29, unit_bytes=10) == (2, None)
    assert memory(budget_bytes=10, unit_bytes=10, step_bytes=39) == (1, 3)
    assert memory(budget_bytes=10, unit_bytes=10, step_bytes=10) == (1, 1)
    for fields, text in (
        ({"budget_bytes": 9, "unit_bytes": 10}, "budget_bytes 9 holds no unit of unit_bytes 10"),
        ({"budget_bytes": 10, "unit_bytes": 10, "step_bytes": 9}, "step_bytes is 9 and budget_bytes 10"),
    ):
        with pytest.raises(JobSpecError, match=text):
            memory(**fields)
