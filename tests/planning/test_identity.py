import copy
import hashlib
import json
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from planning.builders import job_data, make_job
from pydantic import BaseModel, ValidationError

from dataserver.planning.identity import (
    Job,
    JobSpecError,
    UnsupportedVersionError,
    canonical_json,
    differing_fields,
    identify,
    parse_job,
)
from dataserver.planning.jobspec import MAX_INTEGER, JobSpec, Stream

SCHEMA = Path(__file__).resolve().parents[2] / "protos" / "disttrain" / "v1" / "job_spec.schema.json"

GOLDEN_JOB = """
stream:
  datasets:
    - {name: laion, fingerprint: '0000000000000000000000000000000000000000000000000000000000000000', weight: 0.7,
       filter: width >= 256 and punsafe < 0.1}
    - name: obelics
      fingerprint: 'ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff'
      weight: 0.30
      quarantine: 'abababababababababababababababababababababababababababababababab'
  tokenizer: {name: bytes, digest: '1111111111111111111111111111111111111111111111111111111111111111',
              vocab_size: 300, bos: 256, eos: 257, boi: 258, eoi: 259, image: 260, query: 261}
  seq_len: 4096
  global_batch: 64
  packing: {fill: 0.970}
  generation: {ratio: 0.25, query_tokens: 32}
  seed: 42
execution:
  modules:
    - {name: vit, kind: encoder, dp: 3}
    - {name: llm, kind: backbone, dp: 4, pp: 2}
    - {name: dit, kind: generator, dp: 2, cost: {linear_ps: 1000, quadratic_fs: 10}}
  microbatch: 2
  end: {passes: 3, last: drop}
"""


def test_golden_ids() -> None:
    """A change here changes the identity of running jobs: do not make one."""
    job = parse_job(yaml.safe_load(GOLDEN_JOB))
    assert job.stream_id == "5b3fd955141cfb47540a727d409960a177e0e3cb89186db52051cfdb5412319e"
    assert job.job_id == "5eb0131fb76ee25284e5bb1229e1afe1d299ec77c533fdbfe16ec4450c0b1056"


def test_ids_are_hashes_of_canonical_json() -> None:
    job = parse_job(yaml.safe_load(GOLDEN_JOB))
    for spec, found in ((job.spec, job.job_id), (job.stream, job.stream_id)):
        text = canonical_json(spec)
        assert hashlib.sha256(text).hexdigest() == found
        # RFC 8785 of what we have, integers and ASCII text: sorted keys, no space, nothing escaped.
        plain = json.loads(text)
        assert text == json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
        assert type(spec).model_validate(plain) == spec
        assert not any(isinstance(leaf, float) or leaf is None for _, leaf in leaves(plain))


def test_text_beyond_ascii_is_kept_as_utf8() -> None:
    data = job_data()
    data["stream"]["datasets"][0]["filter"] = 'lang == "\u00e9\U0001f600\n"'
    assert 'lang == \\"\u00e9\U0001f600\\n\\"'.encode() in canonical_json(parse_job(data).spec)


# --- what is equal --------------------------------------------------------------------------------------------------


def reversed_keys(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: reversed_keys(v) for k, v in reversed(value.items())}
    return [reversed_keys(v) for v in value] if isinstance(value, list) else value


def test_spelling_does_not_matter() -> None:
    data = yaml.safe_load(GOLDEN_JOB)
    job = parse_job(data)
    explicit = job.spec.model_dump(mode="json")  # all defaults spelt out, null for the end that is not meant
    same = [reversed_keys(data), explicit, json.loads(canonical_json(job.spec))]
    for path, spellings in {
        ("stream", "packing", "fill"): ["0.97", "0.970", ".97", "97e-2", "+0.97", 0.97],
        ("stream", "datasets", 0, "weight"): ["0.7", "0.70", "7E-1", 0.7],
        ("stream", "seed"): [42, "42"],
        ("execution", "modules", 0, "cost"): [None],
    }.items():
        same += [changed(data, path, s) for s in spellings]
    assert {(j.stream_id, j.job_id) for j in map(parse_job, same)} == {(job.stream_id, job.job_id)}


@given(st.decimals(0, 10**6, places=4))
def test_equal_decimals_have_one_spelling(value: Any) -> None:
    spellings = [str(value), f"{value}0000", f"{value:E}", str(value.normalize()), f"0{value}"]
    weights = {
        make_job(stream={"datasets": [{**job_data()["stream"]["datasets"][0], "weight": w}, other]}).stream_id
        for w in spellings
        for other in [{"name": "other", "fingerprint": "2" * 64}]
    }
    assert len(weights) == 1


