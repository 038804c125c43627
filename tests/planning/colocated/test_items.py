"""The phases of a job with colocated modules."""

from typing import Any

import numpy as np
import pytest
from builders.jobs import job_data
from builders.samples import make_samples
from hypothesis import given, settings
from hypothesis import strategies as st

from dataserver.planning.balancing import BALANCERS, Memory, bin_loads
from dataserver.planning.colocated.arranging import arrange_phases
from dataserver.planning.colocated.items import ModulePhase, module_items, module_phase, phase_links
from dataserver.planning.colocated.microbatches import fits, runs, split_ranks
from dataserver.planning.costs import forward_ns, padded_ns
from dataserver.planning.identity import Job, parse_job
from dataserver.planning.jobspec import ModuleKind
from dataserver.planning.packing import best_fit_decreasing
from dataserver.planning.samples import I64, StepSamples, Task

BYTES = 1_024
RANKS = 4
NODE = np.arange(RANKS) // 2


def colocated_job(generator: bool = True, packed: bool = True, **changes: dict[str, Any]) -> Job:
    """Four ranks; `changes` are fields of modules by name."""
    data = job_data(
        stream={
            "seq_len": 900,
            "global_batch": 64,
            "sizing": {"max_patches": 256},
            "generation": {"query_tokens": 16, "ratio": "0.4" if generator else "0"},
            "packing": {"enabled": packed},
        },
        execution={"layout": {"kind": "colocated", "ranks_per_node": 2, "row_bytes": BYTES}, "microbatch": 4},
        encoder=RANKS,
        backbone=(RANKS, 1),
        generator=RANKS * generator,
    )
    data["execution"]["modules"] = [{**m, **changes.get(m["name"], {})} for m in data["execution"]["modules"]]
    return parse_job(data)


def phases_of(job: Job, samples: StepSamples, sequence: I64, microbatches: int = 4) -> list[ModulePhase]:
    items = module_items(job.spec, samples, sequence)
    return [module_phase(i, int(sequence.max(initial=-1)) + 1, RANKS, microbatches) for i in items]


