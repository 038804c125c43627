"""Weights in pieces of steps, against exact sums step by step and against a walk along whole axes."""

import json
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from builders.jobs import dataset, make_job
from builders.samples import SyntheticDatasets, make_table, sample_number
from hypothesis import given, settings
from hypothesis import strategies as st

from dataserver.planning.job.fields import MAX_TEXT_BYTES, Stream, TextError, parse_json
from dataserver.planning.job.fields.weights import MAX_PIECES
from dataserver.planning.job.identity import JobSpecError, canonical_json
from dataserver.planning.stream.mixture import Mixture
from dataserver.planning.stream.order import DatasetEmptyError

STEPS = 24


def piece(from_step: int, weight: str) -> dict[str, object]:
    return {"from_step": from_step, "weight": weight}


@st.composite
def mixtures(draw: st.DrawFn) -> dict[str, object]:
    """Streams of one to three datasets, each with a weight that changes at some steps; d0 never has none."""
    borders = [0, *sorted(draw(st.sets(st.integers(1, STEPS), max_size=6)))]
    datasets = []
    for number in range(draw(st.integers(1, 3))):
        weights = [draw(st.sampled_from(["0", "0.001", "0.3", "1", "7.77"])) for _ in borders]
        pieces = [piece(*of) for of in zip(borders, weights, strict=True)]
        if number == 0:
            pieces = [one | {"weight": "0.7"} if one["weight"] == "0" else one for one in pieces]
        datasets.append(dataset(f"d{number}", weight=pieces if draw(st.booleans()) or number == 0 else "0.9"))
    return {
        "datasets": datasets,
        "packing": {"enabled": draw(st.booleans()), "fill": draw(st.sampled_from(["1", "0.97", "0.333"]))},
        "global_batch": draw(st.integers(1, 7)),
        "shuffle_window": draw(st.integers(1, 4)),
    }


def exact(stream: Stream, steps: int) -> list[list[Fraction]]:
    """What each dataset should have given before each step, added up one step after the other."""
    tokens = Fraction(stream.packing.fill) * stream.seq_len if stream.packing.enabled else Fraction(1)
    due = [[Fraction(0)] * len(stream.datasets)]
    for step in range(steps):
        weights = [Fraction(weight) for weight in stream.weights_at(step)]
        each = [weight / sum(weights) * stream.global_batch * tokens for weight in weights]
        due.append([before + share for before, share in zip(due[-1], each, strict=True)])
    return due


@settings(max_examples=60, deadline=None)
@given(stream=mixtures())
def test_bounds_are_the_exact_sums(stream: dict[str, object]) -> None:
    made = make_job(stream=stream).stream
    mixture = Mixture(made)
    bounds = [list(mixture.bounds(step)) for step in range(STEPS + 8)]
    for due, found in zip(exact(made, STEPS + 7), bounds, strict=True):
        off = [share - units for share, units in zip(due, found, strict=True)]
        if made.packing.enabled:
            assert all(-1 < value < 1 + Fraction(1, 2**32) for value in off)
        else:  # what datasets round off goes to those behind them
            assert all(abs(value) < len(off) for value in off)
    for step, (before, after) in enumerate(pairwise(bounds)):
        taken = [b - a for a, b in zip(before, after, strict=True)]
        assert min(taken) >= 0
        assert not any(units for units, weight in zip(taken, made.weights_at(step), strict=True) if weight == "0")
        assert made.packing.enabled or sum(taken) == made.global_batch


@settings(max_examples=16, deadline=None)
@given(stream=mixtures(), order=st.permutations(range(STEPS)), seed=st.integers(0, 1000))
def test_any_step_is_the_walk_and_epochs_go_on_over_borders(
    stream: dict[str, object], order: list[int], seed: int
) -> None:
    job = make_job(stream=stream, execution={"end": {"steps": STEPS}})
    rng = np.random.default_rng(seed)
    shards = [[make_table(job, rng, int(n)) for n in rng.integers(0, 9, 4)] for _ in job.stream.datasets]
    shards = [[*some[:-1], make_table(job, rng, 3)] for some in shards]
    data = SyntheticDatasets(job, shards)
    found = {step: data.ids(step) for step in order}
    for number, tables in enumerate(shards):
        every = sorted(sample_number(shard, int(row)) for shard, table in enumerate(tables) for row in table.row)
        seen = [(epoch, sample) for step in range(STEPS) for d, epoch, sample in found[step] if d == number]
        epochs = [epoch for epoch, _ in seen]
        assert epochs == sorted(epochs)
        for epoch in set(epochs):
            of_epoch = sorted(sample for e, sample in seen if e == epoch)
            whole = epoch < epochs[-1]
            assert of_epoch == every if whole else set(of_epoch) <= set(every)
            assert len(set(of_epoch)) == len(of_epoch)


def test_fractions_of_samples_are_not_lost_where_weights_change_at_each_step() -> None:
    rising = [piece(step, str(1000 + step)) for step in range(400)]
    stream = make_job(
        stream={
            "datasets": [dataset("rare", weight="11"), dataset("web", weight=rising)],
            "packing": {"enabled": False},
            "global_batch": 8,
        }
    ).stream
    due = exact(stream, 400)[-1][0]
    assert 20 < due < 40  # one sample in some fourteen steps
    assert Mixture(stream).bounds(400)[0] in (int(due) - 1, int(due), int(due) + 1)


