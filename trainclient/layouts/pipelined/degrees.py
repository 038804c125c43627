"""DistTrain's layout, each module on devices of its own, and the monolithic one that it is compared with."""

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Final

import numpy as np

from trainclient.layouts.shared.beside_backbone import beside, module_choices, shared, side_options
from trainclient.orchestrate.backbones import Backbone, Backbones, backbones, fastest_first
from trainclient.orchestrate.choice import (
    BEST_CHOICES,
    Choice,
    LayoutDegrees,
    ModuleChoice,
    Problem,
    TooLargeError,
    insert,
)
from trainclient.orchestrate.costs import Option
from trainclient.orchestrate.sharing import Side, least_of_two, parts, step_ns
from trainclient.orchestrate.workload import F64

Kinds = Sequence[Sequence[Option]]
"""The options of each module beside the backbone."""
ROUNDING: Final = 1e-9
"""Relative error that a bound may have."""


def pipelined(problem: Problem) -> list[Choice]:
    """DistTrain: for each choice of the backbone the best degrees and ranks of encoder and generator; all exact.

    Raises:
        TooLargeError: nothing fits.
    """

    def choices(backbone: Backbone, kinds: Kinds, below: float) -> Iterator[Choice]:
        sides = beside(problem, backbone.spine, kinds)
        best = shared(backbone.spine, sides, problem.cluster.gpus - backbone.spine.gpus, below)
        if best is not None:
            yield _choice("pipelined", problem, backbone, best[1], best[2])

    return _best("pipelined", problem, _bounds, choices)


def monolithic(problem: Problem, only: Callable[[Backbone], bool] = lambda _: True) -> list[Choice]:
    """Choose as in Megatron-LM: encoder and generator are further stages, with the backbone's degrees.

    `only` says which degrees of the backbone are looked at.

    Raises:
        TooLargeError: nothing fits.
    """

    def choices(backbone: Backbone, kinds: Kinds, _below: float) -> Iterator[Choice]:
        if only(backbone):
            for sides in product(*(_tied(problem, backbone, options) for options in kinds)):
                ranks = (backbone.dp,) * len(sides)
                gpus = backbone.spine.gpus + sum(s.tp * r for s, r in zip(sides, ranks, strict=True))
                if gpus <= problem.cluster.gpus:
                    yield _choice("monolithic", problem, backbone, sides, ranks)

    return _best("monolithic", problem, _tied_bounds, choices)


def _best(
    name: str,
    problem: Problem,
    bounds: Callable[[Problem, Backbones, Kinds], F64],
    choices: Callable[[Backbone, Kinds, float], Iterator[Choice]],
) -> list[Choice]:
    """The best of all choices for each backbone, each of other degrees; those that the bounds of their backbones rule
    out are not made."""
    kinds = side_options(problem)
    made = backbones(problem, len(kinds))
    found: list[Choice] = []
    for bound, backbone in fastest_first(made, [bounds(problem, m, kinds) for m in made]):
        below = found[BEST_CHOICES - 1].step_ns if len(found) >= BEST_CHOICES else float("inf")
        if bound * (1 - ROUNDING) >= below:
            break
        for choice in choices(backbone, kinds, below):
            found = _insert(found, choice)
    if not found:
        raise TooLargeError(name)
    return found


def _insert(found: list[Choice], choice: Choice) -> list[Choice]:
    """As `insert`, with only the fastest microbatch for the same degrees, so that what is shown differs in degrees.

    Others are other jobs: each names its `microbatch`, and servers plan as many waves as follow from it, or more.
    """
    alike = [c for c in found if _degrees(c) == _degrees(choice)]
    if any(c.step_ns <= choice.step_ns for c in alike):
        return found
    return insert([c for c in found if c not in alike], choice)


def _degrees(choice: Choice) -> tuple[object, ...]:
    return choice.chunks, *((m.option.tp, m.option.recompute, m.dp, m.pp) for m in choice.modules)


def _bounds(problem: Problem, made: Backbones, kinds: Kinds) -> F64:
    """A time that no encoder and generator beside each choice can beat. float64 [n].

    As if there were one degree with the least fixed time, the least work, and devices that can be divided at will.
    """
    devices = problem.cluster.gpus - made.gpus
    encoders = [options for options in kinds if options[0].network.role.feeds]
    curves = [
        (  # of encoders beside each other the work of all, and the least fixed time
            np.full(len(made), min(o.fixed_ns for options in together for o in options)),
            made.sequences * sum(min(o.sequence_ns * o.tp for o in options) for options in together),
            np.full(len(made), float(sum(min(o.tp for o in options) for options in together))),
        )
        for together in (encoders, [options for options in kinds if not options[0].network.role.feeds])
        if together
    ]
    late = (made.waves - 1) * (1 - made.ahead)
    if len(curves) == 2:
        rest = least_of_two(curves[0], curves[1], 1 + late, made.stage_ns, devices)
    else:
        times = [fixed + work / devices for fixed, work, _ in curves]
        rest = sum(times) + late * np.maximum.reduce([made.stage_ns, *times])
    steady = made.rest_ns + made.ahead * made.stage_ns
    found: F64 = made.alone_ns + rest + steady * (made.waves - 1) + made.sync_ns
    return found


def _tied_bounds(_problem: Problem, made: Backbones, kinds: Kinds) -> F64:
    """The same where encoder and generator have the degrees of each choice. float64 [n]."""
    encoder = generator = np.zeros(len(made))
    for options in kinds:
        each = [o.fixed_ns + o.sequence_ns * made.sequences / made.degrees[0] for o in options
                if o.tp == made.option.tp]  # fmt: skip
        if not each:
            return np.full(len(made), np.inf)
        time = np.minimum.reduce(each)
        if options[0].network.role.feeds:
            encoder = np.maximum(encoder, time)
        else:
            generator = time
    slowest = np.maximum.reduce([made.stage_ns, encoder, generator])
    steady = slowest + made.rest_ns - made.ahead * (slowest - made.stage_ns)
    found: F64 = made.alone_ns + encoder + generator + (made.waves - 1) * steady + made.sync_ns
    return found


def _tied(problem: Problem, backbone: Backbone, options: Sequence[Option]) -> list[Side]:
    """The ways of a module with the degrees of the backbone."""
    (found,) = beside(problem, backbone.spine, [[o for o in options if o.tp == backbone.option.tp]])
    return [s for s in found if s.fewest <= backbone.dp]


def _choice(layout: str, problem: Problem, backbone: Backbone, sides: Sequence[Side], ranks: Sequence[int]) -> Choice:
    spine = backbone.spine
    backbone_choice = ModuleChoice(
        backbone.option, backbone.dp, backbone.pp, backbone.bytes, backbone.states, backbone.work,
        spine.stage_ns + spine.rest_ns,
    )  # fmt: skip
    modules = module_choices(problem, spine, sides, ranks, backbone_choice)
    return Choice(
        layout, modules, sum(m.gpus for m in modules), backbone.microbatch, spine.waves,
        step_ns(spine, sides, ranks), parts(spine, sides, ranks), finer=backbone.finer, chunks=backbone.chunks,
        kind="pipelined", extras={"schedule": "interleaved", "chunks": backbone.chunks} if backbone.chunks > 1 else {},
    )  # fmt: skip


DEGREES = LayoutDegrees(has_backbone=True, best=pipelined, equal=monolithic)