@given(st.integers(0, 2**32), st.booleans(), st.booleans())
@settings(max_examples=30, deadline=None)
def test_phases_hold_what_the_step_holds(seed: int, generator: bool, packed: bool) -> None:
    job = colocated_job(generator, packed)
    samples = make_samples(job, 60, seed, 3)
    sequence = best_fit_decreasing(samples.tokens, 900) if packed else np.arange(len(samples))
    found = phases_of(job, samples, sequence)
    assert [p.phase.name for p in found] == ["vit", "llm", "dit"][: 2 + generator]
    understood = samples.task[samples.image_sample] == Task.UNDERSTANDING
    for phase, module in zip(found, job.spec.execution.modules, strict=True):
        assert phase.phase.constant_ns == 4 * module.cost.microbatch_ns
        if module.kind is ModuleKind.BACKBONE:
            loads = forward_ns(module.cost, samples.tokens)
            expected = [int(loads[sequence == s].sum()) for s in range(int(sequence.max()) + 1)]
            assert sequence[phase.phase.sample].tolist() == list(range(len(expected)))
        else:
            images = np.flatnonzero(understood == (module.kind is ModuleKind.ENCODER))
            expected = forward_ns(module.cost, samples.patches[images]).tolist()
            assert phase.phase.sample.tolist() == samples.image_sample[images].tolist()
        assert phase.phase.loads.tolist() == expected
        assert int(phase.home_loads.sum()) == sum(expected) + RANKS * phase.phase.constant_ns
    links = phase_links(found, BYTES)
    assert links[0].target_item.tolist() == sequence[samples.image_sample[understood]].tolist()
    assert links[0].rows.tolist() == (samples.patches[understood] // 4).tolist()
    assert links[0].source_item.tolist() == list(range(int(understood.sum())))
    if generator:
        assert (links[1].source, links[1].target) == ("llm", "dit")
        assert links[1].source_item.tolist() == sequence[samples.image_sample[~understood]].tolist()
        assert set(links[1].rows.tolist()) == {16}


def test_phases_are_balanced_each_for_itself() -> None:
    """Far closer to its bound than the backbone's arrangement would leave the encoder."""
    search = {"balance": "lpt_search"}
    job = colocated_job(packed=False, vit=search, llm=search, dit=search)
    samples = make_samples(job, 400, 0, 3)
    found = phases_of(job, samples, np.arange(400), 25)
    links = phase_links(found, BYTES)
    plan = arrange_phases([p.phase for p in found], links, NODE)
    for arrangement in plan.arrangements:
        assert int(arrangement.loads.max()) * 1_000 <= arrangement.bound_ns * 1_001
    vit, backbone = found[0].phase, plan.arrangement("llm").places
    beside = vit.rank_loads(backbone.rank[links[0].target_item], RANKS)
    assert int(beside.max()) * 100 > plan.arrangement("vit").bound_ns * 103
    assert plan.bytes_between_nodes < plan.identity_bytes


@given(st.integers(0, 2**32), st.integers(1, 5), st.sampled_from(["none", "lpt", "karmarkar_karp", "lpt_search"]))
@settings(max_examples=40, deadline=None)
def test_padded_items_become_microbatches_first(seed: int, microbatches: int, balance: str) -> None:
    """The phase's items are all microbatches, as costly as their largest image, and never slower than canonical."""
    job = colocated_job(generator=False, packed=False, vit={"padded": True, "balance": balance})
    samples = make_samples(job, 50, seed, 3)
    found = phases_of(job, samples, np.arange(50), microbatches)[0]
    cost, count = found.items.module.cost, RANKS * microbatches
    times = padded_ns(cost, found.items.sizes, found.unit, count)
    assert (times - cost.microbatch_ns).tolist() == found.phase.loads.tolist()
    for batch in np.unique(found.unit).tolist():
        assert found.phase.sample[batch] == found.items.sample[found.unit == batch].min()
    rank = arrange_phases([found.phase], [], NODE).arrangement("vit")
    assert np.bincount(rank.places.rank).tolist() == [microbatches] * RANKS
    assert int(rank.loads.max()) <= int(found.home_loads.max())
    if balance == "none":
        assert sorted(rank.loads.tolist()) == sorted(found.home_loads.tolist())


def test_a_policy_that_is_slower_gives_way() -> None:
    """Longest first puts 3, 3, 2, 2, 2 on two ranks as 7 and 5; in canonical order they are 6 and 6."""
    job = colocated_job(generator=False, packed=False)
    samples = make_samples(job, 5, 0, 1)
    items = module_items(job.spec, samples, np.arange(5))[1]
    changed = type(items)(
        items.module, items.index, items.sizes, np.array([3, 3, 2, 2, 2]), items.sample, np.array([0, 0, 1, 1, 1]),
        items.rows, None,
    )  # fmt: skip
    phase = module_phase(changed, 2, 2, 1).phase
    assert phase.balancer(phase.loads, 2).tolist() == [0, 0, 1, 1, 1]


@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(1, 6), st.booleans())
@settings(max_examples=40, deadline=None)
def test_ranks_are_split_within_slots_and_memory(seed: int, ranks: int, microbatches: int, canonical: bool) -> None:
    draw = np.random.default_rng(seed)
    slots = 3
    rank = np.repeat(np.arange(ranks), draw.integers(0, slots * microbatches + 1, ranks))
    loads = draw.integers(0, 100, len(rank))
    memory = Memory(loads, 100 * slots)
    found = split_ranks(runs if canonical else BALANCERS["lpt"], loads, rank, ranks, microbatches, slots, memory)
    place = rank * microbatches + found
    assert np.bincount(place, minlength=ranks * microbatches).max() <= slots
    assert fits(loads, place, ranks * microbatches, memory, padded=False)
    for r in range(ranks):
        mine = found[rank == r]
        if canonical:
            assert (np.diff(mine) >= 0).all()
        else:
            assert list(dict.fromkeys(mine.tolist())) == list(range(len(set(mine.tolist()))))


def test_runs_refuse_what_does_not_fit() -> None:
    loads = np.array([5, 5, 1, 1])
    assert runs(loads, 2).tolist() == [0, 0, 1, 1]
    with pytest.raises(ValueError, match="4 items in canonical order exceed the memory of 2 bins"):
        runs(loads, 2, None, Memory(loads, 9))
    with pytest.raises(ValueError, match="4 items do not fit 2 bins of 1"):
        runs(loads, 2, 1)


def test_sequences_must_fit_the_samples() -> None:
    job = colocated_job(generator=False)
    samples = make_samples(job, 4, 0, 3)
    for sequence in ([0, 1, 2], [0, 1, 3, 3], [-1, 0, 1, 2]):
        with pytest.raises(ValueError, match="numbered from 0 without gaps"):
            module_items(job.spec, samples, np.array(sequence))


def test_a_step_without_samples() -> None:
    job = colocated_job()
    found = phases_of(job, make_samples(job, 0), np.zeros(0, np.int64))
    plan = arrange_phases([p.phase for p in found], phase_links(found, BYTES), NODE)
    for phase, arrangement in zip(found, plan.arrangements, strict=True):
        assert arrangement.loads.tolist() == [phase.phase.constant_ns] * RANKS
        assert bin_loads(phase.phase.loads, arrangement.places.rank, RANKS).tolist() == [0] * RANKS
    assert plan.bytes_between_nodes == plan.identity_bytes == 0
