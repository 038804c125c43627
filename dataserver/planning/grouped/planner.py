"""A backbone whose ranks share sequences in groups of unequal degrees (FlexSP, arXiv 2412.01523), wave by wave.

Encoders and generators stand beside it on devices of their own: a wave of theirs holds the images of one microbatch of
all groups, spread over all their ranks.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

import numpy as np

from dataserver.planning import waves
from dataserver.planning.balancing import bin_loads
from dataserver.planning.grouped.arranging import ArrangedGroups, Microbatches, arrange_groups
from dataserver.planning.grouped.costs import GroupCosts
from dataserver.planning.grouped.options import GroupedOptions, GroupPolicy
from dataserver.planning.grouped.policies import compositions_text, halved, idle_groups, plans_of
from dataserver.planning.grouped.sequence_plan import SequencePlan
from dataserver.planning.grouped.sequences import group_costs, rank_tokens, units_held
from dataserver.planning.grouped.timeline import timeline
from dataserver.planning.grouped.wave_order import algorithm_2, chain, searched_order
from dataserver.planning.identity import Job, JobSpecError
from dataserver.planning.job import Execution
from dataserver.planning.jobspec import ModuleKind, OrderPolicy
from dataserver.planning.layout import PlannedTimeline, canonical_modules
from dataserver.planning.naming import milliseconds, sample_name
from dataserver.planning.plan import Candidate, Decision, RankGroups, StepPlan, make_plan
from dataserver.planning.samples import StepSamples
from dataserver.planning.sequences import pack_sequences
from dataserver.planning.simulation import Pipeline
from dataserver.planning.sizing import SampleTooLargeError
from dataserver.planning.waves import InFlight

NUM_SEEDS = 2
"""Groups whose microbatches are put into another order beside encoders and generators."""

MAX_HALVINGS = 16
"""Microbatches that are divided for the sake of encoders and generators, at most."""

_ORDERS: Mapping[OrderPolicy, tuple[Callable[[Pipeline], list[int]], str]] = MappingProxyType(
    {OrderPolicy.DISTTRAIN: (algorithm_2, "Algorithm 2"), OrderPolicy.SEARCH: (searched_order, "order searched")}
)


def baseline(execution: Execution) -> Execution:
    """Groups of the largest degree always, best-fit packing, images beside their groups, microbatches as they come.

    As if encoders and generators had endless memory.
    """
    kept = {"memory": execution.backbone.memory}  # it says what a device of a group takes
    modules = tuple(
        m.model_copy(update=kept) if m.kind is ModuleKind.BACKBONE else m for m in canonical_modules(execution)
    )
    changes = {"policy": GroupPolicy.STATIC, "order": OrderPolicy.NONE}
    layout = execution.options(GroupedOptions).model_copy(update=changes)
    return execution.model_copy(update={"modules": modules, "layout": layout})


def plan(job: Job, step: int, samples: StepSamples) -> StepPlan:
    """Plan one step.

    Raises:
        SampleTooLargeError: the largest group does not hold a sample; names it and the limit.
        WaveTooLargeError: an encoder or generator does not hold the images of a sample; names it.
        JobSpecError: costs are beyond int64.
    """
    return _Planner(job, step, samples).plan()


@dataclass(frozen=True, slots=True)
class _Variant:
    """One of the plans that are compared."""

    groups: str
    """How they were found, for people."""
    changes: tuple[str, ...]
    """What was changed afterwards."""
    plan: StepPlan
    planned: PlannedTimeline
    held: InFlight
    arranged: ArrangedGroups

    @property
    def name(self) -> str:
        """All of it."""
        return ", ".join((self.groups, *self.changes))

    @property
    def makespan_ns(self) -> int:
        """As simulated."""
        return self.planned.makespan_ns


class _Planner:
    """The stages of planning, over the samples of one step."""

    def __init__(self, job: Job, step: int, samples: StepSamples) -> None:
        self._job, self._step, self._samples = job, step, samples
        self._execution = job.spec.execution
        self._layout = self._execution.options(GroupedOptions)
        self._costs, self._policy = group_costs(self._execution), self._layout.policy
        capacity = self._costs.device_tokens * self._costs.degrees[-1]
        _refuse_too_large(job, samples, capacity)
        self._sequence, _ = pack_sequences(job, samples, min(job.stream.seq_len, capacity), 1)
        tokens, count = samples.tokens, int(self._sequence.max(initial=-1)) + 1
        self._sizes = bin_loads(tokens, self._sequence, count), bin_loads(tokens * tokens, self._sequence, count)

    def plan(self) -> StepPlan:
        plans = self._plans_of(self._costs)
        found = compared = [self._plain(name, plan) for name, plan in plans.items()]
        if len(self._execution.modules) > 1:
            plain = [*compared, *self._with_two_in_flight(compared, plans)]
            found = [*plain, *self._beside_images(plain)]
        ranked = sorted(found, key=_makespan_ns)  # equals stay in order: the policy's own comes first
        return replace(
            ranked[0].plan,
            candidates=tuple(Candidate(v.name, v.makespan_ns) for v in ranked),
            decisions=self._decisions(ranked[0], [v for v in compared if v is not ranked[0]]),
        )

    def _plans_of(self, costs: GroupCosts) -> dict[str, SequencePlan]:
        try:
            return plans_of(self._policy, *self._sizes, costs)
        except ValueError as error:
            raise JobSpecError(f"step {self._step}: {error}") from error

    def _plain(self, name: str, plan: SequencePlan) -> _Variant:
        microbatches = [m.groups for m in plan.microbatches] or [idle_groups(self._costs)]
        arranged = arrange_groups(self._job, self._samples, microbatches, self._sequence)
        return self._variant(name, (), arranged, 0)

    def _with_two_in_flight(self, plain: Sequence[_Variant], plans: Mapping[str, SequencePlan]) -> Iterator[_Variant]:
        """The same plans for half of the memory, if that holds all sequences and there is time to win.

        Two microbatches then fit: the backbone works on one while a generator works on the other.
        """
        fastest, longest = min(plain, key=_makespan_ns), int(self._sizes[0].max(initial=1))
        waits = 20 * fastest.makespan_ns > 21 * plans[fastest.groups].time_ns
        half = replace(self._costs, device_tokens=self._costs.device_tokens // 2)
        fits = longest <= half.device_tokens * half.degrees[-1]
        if waits and fits and self._policy is not GroupPolicy.STATIC and self._execution.of_kind(ModuleKind.GENERATOR):
            for name, plan in self._plans_of(half).items():
                yield self._plain(f"{name}, in half the memory", plan)

    def _beside_images(self, plain: Sequence[_Variant]) -> Iterator[_Variant]:
        """The fastest groups with what matters beside encoders or generators: order, finer waves, more in flight."""
        seeds = sorted(plain, key=_makespan_ns)[:NUM_SEEDS]
        ordered = [variant for seed in seeds for variant in self._ordered(seed)]
        yield from ordered
        best = min([*seeds, *ordered], key=_makespan_ns)
        for number in range(1, MAX_HALVINGS + 1 if self._layout.order is OrderPolicy.SEARCH else 1):
            finer = self._halved(best, number)
            found = min([finer, *self._ordered(finer)], key=_makespan_ns)
            if found.makespan_ns >= best.makespan_ns:
                break
            yield found
            best = found
        for extra in waves.extras(self._execution)[1:]:
            changes = (*best.changes, f"up to {extra} extra in flight")
            yield self._variant(best.groups, changes, best.arranged, extra)

    def _ordered(self, variant: _Variant) -> Iterator[_Variant]:
        """The same microbatches in a better order, as the job's policy finds it."""
        find, title = _ORDERS.get(self._layout.order, (None, ""))
        if find is not None:
            groups = variant.arranged.microbatches
            order = find(_chain(self._execution, variant))
            arranged = arrange_groups(self._job, self._samples, [groups[k] for k in order], variant.arranged.sequence)
            yield self._variant(variant.groups, (*variant.changes, title), arranged, 0)

    def _halved(self, variant: _Variant, number: int) -> _Variant:
        """Two microbatches in place of the one whose images take an encoder or generator longest.

        Sequences of similar lengths share a microbatch, so that one can have most of the images.
        """
        outer = [node.modules != (self._execution.backbone.name,) for node in variant.planned.nodes]
        pipeline, groups = variant.planned.pipeline, variant.arranged.microbatches
        wave = int((pipeline.forward_ns + pipeline.backward_ns)[outer].max(axis=0).argmax())
        microbatches = [*groups[:wave], *halved(groups[wave]), *groups[wave + 1 :]]
        arranged = arrange_groups(self._job, self._samples, microbatches, variant.arranged.sequence)
        return self._variant(variant.groups, (f"{number} {'wave' if number == 1 else 'waves'} halved",), arranged, 0)

    def _variant(self, groups: str, changes: tuple[str, ...], arranged: ArrangedGroups, extra: int) -> _Variant:
        make = partial(
            make_plan,
            self._job,
            self._step,
            self._samples,
            num_microbatches=len(arranged.microbatches),
            sequences_per_microbatch=max(1, *(len(g.sequences) for here in arranged.microbatches for g in here)),
            arrangements=arranged.arrangements,
            routings=arranged.routings,
            groups=_rank_groups(self._execution.backbone.name, arranged.microbatches),
        )
        bare = make(schedules=())
        units = {m.name: units_held(self._execution, m, bare) for m in self._execution.modules if m.memory is not None}
        held = waves.in_flight(self._execution, bare.num_microbatches, extra, units)
        plan = make(schedules=held.schedules(self._execution))
        return _Variant(groups, changes, plan, timeline(self._job.spec, plan), held, arranged)

    def _decisions(self, best: _Variant, others: Iterable[_Variant]) -> tuple[Decision, ...]:
        """Why these groups, and what is in flight."""
        backbone, plan = self._execution.backbone, best.plan
        tokens = rank_tokens(self._execution, plan)
        rank, fullest = (int(n) for n in np.unravel_index(tokens.argmax(), tokens.shape))
        here = plan.groups.of(fullest)
        degree = plan.groups.degree[here][np.searchsorted(plan.groups.first_rank[here], rank, side="right") - 1]
        times = [f"{milliseconds(v.makespan_ns)} for {v.name}" for v in (best, *others)]
        reason = (
            f"simulated {'; '.join(times)}. The fullest device holds {tokens[rank, fullest]:,} of "
            f"{self._costs.device_tokens:,} tokens, in a group of {degree} in microbatch {fullest}"
        )
        compositions = [plan.groups.degree[plan.groups.of(k)].tolist() for k in range(plan.num_microbatches)]
        groups = Decision(backbone.name, f"groups {compositions_text(compositions)}", reason)
        return groups, *(waves.decisions(self._execution, best.held) if len(self._execution.modules) > 1 else ())


