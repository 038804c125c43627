"""A way to run a job on a cluster, and the problem that it is one answer to."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import ceil
from typing import Any, Final

from trainclient.orchestrate.cluster import Cluster
from trainclient.orchestrate.costs import CostTable, Option, options
from trainclient.orchestrate.networks import Network
from trainclient.orchestrate.workload import Workload

MAX_MICROBATCH: Final = 64
"""Sequences of the largest microbatch that is tried."""
FINER: Final = (2, 4, 8)
"""Microbatches that a packed sequence is divided between in colocated layouts, where memory does not hold it whole."""
HALVES: Final = (2, 3, 4, 6, 8, 12, 16)
"""Twice as many times more microbatches as servers try, where they work wave by wave (`pipelined/counts.py`)."""
BEST_CHOICES: Final = 3
"""Number of choices of each layout that are shown, and scored by planner and simulator."""


class NoLayoutError(ValueError):
    """A layout has no choice; says why."""


class TooLargeError(NoLayoutError):
    """No degrees of a layout fit the cluster; `shortfall` tells what would."""

    def __init__(self, layout: str) -> None:
        super().__init__(f"{layout}: no degrees fit")


@dataclass(frozen=True, slots=True)
class Problem:
    """A model, a cluster and sizes of samples."""

    networks: tuple[Network, ...]
    """Encoders of different modalities, a backbone, at most one generator; or towers."""
    cluster: Cluster
    workload: Workload
    table: CostTable | None = None
    """Measured costs; without them they are computed."""
    max_tp: int = 8
    """Largest degree of tensor parallelism."""

    def network(self, kind: str) -> Network | None:
        """The module of a kind, if there is one."""
        return next((n for n in self.networks if n.kind == kind), None)

    def options(self, network: Network) -> list[Option]:
        """The degrees that a module can have."""
        return options(network, self.workload.load(network), self.cluster, self.max_tp, self.table)

    @property
    def flops(self) -> float:
        """Operations of a step: forward, and backwards as far as they are needed, without what is computed again."""
        total = 0.0
        for network in self.networks:
            load = self.workload.load(network)
            of_rows = network.row_flops + network.windowed_flops
            forward = load.rows * of_rows + load.squares * network.pair_flops
            total += forward * (1 + network.gradient_passes) * self.workload.stream.global_batch
        return total


@dataclass(frozen=True, slots=True)
class ModuleChoice:
    """A module with its degrees."""

    option: Option
    dp: int
    pp: int = 1
    stage_bytes: float = 0
    """Bytes that the fullest device needs."""
    state_bytes: float = 0
    """The part of it that weights, gradients and optimizer states take."""
    work_bytes: float = 0
    """The part of it that is there only while a microbatch is computed."""
    wave_ns: float = 0
    """Forward and backward of a microbatch on a device of it."""
    waiting_ns: float = 0
    """The part of that in which it waits for weights and sums of gradients that are not overlapped."""
    budget_bytes: float | None = None
    """What its activations may take where several modules share a device; else all that is left."""
    step_bytes: float | None = None
    """The same of all its microbatches of a step or round, where it keeps them."""

    @property
    def gpus(self) -> int:
        """Number of devices of the module."""
        return self.dp * self.pp * self.option.tp


@dataclass(frozen=True, slots=True)
class Choice:
    """Degrees of all modules, and what the solver expects of them."""

    layout: str
    """The kind of layout, or monolithic where it is the baseline with the same degrees for all modules."""
    modules: tuple[ModuleChoice, ...]
    gpus: int
    """Number of GPUs that compute."""
    microbatch: int
    """Sequences of a microbatch of each rank."""
    waves: int
    """Number of microbatches that each rank runs."""
    step_ns: float
    parts: Mapping[str, float]
    """What adds up to the step."""
    sharding: str = "zero2"
    """What data-parallel ranks share: states of the optimizer (zero2), all states (zero3), or none."""
    extras: Mapping[str, Any] = field(default_factory=dict)
    """Options of the layout, as a job has them."""
    rounds: int = 1
    """Times that a step goes through all phases, since memory does not hold it at once."""
    finer: float = 1
    """Times as many microbatches, each as much smaller: of 3 sequences at 1.5 times as many each holds 2."""
    chunks: int = 1
    """Model chunks of each stage of the backbone; several are interleaved."""
    kind: str = field(kw_only=True)
    """The layout of a job that runs it."""
    end: Mapping[str, Any] = field(default_factory=lambda: {"epochs": 1})
    """Where such a job ends."""

    def module(self, kind: str) -> ModuleChoice:
        """The module of a kind."""
        return next(m for m in self.modules if m.option.network.kind == kind)

    @property
    def bottleneck(self) -> ModuleChoice:
        """The module that a microbatch takes longest in."""
        return max(self.modules, key=lambda m: m.wave_ns)

    @property
    def busy_ns(self) -> float:
        """Time that all devices together compute in a step."""
        return sum(m.wave_ns * m.gpus for m in self.modules) * self.waves

    @property
    def bubble(self) -> float:
        """Share of the time of its devices in which they do not compute."""
        return max(0.0, 1 - self.busy_ns / (self.step_ns * self.gpus))

    @property
    def memory_bytes(self) -> float:
        """Memory of the fullest device."""
        return max(m.stage_bytes for m in self.modules)

    def mfu(self, problem: Problem) -> float:
        """Share of what all devices of the cluster could compute in the step's time."""
        peak = problem.cluster.peak_flops_ns * problem.cluster.gpus * self.step_ns
        return problem.flops / peak