# --- what is different ----------------------------------------------------------------------------------------------


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every leaf of a JSON value with its path."""
    if isinstance(value, dict | list) and value:
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in items:
            yield from leaves(inner, (*path, key))
    else:
        yield path, value


def model_leaves(model: type[BaseModel], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every leaf field of a model by introspection, so that none can be forgotten here."""
    for name, field in model.model_fields.items():
        inner = [t for t in (field.annotation, *get_args(field.annotation)) if isinstance(t, type)]
        models = [t for t in inner if issubclass(t, BaseModel)]
        yield from model_leaves(models[0], (*path, name)) if models else [(*path, name)]


def changed(data: Any, path: tuple[Any, ...], value: Any) -> Any:
    copied = copy.deepcopy(data)
    inner = copied
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return copied


def candidates(value: Any) -> list[Any]:
    """Other values that a field might take instead."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, value * 2, value - 1]
    if value is None:
        return [5]
    flipped = "f" * 64 if value != "f" * 64 else "e" * 64
    names = [m.value for e in StrEnum.__subclasses__() if value in set(e) for m in e]
    return [v for v in [*names, flipped, "0.5", "2", "x"] if v != value]


def variants(data: dict[str, Any]) -> dict[tuple[str, ...], Job]:
    """For every leaf field a valid job that differs there alone (in `end`: the other way to end)."""
    found: dict[tuple[str, ...], Job] = {}
    for path, value in leaves(data):
        field = tuple(k for k in path if isinstance(k, str))
        for candidate in candidates(value):
            other = changed(data, path, candidate)
            if value is None:
                other["execution"]["end"] = {path[-1]: candidate}
            try:
                found.setdefault(field, identify(JobSpec.model_validate(other)))
            except ValidationError:
                continue
    return found


def test_every_field_counts() -> None:
    base = make_job(stream={"global_batch": 4}, encoder=0, generator=1)
    jobs = variants(base.spec.model_dump(mode="json"))
    assert set(jobs) == set(model_leaves(JobSpec))
    assert len(jobs) > 40
    ids = [base.job_id]
    for field, job in jobs.items():
        ids.append(job.job_id)
        in_stream = field[0] == "stream"
        assert (job.stream_id != base.stream_id) == in_stream, field
        theirs = json.loads(canonical_json(job.stream))
        listed = differing_fields(base.stream, theirs)
        assert len(listed) == in_stream, field
        assert all(field[-1] in line for line in listed)
    assert len(set(ids)) == len(ids)


# --- what is refused ------------------------------------------------------------------------------------------------

MODULE = ("execution", "modules", 0)
BAD = [
    (("stream", "bogus"), 1, "stream.bogus: this key is unknown"),
    (("execution", "layout"), {"kind": "pipeline", "odrer": "none"}, "execution.layout.pipeline.odrer"),
    (("execution", "layout"), {"kind": "pipeline", "order": "best"}, "execution.layout.pipeline.order"),
    (("execution", "layout"), {"kind": "ring"}, "execution.layout"),
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
    ((*MODULE, "kind"), "backbone", "a pipeline layout has one backbone, any number of encoders"),
    ((*MODULE, "name"), "llm", r"module names \['llm', 'llm'\] are not unique"),
    ((*MODULE, "name"), "../x", "execution.modules.0.name"),
    ((*MODULE, "name"), "x\n", "execution.modules.0.name"),
    ((*MODULE, "cost"), {"linear_ps": -1, "quadratic_fs": 0}, "execution.modules.0.cost.linear_ps"),
    (("execution", "modules"), [], "execution.modules"),
    (("execution", "modules"), [{"name": "vit", "kind": "encoder"}], "one backbone"),
    (("execution", "microbatch"), 3, "global_batch 1 does not divide into dp 1 x microbatch 3 = 3 sequences"),
    (("execution", "end"), {}, "exactly one of end.steps and end.passes"),
    (("execution", "end"), {"steps": 1, "passes": 1}, "exactly one of end.steps and end.passes"),
    (("execution", "end"), {"steps": 0}, "execution.end.steps"),
    (("stream", "datasets"), [], "stream.datasets"),
    (("stream", "datasets", 0, "name"), "a/b", "stream.datasets.0.name"),
    (("stream", "datasets", 0, "fingerprint"), "0" * 63, "stream.datasets.0.fingerprint"),
    (("stream", "datasets", 0, "quarantine"), "x", "stream.datasets.0.quarantine"),
    (("stream", "datasets", 0, "weight"), "0", "all dataset weights are 0"),
    (("stream", "datasets", 0, "weight"), "-1", "stream.datasets.0.weight: found '-1'"),
    (("stream", "datasets", 0, "weight"), "-0", "stream.datasets.0.weight: found '-0'"),
    (("stream", "datasets", 0, "weight"), float("nan"), "stream.datasets.0.weight: found 'nan'"),
    (("stream", "datasets", 0, "weight"), float("inf"), "stream.datasets.0.weight: found 'inf'"),
    (("stream", "datasets", 0, "weight"), "1e19", "stream.datasets.0.weight: found '1e19'"),
    (("stream", "datasets", 0, "weight"), "1" * 33, "stream.datasets.0.weight"),
    (("stream", "datasets", 0, "weight"), "a half", "stream.datasets.0.weight: found 'a half'"),
    (("stream", "datasets", 0, "weight"), True, "stream.datasets.0.weight"),
    (("stream", "datasets", 0, "filter"), "x" * 4097, "stream.datasets.0.filter"),
    (("stream", "datasets", 0, "filter"), "\ud800", "stream.datasets.0.filter"),
    (("stream", "tokenizer", "bos"), 300, "tokenizer.bos is 300; it must lie below vocab_size 300"),
    (("stream", "tokenizer", "digest"), "1" * 63 + "G", "stream.tokenizer.digest"),
    (("stream", "sizing"), {"merge": 4, "max_patches": 15}, r"max_patches is 15; at least merge\^2 = 16"),
    (("stream", "sizing"), {"patch": 0}, "stream.sizing.patch"),
    (("stream", "seq_len"), 7, "stream.seq_len"),
    (("stream", "seq_len"), 512.5, "stream.seq_len"),
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


@pytest.mark.parametrize("data", [None, [], "job", 3, {}, {"stream": {}}])
def test_what_is_no_job_at_all(data: Any) -> None:
    with pytest.raises(JobSpecError, match="the job is not valid: "):
        parse_job(data)


def test_all_problems_are_listed_at_once() -> None:
    data = changed(changed(job_data(), ("stream", "seed"), -1), (*MODULE, "dp"), 0)
    with pytest.raises(JobSpecError, match=r"stream\.seed: .*; execution\.modules\.0\.dp: "):
        parse_job(data)


def test_datasets_named_twice_and_batches_that_do_not_divide() -> None:
    twice = [{"name": "a", "fingerprint": "0" * 64}] * 2
    with pytest.raises(JobSpecError, match=r"datasets \['a'\] are named twice"):
        make_job(stream={"datasets": twice})
    with pytest.raises(JobSpecError, match=r"global_batch 9 .* dp 2 x microbatch 2 = 4 sequences; use a multiple of 4"):
        make_job(stream={"global_batch": 9}, execution={"microbatch": 2}, backbone=(2, 1))


@pytest.mark.parametrize(
    ("path", "name"),
    [
        (("stream", "order_version"), "order_version"),
        (("stream", "content_version"), "content_version"),
        (("execution", "plan_version"), "plan_version"),
    ],
)
def test_other_versions_are_refused_by_name(path: tuple[str, str], name: str) -> None:
    with pytest.raises(UnsupportedVersionError, match=rf"pinned to {name} 2; this release has \[1\]"):
        parse_job(changed(job_data(), path, 2))


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


def test_streams_that_differ_say_where() -> None:
    ours = make_job().stream
    theirs = json.loads(canonical_json(make_job(stream={"seed": 9, "sizing": {"patch": 16}}).stream))
    assert differing_fields(ours, theirs) == ["seed: 0 here, 9 there", "sizing.patch: 14 here, 16 there"]
    assert differing_fields(ours, json.loads(canonical_json(ours))) == []
    theirs["datasets"] = []
    del theirs["seed"]
    assert [line.split(":")[0] for line in differing_fields(ours, theirs)] == ["datasets", "seed", "sizing.patch"]


def test_the_published_schema_is_that_of_the_model() -> None:
    assert json.loads(SCHEMA.read_text()) == JobSpec.model_json_schema(), "run scripts/generate_stubs"
    assert set(JobSpec.model_json_schema()["$defs"]["Stream"]["properties"]) == set(Stream.model_fields)
