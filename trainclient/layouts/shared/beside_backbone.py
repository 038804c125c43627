"""The modules beside a backbone: their degrees, and what a choice says of them."""

from collections.abc import Sequence

from trainclient.orchestrate.choice import ModuleChoice, Problem
from trainclient.orchestrate.costs import Option
from trainclient.orchestrate.several_encoders import share_several
from trainclient.orchestrate.sharing import Side, Spine, share, side, stage_bytes


def side_options(problem: Problem) -> list[list[Option]]:
    """The degrees that each module beside the backbone can have."""
    return [problem.options(n) for n in problem.networks if not n.role.spine]


def beside(problem: Problem, spine: Spine, kinds: Sequence[Sequence[Option]]) -> list[list[Side]]:
    """The degrees that each other module can have beside a backbone."""
    made = [[side(o, spine, problem.cluster) for o in options] for options in kinds]
    return [[s for s in sides if s is not None] for sides in made]


def module_choices(
    problem: Problem, spine: Spine, sides: Sequence[Side], ranks: Sequence[int], backbone: ModuleChoice
) -> tuple[ModuleChoice, ...]:
    """The modules of a choice, in the order of the problem."""
    found = {backbone.option.network.name: backbone}
    for s, r in zip(sides, ranks, strict=True):
        held, states, work = stage_bytes(s.option, spine, r)
        found[s.option.network.name] = ModuleChoice(s.option, r, 1, held, states, work, float(s.wave_ns(r)))
    return tuple(found[n.name] for n in problem.networks)


def shared(
    spine: Spine, kinds: Sequence[Sequence[Side]], devices: int, below: float
) -> tuple[float, tuple[Side, ...], tuple[int, ...]] | None:
    """The fastest degrees and ranks of all modules beside a backbone on at most so many devices; None if not `below`.

    Exact: no legal degrees and ranks are faster.
    """
    if not all(kinds):
        return None  # one of them fits no number of devices
    several = sum(sides[0].encodes for sides in kinds) > 1
    return share_several(spine, kinds, devices, below) if several else share(spine, kinds, devices, below)