Solver = Callable[[Problem], list[Choice]]
"""The best choices of a layout, the fastest first; NoLayoutError where there is none."""


@dataclass(frozen=True, slots=True)
class LayoutDegrees:
    """How the degrees of a layout are found: `DEGREES` in the `degrees` of its folder."""

    has_backbone: bool
    """Whether it is for models with a backbone; otherwise for towers."""
    best: Solver
    equal: Solver | None = None
    """The baseline, monolithic: the same degrees for all modules."""


def insert(found: list[Choice], choice: Choice) -> list[Choice]:
    """The best choices, the fastest first; of equally fast ones that of fewer devices, and of equal ones the first."""
    if any((c.step_ns, c.gpus) == (choice.step_ns, choice.gpus) for c in found):
        return found
    return sorted([*found, choice], key=lambda c: (c.step_ns, c.gpus))[:BEST_CHOICES]


def microbatches(problem: Problem) -> list[tuple[int, int]]:
    """Sequences of a microbatch, and microbatches of a sequence: every divisor of the batch; and finer ones of packed
    sequences, as long as each holds any sample."""
    stream, backbone = problem.workload.stream, problem.network("backbone")
    found = [(m, 1) for m in divisors(stream.global_batch, MAX_MICROBATCH)]
    if stream.packed and backbone is not None:
        load = problem.workload.load(backbone)
        found += [(1, finer) for finer in FINER if finer * load.largest <= load.rows]
    return found


def wave_microbatches(problem: Problem) -> list[tuple[int, int]]:
    """Where servers choose how many waves there are: sequences of a microbatch, and twice the times as many there are.

    Every divisor of the batch; 1.5 times as many; and of single sequences all `HALVES`. Microbatches of packed samples
    each hold any sample, others a sequence at least.
    """
    stream, backbone = problem.workload.stream, problem.network("backbone")
    if backbone is None:
        return []
    load = problem.workload.load(backbone)
    smallest = load.largest / load.rows if stream.packed else 1
    return [
        (m, halves)
        for m in divisors(stream.global_batch, MAX_MICROBATCH)
        for halves in (HALVES if m == 1 else HALVES[:2])
        if halves == HALVES[0] or 2 * m >= halves * smallest
    ]


def divisors(number: int, most: int) -> list[int]:
    """Those up to a limit."""
    return [n for n in range(1, min(number, most) + 1) if number % n == 0]


def at_least(numerator: float, denominator: float) -> int:
    """The smallest integer n of at least 1 with numerator / n <= denominator; a huge one where there is none."""
    return 1 << 40 if denominator <= 0 else max(1, ceil(numerator / denominator - 1e-12))
