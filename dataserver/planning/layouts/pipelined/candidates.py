"""The plans of a packed step that are compared: placements with their images spread and their stages scheduled."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from dataserver.planning import yield_point
from dataserver.planning.job.fields import BalancePolicy, ModuleKind, ModuleSpec
from dataserver.planning.layouts.pipelined.interleaving import stages_in_flight, too_small
from dataserver.planning.layouts.pipelined.packed import PackedStep
from dataserver.planning.layouts.pipelined.placing import Placement
from dataserver.planning.layouts.pipelined.timeline import makespan_of
from dataserver.planning.layouts.shared.waves import InFlight, extras
from dataserver.planning.plan.arranging import (
    BesideBackbone,
    WaveTooLargeError,
    arrange_and_route,
    arrange_samples,
    images_beside,
    spread_images,
)
from dataserver.planning.plan.expectation import held_units
from dataserver.planning.plan.plan import ArrangedStep, Arrangement, Routing


@dataclass(frozen=True, slots=True)
class CandidatePlan:
    """One of the plans that are compared."""

    name: str
    plan: ArrangedStep
    in_flight: InFlight
    extra: int
    """Microbatches in flight beyond those of the schedule."""
    makespan_ns: int


@dataclass(frozen=True, slots=True)
class ImageSpread:
    """How the images of every wave get their ranks."""

    components: int = 1
    """Parts of the ranks within which they stay."""
    beside: bool = False
    """Whether each goes to the rank beside that of its sequence, whatever the balance of its module."""

    @property
    def name(self) -> str:
        """For people."""
        if self.beside:
            return "images beside their sequences"
        return f"images within {self.components} components" if self.components > 1 else "images over all ranks"


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
        plan = _arranged(packed, backbone, beside, spread)
        if isinstance(plan, ModuleSpec):
            yield plan
        else:
            yield from _scheduled(packed, f"{trial.name}, {spread.name}", plan, trial.extras)


def _arranged(
    packed: PackedStep, backbone: Arrangement, beside: Mapping[str, BesideBackbone], spread: ImageSpread
) -> ArrangedStep | ModuleSpec:
    """The plan without schedules, or the module whose memory does not hold one of its waves."""
    execution, patches = packed.execution, packed.samples.patches
    arrangements: dict[str, Arrangement] = {backbone.module: backbone}
    routings: list[Routing] = []
    for name, images in beside.items():
        module = execution.module(name)
        balanced = module.model_copy(update={"balance": BalancePolicy.NONE}) if spread.beside else module
        try:
            sizes, ranks = patches[images.image], execution.backbone.dp
            yield_point()
            rank = spread_images(balanced, sizes, images.rank, images.microbatch, ranks, spread.components)
        except WaveTooLargeError:
            return module
        yield_point()
        arrangements[name], routing = arrange_and_route(module, backbone, images, rank, images.microbatch)
        routings.append(routing)
    return ArrangedStep(
        samples=packed.samples,
        num_microbatches=packed.num_microbatches,
        sequences_per_microbatch=execution.microbatch,
        arrangements=tuple(arrangements[m.name] for m in execution.modules),
        routings=tuple(routings),
    )


def _scheduled(
    packed: PackedStep, name: str, plan: ArrangedStep, some_extras: tuple[int, ...]
) -> Iterator[CandidatePlan | ModuleSpec]:
    """The plan with each number of extra microbatches in flight, simulated."""
    execution, count = packed.execution, packed.num_microbatches
    units = {m.name: held_units(m, plan) for m in packed.modules if m.memory is not None}
    several = len(extras(execution)) > 1
    for extra in some_extras:
        held = stages_in_flight(execution, count, extra, units)
        if held is None:
            yield too_small(execution, count, units)
            continue
        yield_point()
        scheduled = replace(plan, schedules=held.schedules(execution))
        makespan = makespan_of(packed.job.spec, scheduled)
        yield CandidatePlan(f"{name}, {extra} extra in flight" if several else name, scheduled, held, extra, makespan)
