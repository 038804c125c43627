"""One step: from sized samples to a plan, and what it gains."""

from dataclasses import dataclass, replace

import numpy as np

from dataserver.planning import arranging
from dataserver.planning.costs import forward_ns
from dataserver.planning.expectation import PlannedTimeline, module_loads, timeline
from dataserver.planning.identity import Job, identify
from dataserver.planning.jobspec import BalancePolicy, Execution, ModuleKind, OrderPolicy, PackingPolicy, Policies
from dataserver.planning.packing import balanced as balanced_packing
from dataserver.planning.packing import best_fit_decreasing, first_fit_decreasing, one_per_sequence
from dataserver.planning.placing import (
    TASK_OF,
    Placement,
    PlacementProblem,
    balanced,
    in_disttrain_order,
    lower_bound_ns,
    placement_problem,
    searched,
    stratified,
)
from dataserver.planning.plan import Arrangement, Candidate, Routing, StepPlan, plan_hash
from dataserver.planning.samples import I64, StepSamples, Task

BASELINE = Policies(packing=PackingPolicy.BEST_FIT, balance=BalancePolicy.NONE, order=OrderPolicy.NONE)
"""Canonical order, an image in the encoder and generator rank that stands beside its backbone rank."""


def plan_step(job: Job, step: int, samples: StepSamples) -> StepPlan:
    """Plan one step.

    Args:
        job: the job.
        step: its number.
        samples: the step's samples in canonical order (`order`, `sizing`). Images to understand require an encoder
            (`sizing.check_encoder`).
    """
    return _Planner(job, step, samples).plan()


class _Planner:
    """The stages of planning, over the samples of one step."""

    def __init__(self, job: Job, step: int, samples: StepSamples) -> None:
        self._job, self._step, self._samples = job, step, samples
        self._execution: Execution = job.spec.execution
        self._policies = self._execution.policies

    def plan(self) -> StepPlan:
        sequence, waves = self._pack()
        num_sequences = int(sequence.max(initial=-1)) + 1
        problem = placement_problem(self._execution, self._samples, sequence, num_sequences, waves)
        groups = (1,) if self._policies == BASELINE or problem.islands == 1 else (problem.islands, 1)
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

    def _pack(self) -> tuple[I64, int]:
        """The sequence of each sample, int64 [n], and the microbatches of each rank."""
        stream, tokens, policy = self._job.stream, self._samples.tokens, self._policies.packing
        slots = self._execution.backbone.dp * self._execution.microbatch
        if not stream.packing.enabled:
            return one_per_sequence(tokens), -(-max(stream.global_batch, len(tokens)) // slots)
        pack = first_fit_decreasing if policy is PackingPolicy.FIRST_FIT else best_fit_decreasing
        sequence = pack(tokens, stream.seq_len)
        waves = -(-max(stream.global_batch, int(sequence.max(initial=-1)) + 1) // slots)
        if policy is PackingPolicy.BALANCED:
            loads = forward_ns(self._execution.backbone.cost, tokens)
            sequence = balanced_packing(tokens, loads, stream.seq_len, waves * slots)
        return sequence, waves

    def _placements(self, problem: PlacementProblem) -> dict[str, Placement]:
        """The placements among which the simulator of whole plans chooses; canonical order is always one of them."""
        order = self._policies.order
        seeds = {"canonical order": balanced(problem, BalancePolicy.NONE)}
        if self._policies.balance is BalancePolicy.LPT:
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
        arrangements, routings = {backbone.module: backbone}, []
        for module in execution.modules:
            if module.kind is ModuleKind.BACKBONE:
                continue
            task = TASK_OF[module.kind]
            images, image_rank, wave = arranging.images_in_order(samples, backbone, task)
            rows = arranging.image_rows(job.stream, samples, images, task)
            if self._policies.balance is BalancePolicy.NONE:
                rank = image_rank * module.dp // execution.backbone.dp
            else:
                loads = forward_ns(module.cost, samples.patches[images])
                rank = arranging.spread_images(module, loads, image_rank, wave, execution.backbone.dp, islands)
            arrangement = arranging.arrange_images(module, images, rank, wave, rows)
            arrangements[module.name] = arrangement
            into = module.kind is ModuleKind.ENCODER
            routings.append(arranging.route(backbone, arrangement, images, image_rank, wave, rows, into))
        ordered = tuple(arrangements[m.name] for m in execution.modules)
        return self._finish(problem.num_waves, ordered, tuple(routings))

    def _finish(self, waves: int, arrangements: tuple[Arrangement, ...], routings: tuple[Routing, ...]) -> StepPlan:
        job, samples = self._job, self._samples
        generated = samples.task == Task.GENERATION
        return StepPlan(
            job_id=job.job_id,
            stream_id=job.stream_id,
            step=self._step,
            samples=samples,
            num_microbatches=waves,
            sequences_per_microbatch=self._execution.microbatch,
            arrangements=arrangements,
            routings=routings,
            text_tokens=int((samples.text_tokens[~generated] + 1).sum()),
            target_patches=int(samples.patches[generated[samples.image_sample]].sum()),
            hash=plan_hash(job.job_id, self._step, samples, waves, arrangements, routings),
        )


@dataclass(frozen=True, slots=True)
class PlanSummary:
    """A plan beside the same samples in canonical order, unbalanced and unordered."""

    loads_before: dict[str, I64]
    """For each module int64 [dp]: forward time of each rank over the step, nanoseconds."""
    loads_after: dict[str, I64]
    before: PlannedTimeline
    after: PlannedTimeline
    bound_ns: int
    """A time that no placement of the same sequences can beat."""


def explain(job: Job, plan: StepPlan) -> PlanSummary:
    """What a plan gains over the baseline, as the simulator sees it."""
    execution = job.spec.execution.model_copy(update={"policies": BASELINE})
    baseline_job = identify(job.spec.model_copy(update={"execution": execution}))
    baseline = plan_step(baseline_job, plan.step, plan.samples)
    return PlanSummary(
        loads_before=module_loads(job.spec, baseline),
        loads_after=module_loads(job.spec, plan),
        before=timeline(job.spec, baseline),
        after=timeline(job.spec, plan),
        bound_ns=lower_bound_ns(_problem_of(job, plan)),
    )


def _problem_of(job: Job, plan: StepPlan) -> PlacementProblem:
    """The placement problem that a plan solves."""
    execution = job.spec.execution
    backbone = plan.arrangement(execution.backbone.name)
    place = (backbone.rank * plan.num_microbatches + backbone.microbatch) * execution.microbatch + backbone.slot
    used, of_item = np.unique(place, return_inverse=True)
    sequence = np.empty(len(place), np.int64)
    sequence[backbone.item] = of_item
    return placement_problem(execution, plan.samples, sequence, len(used), plan.num_microbatches)
