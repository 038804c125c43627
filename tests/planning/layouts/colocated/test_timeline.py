"""The time of phases with barriers, against drawn cases and a slow reference."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from builders.colocated import colocated_job, colocated_steps, samples_of
from hypothesis import given, settings
from planning.scattered import numbers

from dataserver.planning import I64
from dataserver.planning.costs.model import backward_ns
from dataserver.planning.job.fields import ModuleKind
from dataserver.planning.job.identity import Job
from dataserver.planning.layouts.colocated import timeline as timelines
from dataserver.planning.layouts.colocated.items import ModuleItems
from dataserver.planning.layouts.colocated.programs import schedules, step_phases
from dataserver.planning.layouts.colocated.timeline import run_phases
from dataserver.planning.plan.expectation import microbatch_loads
from dataserver.planning.planner import explain, plan_step, timeline
from dataserver.planning.simulation import Operation, OperationKind, critical_path
from dataserver.planning.stream.samples import StepSamples

FORWARD, BACKWARD = OperationKind.FORWARD, OperationKind.BACKWARD


def modules(*kinds: str, frozen: str = "") -> list[dict[str, object]]:
    names = {"encoder": "vit", "backbone": "llm", "generator": "dit"}
    found = []
    for number, kind in enumerate(kinds):
        name = names[kind] if names[kind] not in {m["name"] for m in found} else f"{names[kind]}{number}"
        percent = 0 if name == frozen else 200
        cost = {"linear_ps": 1, "quadratic_fs": 0, "backward_percent": percent}
        docs = {"datasets": ["docs"]} if name[-1].isdigit() else {}
        found.append({"name": name, "kind": kind, "dp": 2, "cost": cost, **docs})
    return found


FROZEN = [m | {"frozen": True} if m["name"] == "vit" else m for m in modules("encoder", "backbone", frozen="vit")]


def drawn(job: Job, microbatches: int, size: int = 0) -> list[str]:
    """Phases as text: F0 is a forward of the first module of the pipeline, E0 the exchange of what it leaves."""
    phases = step_phases(job.spec.execution, microbatches, size or microbatches)
    return [" ".join(f"{o.kind[0].upper()}{o.chunk}.{o.microbatch}" for o in phase) for phase in phases]


def test_phases_in_their_order() -> None:
    """Parameters are gathered (U) when a module's first phase begins, gradients are summed (R) behind its last one."""
    job = colocated_job(modules("encoder", "backbone", "generator"), generation={"ratio": "0.5"})
    assert drawn(job, 2) == [
        "U0.0 F0.0 F0.1 E0.1",
        "U1.0 F1.0 F1.1 E1.1",
        "U2.0 F2.0 B2.0 F2.1 B2.1 E2.1 R2.0",
        "B1.0 B1.1 E1.1 R1.0",
        "B0.0 B0.1 R0.0",
    ]
    assert [s.in_flight.tolist() for s in schedules(job.spec.execution, 2, 2)] == [[2], [2], [1]]


def test_without_a_generator_the_backbone_goes_backward_at_once() -> None:
    job = colocated_job(modules("backbone", "encoder", "encoder"))
    assert drawn(job, 2) == [
        "U0.0 F0.0 F0.1 E0.1",
        "U1.0 F1.0 F1.1 E1.1",
        "U2.0 F2.0 B2.0 F2.1 B2.1 E2.1 R2.0",
        "B1.0 B1.1 R1.0",
        "B0.0 B0.1 R0.0",
    ]
    assert [s.in_flight.tolist() for s in schedules(job.spec.execution, 2, 2)] == [[1], [2], [2]]


def test_a_frozen_encoder_has_no_backward_phase() -> None:
    """Nor does it get gradients, or sum any."""
    job = colocated_job(FROZEN)
    assert drawn(job, 1) == ["U0.0 F0.0 E0.0", "U1.0 F1.0 B1.0 R1.0"]
    assert [s.in_flight.tolist() for s in schedules(job.spec.execution, 5, 5)] == [[1], [1]]


