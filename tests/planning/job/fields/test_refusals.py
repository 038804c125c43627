"""Specifications that are refused: every message names the field, what was found and what to change."""

import json
from typing import Any

import pytest
from builders.jobs import MEMORY, TWO_DATASETS, changed, job_data, leaves, make_job, module
from hypothesis import given
from hypothesis import strategies as st

from dataserver.planning.job.fields import MAX_INTEGER
from dataserver.planning.job.identity import JobSpecError, canonical_json, parse_job
from dataserver.planning.job.schema import job_schema

MODULE, BACKBONE = ("execution", "modules", 0), ("execution", "modules", 1)
PIPELINED = {"kind": "pipelined"}
VIT = {"model": "vit-h", "device": "h100"}
BAD = [
    (("stream", "bogus"), 1, "stream.bogus: this key is unknown; correct its spelling"),
    (("execution", "layout"), {"kind": "pipelined", "odrer": "none"}, "execution.layout.odrer"),
    (("execution", "layout"), {"kind": "pipelined", "order": "best"}, "execution.layout.order"),
    (
        ("execution", "layout"),
        {"kind": "ring"},
        'execution.layout: kind is "ring"; one of pipelined, grouped, colocated, contrastive',
    ),
    (
        ("execution", "layout"),
        PIPELINED | {"chunkz": 1},
        r"execution.layout.chunkz: this key is unknown; is chunks meant",
    ),
    ((*MODULE, "cost"), VIT | {"efficiency": 0.4}, "0.cost: efficiency: .* valid string"),
    ((*MODULE, "cost"), VIT | {"efficiency": "0.4", "frozen": 1}, "0.cost: frozen: .* valid boolean"),
    (("execution", "layout"), {"order": "none"}, "execution.layout: kind is missing; say which one this is"),
    (("execution", "layout"), "pipelined", "execution.layout"),
    (
        ("execution", "layout"),
        PIPELINED | {"chunks": 2},
        "schedule is 1f1b and chunks is 2; interleaved needs 2 chunks",
    ),
    (
        ("execution", "layout"),
        PIPELINED | {"chunks": 2},
        "schedule is 1f1b and chunks is 2; interleaved needs 2 chunks",
    ),
    (
        ("execution", "layout"),
        PIPELINED | {"schedule": "interleaved"},
        "schedule is interleaved and chunks is 1; interleaved needs 2 chunks or more, the others have 1",
    ),
    (
        ("execution", "layout"),
        PIPELINED | {"schedule": "gpipe", "extra_in_flight": 2},
        "schedule gpipe has extra_in_flight 2; only 1f1b leaves a choice, leave it out",
    ),
    (("execution", "layout"), PIPELINED | {"extra_in_flight": 1025}, "execution.layout.extra_in_flight"),
    (("execution", "layout"), {"kind": "colocated", "ranks_per_node": 0}, "execution.layout.ranks_per_node"),
    (
        ("execution", "layout"),
        {"kind": "contrastive"},
        r"kinds \['encoder', 'backbone'\] and microbatch 1; a contrastive layout has two towers or more, nothing else",
    ),
    (
        (*MODULE, "kind"),
        "tower",
        r"tower vit has no modality; set it to one of \['image', 'text'\]",
    ),
    (
        (*MODULE, "modality"),
        "text",
        "encoder vit has modality text; image, audio and video are encoded, leave it out",
    ),
    ((*MODULE, "packing"), "best_fit", r"module vit \(encoder\) has packing best_fit; only backbone modules have it"),
    ((*MODULE, "sequence_groups"), {"max_degree": 1}, "execution.modules.0.sequence_groups: this key is unknown"),
    (
        ("execution", "layout"),
        {"kind": "grouped", "max_degree": 1, "policy": "milp"},
        "execution.layout.policy: .*'search', 'homogeneous' or 'static'",
    ),
    (
        (*BACKBONE, "datasets"),
        ["laion"],
        r"module llm \(backbone\) has datasets .*laion.*; only encoder and generator modules have it, leave it out",
    ),
    ((*MODULE, "datasets"), [], "execution.modules.0.datasets"),
    (
        (*MODULE, "datasets"),
        ["coyo"],
        r"modules of kind encoder name datasets \['coyo'\]; each must be one of \['laion'\] and named once",
    ),
    ((*MODULE, "datasets"), ["laion", "laion"], r"name datasets \['laion', 'laion'\]; each .* named once"),
    (
        (*MODULE, "memory"),
        {"budget_bytes": 9, "unit_bytes": 10},
        "budget_bytes 9 holds no unit of unit_bytes 10",
    ),
    ((*MODULE, "memory"), {"budget_bytes": 9}, "execution.modules.0.memory.unit_bytes"),
    ((*MODULE, "balance"), "best", "execution.modules.0.balance: .*'lpt'"),
    ((*MODULE, "balance"), "padded", "execution.modules.0.balance"),
    ((*MODULE, "dp"), 0, "execution.modules.0.dp"),
    ((*MODULE, "dp"), -1, "execution.modules.0.dp"),
    ((*MODULE, "tp"), 0, "execution.modules.0.tp"),
    ((*MODULE, "sp"), 1.5, "execution.modules.0.sp"),
    ((*MODULE, "dp"), "many", "execution.modules.0.dp"),
    ((*MODULE, "dp"), 10**30, "execution.modules.0.dp"),
    ((*MODULE, "pp"), 2, r"module vit \(encoder\) has pp 2; only backbone and tower modules have it, leave it out"),
    ((*MODULE, "kind"), "decoder", "execution.modules.0.kind"),
    ((*MODULE, "kind"), [], "execution.modules.0.kind"),
    ((*MODULE, "kind"), {}, "execution.modules.0.kind"),
    ((*MODULE, "kind"), "backbone", "a layout other than contrastive has one backbone, any number of encoders"),
    ((*MODULE, "name"), "llm", r"module names \['llm', 'llm'\] are not unique"),
    ((*MODULE, "name"), "../x", "execution.modules.0.name"),
    ((*MODULE, "name"), "x\n", "execution.modules.0.name"),
    ((*MODULE, "cost"), {"linear_ps": -1, "quadratic_fs": 0}, "execution.modules.0.cost.linear_ps"),
    (("execution", "modules"), [], "execution.modules"),
    (("execution", "modules"), [{"name": "vit", "kind": "encoder"}], "one backbone"),
    (("execution", "microbatch"), 3, "global_batch 1 does not divide into dp 1 x microbatch 3 = 3 sequences"),
    (("execution", "end"), {}, "exactly one of end.steps and end.epochs"),
    (("execution", "end"), {"steps": 1, "epochs": 1}, "exactly one of end.steps and end.epochs"),
    (("execution", "end"), {"steps": 0}, "execution.end.steps"),
    (("stream", "datasets"), [], "stream.datasets"),
    (("stream", "datasets", 0, "name"), "a/b", "stream.datasets.0.name"),
    (("stream", "datasets", 0, "fingerprint"), "0" * 63, "stream.datasets.0.fingerprint"),
    (("stream", "datasets", 0, "quarantine"), "x", "stream.datasets.0.quarantine"),
    (("stream", "datasets", 0, "weight"), "0", "all dataset weights are 0"),
    (("stream", "datasets", 0, "weight"), "-1", "stream.datasets.0.weight: found '-1'"),
    (("stream", "datasets", 0, "weight"), "-0", "stream.datasets.0.weight: found '-0'"),
    (("stream", "datasets", 0, "weight"), float("nan"), "stream.datasets.0.weight: found NaN"),
    (("stream", "datasets", 0, "weight"), float("inf"), "stream.datasets.0.weight: found Infinity"),
    (("stream", "datasets", 0, "weight"), "1e19", "stream.datasets.0.weight: found '1e19'"),
    (("stream", "datasets", 0, "weight"), "1" * 33, "stream.datasets.0.weight"),
    (("stream", "datasets", 0, "weight"), "a half", "stream.datasets.0.weight: found 'a half'"),
    (("stream", "datasets", 0, "weight"), True, "stream.datasets.0.weight: found true; it should be a valid string"),
    (("stream", "datasets", 0, "weight"), 0.5, "weight: found 0.5; it should be a valid string; put it in quotes"),
    (("stream", "datasets", 0, "weight"), " 0.5 ", "weight: found ' 0.5 '; a decimal string such as '0.97'"),
    (("stream", "datasets", 0, "weight"), "5e-1", "weight: found '5e-1'; .* no sign and no exponent"),
    (("stream", "datasets", 0, "weight"), "\uff11", "weight: found '\uff11'; a decimal string"),
    (("stream", "datasets", 0, "filter"), "x" * 4097, "stream.datasets.0.filter"),
    (("stream", "datasets", 0, "filter"), "\ud800", 'half a surrogate pair, no text, stands after .*"filter"'),
    (("stream", "tokenizer", "bos"), 2**31, "stream.tokenizer.bos: found 2147483648; .* less than 2147483648"),
    (("stream", "tokenizer", "bos"), 300, "tokenizer.bos is 300; it must lie below vocab_size 300"),
    (("stream", "tokenizer", "digest"), "1" * 63 + "G", "stream.tokenizer.digest"),
    (("stream", "sizing"), {"merge": 4, "max_patches": 15}, r"max_patches is 15; at least merge\^2 = 16"),
    (("stream", "sizing"), {"patch": 0}, "stream.sizing.patch"),
    (("stream", "seq_len"), 7, "stream.seq_len"),
    (("stream", "seq_len"), 512.5, "stream.seq_len"),
    (("stream", "seq_len"), 512.0, "found 512.0; it should be a valid integer; write it without a fraction"),
    (
        ("stream", "seq_len"),
        "512",
        'stream.seq_len: found "512"; it should be a valid integer; write it without quotes',
    ),
    (("stream", "seq_len"), True, "stream.seq_len: found true; it should be a valid integer"),
    (("stream", "seq_length"), 512, r"stream.seq_length: this key is unknown; is seq_len meant\?"),
    (("stream", "packing"), {"enabled": "false"}, "packing.enabled: found .* write true or false, without quotes"),
    (("stream", "packing"), {"enabled": 0}, "packing.enabled: found 0; it should be a valid boolean"),
    (("stream", "seq_len"), float("nan"), "stream.seq_len"),
    (("stream", "global_batch"), 0, "stream.global_batch"),
    (("stream", "seed"), MAX_INTEGER + 1, "stream.seed"),
    (("stream", "seed"), -1, "stream.seed"),
    (("stream", "packing"), {"fill": "0"}, r"fill is 0; a value in \(0, 1\]"),
    (("stream", "packing"), {"fill": "1.01"}, r"fill is 1.01; a value in \(0, 1\]"),
    (("stream", "generation"), {"ratio": "1.5"}, r"ratio is 1.5; a probability in \[0, 1\]"),
    (("stream", "generation"), {"ratio": "0.5"}, "generation.ratio is 0.5 but the job has no module of kind generator"),
    (("stream", "generation"), {"ratio": "0.5", "query_tokens": 510}, "510 query tokens and 3 more do not fit seq_len"),
    (("stream", "shuffle_window"), 0, "stream.shuffle_window"),
    (("stream",), None, "stream: "),
    (("execution",), [], "execution: "),
]


