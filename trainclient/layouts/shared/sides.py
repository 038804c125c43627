"""The modules beside a backbone: their degrees, and what a choice says of them."""

from collections.abc import Sequence

from trainclient.orchestrate.choice import ModuleChoice, Problem
from trainclient.orchestrate.costs import Option
from trainclient.orchestrate.sharing import Side, Spine, side, stage_bytes


def side_options(problem: Problem) -> list[list[Option]]:
    """The degrees that each module beside the backbone can have."""
    return [problem.options(n) for n in problem.networks if not n.role.spine]


def beside(problem: Problem, spine: Spine, kinds: Sequence[Sequence[Option]]) -> list[list[Side]]:
    """The degrees that each other module can have beside a backbone."""
    made = [[side(o, spine, problem.cluster, o.network.role.feeds) for o in options] for options in kinds]
    return [[s for s in sides if s is not None] for sides in made]


def module_choices(
    problem: Problem, spine: Spine, sides: Sequence[Side], ranks: Sequence[int], backbone: ModuleChoice
) -> tuple[ModuleChoice, ...]:
    """The modules of a choice, in the order of the problem."""
    found = {"backbone": backbone}
    for s, r in zip(sides, ranks, strict=True):
        held, states, work = stage_bytes(s.option, spine, r, s.option.network.role.feeds)
        found[s.option.network.kind] = ModuleChoice(s.option, r, 1, held, states, work, float(s.wave_ns(r)))
    return tuple(found[n.kind] for n in problem.networks)