def test_rounds_follow_each_other() -> None:
    """The last phase of a round and the first of the next are one, where they are of one module."""
    job = colocated_job(modules("encoder", "backbone", "encoder"))
    assert drawn(job, 3, 2) == [
        "U0.0 F0.0 F0.1 E0.1",
        "U1.0 F1.0 F1.1 E1.1",
        "U2.0 F2.0 B2.0 F2.1 B2.1 E2.1",
        "B1.0 B1.1",
        "B0.0 B0.1 F0.2 E0.2",
        "F1.2 E1.2",
        "F2.2 B2.2 E2.2 R2.0",
        "B1.2 R1.0",
        "B0.2 R0.0",
    ]
    held = [(s.in_flight.tolist(), s.drain_every) for s in schedules(job.spec.execution, 4, 2)]
    assert held == [([2], 2), ([1], 2), ([2], 2)]
    frozen = colocated_job(FROZEN)
    assert drawn(frozen, 2, 1) == ["U0.0 F0.0 E0.0", "U1.0 F1.0 B1.0", "F0.1 E0.1", "F1.1 B1.1 R1.0"]


def test_ranks_wait_at_every_barrier() -> None:
    """Encoder 3 and 5, backbone 4 + 8 and 2 + 4, encoder back 6 and 10: 5 + 12 + 10, each rank waits for the other.

    rank 0  F F F . . f f f f b b b b b b b b B B B B B B . . . .
    rank 1  F F F F F f f b b b b . . . . . . B B B B B B B B B B

    Before the backbone's passes rows take 2 more, in which its parameters are gathered.
    """
    phases = step_phases(colocated_job(modules("encoder", "backbone")).spec.execution, 1, 1)
    assert [len(phase) for phase in phases] == [3, 5, 2]
    forward = np.array([[[3], [4]], [[5], [2]]])
    held = np.array([[[10], [100]], [[20], [50]]])
    for transfer in (0, 2):
        found = run_phases(phases, forward, 2 * forward, held, np.array([0, transfer, 0]))
        assert found.makespan_ns == 27 + transfer
        starts = [[0, 0, 3, 5, 5, 9, 17, 17, 17, 23], [0, 0, 5, 5, 5, 7, 11, 11, 17, 27]]
        later = np.array([0, 0, 0, 0, *[transfer] * 6])
        assert found.start_ns.tolist() == (np.array(starts) + later).tolist()
        ends = [[0, 3, 3, 5, 9, 17, 17, 17, 23, 23], [0, 5, 5, 5, 7, 11, 11, 11, 27, 27]]
        assert found.end_ns.tolist() == (np.array(ends) + later).tolist()
        assert found.busy_ns.tolist() == [21, 21]
        assert found.cause.tolist() == [[-1, 0, 1, 12, 3, 4, 5, 6, 7, 8], [-1, 10, 11, 12, 13, 14, 15, 16, 7, 18]]
        assert found.peak_bytes.tolist() == [110, 70]
    assert run_phases(phases, forward, 2 * forward, held, np.zeros(3, np.int64)).bubble_ppm == 12 * 1_000_000 // 54


def test_what_a_generator_holds_comes_on_top_of_encoder_and_backbone() -> None:
    job = colocated_job(modules("encoder", "backbone", "generator", frozen="vit"), generation={"ratio": "0.5"})
    times = np.ones((1, 3, 2), np.int64)
    held = np.array([[[1_000, 9_000], [10, 20], [3, 4]]])
    phases = step_phases(job.spec.execution, 2, 2)
    at_once = np.zeros(len(phases), np.int64)
    assert run_phases(phases, times, times, held, at_once).peak_bytes.tolist() == [9_000]
    held[0, 0] = 1
    assert run_phases(phases, times, times, held, at_once).peak_bytes.tolist() == [34]


@dataclass
class Rank:
    """One rank of the slow reference."""

    clock: int = 0
    held: int = 0
    peak: int = 0


