import hashlib
import json
import re
from collections.abc import Iterator
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest
from builders.jobs import LAYOUT_KINDS, MEMORY, TWO_DATASETS, changed, job_data, leaves, make_job
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from dataserver.planning.job.fields import Stream
from dataserver.planning.job.fields.text import parse_yaml
from dataserver.planning.job.identity import (
    Job,
    JobSpecError,
    UnsupportedVersionError,
    canonical_json,
    differing_fields,
    identify,
    parse_job,
)
from dataserver.planning.job.schema import job_schema
from dataserver.planning.job.spec import AnyLayout, JobSpec

SCHEMA = Path(__file__).resolve().parents[3] / "protos" / "disttrain" / "v1" / "job_spec.schema.json"

GOLDEN_JOB = """
stream:
  datasets:
    - {name: laion, fingerprint: '0000000000000000000000000000000000000000000000000000000000000000', weight: '0.7',
       filter: width >= 256 and punsafe < 0.1}
    - name: obelics
      fingerprint: 'ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff'
      weight: '0.30'
      quarantine: 'abababababababababababababababababababababababababababababababab'
  tokenizer: {name: bytes, digest: '1111111111111111111111111111111111111111111111111111111111111111',
              vocab_size: 300, bos: 256, eos: 257, boi: 258, eoi: 259, image: 260, query: 261}
  seq_len: 4096
  global_batch: 64
  packing: {fill: '0.970'}
  generation: {ratio: '0.25', query_tokens: 32}
  seed: 42
execution:
  modules:
    - {name: vit, kind: encoder, dp: 3, cost: {microbatch_ns: 320000, linear_ps: 3179430, quadratic_fs: 413989}}
    - {name: llm, kind: backbone, dp: 4, pp: 2,
       cost: {microbatch_ns: 320000, linear_ps: 35381757, quadratic_fs: 662382}}
    - {name: dit, kind: generator, dp: 2, cost: {linear_ps: 1000, quadratic_fs: 10}}
  microbatch: 2
  end: {epochs: 3, last: drop}
"""


@pytest.mark.parametrize(
    ("version", "job_id"),
    [
        (5, "1cc13b0bb66791512cb69d30693427fa5ec28acc15d53e3e6cf60ef75239d7e4"),
        (6, "3351b61fff11e1926303137840890836432fa86b36d36561dfbd370c7c6b6594"),
        (7, "82ad3bd2a2c225141b3b03fb0ed82e6f125810db47dbe0aef6448a1d467b9c9b"),
        (8, "70c86601cf6cfc00feb4afb5fd102ff177b4ef800052cffce02f8db8b1c70c5a"),
    ],
)
def test_golden_ids(version: int, job_id: str) -> None:
    """A change here changes the identity of running jobs: do not make one."""
    job = parse_job(parse_yaml(f"{GOLDEN_JOB}  plan_version: {version}\n".encode()))
    assert job.stream_id == "cdbc995083e1ea03daef68fdf47474cdbaef6e049ec5b93090b88e8481def5d9"
    assert job.job_id == job_id
    assert (job == parse_job(parse_yaml(GOLDEN_JOB.encode()))) == (version == 8)


@pytest.mark.parametrize(
    ("sizing", "max_patches", "stream_id"),
    [
        (
            {"rule": "qwen", "min_pixels": 3136, "max_pixels": 12845056},
            65536,
            "fa551822a4c9be1c2be12b89eeb7dd277160e4f148b603c3a5a7a93dc764566b",
        ),
        (
            {"rule": "qwen", "min_pixels": 12845056, "max_pixels": 12845056, "patch": 16},
            56568,
            "d0b1b065b42e290b945ac59bf0c94607500a9cda4da23461d69c9f7e2f628228",
        ),
        ({"rule": "naflex", "merge": 1}, 1024, "8076b2dc45e3e179bf4d85d187ded045f019c0bb86b26fae2f75a9e7161c4446"),
        ({"rule": "square", "side": 448}, 1024, "d6dffbe86202712dbdb68096e06bcfe75c97887bc1e57dc30dd7797876ebae71"),
        (
            {"rule": "crop", "side": 336, "patch": 14, "merge": 1, "resampling": "bicubic"},
            576,
            "e077aeb94258a2291033ec0b69845d36f5511bae73146714acb12b3a313e7141",
        ),
    ],
)
def test_golden_ids_of_rules(sizing: dict[str, Any], max_patches: int, stream_id: str) -> None:
    """The bound that follows from a rule is a part of the identity."""
    data = parse_yaml(GOLDEN_JOB.encode())
    data["stream"]["sizing"] = sizing
    job = parse_job(data)
    assert (job.stream.sizing.max_patches, job.stream_id) == (max_patches, stream_id)


