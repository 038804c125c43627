"""Measures of shards: whatever they say about a job is what its samples say."""

import hashlib
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from builders.jobs import job_data
from hypothesis import given, settings
from hypothesis import strategies as st

from dataserver.planning.job.identity import Job, parse_job
from dataserver.planning.layouts.contrastive.limits import TowerLimits
from dataserver.planning.layouts.interface import layout_of
from dataserver.planning.stream.columns import ShardColumns
from dataserver.planning.stream.gathering import size_rows
from dataserver.planning.stream.sizing import SampleTooLargeError
from dataserver.planning.stream.statistics import (
    LISTED,
    Lists,
    ShardStatistics,
    axis_lengths,
    join_statistics,
    row_statistics,
)
from dataserver.planning.stream.windows import units_of

Found = tuple[int, str, int, bool]
"""Seed, kind, number of samples, whether all are kept."""
KINDS = ("pairs", "documents", "texts", "mixed", "nothing")


def columns(seed: int, kind: str, num_samples: int) -> ShardColumns:
    """A shard of random samples: a few or several hundred, so that all are listed or only the longest are."""
    rng = np.random.default_rng(seed)
    ones = np.ones(num_samples, np.int64)
    images = {"pairs": ones, "texts": 0 * ones, "nothing": 0 * ones}.get(kind, rng.integers(0, 4, num_samples))
    texts = ones if kind == "pairs" else rng.integers(0 if kind == "mixed" else 1, 4, num_samples)
    tokens = np.exp(rng.normal(3, 1.3, int(texts.sum()))).astype(np.int32)
    if kind == "mixed":
        tokens *= rng.integers(0, 2, len(tokens), dtype=np.int32)
    sides = rng.integers(1, 900, (2, int(images.sum()))).astype(np.int32)
    return ShardColumns(np.append(0, np.cumsum(texts)), tokens, np.append(0, np.cumsum(images)), sides[0], sides[1])


def make_job(changes: dict[str, Any], **modules: Any) -> Job:
    stream: dict[str, Any] = {"global_batch": 8, "seq_len": 1024, "packing": {"enabled": True}, **changes}
    return parse_job(job_data(stream=stream, execution={"end": {"steps": 1}}, **modules))


shards = st.tuples(st.integers(0, 2**32), st.sampled_from(KINDS), st.sampled_from([0, 1, 7, 90, 700]), st.booleans())
streams = st.fixed_dictionaries(
    {
        "seq_len": st.sampled_from([200, 600, 1024, 5000, 100_000]),
        "packing": st.sampled_from([{"enabled": True}, {"enabled": True}, {"enabled": False}]),
        "sizing": st.sampled_from(
            [{"patch": 14, "merge": 2, "max_patches": 1024}, {"patch": 16, "merge": 1, "max_patches": 100}]
        ),
        "generation": st.builds(
            lambda ratio, queries: {"ratio": ratio, "query_tokens": queries},
            st.sampled_from(["0", "0.3", "0.5", "0.999999999999", "1"]),
            st.sampled_from([1, 64, 150]),
        ),
    }
)


@settings(max_examples=150, deadline=None)
@given(st.lists(shards, min_size=1, max_size=4), streams)
def test_lengths_are_the_sums_over_all_samples(found: list[Found], changes: dict[str, Any]) -> None:
    job = make_job(changes, generator=1)
    statistics, expected = [], []
    for seed, kind, count, every in found:
        shard = columns(seed, kind, count)
        row = np.arange(count) if every else np.flatnonzero(np.random.default_rng(seed).integers(0, 2, count))
        statistics.append(row_statistics(job.stream.sizing, shard, row))
        try:
            table = size_rows(job.stream, shard, row, "shard")
        except SampleTooLargeError:
            expected.append(None)
        else:
            expected.append((int(units_of(job.stream, table).sum()), len(table.row), len(table.image_rows)))
    joined = join_statistics(statistics)
    lengths, certain = axis_lengths(job.stream, joined)
    for i, values in enumerate(expected):
        if values is None:
            assert not certain[i]
        else:
            assert (joined.samples[i], joined.images[i]) == values[1:]
            assert not certain[i] or lengths[i] == values[0]
    order = np.random.default_rng(found[0][0]).permutation(len(found))
    again, certain_again = axis_lengths(job.stream, joined.take(order))
    assert (again.tolist(), certain_again.tolist()) == (lengths[order].tolist(), certain[order].tolist())


def test_many_shards_are_laid_out_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    job = make_job({"generation": {"ratio": "0.3", "query_tokens": 64}}, generator=1)
    shards = [columns(seed, kind, 90) for seed, kind in enumerate(KINDS)]
    statistics = join_statistics([row_statistics(job.stream.sizing, shard, np.arange(90)) for shard in shards])
    whole = axis_lengths(job.stream, statistics)
    monkeypatch.setattr("dataserver.planning.stream.statistics.BLOCK", 2)
    assert [a.tolist() for a in axis_lengths(job.stream, statistics)] == [a.tolist() for a in whole]