@pytest.mark.parametrize(("path", "value", "message"), BAD, ids=lambda v: repr(v)[:40])
def test_bad_specs_name_the_field(path: tuple[Any, ...], value: Any, message: str) -> None:
    with pytest.raises(JobSpecError, match=message):
        parse_job(changed(job_data(), path, value))


def of_modules(*modules: dict[str, Any], **execution: Any) -> dict[str, Any]:
    """A job of an encoder for everything else, a backbone, and these modules, over two datasets."""
    base: list[dict[str, Any]] = [{"name": "vit", "kind": "encoder"}, {"name": "llm", "kind": "backbone"}]
    found = {m["name"]: m for m in (*base, *modules)}
    return job_data(stream={"datasets": TWO_DATASETS}, execution={"modules": list(found.values()), **execution})


def grouped(groups: dict[str, Any], dp: int = 8, **backbone: Any) -> dict[str, Any]:
    """A grouped job."""
    layout = {"kind": "grouped", **groups}
    modules = [module("backbone", **{"dp": dp, "memory": MEMORY, **backbone})]
    return job_data(execution={"modules": modules, "layout": layout})


def contrastive(stream: dict[str, Any], *towers: dict[str, Any], **execution: Any) -> dict[str, Any]:
    """A job of two towers with changes."""
    modules = [{"name": m, "kind": "tower", "modality": m} for m in ("image", "text")]
    modules = [{**m, **t} for m, t in zip(modules, (*towers, {}, {}), strict=False)]
    whole = {"global_batch": 8, "contrastive_batch": 4, "packing": {"enabled": False}, **stream}
    execution = {"modules": modules, "layout": {"kind": "contrastive"}, **execution}
    return job_data(stream={k: v for k, v in whole.items() if v is not None}, execution=execution)


