"""The plans of a packed step that are compared: placements with their images spread and their stages scheduled."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from dataserver.planning import I64, yield_point
from dataserver.planning.job.fields import BalancePolicy, ModuleKind, ModuleSpec
from dataserver.planning.layouts.pipelined.interleaving import too_small
from dataserver.planning.layouts.pipelined.packed import PackedStep
from dataserver.planning.layouts.pipelined.placing import Placement
from dataserver.planning.layouts.pipelined.timeline import makespans_of
from dataserver.planning.layouts.shared.waves import FEWER, InFlight, extras, in_flight
from dataserver.planning.plan.arranging import (
    BesideBackbone,
    WaveTooLargeError,
    arrange_and_route,
    arrange_samples,
    images_beside,
    spread_images,
    without_places,
)
from dataserver.planning.plan.expectation import held_units
from dataserver.planning.plan.plan import ArrangedStep, Arrangement, ModuleSchedule, Routing


@dataclass(frozen=True, slots=True)
class SpreadStep:
    """A packed step with ranks for all its sequences and images."""

    packed: PackedStep
    backbone: Arrangement
    beside: Mapping[str, BesideBackbone]
    """For each encoder and generator: its images."""
    rank: Mapping[str, I64]
    """For each encoder and generator int64 [k]: the rank of each of these."""

    def to_simulate(self) -> ArrangedStep:
        """The plan without schedules, and without what no simulation asks for (`without_places`)."""
        own, backbone = self.packed.execution.module, self.packed.execution.backbone
        found = [without_places(own(name), backbone, images, self.rank[name]) for name, images in self.beside.items()]
        return self._joined(found, ())

    def arranged(self, schedules: tuple[ModuleSchedule, ...]) -> ArrangedStep:
        """The step with these schedules, all modules arranged."""
        found = []
        for name, images in self.beside.items():
            yield_point()
            module = self.packed.execution.module(name)
            found.append(arrange_and_route(module, self.backbone, images, self.rank[name], images.microbatch))
        return self._joined(found, schedules)

    def _joined(
        self, found: Sequence[tuple[Arrangement, Routing]], schedules: tuple[ModuleSchedule, ...]
    ) -> ArrangedStep:
        arrangements = {self.backbone.module: self.backbone} | {one.module: one for one, _ in found}
        return ArrangedStep(
            samples=self.packed.samples,
            num_microbatches=self.packed.num_microbatches,
            sequences_per_microbatch=self.packed.execution.microbatch,
            arrangements=tuple(arrangements[m.name] for m in self.packed.execution.modules),
            routings=tuple(routing for _, routing in found),
            schedules=schedules,
        )


@dataclass(frozen=True, slots=True)
class CandidatePlan:
    """One of the plans that are compared."""

    name: str
    spread: SpreadStep
    in_flight: InFlight
    extra: int
    """Microbatches in flight beyond those of the schedule."""
    makespan_ns: int

    @property
    def num_microbatches(self) -> int:
        """Microbatches that each rank runs in the step."""
        return self.spread.packed.num_microbatches

    def plan(self) -> ArrangedStep:
        """The whole plan: only that of the fastest candidate is ever made."""
        return self.spread.arranged(self.in_flight.schedules(self.spread.packed.execution))


@dataclass(frozen=True, slots=True)
class ImageSpread:
    """How the images of every wave get their ranks."""

    components: int = 1
    """Parts of the ranks within which they stay."""
    beside: bool = False
    """Whether each goes to the rank beside that of its sequence, whatever the balance of its module."""
    even: bool = False
    """Whether ranks get equal counts, whatever the balance of their module."""

    def name_for(self, modules: Iterable[ModuleSpec]) -> str:
        """Name the spread for people, of a job with these modules; empty without any that has images."""
        balances = {m.name: m.balance for m in modules if m.kind is not ModuleKind.BACKBONE}
        staying = [name for name, balance in balances.items() if balance is BalancePolicy.NONE]
        if not balances:
            return ""
        if self.beside or (len(staying) == len(balances) and not self.even):
            return "images beside their sequences"
        if self.even or set(balances.values()) == {BalancePolicy.EVEN}:
            return "images dealt out evenly"
        found = f"images within {self.components} components" if self.components > 1 else "images over all ranks"
        return f"{found}, of {' and '.join(staying)} beside their sequences" if staying else found


@dataclass(frozen=True, slots=True)
class Trial:
    """A placement, and what it is tried with."""

    name: str
    placement: Placement
    spreads: tuple[ImageSpread, ...]
    extras: tuple[int, ...]
    """Numbers of microbatches in flight beyond those of the schedule."""


def candidates_of(packed: PackedStep, trial: Trial) -> Iterator[CandidatePlan | ModuleSpec]:
    """A candidate for each spread and number of extra microbatches, or the module whose memory does not hold it."""
    execution, samples = packed.execution, packed.samples
    backbone = arrange_samples(execution.backbone, samples, packed.sequence, trial.placement)
    beside = {
        m.name: images_beside(packed.job.spec, m, samples, backbone)
        for m in execution.modules
        if m.kind is not ModuleKind.BACKBONE
    }
    for spread in trial.spreads:
        yield_point()
        found = _spread(packed, backbone, beside, spread)
        if isinstance(found, ModuleSpec):
            yield found
        else:
            name = ", ".join(filter(None, (trial.name, spread.name_for(packed.modules))))
            yield from _scheduled(name, found, trial.extras)


def _spread(
    packed: PackedStep, backbone: Arrangement, beside: Mapping[str, BesideBackbone], spread: ImageSpread
) -> SpreadStep | ModuleSpec:
    """All images on ranks, or the module whose memory does not hold one of its waves."""
    execution, patches, rank = packed.execution, packed.samples.patches, dict[str, I64]()
    for name, images in beside.items():
        module = execution.module(name)
        policy = BalancePolicy.NONE if spread.beside else BalancePolicy.EVEN if spread.even else module.balance
        balanced = module if policy is module.balance else module.model_copy(update={"balance": policy})
        try:
            sizes, ranks = patches[images.image], execution.backbone.dp
            yield_point()
            depths, components = packed.samples.depths(images.image), spread.components
            rank[name] = spread_images(balanced, sizes, images.rank, images.microbatch, ranks, components, depths)
        except WaveTooLargeError:
            return module
    return SpreadStep(packed, backbone, beside, rank)


def _scheduled(name: str, spread: SpreadStep, some_extras: tuple[int, ...]) -> Iterator[CandidatePlan | ModuleSpec]:
    """The plan with each number of extra microbatches in flight, simulated."""
    packed, plan = spread.packed, spread.to_simulate()
    execution, count = packed.execution, packed.num_microbatches
    units = {m.name: held_units(m, plan) for m in packed.modules if m.memory is not None}
    several = len(extras(execution)) > 1
    found = [(extra, packed.in_flight(extra, units)) for extra in some_extras]
    yield from (too_small(execution, count, units) for _, held in found if held is None)
    fitting = _different([(extra, held) for extra, held in found if held is not None])
    times = makespans_of(packed.job.spec, plan, (held.schedules(execution) for _, held in fitting))
    for (extra, held), makespan in zip(fitting, times, strict=True):
        yield_point()
        yield CandidatePlan(f"{name}, {extra} extra in flight" if several else name, spread, held, extra, makespan)


def with_fewer_in_flight(made: CandidatePlan) -> Iterator[CandidatePlan]:
    """The same plan as less memory would run it, down to half of what stages hold; nothing where no module has any."""
    packed, execution = made.spread.packed, made.spread.packed.execution
    limited = [m.name for m in execution.modules if m.memory is not None and m.runs_backward]
    most = max((int(made.in_flight.held[name].max()) for name in limited), default=0)
    numbers = [number for number in FEWER if most <= 2 * number < 2 * most]
    if packed.layout.chunks > 1 or not numbers:
        return
    plan = made.spread.to_simulate()
    units = {m.name: held_units(m, plan) for m in packed.modules if m.memory is not None}
    found = [in_flight(execution, packed.num_microbatches, made.extra, units, number) for number in numbers]
    times = makespans_of(packed.job.spec, plan, (held.schedules(execution) for held in found))
    for number, held, makespan in zip(numbers, found, times, strict=True):
        yield_point()
        yield replace(made, name=f"{made.name}, at most {number} in flight", in_flight=held, makespan_ns=makespan)


def _different(found: Sequence[tuple[int, InFlight]]) -> list[tuple[int, InFlight]]:
    """The first of those that memory makes the same."""
    by_held = {
        tuple(n for held in one.held.values() for n in held.tolist()): (extra, one) for extra, one in found[::-1]
    }
    return sorted(by_held.values(), key=lambda pair: pair[0])
