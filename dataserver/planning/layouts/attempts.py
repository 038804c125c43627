"""Plans of one step of a pipelined job, for sequences and a number of microbatches that are settled."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from dataserver.planning import arranging
from dataserver.planning.identity import Job
from dataserver.planning.jobspec import BalancePolicy, ModuleKind, ModuleSpec, OrderPolicy, Schedule
from dataserver.planning.layouts.held import held_units
from dataserver.planning.layouts.in_flight import InFlight, Units, extras, in_flight, too_small
from dataserver.planning.layouts.joined import depths, pipeline_layout, pipeline_modules, timeline
from dataserver.planning.pipeline import one_f_one_b_in_flight
from dataserver.planning.placing import (
    Placement,
    PlacementProblem,
    balanced,
    fitted,
    in_disttrain_order,
    makespan_ns,
    microbatch_sums,
    one_in_each_wave,
    padded_runs,
    placement_problem,
    searched,
    stratified,
)
from dataserver.planning.plan import NO_GROUPS, Arrangement, Routing, StepPlan
from dataserver.planning.samples import I64, StepSamples

_CANONICAL = "canonical order"
_BESIDE = 0
"""In place of a number of islands: every image on the rank beside that of its sequence."""


@dataclass(frozen=True, slots=True)
class Option:
    """One of the plans that are compared, without hash and denominators: only the one that is chosen gets them."""

    name: str
    plan: StepPlan
    in_flight: InFlight
    extra: int
    makespan_ns: int


class Attempt:
    """One number of microbatches."""

    def __init__(self, job: Job, step: int, samples: StepSamples, sequence: I64, num_microbatches: int) -> None:
        self._job, self._step, self._samples, self._sequence = job, step, samples, sequence
        self._execution, self._waves = job.spec.execution, num_microbatches
        self._modules = pipeline_modules(self._execution)
        self._extras, self._chunks = extras(self._execution), pipeline_layout(self._execution).chunks
        guide = self._guide(0, {})
        self._problem = placement_problem(job.spec, guide, samples, sequence, num_microbatches)
        self.too_large: ModuleSpec | None = None
        """A module whose memory was too small for a placement."""

    def options(self) -> list[Option]:
        """All plans that keep within the memory of all modules; none if there is none."""
        found: list[Option] = []
        for name, placement, some_extras in self._placements():
            backbone = arranging.arrange_samples(self._execution.backbone, self._samples, self._sequence, placement)
            beside = {
                m.name: arranging.images_beside(self._job.spec, m, self._samples, backbone)
                for m in self._execution.modules
                if m.kind is not ModuleKind.BACKBONE
            }
            for islands in self._spreads(name):
                plan = self._arranged(backbone, beside, islands)
                if plan is not None:
                    within = f"images within {islands} islands" if islands > 1 else "images over all ranks"
                    label = "images beside their sequences" if islands == _BESIDE else within
                    found += self._scheduled(f"{name}, {label}", plan, some_extras)
        return found

    def _placements(self) -> Iterator[tuple[str, Placement, tuple[int, ...]]]:
        """The placements among which the simulator of whole plans chooses; canonical order is always one of them.

        With each the numbers of extra microbatches in flight that it is tried with.
        """
        order, seeds = pipeline_layout(self._execution).order, self._fitting(self._seeds())
        if self._problem.rooms is not None and self._waves >= self._problem.num_sequences == len(self._samples):
            yield "a sample in each wave", one_in_each_wave(self._problem), self._extras[:1]
        if order is OrderPolicy.NONE or not seeds:
            yield from ((name, seed, self._extras) for name, seed in seeds.items())
            return
        ordered = {f"{name} + Algorithm 2": in_disttrain_order(self._problem, seed) for name, seed in seeds.items()}
        starts = seeds | self._fitting(ordered)
        if order is OrderPolicy.DISTTRAIN:
            yield from ((name, start, self._extras) for name, start in starts.items())
            return
        limited = self._problem.rooms is not None
        yield from ((name, seed, self._extras[:1]) for name, seed in seeds.items() if name == _CANONICAL or limited)
        for extra in self._extras:
            guided = [(self._guided(extra, start), start) for start in starts.values()]
            problem, best = min(guided, key=lambda pair: makespan_ns(*pair))
            yield "search", searched(problem, [best], self._step, self._job.stream.seed), (extra,)

    def _guided(self, extra: int, placement: Placement) -> PlacementProblem:
        """The problem with what stages hold under a placement, which memory must go on holding in a search."""
        rooms = self._problem.rooms
        if rooms is None:
            return self._problem if extra == 0 else replace(self._problem, in_flight=self._guide(extra, {}))
        held = self._guide(extra, self._units(placement))
        first, stages = self._problem.num_encoders, self._problem.num_stages
        if self._chunks == 1:
            rooms = replace(rooms, window=np.concatenate([held[: first + 1], held[first + stages :]]))
        return replace(self._problem, in_flight=held, rooms=rooms)

    def _seeds(self) -> dict[str, Placement]:
        policy, order = self._execution.backbone.balance, pipeline_layout(self._execution).order
        seeds = {_CANONICAL: balanced(self._problem, BalancePolicy.NONE)}
        if policy is not BalancePolicy.NONE:
            name = "longest first" if policy is BalancePolicy.LPT else f"balanced by {policy}"
            seeds[name] = balanced(self._problem, policy)
            if self._problem.items is not None:
                seeds |= padded_runs(self._problem)
        if order is OrderPolicy.SEARCH:
            seeds["stratified"] = stratified(self._problem, policy)
        return seeds

    def _fitting(self, placements: dict[str, Placement]) -> dict[str, Placement]:
        """Those that memory holds, after exchanges where it takes some."""
        found = {}
        for name, placement in placements.items():
            fitting, row = fitted(self._problem, placement)
            if row is None:
                found[name] = fitting
            else:
                self.too_large = self._modules[row]
        return found

    def _spreads(self, placement: str) -> tuple[int, ...]:
        """Numbers of islands within which images are spread."""
        islands, others = self._problem.islands, [m for m in self._modules if m.kind is not ModuleKind.BACKBONE]
        if all(m.balance is BalancePolicy.NONE for m in others):
            return (1,)
        spreads = (islands, 1) if islands > 1 else (1,)
        same = all(m.dp == islands for m in others)  # islands of one rank leave no other
        return spreads if same or placement != _CANONICAL else (*spreads, _BESIDE)

    def _arranged(
        self, backbone: Arrangement, beside: Mapping[str, arranging.BesideBackbone], islands: int
    ) -> StepPlan | None:
        """The plan without schedules, or None if a module's memory does not hold one of its waves."""
        samples, patches = self._samples, self._samples.patches
        arrangements: dict[str, Arrangement] = {backbone.module: backbone}
        routings: list[Routing] = []
        for name, images in beside.items():
            module = self._execution.module(name)
            spread = module.model_copy(update={"balance": BalancePolicy.NONE}) if islands == _BESIDE else module
            try:
                rank = arranging.spread_images(
                    spread,
                    patches[images.image],
                    images.rank,
                    images.microbatch,
                    self._execution.backbone.dp,
                    max(islands, 1),
                )
            except arranging.WaveTooLargeError:
                self.too_large = module
                return None
            arrangements[name], routing = arranging.arrange_and_route(module, backbone, images, rank, images.microbatch)
            routings.append(routing)
        return StepPlan(
            job_id=self._job.job_id,
            stream_id=self._job.stream_id,
            step=self._step,
            samples=samples,
            num_microbatches=self._waves,
            sequences_per_microbatch=self._execution.microbatch,
            arrangements=tuple(arrangements[m.name] for m in self._execution.modules),
            routings=tuple(routings),
            schedules=(),
            groups=NO_GROUPS,
            text_tokens=0,
            target_patches=0,
            hash=b"",
        )

    def _scheduled(self, name: str, plan: StepPlan, some_extras: tuple[int, ...]) -> Iterator[Option]:
        """The plan with each number of extra microbatches in flight, simulated."""
        units = {m.name: held_units(m, plan) for m in self._modules if m.memory is not None}
        for extra in some_extras:
            found = in_flight(self._execution, self._waves, extra, units)
            if found is None:
                self.too_large = too_small(self._execution, self._waves, units)
                continue
            label = f"{name}, {extra} extra in flight" if len(self._extras) > 1 else name
            scheduled = replace(plan, schedules=found.schedules(self._execution))
            yield Option(label, scheduled, found, extra, timeline(self._job.spec, scheduled).makespan_ns)

    def _guide(self, extra: int, units: Units) -> I64:
        """Microbatches in flight for the search, which knows no chunks. int64 [encoders + stages + generators]."""
        if pipeline_layout(self._execution).schedule is not Schedule.INTERLEAVED:
            found = in_flight(self._execution, self._waves, extra, units)
            if found is not None:
                return np.concatenate([found.held[m.name] for m in self._modules])
        places = depths(self._execution)
        vector = one_f_one_b_in_flight(1 + max(int(p.max()) for p in places.values()), extra)
        return np.concatenate([vector[places[m.name]] for m in self._modules])

    def _units(self, placement: Placement) -> Units:
        """About what microbatches hold under a placement, images spread evenly over the ranks of an island."""
        problem = self._problem
        found: dict[str, I64] = {}
        if problem.rooms is None:
            return found
        held = microbatch_sums(problem, problem.rooms.need, placement)
        for row, module in enumerate(self._modules):
            if row == problem.num_encoders:
                found[module.name] = held[row]
            else:
                waves = held[row].reshape(problem.islands, problem.ranks_per_island, -1).sum(axis=1)
                found[module.name] = -(-waves * problem.islands // module.dp)
        return found