def test_one_piece_is_a_constant_weight() -> None:
    changes = {"packing": {"enabled": False}, "global_batch": 7}
    names = ("a", "b", "c")
    constant = [dataset(name, weight=weight) for name, weight in zip(names, ("0.3", "1", "0.001"), strict=True)]
    pieces = [one | {"weight": [piece(0, str(one["weight"])), piece(9, str(one["weight"]))]} for one in constant]
    one, other = (Mixture(make_job(stream={**changes, "datasets": some}).stream) for some in (constant, pieces))
    assert [one.bounds(step) for step in range(9)] == [other.bounds(step) for step in range(9)]
    assert [abs(a - b) < 2 for a, b in zip(one.bounds(1000), other.bounds(1000), strict=True)] == [True] * 3


def test_an_end_by_epochs_counts_over_the_pieces() -> None:
    def job(*weights: object, **end: object) -> SyntheticDatasets:
        stream = {
            "datasets": [dataset(f"d{i}", weight=weight) for i, weight in enumerate(weights)],
            "packing": {"enabled": False},
            "global_batch": 4,
        }
        made = make_job(stream=stream, execution={"end": end or {"epochs": 1}})
        rng = np.random.default_rng(1)
        return SyntheticDatasets(made, [[make_table(made, rng, 20)] for _ in weights])

    curriculum = job([piece(0, "1"), piece(5, "0")], [piece(0, "0"), piece(5, "1")])
    assert curriculum.order.num_steps == 10
    assert {d for step in range(5) for d, _, _ in curriculum.ids(step)} == {0}
    assert {d for step in range(5, 10) for d, _, _ in curriculum.ids(step)} == {1}
    with pytest.raises(ValueError, match=r"datasets \['d0'\] have weight 0 from step 4 on, before they complete 1"):
        job([piece(0, "1"), piece(4, "0")], [piece(0, "0"), piece(4, "1")])
    assert job([piece(0, "1"), piece(4, "0")], [piece(0, "0"), piece(4, "1")], steps=9).order.num_steps == 9


def test_the_fullest_piece_decides_what_a_step_may_hold() -> None:
    weights = [piece(0, "1"), piece(10, "0")], [piece(0, "0"), piece(10, "1")]
    stream = {
        "datasets": [dataset(f"d{i}", weight=weight) for i, weight in enumerate(weights)],
        "packing": {"enabled": False},
        "global_batch": 4,
    }
    job = make_job(stream=stream, execution={"end": {"steps": 20}})
    rng = np.random.default_rng(1)
    data = SyntheticDatasets(job, [[make_table(job, rng, 20)] for _ in weights])
    assert data.order.in_step([20, 100]) == 20  # 4 samples x 5 images
    short = make_job(stream=stream, execution={"end": {"steps": 10}})
    assert SyntheticDatasets(short, data.tables).order.in_step([20, 100]) == 4  # the second piece is never reached
    with pytest.raises(DatasetEmptyError, match="dataset d1"):
        SyntheticDatasets(job, [data.tables[0], [make_table(job, rng, 0)]])


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        ([], "found an empty list; it should have at least 1 item"),
        ([piece(0, "1"), piece(5, "2"), piece(5, "3")], "from step 5 behind one from step 5; list the pieces in asc"),
        ([piece(0, "1"), piece(7, "2"), piece(5, "3")], "from step 5 behind one from step 7"),
        ([piece(3, "1")], r"datasets \['a'\] have no weight at step 0, the first; begin each list"),
        ([piece(0, "1"), piece(9, "0")], "all dataset weights are 0 from step 9 on"),
        ([piece(0, "1e3")], "stream.datasets.0.weight.0.weight: found '1e3'; a decimal string"),
        ([piece(0, "1"), piece(2**64, "1")], "weight.1.from_step: found 18446744073709551616; it should be less"),
        ([piece(-1, "1")], "weight.0.from_step: found -1; it should be greater than or equal to 0"),
        ([piece(0, "1"), {"from_step": 3}], "weight.1.weight: Field required"),
        ([piece(step, "1") for step in range(MAX_PIECES + 1)], f"found a list; it should have at most {MAX_PIECES}"),
        ({"from_step": 0}, "weight: found a mapping; it should be a valid string"),
        ("-1", "weight: found '-1'; a decimal string"),
    ],
)
def test_hostile_pieces_are_refused(weight: object, message: str) -> None:
    with pytest.raises(JobSpecError, match=message):
        make_job(stream={"datasets": [dataset("a", weight=weight)]})


def test_millions_of_pieces_are_refused_unread() -> None:
    with pytest.raises(TextError, match=f"bytes; at most {MAX_TEXT_BYTES} are allowed"):
        parse_json('{"weight": [' + '{"from_step": 1, "weight": 1}, ' * 1_000_000 + "1]}")


def test_too_many_changes_of_a_chain_are_refused() -> None:
    other = [dataset(f"d{i}") for i in range(1, 512)]
    weight = [piece(0, "1"), *(piece(10**6 + step, "1") for step in range(7))]
    datasets = [dataset("d0", weight=weight), *other]
    alone = json.loads(canonical_json(make_job(stream={"datasets": datasets}).stream))
    chain = {"step": 1, "stream": alone}
    for step in range(2, 17):
        chain = {"step": step, "stream": {**alone, "continues": chain}}
    with pytest.raises(JobSpecError, match=r"change at 8 steps, which makes 69,632 weights .* 65,536 weights in all"):
        make_job(stream={"datasets": datasets, "continues": chain})
    make_job(stream={"datasets": datasets, "continues": chain["stream"]["continues"]})


def test_too_many_changes_of_too_many_datasets_are_refused() -> None:
    rising = [[piece(0, "1"), *(piece(number + 8 * i, "2") for i in range(1, 600))] for number in range(20)]
    with pytest.raises(JobSpecError, match=r"weights of 20 datasets change at .* 65,536 weights in all are allowed"):
        make_job(stream={"datasets": [dataset(f"d{i}", weight=weight) for i, weight in enumerate(rising)]})