def exchange(*degrees: int) -> list[dict[str, int]]:
    return [{"degree": d, "unit_ps": 1} for d in degrees]


TIMES = {"before": [5], "digits": [*range(10, 20)], "point": [6], "after": [7]}
BAD_JOBS = [
    (
        of_modules({"name": "vit2", "kind": "encoder"}),
        r"modules \['vit', 'vit2'\] of kind encoder name no datasets; all but one must say whose images they handle",
    ),
    (
        of_modules({"name": "vit2", "kind": "encoder", "datasets": ["laion"]},
                   {"name": "vit3", "kind": "encoder", "datasets": ["x", "laion"]}),
        r"modules of kind encoder name datasets \['laion', 'x', 'laion'\]; each must be one of \['laion', 'x'\] and",
    ),
    (
        of_modules({"name": "vit2", "kind": "encoder", "datasets": ["laion", "x"]}),
        r"module vit of kind encoder handles nothing, since others name all datasets \['laion', 'x'\]; leave it out,",
    ),
    (
        of_modules({"name": "clip", "kind": "tower", "modality": "text"}),
        r"kinds \['encoder', 'backbone', 'tower'\]; a layout other than contrastive has one .* and no tower",
    ),
    (
        of_modules({"name": "vit", "kind": "encoder", "dp": 2}, layout={"kind": "colocated"}),
        r"modules have \(dp, tp, sp, pp\) .*'vit': \(2, 1, 1, 1\).*; colocated modules need the same degrees and pp 1",
    ),
    (
        of_modules({"name": "llm-2", "kind": "backbone"}, layout={"kind": "colocated"}),
        r"kinds .*'backbone', 'backbone'.*; a layout other than contrastive has one backbone",
    ),
    (
        job_data(backbone=(1, 2), encoder=0, execution={"layout": {"kind": "colocated"}}),
        r"modules have \(dp, tp, sp, pp\) \{'llm': \(1, 1, 1, 2\)\}; colocated modules need the same degrees and pp 1",
    ),
    (grouped({"max_degree": 6}), "max_degree is 6; a power of two is required"),
    (grouped({"max_degree": 2, "min_degree": 3}), "min_degree is 3; a power of two is required"),
    (grouped({"max_degree": 2, "min_degree": 4}), "min_degree is 4, above max_degree 2; lower it"),
    (grouped({"max_degree": 4}), r"exchange has degrees \[\]; one entry for each of \[2, 4\] is required: what the"),
    (grouped({"max_degree": 4, "exchange": exchange(2, 4, 8)}), r"exchange has degrees \[2, 4, 8\]; one entry for"),
    (
        grouped({"max_degree": 1}, memory=None),
        "module llm has pp 1, sp 1, padded False and no memory; groups need pp 1, sp 1, no",
    ),
    (grouped({"max_degree": 1}, pp=2), "module llm has pp 2, sp 1, padded False and memory;"),
    (grouped({"max_degree": 1}, padded=True), "padded True and memory; groups need pp 1, sp 1, no padding, and memory"),
    (
        grouped({"max_degree": 4, "exchange": exchange(2, 4)}, dp=6),
        "module llm has dp 6 and groups up to 4 ranks; the largest group must divide the ranks: .* to 2",
    ),
    (
        changed(grouped({"max_degree": 1}), ("execution", "microbatch"), 2),
        "microbatch is 2; groups decide microbatches themselves: leave microbatch out",
    ),
    (
        grouped({"max_degree": 1, "schedule": "interleaved"}),
        "schedule is interleaved; a grouped backbone has one stage of one chunk: use 1f1b or gpipe",
    ),
    (
        grouped({"max_degree": 1}, balance="none"),
        "module llm has balance none; groups themselves spread the sequences: leave balance out",
    ),
    (
        contrastive({"sizing": {"video": {"rule": "qwen3", "timestamps": TIMES}}}),
        r"sizing.video.timestamps has the ids \[5, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 6, 7\], and "
        r"contrastive_batch is 4; towers see .* no times of frames: leave sizing.video.timestamps out",
    ),
    (
        contrastive({}, layout={"kind": "pipelined"}),
        r"kinds \['tower', 'tower'\]; a layout other than contrastive has one backbone,",
    ),
    (contrastive({}, microbatch=2), r"and microbatch 2; a contrastive layout has .* no microbatch"),
    (
        contrastive({"contrastive_batch": None}),
        "layout is contrastive and stream.contrastive_batch is absent; say how many pairs one loss couples",
    ),
    (
        job_data(stream={"contrastive_batch": 1, "packing": {"enabled": False}}),
        "stream.contrastive_batch is 1; only a contrastive layout has it, leave it out or set layout.kind to contr",
    ),
    (
        contrastive({"global_batch": 6}),
        r"contrastive_batch 4 with global_batch 6, packing.enabled False, generation.ratio 0; .* multiple .* false",
    ),
    (contrastive({"packing": {}}), r"global_batch 8, packing.enabled True, generation.ratio 0; .*false and 0 are"),
    (
        contrastive({}, {"dp": 3}),
        "contrastive_batch 4 does not divide into dp 3 of image x layout.microbatches 1; use a multiple of 3",
    ),
    (
        contrastive({}, layout={"kind": "contrastive", "microbatches": 8}),
        "contrastive_batch 4 does not divide into dp 1 of image x layout.microbatches 8; use a multiple of 8",
    ),
    (
        contrastive({}, end={"epochs": 1}),
        "end.last is pad; a short contrastive batch would have fewer negatives, set end.last to drop",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("data", "message"), BAD_JOBS, ids=[message[:40] for _, message in BAD_JOBS])
def test_parts_that_do_not_fit_say_what_to_change(data: dict[str, Any], message: str) -> None:
    with pytest.raises(JobSpecError, match=message):
        parse_job(data)


def test_jobs_that_the_bad_ones_are_made_of_are_good() -> None:
    parse_job(of_modules({"name": "vit2", "kind": "encoder", "datasets": ["x"]}))
    parse_job(grouped({"max_degree": 4, "exchange": exchange(4, 2)}))
    parse_job(contrastive({}, {"dp": 4}, end={"epochs": 1, "last": "drop"}))


@pytest.mark.parametrize("data", [None, [], "job", 3, {}, {"stream": {}}])
def test_what_is_no_job_at_all(data: Any) -> None:
    with pytest.raises(JobSpecError, match="the job is not valid: "):
        parse_job(data)


def test_all_problems_are_listed_at_once() -> None:
    data = changed(changed(job_data(), ("stream", "seed"), -1), (*MODULE, "dp"), 0)
    with pytest.raises(JobSpecError, match=r"stream\.seed: .*; execution\.modules\.0\.dp: "):
        parse_job(data)


def test_what_follows_from_a_problem_is_not_listed_beside_it() -> None:
    """Without a kind that is known there is no default cost."""
    with pytest.raises(JobSpecError) as caught:
        parse_job(changed(job_data(), (*MODULE, "kind"), "decoder"))
    assert str(caught.value) == (
        "the job is not valid: execution.modules.0.kind: found \"decoder\"; it should be 'encoder', 'backbone', "
        "'generator' or 'tower'"
    )


def test_a_list_of_wrong_members_is_not_called_empty() -> None:
    with pytest.raises(JobSpecError) as caught:
        parse_job(changed(job_data(), ("execution", "modules"), [{"name": "a", "kind": "b"}]))
    assert "modules.0.kind: " in str(caught.value)
    assert "cost" not in str(caught.value), "the default that needs the kind is no mistake of its own"
    assert "at least 1 item" not in str(caught.value)
    with pytest.raises(JobSpecError, match=r"execution\.modules: found an empty list; it should have at least 1 item"):
        parse_job(changed(job_data(), ("execution", "modules"), []))


@pytest.mark.parametrize("kind", ["ring", "Colocated", 3, None, ["colocated"]])
def test_an_unknown_layout_is_answered_with_those_there_are(kind: Any) -> None:
    kinds = job_schema()["$defs"]["Execution"]["properties"]["layout"]["discriminator"]["mapping"]
    with pytest.raises(JobSpecError, match=r"execution\.layout: kind is .*; one of ") as caught:
        parse_job(changed(job_data(), ("execution", "layout"), {"kind": kind, "chunks": 2}))
    assert all(known in str(caught.value) for known in kinds)
    assert ";" not in str(caught.value).partition("; one of ")[2], "one problem, not one for each layout"


def test_datasets_named_twice_and_batches_that_do_not_divide() -> None:
    twice = [{"name": "a", "fingerprint": "0" * 64}] * 2
    with pytest.raises(JobSpecError, match=r"datasets \['a'\] are named twice"):
        make_job(stream={"datasets": twice})
    with pytest.raises(JobSpecError, match=r"global_batch 9 .* dp 2 x microbatch 2 = 4 sequences; use a multiple of 4"):
        make_job(stream={"global_batch": 9}, execution={"microbatch": 2}, backbone=(2, 1))


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), lambda inner: st.lists(
    inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3), max_leaves=6), st.data())  # fmt: skip
def test_hostile_values_anywhere_are_job_errors(value: Any, data: Any) -> None:
    job = job_data()
    paths = [path[:n] for path, _ in leaves(job) for n in range(1, len(path) + 1)]
    try:
        parsed = parse_job(changed(job, data.draw(st.sampled_from(paths)), value))
    except JobSpecError:
        return
    assert parse_job(json.loads(canonical_json(parsed.spec))) == parsed