def reference(phases: list[list[Operation]], forward: I64, backward: I64, held: I64) -> tuple[int, list[int]]:
    """Operation after operation, rank after rank: makespan and peaks."""
    ranks = [Rank() for _ in range(len(forward))]
    returned = {(o.chunk, o.microbatch) for phase in phases for o in phase if o.kind is BACKWARD}
    for phase in phases:
        for r, rank in enumerate(ranks):
            for o in filter(lambda o: o.computes, phase):
                times = forward if o.kind is FORWARD else backward
                rank.clock += int(times[r, o.chunk, o.microbatch])
                if o.kind is FORWARD:
                    rank.held += int(held[r, o.chunk, o.microbatch])
                    rank.peak = max(rank.peak, rank.held)
                if o.kind is BACKWARD or (o.chunk, o.microbatch) not in returned:
                    rank.held -= int(held[r, o.chunk, o.microbatch])
        meet = max(rank.clock for rank in ranks)
        for rank in ranks:
            rank.clock = meet
    assert all(rank.held == 0 for rank in ranks)
    return ranks[0].clock, [rank.peak for rank in ranks]


@settings(max_examples=100, deadline=None)
@given(colocated_steps())
def test_timelines_agree_with_a_slow_reference(step: tuple[Job, StepSamples]) -> None:
    job, samples = step
    plan = plan_step(job, 0, samples)
    found = timeline(job.spec, plan)
    execution = job.spec.execution
    phases = [list(phase) for phase in step_phases(execution, plan.num_microbatches, plan.num_microbatches)]
    names = found.nodes[0].modules
    order = [execution.module(name) for name in names]
    assert [m.kind for m in order] == sorted((m.kind for m in order), key=list(ModuleKind).index)
    forward = np.stack([microbatch_loads(m, plan) for m in order], axis=1)
    backward = np.stack([backward_ns(m.cost, forward[:, c]) for c, m in enumerate(order)], axis=1)
    assert found.pipeline.activation_bytes is not None
    held = found.pipeline.activation_bytes.reshape(forward.shape)
    makespan, peaks = reference(phases, forward, backward, held)
    assert (found.makespan_ns, found.timeline.peak_bytes.tolist()) == (makespan, peaks)
    found.pipeline.check()
    lists = found.pipeline.operations[0]
    assert list(lists) == [o for phase in phases for o in phase]
    assert sum(int(o.end_ns - o.start_ns) for o in critical_path(found.pipeline, found.timeline)) == makespan
    assert found.timeline.busy_ns.sum() == sum(
        int((forward if o.kind is FORWARD else backward)[:, o.chunk, o.microbatch].sum()) for o in lists if o.computes
    )


@settings(max_examples=50, deadline=None)
@given(colocated_steps())
def test_operations_follow_each_other_without_overlap(step: tuple[Job, StepSamples]) -> None:
    """Each begins when what it waits for ends, and not before the one before it in its rank ends."""
    job, samples = step
    found = timeline(job.spec, plan_step(job, 0, samples)).timeline
    assert (found.start_ns[:, 1:] >= found.end_ns[:, :-1]).all()
    assert (found.cause[:, 0] == -1).all()
    assert (found.start_ns[:, 0] == 0).all()
    later = found.cause[:, 1:]
    assert (later >= 0).all()
    assert np.array_equal(found.end_ns.ravel()[later], found.start_ns[:, 1:])
    if found.makespan_ns:
        idle = found.makespan_ns * len(found.busy_ns) - int(found.busy_ns.sum())
        assert found.bubble_ppm == idle * 1_000_000 // (found.makespan_ns * len(found.busy_ns))


def test_held_units_count_padding() -> None:
    memory = {"budget_bytes": 5_000_000, "unit_bytes": 3}
    spec = [{**m, "memory": memory, "padded": m["name"] == "vit"} for m in modules("encoder", "backbone")]
    job = colocated_job(spec, generation={"ratio": "0"}, packing={"enabled": False})
    samples = samples_of(job, (8, 0), 0, 2)
    plan = plan_step(job, 0, samples)
    found = timeline(job.spec, plan).pipeline.activation_bytes
    assert found is not None
    found = found.reshape(2, 2, -1)
    for chunk, name in enumerate(("vit", "llm")):
        arrangement = plan.arrangement(name)
        for rank in range(2):
            for m in range(plan.num_microbatches):
                here = arrangement.item[arrangement.of(rank, m)]
                sizes = (samples.patches if name == "vit" else samples.tokens)[here].tolist()
                units = len(sizes) * max(sizes, default=0) if name == "vit" else sum(sizes)
                assert found[rank, chunk, m] == 3 * units