def _makespan_ns(variant: _Variant) -> int:
    return variant.makespan_ns


def _refuse_too_large(job: Job, samples: StepSamples, capacity: int) -> None:
    """Refuse a sample that no group holds, even alone."""
    over = np.flatnonzero(samples.tokens > capacity)
    if len(over):
        worst = int(over[samples.tokens[over].argmax()])
        backbone = job.spec.execution.backbone
        raise SampleTooLargeError(
            f"{sample_name(job.stream, samples, worst)}: the sample has {samples.tokens[worst]} tokens, but the "
            f"largest sequence group of module {backbone.name} holds {capacity}; raise layout.max_degree or "
            "the module's memory, lower seq_len, or leave such samples out with a filter or a quarantine list"
        )


def _rank_groups(module: str, microbatches: Microbatches) -> RankGroups:
    rows = [(wave, g.first_rank, g.degree) for wave, groups in enumerate(microbatches) for g in groups]
    return RankGroups(module, *np.array(rows, np.int64).T.copy())


def _chain(execution: Execution, variant: _Variant) -> Pipeline:
    """Encoders, backbone and generators as one node each, which takes as long as its slowest rank.

    Hops take their mean over the microbatches: an order is scored with the same hops for all (`OrderScorer`).
    """
    pipeline, kinds = variant.planned.pipeline, [execution.module(n.modules[0]).kind for n in variant.planned.nodes]
    stages = [np.array([k is kind for k in kinds]) for kind in ModuleKind if kind in kinds]
    held = [min(variant.plan.in_flight(m.name)[0] for m in execution.of_kind(k)) for k in ModuleKind if k in kinds]
    times = [(pipeline.forward_ns[here].max(axis=0), pipeline.backward_ns[here].max(axis=0)) for here in stages]
    if pipeline.transfer_ns is None:
        return chain(times, np.array(held))
    microbatch, source, _ = pipeline.edges.T
    slowest = np.zeros((len(stages) - 1, pipeline.forward_ns.shape[1]), np.int64)
    np.maximum.at(slowest, (np.array(stages).argmax(axis=0)[source], microbatch), pipeline.transfer_ns)
    return chain(times, np.array(held), slowest.sum(axis=1) // slowest.shape[1])
