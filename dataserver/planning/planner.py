"""One step: from sized samples to a plan, and what it gains."""

from dataclasses import dataclass

import numpy as np

from dataserver.planning import arranging
from dataserver.planning.arranging import TASK_OF
from dataserver.planning.costs import forward_ns
from dataserver.planning.expectation import PlannedTimeline, module_loads, own_times, timeline
from dataserver.planning.identity import Job, identify
from dataserver.planning.jobspec import BalancePolicy, Execution, ModuleKind, OrderPolicy, Policies
from dataserver.planning.ordering import disttrain_order
from dataserver.planning.packing import best_fit_decreasing, one_per_sequence
from dataserver.planning.plan import Arrangement, Routing, StepPlan, plan_hash
from dataserver.planning.samples import I64, StepSamples, Task

_BASELINE = Policies(balance=BalancePolicy.NONE, order=OrderPolicy.NONE)


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
        stream, samples, execution = self._job.stream, self._samples, self._execution
        packed = stream.packing.enabled
        sequence = best_fit_decreasing(samples.tokens, stream.seq_len) if packed else one_per_sequence(samples.tokens)
        loads = self._sequence_loads(sequence)
        slots = execution.backbone.dp * execution.microbatch
        waves = -(-max(stream.global_batch, len(loads)) // slots)
        candidates = []
        for policy in dict.fromkeys((self._policies.balance, BalancePolicy.NONE)):
            rank, wave, slot = arranging.place_sequences(
                policy, loads, execution.backbone.dp, waves, execution.microbatch
            )
            candidates.append(self._assemble(waves, sequence, rank, wave, slot))
            if self._policies.order is not OrderPolicy.NONE:
                wave = self._ordered(candidates[-1], rank, wave)
                candidates.append(self._assemble(waves, sequence, rank, wave, slot))
        if len(candidates) == 1:
            return candidates[0]
        return min(candidates, key=lambda plan: timeline(self._job.spec, plan).makespan_ns)

    def _sequence_loads(self, sequence: I64) -> I64:
        times = forward_ns(self._execution.backbone.cost, self._samples.tokens)
        loads = np.zeros(int(sequence.max(initial=-1)) + 1, np.int64)
        np.add.at(loads, sequence, times)
        return loads

    def _assemble(self, waves: int, sequence: I64, rank: I64, wave: I64, slot: I64) -> StepPlan:
        job, samples, execution = self._job, self._samples, self._execution
        backbone = arranging.arrange_samples(execution.backbone, samples, sequence, rank, wave, slot)
        arrangements, routings = {backbone.module: backbone}, []
        for module in execution.modules:
            if module.kind is ModuleKind.BACKBONE:
                continue
            task = TASK_OF[module.kind]
            images, image_rank, image_wave = arranging.images_in_order(samples, backbone, task)
            rows = arranging.image_rows(job.stream, samples, images, task)
            patches = samples.patches[images]
            arrangement = arranging.arrange_images(
                self._policies.balance, module, images, patches, rows, image_wave, waves
            )
            arrangements[module.name] = arrangement
            into = module.kind is ModuleKind.ENCODER
            routings.append(arranging.route(backbone, arrangement, images, image_rank, image_wave, rows, into))
        return self._finish(waves, tuple(arrangements[m.name] for m in execution.modules), tuple(routings))

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

    def _ordered(self, plan: StepPlan, rank: I64, wave: I64) -> I64:
        """The wave of each sequence after ordering the microbatches of each rank."""
        stages = own_times(self._job.spec, plan)
        new_wave = np.empty_like(wave)
        for r in range(self._execution.backbone.dp):
            order = disttrain_order([s.forward[r] for s in stages], [s.backward[r] for s in stages])
            position = np.empty(len(order), np.int64)
            position[order] = np.arange(len(order))
            mine = rank == r
            new_wave[mine] = position[wave[mine]]
        return new_wave


@dataclass(frozen=True, slots=True)
class PlanSummary:
    """A plan beside the same samples in canonical order, unbalanced and unordered."""

    loads_before: dict[str, I64]
    """For each module int64 [dp]: forward time of each rank over the step, nanoseconds."""
    loads_after: dict[str, I64]
    before: PlannedTimeline
    after: PlannedTimeline


def explain(job: Job, plan: StepPlan) -> PlanSummary:
    """What a plan gains over the baseline, as the simulator sees it."""
    execution = job.spec.execution.model_copy(update={"policies": _BASELINE})
    baseline_job = identify(job.spec.model_copy(update={"execution": execution}))
    baseline = plan_step(baseline_job, plan.step, plan.samples)
    return PlanSummary(
        loads_before=module_loads(job.spec, baseline),
        loads_after=module_loads(job.spec, plan),
        before=timeline(job.spec, baseline),
        after=timeline(job.spec, plan),
    )