def test_ids_are_hashes_of_canonical_json() -> None:
    job = parse_job(parse_yaml(GOLDEN_JOB.encode()))
    for spec, found in ((job.spec, job.job_id), (job.stream, job.stream_id)):
        text = canonical_json(spec)
        assert hashlib.sha256(text).hexdigest() == found
        # RFC 8785 of what we have, integers and ASCII text: sorted keys, no space, nothing escaped.
        plain = json.loads(text)
        assert text == json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
        assert type(spec).model_validate_json(text, strict=True) == spec
        assert not any(isinstance(leaf, float) or leaf is None for _, leaf in leaves(plain))


@pytest.mark.parametrize("audio", [{}, {"padded": False}, {"bins": 128, "merge": 2, "max_seconds": 30}])
def test_audio_that_states_the_defaults_is_that_which_states_nothing(audio: dict[str, Any]) -> None:
    job = job_data()
    job["stream"]["sizing"] = {**job["stream"].get("sizing", {}), "audio": audio}
    plain = job_data()
    assert parse_job(job).job_id == parse_job(plain).job_id
    audio["bins"] = 80
    assert parse_job(job).job_id != parse_job(plain).job_id


def test_the_default_background_is_that_which_is_not_stated() -> None:
    pad = {"rule": "pad", "side": 28, "resampling": "bicubic"}
    jobs = [job_data(stream={"sizing": {**pad, **more}}) for more in ({}, {"background": [122, 116, 104]})]
    assert len({parse_job(job).job_id for job in jobs}) == 1


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
    data = parse_yaml(GOLDEN_JOB.encode())
    job = parse_job(data)
    explicit = job.spec.model_dump(mode="json")  # all defaults spelt out, null for the end that is not meant
    same = [reversed_keys(data), explicit, json.loads(canonical_json(job.spec))]
    for path, spellings in {
        ("stream", "packing", "fill"): ["0.97", "0.970", "00.97"],
        ("stream", "datasets", 0, "weight"): ["0.7", "0.70", "000.7"],
        ("execution", "modules", 0, "sp"): [1],
    }.items():
        same += [changed(data, path, s) for s in spellings]
    assert {(j.stream_id, j.job_id) for j in map(parse_job, same)} == {(job.stream_id, job.job_id)}


@given(st.decimals(0, 10**6, places=4))
def test_equal_decimals_have_one_spelling(value: Any) -> None:
    spellings = [str(value), f"{value}0000", f"{value.normalize():f}", f"0{value}"]
    weights = {
        make_job(stream={"datasets": [{**job_data()["stream"]["datasets"][0], "weight": w}, other]}).stream_id
        for w in spellings
        for other in [{"name": "other", "fingerprint": "2" * 64}]
    }
    assert len(weights) == 1


@given(st.integers(0, 10**15 - 1))
def test_an_integer_without_quotes_is_that_decimal(value: int) -> None:
    entry = job_data()["stream"]["datasets"][0]
    other = {"name": "other", "fingerprint": "2" * 64}
    text, number = (make_job(stream={"datasets": [{**entry, "weight": w}, other]}) for w in (str(value), value))
    assert (text.stream_id, text.job_id, text.text) == (number.stream_id, number.job_id, number.text)


@pytest.mark.parametrize("value", [-1, 10**15, 2.0, True])
def test_other_numbers_without_quotes_are_no_decimals(value: object) -> None:
    with pytest.raises(JobSpecError, match="weight"):
        make_job(stream={"datasets": [{**job_data()["stream"]["datasets"][0], "weight": value}]})


