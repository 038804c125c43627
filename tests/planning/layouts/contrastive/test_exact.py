"""Towers to the last number: profiles, choices, refusals, and plans of small jobs, pinned."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
from builders.contrastive import contrastive_job, contrastive_samples, contrastive_table, tower
from builders.jobs import in_version
from planning.scattered import digest, numbers

from dataserver.planning.balancing import BALANCERS, BinBudget
from dataserver.planning.job.fields import Memory, ModuleSpec
from dataserver.planning.job.identity import Job, JobSpecError
from dataserver.planning.layouts.contrastive.batches import (
    balance_batches,
    batches_in_order,
    contrastive_batches,
    deal_by_size,
    pad_batches,
)
from dataserver.planning.layouts.contrastive.choice import (
    TowerCluster,
    TowerDegree,
    TowerPlan,
    TowerProfile,
    choose_towers,
    devices_in_parallel,
    devices_shared_equally,
    share_time,
)
from dataserver.planning.layouts.contrastive.limits import TowerLimits
from dataserver.planning.layouts.contrastive.options import ContrastiveOptions, ContrastiveSchedule
from dataserver.planning.layouts.contrastive.profiles import tower_profile, with_degrees
from dataserver.planning.layouts.contrastive.timeline import bound_ns
from dataserver.planning.planner import plan_step, timeline


def outcome(call: Callable[[], Any]) -> Any:
    """What comes out, or why nothing does."""
    try:
        return call()
    except ValueError as error:
        return str(error)


def test_profiles_round_up_what_devices_share() -> None:
    cost = {"microbatch_ns": 1_003, "linear_ps": 2_000_001, "quadratic_fs": 5_000_003, "backward_percent": 133}
    image = ModuleSpec(name="image", kind="tower", modality="image", dp=3, tp=2, sp=3, cost=cost)
    held = image.model_copy(update={"memory": Memory(budget_bytes=1_000, unit_bytes=7)})
    sizes, cluster = np.array([4, 6, 20, 10, 5, 5]), TowerCluster(12, 6, 10_000)
    profile = tower_profile(held, sizes, batch=2, microbatches=3, state_bytes=1_001, cluster=cluster)
    forward = [n * 2_000_001 // 1_000 + n * n * 5_000_003 // 10**6 for n in sizes.tolist()]
    work_ps = 1_000 * sum(f + f * 133 // 100 for f in forward) * 6
    assert profile.name == "image"
    assert profile.degrees == tuple(
        TowerDegree(
            tp=tp,
            fixed_ns=3 * (1_003 * 233 // 100),
            sample_ps=-(-work_ps // (6 * tp)),
            state_bytes=-(-1_001 // tp),
            sample_bytes=-(-7 * 30 * 6 // (2 * tp)),
        )
        for tp in (1, 2, 3, 6)
    )
    free = tower_profile(image, sizes, batch=3, microbatches=1, state_bytes=0, cluster=cluster)
    assert [d.sample_bytes for d in free.degrees] == [0] * 4
    changed = with_degrees(held, tp=5, replicas=4, free_bytes=91)
    assert (changed.dp, changed.tp, changed.pp, changed.sp) == (4, 5, 1, 1)
    assert changed.memory == Memory(budget_bytes=91, unit_bytes=9)  # 42 of all six, divided by five
    assert changed.cost.model_dump() == {
        **held.cost.model_dump(),
        "linear_ps": -(-2_000_001 * 6 // 5),
        "quadratic_fs": -(-5_000_003 * 6 // 5),
    }
    assert with_degrees(image, 1, 1, 5).memory is None


def tower_choices() -> Iterator[TowerPlan | str]:
    for seed in range(60):
        fixed, ps, state, sample = numbers(seed, 24, 0, 9).reshape(4, 6)
        towers = [
            TowerProfile(
                f"tower{t}",
                tuple(
                    TowerDegree(tp, int(fixed[t + d]), 1_000 * int(ps[t + d]) + 500, int(state[t + d]), int(sample[t]))
                    for d, tp in enumerate(((1, 2, 4), (2, 1), (4, 3, 0, 1))[t])
                ),
            )
            for t in range(1 + seed % 3)
        ]
        cluster = TowerCluster(1 + seed % 9, 4, (20, 40, 90)[seed // 3 % 3])
        for place, microbatches in product(
            (devices_in_parallel, share_time, devices_shared_equally, choose_towers), (1, 2)
        ):
            yield outcome(partial(place, towers, cluster, (8, 12)[seed % 2], microbatches))


def test_golden_choices_of_towers() -> None:
    """With ties, with nothing that fits, and what is then said."""
    assert digest(list(tower_choices())) == "e108c9c9850e5c1b"


def spread(seed: int) -> Iterator[list[list[int]] | str]:
    ranks, each, items, batches = 1 + seed % 4, 1 + seed % 3, 1 + seed % 5, 1 + seed % 2
    size = ranks * each * items
    batch = contrastive_batches(size * batches, size)
    loads = numbers(seed, size * batches, 0, (5, 90)[seed % 2])
    need = numbers(seed + 1, size * batches, 0, 9)
    budget = BinBudget(need, int(need.sum()) // batches // ranks + 3 * items)
    ways: list[Callable[[], Any]] = [partial(batches_in_order, loads, batch, ranks, each)]
    ways += [
        partial(balance_batches, loads, batch, ranks, each, BALANCERS[b], r)
        for b in ("lpt", "search")
        for r in (None, budget)
    ]
    ways += [
        partial(pad_batches, loads, batch, ranks, each, r) for r in (None, budget, BinBudget(need, 9 * items * each))
    ]
    ways += [partial(deal_by_size, loads, batch, ranks, each, padded) for padded in (False, True)]
    for way in ways:
        found = outcome(way)
        yield found if isinstance(found, str) else [found.rank.tolist(), found.microbatch.tolist()]


def test_golden_batches() -> None:
    assert digest([list(spread(seed)) for seed in range(40)]) == "e3c124d17721e8c5"


def test_what_batches_must_be() -> None:
    none = np.zeros(0, np.int64)
    assert contrastive_batches(3, 1).tolist() == [0, 1, 2]
    assert contrastive_batches(0, 5).tolist() == []
    for size in (0, 3, -4):
        with pytest.raises(ValueError, match=f"4 items do not divide into contrastive batches of {size}; a smaller"):
            contrastive_batches(4, size)
    assert batches_in_order(none, none, 1, 1).rank.tolist() == []


def small_jobs() -> Iterator[Job]:
    """Two or three towers of every policy; the memory of some holds less than they would like."""
    costs = [
        {"microbatch_ns": 1_000, "linear_ps": 300_000 * n, "quadratic_fs": 10**6, "backward_percent": 50 * n}
        for n in (1, 3)
    ]
    for seed in range(36):
        each, towers = 1 + seed % 3, list[dict[str, Any]]()
        for number, modality in enumerate(("image", "text", "image")[: 2 + seed % 2]):
            dp, pp = 1 + (seed // 2 + number) % 3, 1 + (seed + number) % 3
            fields: dict[str, Any] = {
                "dp": dp,
                "pp": pp,
                "cost": costs[(seed + number) % 2],
                "padded": seed % 5 == number,
            }
            fields["balance"] = ("none", "lpt")[(seed + number) % 2]
            if (seed + number) % 4:
                units = (45, 95, 200)[seed // 4 % 3] * 12 * each // dp
                fields["memory"] = {"budget_bytes": 100 * units, "unit_bytes": 100}
            towers.append(tower(f"{modality}-{number}", modality, **fields))
        pipe = seed % 7 > 0
        job = contrastive_job(
            towers,
            batch=12 * each,
            groups=1 + seed % 4,
            microbatches=(1, each)[seed % 2],
            schedule="distmm_pipe" if pipe else "batch_sync",
            extra_in_flight=seed % 3 if pipe else 0,
            interaction_ns=777 * (seed % 3),
        )
        yield job


def planned(job: Job, number: int) -> list[object]:
    limits = TowerLimits(job.spec)
    found: list[object] = []
    try:
        for part in range(2):
            limits.add(0, contrastive_table(job, 9 + number, number + part), "a shard")
        limits.check([1 + number % 3])
    except ValueError as error:
        found.append(str(error))
    try:
        plan = plan_step(job, number, contrastive_samples(job, number))
    except ValueError as error:
        return [*found, str(error)]
    simulated = timeline(job.spec, plan)
    found += [plan.hash.hex(), [(c.name, c.makespan_ns) for c in plan.candidates]]
    found += [(d.subject, d.chosen, d.reason) for d in plan.decisions]
    found += [bound_ns(job, plan), simulated.makespan_ns, simulated.timeline.peak_bytes.tolist()]
    assert bound_ns(job, plan) <= simulated.makespan_ns
    return found


@pytest.mark.parametrize("part", range(2))
def test_golden_jobs(part: int) -> None:
    """Plans, what is said of them, bounds, and refusals with their advice; of version 7, since hashes name it."""
    jobs = [in_version(job, 7) for job in small_jobs()]
    found = [planned(job, number) for number, job in enumerate(jobs) if number % 2 == part]
    assert digest(found) == ("b8e5922f73091d90", "efc4514d72d6f01e")[part]


def test_options_and_their_largest_numbers() -> None:
    cost = {"microbatch_ns": 1_000, "linear_ps": 30_000, "quadratic_fs": 10**6, "backward_percent": 50}
    towers = [tower("image", "image", dp=2, cost=cost), tower("text", "text", dp=4, cost=cost)]
    job = contrastive_job(towers, batch=8, groups=5, microbatches=2, interaction_ns=1_234)
    options = job.spec.execution.options(ContrastiveOptions)
    assert options.num_microbatches(job.stream, job.spec.execution) == 10
    image = 8 * 64 * 30_000 // 1_000 + 8 * 64 * 64 * 10**6 // 10**6
    text = 8 * 77 * 30_000 // 1_000 + 8 * 77 * 77 * 10**6 // 10**6
    assert [(e.what, e.value, e.remedy) for e in options.extremes(job.stream, job.spec.execution)] == [
        ("nanoseconds of interactions", 5 * 1_234, "lower layout.interaction_ns"),
        ("nanoseconds of a contrastive batch of image x ranks", 1_000 * image * 2, ""),
        ("nanoseconds of a contrastive batch of text x ranks", 1_000 * text * 4, ""),
    ]
    plain = ContrastiveOptions(kind="contrastive")
    assert (plain.schedule, plain.microbatches) == (ContrastiveSchedule.DISTMM_PIPE, 1)
    assert (plain.extra_in_flight, plain.interaction_ns) == (0, 0)
    assert ContrastiveOptions(kind="contrastive", microbatches=65_536).microbatches == 65_536
    for count in (0, 65_537):
        with pytest.raises(ValueError, match="microbatches"):
            ContrastiveOptions(kind="contrastive", microbatches=count)
    with pytest.raises(
        JobSpecError, match=r"does not divide into dp 4 of text x layout.microbatches 4; .* multiple of 16"
    ):
        contrastive_job(towers, batch=8, microbatches=4)


def test_towers_that_just_fit() -> None:
    """One byte, or one device, less is too little."""
    towers = [TowerProfile(name, (TowerDegree(1, 5, 1_000, 30, 0),)) for name in ("image", "text")]
    assert share_time(towers, TowerCluster(1, 1, 60), 4).step_ns == 2 * (5 + 4)
    with pytest.raises(
        ValueError, match=r"towers \['image', 'text'\] together need more than 59 bytes .* from text on"
    ):
        share_time(towers, TowerCluster(1, 1, 59), 4)
    assert devices_in_parallel(towers, TowerCluster(2, 1, 30), 4).step_ns == 5 + 4
    with pytest.raises(ValueError, match=r"need at least \[1, 1\] devices of their own for a batch of 4, 1 are there"):
        devices_in_parallel(towers, TowerCluster(1, 1, 30), 4)
    with pytest.raises(ValueError, match=r"tower image fits no device: .* takes at least 30 bytes of the 29"):
        devices_in_parallel(towers, TowerCluster(2, 1, 29), 4)
    halves = [TowerProfile(name, (TowerDegree(2, 5, 1_000, 30, 0),)) for name in ("image", "text")]
    with pytest.raises(ValueError, match=r"0 of degrees \[2\] divide a node of 1; .* takes at least 0 bytes"):
        devices_in_parallel(halves, TowerCluster(2, 1, 30), 4)
