"""Encoders, backbone stages and generators on devices of their own, wave by wave (DistTrain, arXiv 2408.04275)."""

from dataclasses import replace

import numpy as np

from dataserver.planning import arranging
from dataserver.planning.identity import Job
from dataserver.planning.jobspec import (
    BalancePolicy,
    Execution,
    ModuleKind,
    OrderPolicy,
    PackingPolicy,
)
from dataserver.planning.layouts.interface import LayoutPlanner
from dataserver.planning.layouts.joined import pipeline_layout, placing_in_flight, schedules, timeline
from dataserver.planning.placing import (
    Placement,
    PlacementProblem,
    balanced,
    in_disttrain_order,
    lower_bound_ns,
    placement_problem,
    searched,
    stratified,
)
from dataserver.planning.plan import Arrangement, Candidate, Routing, StepPlan, make_plan
from dataserver.planning.samples import I64, StepSamples
from dataserver.planning.sequences import pack_step


def baseline(execution: Execution) -> Execution:
    """Best-fit packing, canonical order, an image in the encoder and generator rank beside its backbone rank."""
    modules = tuple(
        m.model_copy(
            update={
                "balance": BalancePolicy.NONE,
                "packing": PackingPolicy.BEST_FIT if m.kind is ModuleKind.BACKBONE else None,
            }
        )
        for m in execution.modules
    )
    layout = pipeline_layout(execution).model_copy(update={"order": OrderPolicy.NONE})
    return execution.model_copy(update={"modules": modules, "layout": layout})


def plan(job: Job, step: int, samples: StepSamples) -> StepPlan:
    """Plan one step.

    Every image has a module that handles it (`limits.check_table`).
    """
    return _Planner(job, step, samples).plan()


class _Planner:
    """The stages of planning, over the samples of one step."""

    def __init__(self, job: Job, step: int, samples: StepSamples) -> None:
        self._job, self._step, self._samples = job, step, samples
        self._execution: Execution = job.spec.execution
        self._layout = pipeline_layout(self._execution)

    def plan(self) -> StepPlan:
        sequence, waves = pack_step(self._job, self._samples)
        num_sequences = int(sequence.max(initial=-1)) + 1
        problem = placement_problem(
            self._execution, placing_in_flight(self._execution, waves), self._samples, sequence, num_sequences, waves
        )
        spread = any(m.balance is not BalancePolicy.NONE for m in self._execution.modules)
        groups = (problem.islands, 1) if spread and problem.islands > 1 else (1,)
        plans = [
            (f"{name}, images within {islands} islands" if islands > 1 else f"{name}, images over all ranks", plan)
            for name, placement in self._placements(problem).items()
            for islands, plan in ((i, self._assemble(problem, sequence, placement, i)) for i in groups)
        ]
        if len(plans) == 1:
            return plans[0][1]
        scored = [(timeline(self._job.spec, plan).makespan_ns, number) for number, (_, plan) in enumerate(plans)]
        ranked = tuple(Candidate(plans[number][0], makespan) for makespan, number in sorted(scored))
        return replace(plans[min(scored)[1]][1], candidates=ranked)

    def _placements(self, problem: PlacementProblem) -> dict[str, Placement]:
        """The placements among which the simulator of whole plans chooses; canonical order is always one of them."""
        order = self._layout.order
        seeds = {"canonical order": balanced(problem, BalancePolicy.NONE)}
        if self._execution.backbone.balance is not BalancePolicy.NONE:
            seeds["longest first"] = balanced(problem, BalancePolicy.LPT)
        if order is OrderPolicy.NONE:
            return seeds
        if order is OrderPolicy.SEARCH:
            seeds["stratified"] = stratified(problem)
        ordered = {f"{name} + Algorithm 2": in_disttrain_order(problem, seed) for name, seed in seeds.items()}
        if order is OrderPolicy.DISTTRAIN:
            return seeds | ordered
        starts = [*seeds.values(), *ordered.values()]
        best = searched(problem, starts, self._step, self._job.stream.seed)
        return {"canonical order": seeds["canonical order"], "search": best}

    def _assemble(self, problem: PlacementProblem, sequence: I64, placement: Placement, islands: int) -> StepPlan:
        job, samples, execution = self._job, self._samples, self._execution
        backbone = arranging.arrange_samples(execution.backbone, samples, sequence, placement)
        arrangements: dict[str, Arrangement] = {backbone.module: backbone}
        routings: list[Routing] = []
        for module in execution.modules:
            if module.kind is ModuleKind.BACKBONE:
                continue
            arrangement, routing = arranging.arrange_module(job.spec, module, samples, backbone, islands)
            arrangements[module.name] = arrangement
            routings.append(routing)
        ordered = tuple(arrangements[m.name] for m in execution.modules)
        return make_plan(
            job,
            self._step,
            samples,
            num_microbatches=problem.num_waves,
            sequences_per_microbatch=execution.microbatch,
            arrangements=ordered,
            routings=tuple(routings),
            schedules=schedules(execution, problem.num_waves),
        )


def bound_ns(job: Job, plan: StepPlan) -> int:
    """A time that no placement of the plan's sequences can beat."""
    execution = job.spec.execution
    backbone = plan.arrangement(execution.backbone.name)
    place = (backbone.rank * plan.num_microbatches + backbone.microbatch) * execution.microbatch + backbone.slot
    used, of_item = np.unique(place, return_inverse=True)
    sequence = np.empty(len(place), np.int64)
    sequence[backbone.item] = of_item
    in_flight = placing_in_flight(execution, plan.num_microbatches)
    problem = placement_problem(execution, in_flight, plan.samples, sequence, len(used), plan.num_microbatches)
    return lower_bound_ns(problem)


PLANNER = LayoutPlanner(plan, baseline, timeline, bound_ns)