# --- what is different ----------------------------------------------------------------------------------------------


def model_leaves(model: type[BaseModel], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every leaf field of a model by introspection, so that none can be forgotten here.

    Whatever holds models is looked into: options, tuples, unions. Members of a union go by their `kind`.
    """
    for name, field in model.model_fields.items():
        if name == "continues":  # a stream within a stream, which has a test of its own
            continue
        models = list(_models_in(field.annotation))
        for inner in models:
            tag = (inner.__name__,) if len(models) > 1 else ()
            yield from model_leaves(inner, (*path, name, *tag))
        if not models:
            yield (*path, name)


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _models_in(inner)


def candidates(value: Any) -> list[Any]:
    """Other values that a field might take instead."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, value * 2, value - 1]
    if value is None:
        return [5, "exact", True, "0.5"]
    flipped = "f" * 64 if value != "f" * 64 else "e" * 64
    names = [m.value for e in StrEnum.__subclasses__() if value in set(e) for m in e]
    return [v for v in [*names, flipped, "0.5", "0.25", "2", "x"] if v != value]


TRANSFER = {"source": "vit", "target": "llm", "latency_ns": 20, "bytes_per_ns": "25.5", "row_bytes": 8192}


def base_jobs() -> list[dict[str, Any]]:
    """Jobs that have every part of a specification between them."""
    generation = {"ratio": "0.5", "interleaved": True}
    plain = job_data(stream={"global_batch": 4, "generation": generation}, encoder=0, generator=1)
    whole = job_data(stream={"global_batch": 4, "datasets": TWO_DATASETS}, generator=1)
    rising = [{"from_step": 0, "weight": "1"}, {"from_step": 5, "weight": "2"}]
    whole["stream"]["datasets"] = [{**TWO_DATASETS[0], "weight": rising}, TWO_DATASETS[1]]
    whole["execution"]["modules"][0] |= {"datasets": ["laion"]}
    whole["execution"]["modules"][1] |= {"memory": MEMORY}
    whole["execution"]["transfers"] = [TRANSFER]
    chunks = job_data(execution={"layout": {"kind": "pipelined", "schedule": "interleaved", "chunks": 2}})
    chunks["stream"]["datasets"][0] |= {"captions": [{"name": "long", "weight": "2"}, {"name": "own"}]}
    exchange = [{"degree": d, "unit_ps": d} for d in (2, 4)]
    groups = {"kind": "grouped", "max_degree": 4, "exchange": exchange, "heads": 24}
    grouped = job_data(stream={"global_batch": 4}, execution={"layout": groups}, backbone=(8, 1))
    grouped["execution"]["modules"][1] |= {"memory": MEMORY}
    grouped["stream"]["datasets"][0] |= {"conversations": {"template": "2" * 64, "cut_at": "turn"}}
    towers = [{"name": m, "kind": "tower", "modality": m, "memory": MEMORY} for m in ("image", "text")]
    contrastive = job_data(
        stream={"global_batch": 8, "contrastive_batch": 4, "packing": {"enabled": False}},
        execution={"modules": towers, "layout": {"kind": "contrastive"}},
    )
    tint = {"name": "tint", "version": "1.2.0"}
    transforms: list[dict[str, Any]] = [
        {"kind": kind}
        for kind in ("horizontal_flip", "random_resized_crop", "color_jitter", "gaussian_blur", "rand_augment")
    ]
    transforms.append({"kind": "installed", **tint})
    colocated = job_data(stream={"transforms": transforms}, execution={"layout": {"kind": "colocated"}})
    colocated["execution"]["modules"][0] |= {"memory": {**MEMORY, "step_bytes": 2 * MEMORY["budget_bytes"]}}
    whole["stream"]["datasets"][0] |= {
        "metadata_transforms": [tint],
        "text_transforms": [tint],
        "transformed": "3" * 64,
    }
    plain["stream"]["sizing"] = {"rule": "qwen", "min_pixels": 3136, "max_pixels": 1003520}
    fixed = {"side": 60, "resampling": "bicubic"}
    chunks["stream"]["sizing"] = {"rule": "square", **fixed}
    grouped["stream"]["sizing"] = {"rule": "crop", "shortest_edge": 64, **fixed}
    contrastive["stream"]["sizing"] = {"rule": "pad", "background": [1, 2, 3], **fixed}
    colocated["stream"]["sizing"] = {"audio": {"padded": True}, "video": {"max_frames": 16}}
    tiles = {"choice": "pinpoints", "grids": [[1, 2], [2, 2]], "max_tiles": 2}
    pinpoints = job_data(stream={"sizing": {"rule": "tiles", **fixed, "merge": 1, "tiles": tiles}})
    budget = {"max_images": 2, "max_clips": 3, "max_videos": 4}
    pinpoints["stream"]["packing"] = budget
    pinpoints["stream"]["datasets"][0] |= {"documents": {**budget, "together": True}}
    tiles = {"choice": "aspect", "min_tiles": 1, "max_tiles": 2}
    marks = {"alone": [1], "tiles": [[[2], [3]], [[4], [5]]], "row_end": [6], "whole": [7]}
    timestamps = {"before": [1], "digits": [*range(10)], "point": [2], "after": [3], "end": [4]}
    video = {"rule": "qwen3", "max_frame_tokens": 64, "timestamps": timestamps}
    marked = job_data(stream={"sizing": {"rule": "tiles", **fixed, "tiles": tiles, "marks": marks, "video": video}})
    return [plain, whole, chunks, grouped, contrastive, colocated, pinpoints, marked]


def with_other_kind(data: dict[str, Any]) -> list[dict[str, Any]]:
    """The same job in a layout of another kind, which has other fields; only a colocated one bounds whole steps."""
    data = json.loads(json.dumps(data))
    for module in data["execution"]["modules"]:
        (module["memory"] or {}).pop("step_bytes", None)
    return [changed(data, ("execution", "layout"), {"kind": k}) for k in ("pipelined", "colocated")]


def larger_groups(data: dict[str, Any]) -> list[dict[str, Any]]:
    """The same job with groups of up to 8 ranks, which need another entry of `exchange`."""
    groups = data["execution"]["layout"]
    larger = {**groups, "max_degree": 8, "exchange": [*groups["exchange"], {"degree": 8, "unit_ps": 3}]}
    return [changed(data, ("execution", "layout"), larger)]


def another_transfer(data: dict[str, Any]) -> list[dict[str, Any]]:
    """The same job with rows that take time elsewhere."""
    return [changed(data, ("execution", "transfers"), [{**TRANSFER, "source": "llm", "target": "dit"}])]


def frozen(data: dict[str, Any]) -> list[dict[str, Any]]:
    """The same job with its first module frozen, whose cost then names no backward."""
    first = data["execution"]["modules"][0]
    without = {**first, "frozen": True, "cost": {**first["cost"], "backward_percent": 0}}
    return [changed(data, ("execution", "modules"), [without, *data["execution"]["modules"][1:]])]


def computed_again(data: dict[str, Any]) -> list[dict[str, Any]]:
    """The same job whose first module computes its blocks again."""
    return [changed(data, ("execution", "modules", 0, "recompute"), value=True)]


def uncut(data: dict[str, Any]) -> list[dict[str, Any]]:
    """The same job whose long conversations are left out."""
    return [changed(data, ("stream", "datasets", 0, "conversations", "cut_at"), value=None)]


def with_options(data: dict[str, Any]) -> list[dict[str, Any]]:
    """The same job whose installed transforms are given something."""
    transforms = [{**t, "options": {"x": 1}} if "options" in t else t for t in data["stream"]["transforms"]]
    return [changed(data, ("stream", "transforms"), transforms)]


def with_dataset_options(field: str, data: dict[str, Any]) -> list[dict[str, Any]]:
    """The same job whose transforms of a dataset are given something."""
    return [changed(data, ("stream", "datasets", 0, field, 0, "options"), {"x": "1"})]


TOGETHER = {
    ("stream", "transforms", "InstalledPixels", "options"): with_options,
    ("stream", "datasets", "metadata_transforms", "options"): partial(with_dataset_options, "metadata_transforms"),
    ("stream", "datasets", "text_transforms", "options"): partial(with_dataset_options, "text_transforms"),
    ("stream", "datasets", "conversations", "cut_at"): uncut,
    ("execution", "modules", "recompute"): computed_again,
    ("execution", "modules", "frozen"): frozen,
    ("execution", "transfers", "source"): another_transfer,
    ("execution", "transfers", "target"): another_transfer,
    ("execution", "layout", "PipelinedOptions", "kind"): with_other_kind,
    ("execution", "layout", "ColocatedOptions", "kind"): with_other_kind,
    ("execution", "layout", "GroupedOptions", "max_degree"): larger_groups,
    ("execution", "layout", "GroupedOptions", "exchange", "degree"): larger_groups,
}
"""Fields that no valid job changes alone."""

ONLY_WITH_MODULES = {
    ("execution", "layout", "ContrastiveOptions", "kind"),
    ("execution", "layout", "GroupedOptions", "kind"),
    ("stream", "transforms", "HorizontalFlip", "kind"),
    ("stream", "transforms", "RandomResizedCrop", "kind"),
    ("stream", "transforms", "ColorJitter", "kind"),
    ("stream", "transforms", "GaussianBlur", "kind"),
    ("stream", "transforms", "RandAugment", "kind"),
    ("stream", "transforms", "InstalledPixels", "kind"),
    ("stream", "sizing", "tiles", "choice"),
    ("stream", "sizing", "tiles", "longest_edge"),
}
"""A contrastive layout has other modules than the rest, a grouped one needs its degrees, and transforms and choices of
tiles have fields of their own: no field of them can be kept. `max_patches` follows from the last."""


def variants(data: dict[str, Any]) -> dict[tuple[str, ...], Job]:
    """For every leaf field a valid job that differs there alone, as far as it can."""
    found: dict[tuple[str, ...], Job] = {}
    for path, value in leaves(data):
        field = tuple(k for k in path if isinstance(k, str))
        if field[:2] == ("execution", "layout"):
            field = (*field[:2], LAYOUTS[data["execution"]["layout"]["kind"]], *field[2:])
        if field[:2] == ("stream", "transforms") and len(path) > 2:
            kind = data["stream"]["transforms"][path[2]]["kind"]
            name = "".join(word.title() for word in kind.split("_"))
            field = (*field[:2], "InstalledPixels" if name == "Installed" else name, *field[2:])
        if field in TOGETHER:
            others = TOGETHER[field](data)
        elif path[-2:-1] == ("end",) and value is None:
            others = [changed(data, path[:-1], {path[-1]: 5})]
        else:
            others = [changed(data, path, candidate) for candidate in candidates(value)]
        for other in others:
            try:
                job = identify(JobSpec.model_validate_json(json.dumps(other), strict=True))
            except ValidationError:
                continue
            if job.spec != parse_job(data).spec:
                found.setdefault(field, job)
    return found


LAYOUTS = dict(zip(LAYOUT_KINDS, (options.__name__ for options in get_args(AnyLayout)), strict=True))


def test_what_a_stream_continues_counts() -> None:
    stream = json.loads(canonical_json(make_job().stream))
    jobs = [
        make_job(stream={} if step == 0 else {"continues": {"step": step, "stream": {**stream, "seed": seed}, **ended}})
        for step, seed, ended in [(0, 0, {}), (1, 0, {}), (2, 0, {"epochs": 1}), (2, 0, {}), (2, 1, {})]
    ]
    assert len({job.stream_id for job in jobs}) == len(jobs)
    listed = [differing_fields(jobs[-1].stream, json.loads(canonical_json(job.stream))) for job in jobs]
    assert listed[0][0].startswith("continues: {'step': 2, 'stream': ")
    assert listed[0][0].endswith(" ... here, None there")
    assert len(listed[0][0]) < 300
    assert listed[1:] == [
        ["continues.step: 2 here, 1 there", "continues.stream.seed: 1 here, 0 there"],
        ["continues.epochs: None here, 1 there", "continues.stream.seed: 1 here, 0 there"],
        ["continues.stream.seed: 1 here, 0 there"],
        [],
    ]


def test_every_field_counts() -> None:
    bases = [parse_job(data) for data in base_jobs()]
    assert len({base.job_id for base in bases}) == len(bases)
    seen: set[tuple[str, ...]] = set()
    for base in bases:
        jobs = variants(base.spec.model_dump(mode="json"))
        seen |= jobs.keys()
        for field, job in jobs.items():
            assert job.job_id != base.job_id, field
            in_stream = field[0] == "stream"
            assert (job.stream_id != base.stream_id) == in_stream, field
            listed = differing_fields(base.stream, json.loads(canonical_json(job.stream)))
            assert len(listed) == in_stream, field
            assert all(field[-1] in line for line in listed)
        alone = [job.job_id for field, job in jobs.items() if field not in TOGETHER]
        assert len(set(alone)) == len(alone)
    expected = {*model_leaves(JobSpec), ("stream", "datasets", "weight")}
    assert len(expected) > 60
    assert seen == expected - ONLY_WITH_MODULES


@pytest.mark.parametrize(
    ("path", "found", "supported"),
    [
        (("stream", "order_version"), 3, [1, 2]),
        (("stream", "content_version"), 1, [2]),
        (("stream", "content_version"), 3, [2]),
        (("execution", "plan_version"), 4, [5, 6, 7, 8]),
        (("execution", "plan_version"), 9, [5, 6, 7, 8]),
    ],
)
def test_other_versions_are_refused_by_name(path: tuple[str, str], found: int, supported: list[int]) -> None:
    refusal = f"pinned to {path[1]} {found}; this release has {re.escape(str(supported))}"
    with pytest.raises(UnsupportedVersionError, match=refusal):
        parse_job(changed(job_data(), path, found))


def test_streams_that_differ_say_where() -> None:
    ours = make_job().stream
    theirs = json.loads(canonical_json(make_job(stream={"seed": 9, "sizing": {"patch": 16}}).stream))
    assert differing_fields(ours, theirs) == ["seed: 0 here, 9 there", "sizing.patch: 14 here, 16 there"]
    assert differing_fields(ours, json.loads(canonical_json(ours))) == []
    theirs["datasets"] = []
    del theirs["seed"]
    assert [line.split(":")[0] for line in differing_fields(ours, theirs)] == ["datasets", "seed", "sizing.patch"]


def test_the_published_schema_is_that_of_the_model() -> None:
    assert json.loads(SCHEMA.read_text()) == job_schema(), "run scripts/generate_stubs"
    assert set(job_schema()["$defs"]["Stream"]["properties"]) == set(Stream.model_fields)


@pytest.mark.parametrize(
    ("path", "found", "rule"),
    [
        (("datasets", 0, "name"), "h o", "a name is required: 1 to 128 ASCII letters, digits"),
        (("datasets", 0, "fingerprint"), "F" * 64, "a digest is required: 64 hexadecimal digits, 0 to 9 and a to f"),
        (("datasets", 0, "quarantine"), "none", "or an empty text for none"),
    ],
)
def test_rules_of_texts_are_said_in_words(path: tuple[Any, ...], found: str, rule: str) -> None:
    data = job_data()
    place = data["stream"]
    for part in path[:-1]:
        place = place[part]
    place[path[-1]] = found
    with pytest.raises(JobSpecError) as caught:
        parse_job(data)
    assert f'.{path[-1]}: found "{found[:10]}' in str(caught.value)
    assert rule in str(caught.value)
    assert "pattern" not in str(caught.value)


@pytest.mark.parametrize("value", [{1, 2}, object(), b"x"])
def test_what_json_cannot_say_is_no_job(value: object) -> None:
    with pytest.raises(JobSpecError, match=r"the job is not valid: it holds what JSON cannot say: .* not JSON serial"):
        parse_job({**job_data(), "stream": value})


def test_a_job_that_holds_itself_is_refused() -> None:
    data = job_data()
    data["stream"]["datasets"].append(data)
    with pytest.raises(JobSpecError, match="it holds what JSON cannot say: Circular reference"):
        parse_job(data)
