"""How the items of colocated modules are spread over batches and microbatches."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from builders.colocated import colocated_job
from builders.samples import make_samples
from hypothesis import given, settings
from hypothesis import strategies as st

from dataserver.planning.balancing import BinBudget, BinBudgetError, bin_loads, bin_totals, lower_bound
from dataserver.planning.costs.model import forward_ns
from dataserver.planning.job.fields import BalancePolicy, Memory, ModuleKind
from dataserver.planning.job.identity import Job
from dataserver.planning.layouts.colocated.items import ModuleItems, module_items
from dataserver.planning.layouts.colocated.spreading import Spread, runs, spread_beside, spread_items
from dataserver.planning.stream.packing import best_fit_decreasing
from dataserver.planning.stream.samples import Task

RANKS = 4
POLICIES = ["none", "lpt"]


def job_of(generator: bool = True, packed: bool = True, **changes: dict[str, Any]) -> Job:
    """Four ranks; `changes` are fields of modules by name."""
    kinds = {"vit": "encoder", "llm": "backbone", **({"dit": "generator"} if generator else {})}
    return colocated_job(
        [{"name": name, "kind": kind, "dp": RANKS, **changes.get(name, {})} for name, kind in kinds.items()],
        microbatch=4,
        global_batch=64,
        generation={"query_tokens": 16, "ratio": "0.4" if generator else "0"},
        packing={"enabled": packed},
    )


def items_of(module: str, count: int, seed: int = 0, **changes: Any) -> ModuleItems:
    """The items of one module, each sample a sequence."""
    job = job_of(False, False, **{module: changes})
    found = module_items(job.spec, make_samples(job, count, seed, 3), np.arange(count))
    return next(i for i in found if i.module.name == module)


def slowest(items: ModuleItems, spread: Spread, microbatches: int) -> int:
    """Forward time of the slowest batch, padding and what no item causes included."""
    place = spread.batch * microbatches + spread.microbatch
    times = bin_totals(items.loads, place, RANKS * microbatches, padded=items.module.padded)
    return microbatches * items.module.cost.microbatch_ns + int(times.reshape(RANKS, -1).sum(axis=1).max())


def bound(items: ModuleItems, microbatches: int) -> int:
    return microbatches * items.module.cost.microbatch_ns + lower_bound(items.loads, RANKS)


@given(st.integers(0, 2**32), st.booleans(), st.booleans())
@settings(max_examples=30, deadline=None)
def test_items_are_those_of_the_step(seed: int, generator: bool, packed: bool) -> None:
    job = job_of(generator, packed)
    samples = make_samples(job, 60, seed, 3)
    sequence = best_fit_decreasing(samples.tokens, 900) if packed else np.arange(len(samples))
    found = module_items(job.spec, samples, sequence)
    assert [i.module.name for i in found] == ["vit", "llm", "dit"][: 2 + generator]
    understood = samples.task[samples.image_sample] == Task.UNDERSTANDING
    for items in found:
        cost, kind = items.module.cost, items.module.kind
        if kind is ModuleKind.BACKBONE:
            mine = [np.flatnonzero(sequence == s) for s in range(int(sequence.max()) + 1)]
            assert items.sizes.tolist() == [int(samples.tokens[m].sum()) for m in mine]
            assert items.loads.tolist() == [int(forward_ns(cost, samples.tokens[m]).sum()) for m in mine]
            assert items.slots == 4
        else:
            images = np.flatnonzero(understood == (kind is ModuleKind.ENCODER))
            patches = samples.patches[images]
            assert items.index.tolist() == images.tolist()
            assert items.loads.tolist() == forward_ns(cost, patches).tolist()
            assert items.sequence.tolist() == sequence[samples.image_sample[images]].tolist()
            assert items.rows.tolist() == (patches // 4 if kind is ModuleKind.ENCODER else 16 + 0 * images).tolist()


def test_each_module_is_balanced_for_itself() -> None:
    """Far closer to its bound than the batches of the backbone would leave the encoder."""
    job = job_of(False, False)
    beside_ns = bound_ns = 0
    for seed in range(8):
        vit, llm = module_items(job.spec, make_samples(job, 400, seed, 3), np.arange(400))
        (images, _), (sequences, _) = (spread_items(i, 400, 25) for i in (vit, llm))
        for items, spread in ((vit, images), (llm, sequences)):
            assert slowest(items, spread, 25) * 1_000 <= bound(items, 25) * 1_001
        beside = spread_beside(vit, sequences, 25)
        assert beside.batch.tolist() == sequences.batch[vit.sequence].tolist()
        beside_ns, bound_ns = beside_ns + slowest(vit, beside, 25), bound_ns + bound(vit, 25)
    assert beside_ns * 100 > bound_ns * 103


@given(st.integers(0, 2**32), st.integers(1, 5), st.sampled_from(POLICIES))
@settings(max_examples=40, deadline=None)
def test_padded_items_become_microbatches_first(seed: int, microbatches: int, balance: str) -> None:
    """Every batch has as many microbatches, each as costly as its largest item; never slower than canonical."""
    items = items_of("vit", 50, seed, padded=True, balance=balance)
    spread, at_home = spread_items(items, 50, microbatches)
    assert set(spread.microbatch.tolist()) <= set(range(microbatches))
    place = spread.batch * microbatches + spread.microbatch
    times = bin_totals(items.loads, place, RANKS * microbatches, padded=True) + items.module.cost.microbatch_ns
    times = times.reshape(RANKS, -1).sum(axis=1)
    assert int(times.max()) == slowest(items, spread, microbatches) <= int(at_home.max())
    if balance == "none":
        assert times.tolist() == at_home.tolist()


def test_a_policy_that_is_slower_gives_way() -> None:
    """Longest first puts 3, 3, 2, 2, 2 on two ranks as 7 and 5; in canonical order they are 6 and 6."""
    items = items_of("vit", 5)
    module = items.module.model_copy(update={"dp": 2})
    five, home = np.array([3, 3, 2, 2, 2]), np.array([0, 0, 1, 1, 1])
    items = replace(items, module=module, loads=five, sizes=five, index=np.arange(5), sequence=home, rows=five)
    spread, at_home = spread_items(items, 2, 1)
    assert spread.batch.tolist() == home.tolist()
    assert (at_home - module.cost.microbatch_ns).tolist() == [6, 6]


@given(st.integers(0, 2**32), st.integers(1, 6), st.sampled_from(POLICIES), st.booleans())
@settings(max_examples=60, deadline=None)
def test_spreads_keep_slots_and_memory_or_are_refused(seed: int, microbatches: int, balance: str, padded: bool) -> None:
    """Three slots of 1,200 tokens; refusals name the module."""
    refusal, memory = "", {"budget_bytes": 1200, "unit_bytes": 1}
    count = int(np.random.default_rng(seed).integers(0, 3 * RANKS * microbatches + 1))
    items = replace(items_of("llm", count, seed, balance=balance, padded=padded, memory=memory), slots=3)
    try:
        spread, at_home = spread_items(items, count, microbatches)
    except BinBudgetError as error:
        spread, at_home, refusal = None, None, str(error)
    if spread is None or at_home is None:
        assert refusal.startswith("module llm: ")
        return
    place = spread.batch * microbatches + spread.microbatch
    assert np.bincount(place, minlength=1).max() <= 3
    assert bin_totals(items.sizes, place, RANKS * microbatches, padded=padded).max() <= 1200
    assert len(at_home) == RANKS
    if balance == "none":
        assert (np.diff(place) >= 0).all()


def test_memory_that_canonical_order_exceeds() -> None:
    """Images of 9, 1, 1 and 1 patches fit two batches of 10, but not beside sequences that have two each."""
    items = items_of("vit", 4)
    memory = Memory(budget_bytes=9, unit_bytes=1)
    sizes, home = np.array([9, 1, 1, 1]), np.array([0, 0, 1, 1])
    module = items.module.model_copy(update={"dp": 2, "memory": memory})
    items = replace(items, module=module, loads=sizes, sizes=sizes, index=home, sequence=home, rows=home)
    assert spread_items(items, 2, 1)[0].batch.tolist() == [0, 1, 1, 1]
    backbone = Spread(np.array([0, 1]), np.array([0, 0]))
    with pytest.raises(BinBudgetError, match=r"module vit: .*memory"):
        spread_beside(items, backbone, 1)
    refused = replace(items, module=module.model_copy(update={"balance": BalancePolicy.NONE}))
    with pytest.raises(BinBudgetError, match="module vit: the items of a rank in canonical order exceed its memory"):
        spread_items(refused, 2, 1)
    padded = replace(refused, module=refused.module.model_copy(update={"padded": True}))
    with pytest.raises(BinBudgetError, match="module vit: its microbatches in canonical order exceed its memory"):
        spread_items(padded, 2, 1)
    sizes = np.array([5, 5, 2, 2])
    pads = replace(items, module=module.model_copy(update={"padded": True}), loads=sizes, sizes=sizes)
    with pytest.raises(BinBudgetError, match="module vit: the images beside their sequences exceed its memory"):
        spread_beside(pads, Spread(np.array([0, 0]), np.array([0, 0])), 2)


def test_runs_refuse_what_does_not_fit() -> None:
    loads = np.array([5, 5, 1, 1])
    assert runs(loads, 2).tolist() == [0, 0, 1, 1]
    with pytest.raises(BinBudgetError, match="4 items in canonical order exceed the memory of 2 bins"):
        runs(loads, 2, None, BinBudget(loads, 9))
    with pytest.raises(ValueError, match="4 items do not fit 2 bins of 1"):
        runs(loads, 2, 1)
    assert bin_loads(loads, runs(loads, 2), 2).tolist() == [10, 2]
