"""What DistTrain's degrees gain over monolithic ones, and what that depends on: each assumption changed by itself."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from orchestration.instances import paper_problem
from trainclient.layouts.pipelined.degrees import monolithic, pipelined
from trainclient.orchestrate.choice import Choice, Problem
from trainclient.orchestrate.costs import DEGREES, HALF_WIDTH, computed_cost, with_reductions
from trainclient.orchestrate.networks import Network
from trainclient.orchestrate.workload import workload

WIDE: Final = 8
"""Tensor parallelism of all modules in the paper's baseline."""
PIXELS: Final = {"llama3-7b": 512, "llama3-13b": 512, "llama3-70b": 1024}
"""Resolution that the paper has for each model (recalled)."""
STAGES: Final = {"llama3-7b": 1, "llama3-13b": 2, "llama3-70b": 10}
"""Stages of the backbone in the paper's baseline (recalled)."""
HIDDEN: Final = 1e9
"""A bandwidth within nodes at which sums of tensor parallelism take no time."""


@dataclass(frozen=True, slots=True)
class Case:
    """A model of the paper on a cluster."""

    backbone: str
    gpus: int
    batch: int
    pixels: int


@dataclass(frozen=True, slots=True)
class Gain:
    """The best pipelined degrees over monolithic ones."""

    wide: float
    """Gain over the best with the baseline's tensor parallelism."""
    uniform: float
    """Gain over the best of all with the same degrees for all modules."""
    mfu_percent: float

    def __str__(self) -> str:
        return f"{self.wide:.2f} x, {self.mfu_percent:.0f} %"


@dataclass(frozen=True, slots=True)
class Assumption:
    """What is assumed otherwise than by the solver, for both sides unless it says for which."""

    name: str
    """Short name of the assumption, for the table."""
    about: str
    case: Callable[[Case], Case] = lambda case: case
    problem: Callable[[Problem], Problem] = lambda problem: problem
    ours: Callable[[Problem], Problem] = lambda problem: problem
    stages: Mapping[str, int] | None = None
    """Stages of the baseline's backbone, instead of the best number."""


def gain(case: Case, assumed: Assumption | None = None) -> Gain:
    """What the solver finds for a case, as it counts or with one assumption changed.

    Raises:
        NoLayoutError: nothing fits.
    """
    assumed = assumed or Assumption("", "")
    case = assumed.case(case)
    problem = assumed.problem(paper_problem(case.backbone, case.gpus, case.batch, case.pixels))
    best = pipelined(assumed.ours(problem))[0]
    wide = _wide(problem, None if assumed.stages is None else assumed.stages[case.backbone])
    uniform = monolithic(problem)[0]
    return Gain(wide.step_ns / best.step_ns, uniform.step_ns / best.step_ns, 100 * best.mfu(problem))


def _wide(problem: Problem, stages: int | None) -> Choice:
    """The best monolithic choice with the baseline's tensor parallelism, and so many stages if it is said."""
    return monolithic(problem, lambda b: b.option.tp == WIDE and stages in (None, b.pp))[0]


def _merged(problem: Problem, merge: int) -> Problem:
    known = problem.workload
    return replace(problem, workload=workload(known.sizes, replace(known.stream, merge=merge)))


def _hidden(problem: Problem) -> Problem:
    """Without the time of sums over the peers of tensor parallelism."""
    fast = replace(problem.cluster, within_bytes_ns=HIDDEN)
    peak = problem.cluster.peak_flops_ns
    table = {(n.name, tp): with_reductions(n, tp, fast, computed_cost(n, tp, peak, fast.gpu))
             for n in problem.networks for tp in DEGREES}  # fmt: skip
    return replace(problem, table=table)


def _nearby(problem: Problem, half_width: int) -> Problem:
    """With products that reach half of their efficiency at so many columns."""

    def slower(network: Network, tp: int) -> float:
        width = network.size.width / tp
        return (width + half_width) / (width + HALF_WIDTH)

    cluster = problem.cluster
    table = {(n.name, tp): with_reductions(
                 n, tp, cluster, computed_cost(n, tp, cluster.peak_flops_ns / slower(n, tp), cluster.gpu))
             for n in problem.networks for tp in DEGREES}  # fmt: skip
    return replace(problem, table=table)


ASSUMPTIONS: Final = (
    Assumption(
        "resolution", "512 px for 7B and 13B, 1,024 for 70B, as in the paper (recalled)",
        case=lambda c: replace(c, pixels=PIXELS[c.backbone]),
    ),
    Assumption(
        "tokens", "each patch a token of the backbone, as in the paper (recalled); ours: 2 x 2 patches",
        problem=lambda p: _merged(p, 1),
    ),
    Assumption(
        "overlap", "no time for sums of tensor parallelism but in the baseline: the paper's StepCCL hides them",
        ours=_hidden,
    ),
    Assumption(
        "stages", "1, 2 and 10 stages of the baseline's backbone, as in the paper (recalled); ours: the best",
        stages=STAGES,
    ),
    Assumption(
        "narrow shares", "half of the efficiency at 512 columns of a share, which nobody measured; ours: at 256",
        problem=lambda p: _nearby(p, 512),
    ),
)  # fmt: skip
"""Those of the paper as far as they are known, and the one that nobody has measured."""
