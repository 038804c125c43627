"""DistTrain's layout, each module on devices of its own, and the monolithic one that it is compared with."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trainclient.orchestrate.choice import (
    BEST_CHOICES,
    MICROBATCHES,
    Choice,
    ModuleChoice,
    Problem,
    TooLargeError,
    divisors,
    insert,
)
from trainclient.orchestrate.costs import Option
from trainclient.orchestrate.sharing import Side, Spine, share, side, stage_bytes, step_ns


@dataclass(frozen=True, slots=True)
class Backbone:
    """A choice for the backbone."""

    option: Option
    dp: int
    pp: int
    microbatch: int
    spine: Spine
    bytes: float
    states: float
    work: float


def pipelined(problem: Problem) -> list[Choice]:
    """DistTrain: for each choice of the backbone the best degrees and ranks of encoder and generator; all exact.

    Raises:
        TooLargeError: nothing fits.
    """
    kinds = side_options(problem)
    found: list[Choice] = []
    for backbone in sorted(backbones(problem, len(kinds)), key=lambda b: (b.spine.least_ns, b.spine.gpus)):
        below = found[BEST_CHOICES - 1].step_ns if len(found) >= BEST_CHOICES else float("inf")
        if backbone.spine.least_ns >= below:
            break
        sides = beside(problem, backbone.spine, kinds)
        best = share(backbone.spine, sides, problem.cluster.gpus - backbone.spine.gpus, below)
        if best is not None:
            found = insert(found, _choice("pipelined", problem, backbone, best[1], best[2]))
    if not found:
        raise TooLargeError("pipelined")
    return found


def monolithic(problem: Problem) -> list[Choice]:
    """As in Megatron-LM: encoder and generator are further stages, with the backbone's degrees.

    Raises:
        TooLargeError: nothing fits.
    """
    found: list[Choice] = []
    for choice in all_monolithic(problem):
        found = insert(found, choice)
    if not found:
        raise TooLargeError("monolithic")
    return found


def all_monolithic(problem: Problem) -> Iterator[Choice]:
    """Every choice with the same degrees for all modules."""
    kinds = side_options(problem)
    for backbone in backbones(problem, len(kinds)):
        for sides in _product([_tied(problem, backbone, options) for options in kinds]):
            ranks = (backbone.dp,) * len(sides)
            if backbone.spine.gpus + sum(s.tp * r for s, r in zip(sides, ranks, strict=True)) <= problem.cluster.gpus:
                yield _choice("monolithic", problem, backbone, sides, ranks)


def backbones(problem: Problem, sides: int) -> Iterator[Backbone]:
    """All choices for the backbone that memory holds and that leave a device for each module beside it."""
    cluster, stream = problem.cluster, problem.workload.stream
    network = problem.network("backbone")
    if network is None:
        return
    stages = divisors(network.size.layers, cluster.gpus)
    for option in problem.options(network):
        for microbatch in MICROBATCHES:
            if stream.global_batch % microbatch:
                continue
            for dp in divisors(stream.global_batch // microbatch, (cluster.gpus - sides) // option.tp):
                for pp in stages:
                    if dp * pp * option.tp > cluster.gpus - sides:
                        break
                    found = _backbone(problem, option, dp, pp, microbatch, sides)
                    if found is not None:
                        yield found


def _backbone(problem: Problem, option: Option, dp: int, pp: int, microbatch: int, sides: int) -> Backbone | None:
    cluster, network = problem.cluster, option.network
    waves = problem.workload.stream.global_batch // (dp * microbatch)
    after = 1 if problem.network("generator") else 0
    states = option.static_bytes(pp) + option.optimizer_bytes(pp) / dp
    rows, longest = microbatch * option.load.rows, microbatch * problem.workload.stream.seq_len
    first = min(waves, pp + after) if network.gradient_passes else 1
    each = rows * option.unit_bytes / pp
    held, work = first * each, longest * option.work_bytes
    if states + work + max(held, longest * option.unit_bytes / pp) > cluster.memory_bytes:
        return None
    whole = option.fixed_ns + microbatch * option.sequence_ns
    transfer = 2 * 2 * network.size.width * rows
    spine = Spine(
        gpus=dp * pp * option.tp,
        waves=waves,
        sequences=dp * microbatch,
        stage_ns=whole / pp,
        alone_ns=whole + transfer * ((pp - 1) / cluster.bandwidth(option.tp * pp) + sides / cluster.between_bytes_ns),
        sync_ns=option.sync_ns(dp, pp, cluster),
        held=min(waves, pp + 1 + after),
    )
    return Backbone(option, dp, pp, microbatch, spine, states + held + work, states, work)


def side_options(problem: Problem) -> list[list[Option]]:
    """The degrees that each module beside the backbone can have."""
    return [problem.options(n) for n in problem.networks if not n.role.spine]


def beside(problem: Problem, spine: Spine, kinds: Sequence[Sequence[Option]]) -> list[list[Side]]:
    """The degrees that each other module can have beside a backbone."""
    made = [[side(o, spine, problem.cluster, o.network.role.feeds) for o in options] for options in kinds]
    return [[s for s in sides if s is not None] for sides in made]


def _tied(problem: Problem, backbone: Backbone, options: Sequence[Option]) -> list[Side]:
    """The ways of a module with the degrees of the backbone."""
    (found,) = beside(problem, backbone.spine, [[o for o in options if o.tp == backbone.option.tp]])
    return [s for s in found if s.fewest <= backbone.dp]


def _product(kinds: Sequence[Sequence[Side]]) -> Iterator[tuple[Side, ...]]:
    if not kinds:
        yield ()
        return
    for head in kinds[0]:
        for rest in _product(kinds[1:]):
            yield (head, *rest)


def _choice(layout: str, problem: Problem, backbone: Backbone, sides: Sequence[Side], ranks: Sequence[int]) -> Choice:
    spine = backbone.spine
    backbone_choice = ModuleChoice(
        backbone.option, backbone.dp, backbone.pp, backbone.bytes, backbone.states, backbone.work, spine.stage_ns
    )
    modules = module_choices(problem, spine, sides, ranks, backbone_choice)
    return Choice(
        layout, modules, sum(m.gpus for m in modules), backbone.microbatch, spine.waves,
        step_ns(spine, sides, ranks), parts(spine, sides, ranks),
    )  # fmt: skip


def module_choices(
    problem: Problem, spine: Spine, sides: Sequence[Side], ranks: Sequence[int], backbone: ModuleChoice
) -> tuple[ModuleChoice, ...]:
    """The modules of a choice, in the order of the problem."""
    found = {"backbone": backbone}
    for s, r in zip(sides, ranks, strict=True):
        held, states, work = stage_bytes(s.option, spine, r, s.option.network.role.feeds)
        found[s.option.network.kind] = ModuleChoice(s.option, r, 1, held, states, work, s.fixed_ns + s.work_ns / r)
    return tuple(found[n.kind] for n in problem.networks)


def parts(spine: Spine, sides: Sequence[Side], ranks: Sequence[int]) -> dict[str, float]:
    """What adds up to a step."""
    times = [s.fixed_ns + s.work_ns / r for s, r in zip(sides, ranks, strict=True)]
    syncs = [s.sync_ns for s, r in zip(sides, ranks, strict=True) if r > 1]
    return {
        "waves": max([spine.stage_ns, *times]) * (spine.waves - 1),
        "filling the pipeline": spine.alone_ns + sum(times),
        "gradients": max([spine.sync_ns, *syncs]),
    }
