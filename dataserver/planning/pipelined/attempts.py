"""Plans of one step of a pipelined job, for sequences and a number of microbatches that are settled."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from dataserver.planning import arranging
from dataserver.planning.expectation import held_units
from dataserver.planning.identity import Job
from dataserver.planning.jobspec import BalancePolicy, ModuleKind, ModuleSpec, OrderPolicy, Schedule
from dataserver.planning.pipelined.interleaving import stages_in_flight, too_small
from dataserver.planning.pipelined.options import PipelinedOptions
from dataserver.planning.pipelined.placing import (
    PlacementProblem,
    balanced,
    fitted,
    in_disttrain_order,
    lacking_alone,
    makespan_ns,
    microbatch_sums,
    padded_runs,
    placement_problem,
    searched,
    spread_over_waves,
    stratified,
)
from dataserver.planning.pipelined.timeline import timeline
from dataserver.planning.placement import Placement
from dataserver.planning.plan import NO_GROUPS, ArrangedStep, Arrangement, Routing
from dataserver.planning.samples import I64, StepSamples
from dataserver.planning.waves import InFlight, Units, extras, one_f_one_b_in_flight

_CANONICAL = "canonical order"
_BESIDE = 0
"""In place of a number of islands: every image on the rank beside that of its sequence."""


@dataclass(frozen=True, slots=True)
class Option:
    """One of the plans that are compared."""

    name: str
    plan: ArrangedStep
    in_flight: InFlight
    extra: int
    makespan_ns: int


class Attempt:
    """One number of microbatches. `options` holds all plans by rules that keep within memory, `searched` finds more."""

    def __init__(self, job: Job, step: int, samples: StepSamples, sequence: I64, num_microbatches: int) -> None:
        self._job, self._step, self._samples, self._sequence = job, step, samples, sequence
        self._execution, self.num_microbatches = job.spec.execution, num_microbatches
        self._modules, self._order = self._execution.by_depth, self._execution.options(PipelinedOptions).order
        self._extras, self._chunks = extras(self._execution), self._execution.options(PipelinedOptions).chunks
        guide = self._guide(0, {})
        self._problem = placement_problem(job.spec, guide, samples, sequence, num_microbatches)
        self.num_sequences = self._problem.num_sequences
        self.too_large: ModuleSpec | None = None
        """A module whose memory was too small for a placement."""
        self._seeds: Mapping[str, Placement] = MappingProxyType({})
        self._ordered: Mapping[str, Placement] = MappingProxyType({})
        row = lacking_alone(self._problem)
        self.is_hopeless = row is not None
        """Whether memory does not hold one of the sequences, however many microbatches there are."""
        if row is None:
            self._seeds = self._fitting(self._by_rules())
            self._ordered = self._fitting(self._by_algorithm_2())
        else:
            self.too_large = self._modules[row]
        self.options: Sequence[Option] = tuple(self._options(self._placements()))

    @property
    def is_alone(self) -> bool:
        """Whether every sample is a sequence of its own."""
        return self.num_sequences == len(self._samples)

    @property
    def is_short(self) -> bool:
        """Whether memory holds less in flight than the schedule asks for."""
        return any(o.in_flight.is_short for o in self.options if not o.extra)

    @property
    def fastest_ns(self) -> int:
        """Makespan of the fastest plan by rules, of which there is one."""
        return min(o.makespan_ns for o in self.options)

    def searched(self, most_sequences: int) -> Sequence[Option]:
        """The plans that search finds, if the job asks for it; none if memory holds no start.

        Its budget is for so many sequences at most (`placing.searched`).
        """
        wanted = self._order is OrderPolicy.SEARCH and self._seeds
        return tuple(self._options(self._searches(most_sequences))) if wanted else ()

    def _options(self, placements: Iterable[tuple[str, Placement, tuple[int, ...]]]) -> Iterator[Option]:
        """The placements with images spread in every way and with each number of extra microbatches in flight."""
        for name, placement, some_extras in placements:
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
                    yield from self._scheduled(f"{name}, {label}", plan, some_extras)

    def _placements(self) -> Iterator[tuple[str, Placement, tuple[int, ...]]]:
        """The placements by rules, each with the numbers of extra microbatches in flight that it is tried with.

        Canonical order is always one of them. Where a search follows, they are what it begins with.
        """
        limited = self._problem.rooms is not None
        if self._order is OrderPolicy.SEARCH:
            guessed = self._chunks > 1 or any(m.padded for m in self._modules)  # the search goes by an estimate
            guessed = guessed or self._problem.hops is not None
            for name, seed in {**self._seeds, **(self._ordered if guessed else {})}.items():
                if name == _CANONICAL or limited or guessed:
                    yield name, seed, self._extras[:1]
        else:
            for name, start in {**self._seeds, **self._ordered}.items():
                yield name, start, self._extras

    def _searches(self, most_sequences: int) -> Iterator[tuple[str, Placement, tuple[int, ...]]]:
        """From the best start for every number of extra microbatches, unless memory makes two of them the same."""
        starts, before = [*self._seeds.values(), *self._ordered.values()], list[I64]()
        for extra in self._extras:
            guided = [(self._guided(extra, start), start) for start in starts]
            problem, best = min(guided, key=lambda pair: makespan_ns(*pair))
            if not any(np.array_equal(problem.in_flight, other) for other in before):
                found = searched(problem, [best], self._step, self._job.stream.seed, most_sequences)
                yield "search", found, (extra,)
            before.append(problem.in_flight)

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

    def _by_rules(self) -> dict[str, Placement]:
        policy = self._execution.backbone.balance
        seeds = {_CANONICAL: balanced(self._problem, BalancePolicy.NONE)}
        if policy is not BalancePolicy.NONE:
            name = "longest first" if policy is BalancePolicy.LPT else f"balanced by {policy}"
            seeds[name] = balanced(self._problem, policy)
            if self._problem.items is not None:
                seeds |= padded_runs(self._problem)
        if self._order is OrderPolicy.SEARCH:
            seeds["stratified"] = stratified(self._problem, policy)
        slots = self.num_microbatches * self._problem.slots * self._problem.dp
        if self._problem.rooms is not None and slots > self.num_sequences:
            seeds["even waves"] = spread_over_waves(self._problem)
        return seeds

    def _by_algorithm_2(self) -> dict[str, Placement]:
        if self._order is OrderPolicy.NONE:
            return {}
        return {f"{name} + Algorithm 2": in_disttrain_order(self._problem, p) for name, p in self._seeds.items()}

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
    ) -> ArrangedStep | None:
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
        return ArrangedStep(
            samples=samples,
            num_microbatches=self.num_microbatches,
            sequences_per_microbatch=self._execution.microbatch,
            arrangements=tuple(arrangements[m.name] for m in self._execution.modules),
            routings=tuple(routings),
            schedules=(),
            groups=NO_GROUPS,
        )

    def _scheduled(self, name: str, plan: ArrangedStep, some_extras: tuple[int, ...]) -> Iterator[Option]:
        """The plan with each number of extra microbatches in flight, simulated."""
        units = {m.name: held_units(m, plan) for m in self._modules if m.memory is not None}
        for extra in some_extras:
            found = stages_in_flight(self._execution, self.num_microbatches, extra, units)
            if found is None:
                self.too_large = too_small(self._execution, self.num_microbatches, units)
                continue
            label = f"{name}, {extra} extra in flight" if len(self._extras) > 1 else name
            scheduled = replace(plan, schedules=found.schedules(self._execution))
            yield Option(label, scheduled, found, extra, timeline(self._job.spec, scheduled).makespan_ns)

    def _guide(self, extra: int, units: Units) -> I64:
        """Microbatches in flight for the search, which knows no chunks. int64 [encoders + stages + generators]."""
        if self._execution.options(PipelinedOptions).schedule is not Schedule.INTERLEAVED:
            found = stages_in_flight(self._execution, self.num_microbatches, extra, units)
            if found is not None:
                return np.concatenate([found.held[m.name] for m in self._modules])
        places = self._execution.depths
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