def test_jobs_of_fewer_modules() -> None:
    assert drawn(colocated_job(modules("backbone")), 1) == ["U0.0 F0.0 B0.0 R0.0"], "nothing leaves for anybody"
    both = drawn(colocated_job(modules("encoder", "backbone")), 1)
    assert both == ["U0.0 F0.0 E0.0", "U1.0 F1.0 B1.0 E1.0 R1.0", "B0.0 R0.0"]


def test_the_bound_of_padded_sequences_counts_full_microbatches() -> None:
    """Eight sequences in two slots of four microbatches: that of the largest is full, and as long as two of it."""
    spec = [{**m, "padded": True} for m in modules("backbone")]
    job = colocated_job(spec, generation={"ratio": "0"}, packing={"enabled": False}, microbatch=2)
    samples = samples_of(job, (8, 0), 0, 0)
    tokens = np.array([1000, 1000, 1000, 9000, 1000, 1000, 1000, 1000])
    plan = plan_step(job, 0, replace(samples, tokens=tokens))
    assert explain(job, plan).bound_ns == 2 * 9 + 2 * 2 * 9
    assert timeline(job.spec, plan).makespan_ns == 3 * (2 * 9 + 2 * 1)


def padded_items(sizes: I64, loads: I64, units: int) -> ModuleItems:
    """Items of a padded encoder of two ranks, each with memory for so many units."""
    memory = {"budget_bytes": units * 10, "unit_bytes": 10}
    spec = [{**m, "memory": memory, "padded": m["name"] == "vit"} for m in modules("encoder", "backbone")]
    job = colocated_job(spec, generation={"ratio": "0"}, packing={"enabled": False})
    zeros = np.zeros(len(sizes), np.int64)
    (encoder,) = job.spec.execution.of_kind(ModuleKind.ENCODER)
    return ModuleItems(encoder, np.arange(len(sizes)), sizes, loads, zeros, zeros, None)


def test_the_bound_of_padded_items_is_the_same_where_no_least_maximum_is_searched_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = [numbers(seed, 30, 1, 40) for seed in range(4)]
    cases = [(padded_items(of, of**2 * 100, 10_000), number) for of in sizes for number in (1, 2, 3, 5, 10, 40)]
    searched, padded = list[object](), timelines.padded

    def counted(*arguments: Any) -> I64:
        searched.append(arguments)
        return padded(*arguments)

    monkeypatch.setattr(timelines, "padded", counted)
    found = [timelines._forward_bound(*case) for case in cases]
    assert 4 <= len(searched) <= 12
    monkeypatch.setattr(timelines, "_evenly_within", lambda *_: False)
    assert found == [timelines._forward_bound(*case) for case in cases]


def test_a_padded_microbatch_that_memory_makes_longer_than_the_mean_of_ranks_is_the_bound() -> None:
    """Each of three large items fills a microbatch, and the nine others are in the fourth one."""
    sizes, loads = np.repeat([10, 1], [3, 9]), np.repeat([100, 60], [3, 9])
    assert timelines._forward_bound(padded_items(sizes, loads, 10), 2) == 9 * 60
    assert timelines._forward_bound(padded_items(sizes, loads, 30), 2) == (3 * 100 + 9 * 60) // 2


def test_nothing_is_searched_for_where_microbatches_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank of many microbatches takes longer than any one of them: bounds of these are asked for again and again."""
    monkeypatch.setattr(timelines, "padded", None)
    sizes = numbers(1, 300, 1, 40)
    assert timelines._forward_bound(padded_items(sizes, sizes * 100, 10_000), 50) > 0