@pytest.mark.parametrize("kind", ["pairs", "documents", "texts"])
@pytest.mark.parametrize("ratio", ["0", "0.3", "1"])
def test_ordinary_shards_are_certain(kind: str, ratio: str) -> None:
    """Nothing is gained by a statistics that never knows: captions under long sequences, most of them not listed."""
    job = make_job({"seq_len": 8192, "generation": {"ratio": ratio}}, generator=1)
    shard = columns(1, kind, 10 * LISTED)
    lengths, certain = axis_lengths(job.stream, row_statistics(job.stream.sizing, shard, np.arange(10 * LISTED)))
    assert certain.all()
    assert lengths[0] == units_of(job.stream, size_rows(job.stream, shard, np.arange(10 * LISTED), "shard")).sum()


def test_longest_samples_that_are_cut_are_known_one_by_one() -> None:
    shard = columns(3, "pairs", 10 * LISTED)
    row = np.arange(10 * LISTED)
    text = np.sort(shard.text_tokens)
    job = make_job({"seq_len": 280 + int(text[-LISTED]), "generation": {"ratio": "0.5"}}, generator=1)
    table = size_rows(job.stream, shard, row, "shard")
    assert (table.nominal == job.stream.seq_len).any(), "some are cut"
    lengths, certain = axis_lengths(job.stream, row_statistics(job.stream.sizing, shard, row))
    assert certain.all()
    assert lengths[0] == table.nominal.sum()
    shorter = make_job({"seq_len": 280, "generation": {"ratio": "0.5"}}, generator=1)
    assert not axis_lengths(shorter.stream, row_statistics(job.stream.sizing, shard, row))[1].any()


LAYOUTS: list[dict[str, Any]] = [
    {"encoder": 2, "generator": 1},
    {"encoder": 0, "generator": 1},
    {"encoder": 1, "generator": 0},
]


@settings(max_examples=150, deadline=None)
@given(
    st.lists(shards, min_size=1, max_size=3),
    st.sampled_from(LAYOUTS),
    st.sampled_from(["0", "0.4", "1"]),
    st.sampled_from([None, 40, 300, 1500, 9000]),
    st.booleans(),
    st.booleans(),
)
def test_what_a_measure_clears_is_never_refused(
    found: list[Found], modules: dict[str, Any], ratio: str, budget: int | None, padded: bool, colocated: bool
) -> None:
    ratio = ratio if modules["generator"] else "0"
    data = job_data(
        stream={"global_batch": 8, "seq_len": 2000, "generation": {"ratio": ratio}},
        execution={"end": {"steps": 1}},
        **modules,
    )
    for module in data["execution"]["modules"]:
        if budget is not None:
            module["memory"] = {"budget_bytes": budget, "unit_bytes": 1}
        if padded and module["kind"] != "backbone":
            module["padded"] = True
        if colocated:
            module["dp"], memory = 2, module.pop("memory", None)
            if memory is not None and module["kind"] == "encoder":
                module["memory"] = {**memory, "step_bytes": budget}
    if colocated:
        data["execution"]["layout"] = {"kind": "colocated"}
    job = parse_job(data)
    limits = layout_of(job.spec.execution).limits(job.spec)
    parts = [columns(seed, kind, count) for seed, kind, count, _ in found]
    statistics = join_statistics(
        [row_statistics(job.stream.sizing, p, np.arange(len(p.text_offsets) - 1)) for p in parts]
    )
    clear, certain = limits.add_statistics(0, statistics), axis_lengths(job.stream, statistics)[1]
    for i in np.flatnonzero(clear & certain).tolist():
        table = size_rows(job.stream, parts[i], np.arange(len(parts[i].text_offsets) - 1), "shard")
        limits.add(0, table, "shard")
    if budget is None and modules["encoder"] and (modules["generator"] or ratio == "0"):
        assert clear.all()


def test_a_golden_measure() -> None:
    """Measures are kept on disk: what changes one takes another `STATISTICS_VERSION` (`jobs/statistics_cache.py`)."""
    sizing = make_job({}).stream.sizing
    found = join_statistics([row_statistics(sizing, columns(i, k, 300), np.arange(300)) for i, k in enumerate(KINDS)])
    digest = hashlib.sha256()
    for field in fields(ShardStatistics):
        part = getattr(found, field.name)
        for array in (part.at, part.values) if isinstance(part, Lists) else (part,):
            digest.update(array.astype("<i8").tobytes())
    assert found.samples.tolist() == [300] * 5
    assert digest.hexdigest() == "cc7be41a112749ac4a9c7eac40b970e8576f6a2122c697f06284ce001fbe8afa"


@pytest.mark.parametrize(("batch", "known"), [(LISTED // 2, True), (LISTED, True), (2 * LISTED, False)])
def test_a_shard_is_not_clear_if_more_texts_meet_than_its_measure_lists(batch: int, known: bool) -> None:
    towers = [{"name": m, "kind": "tower", "modality": m} for m in ("image", "text")]
    towers[1] |= {"memory": {"budget_bytes": 2**40, "unit_bytes": 1}}
    data = job_data(
        stream={"global_batch": batch, "contrastive_batch": batch, "packing": {"enabled": False}},
        execution={"modules": towers, "layout": {"kind": "contrastive"}},
    )
    spec, shard = parse_job(data).spec, columns(1, "pairs", 10 * LISTED)
    statistics = row_statistics(spec.stream.sizing, shard, np.flatnonzero(shard.text_tokens))
    assert TowerLimits(spec).add_statistics(0, statistics).tolist() == [known]
