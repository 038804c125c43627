"""What the placement of sequences depends on."""

from dataclasses import dataclass
from math import gcd

import numpy as np

from dataserver.planning import I64, Bool
from dataserver.planning.costs.model import forward_ns, items_ns
from dataserver.planning.job.fields import ModuleKind, ModuleSpec
from dataserver.planning.job.spec import JobSpec
from dataserver.planning.layouts.pipelined.options import PipelinedOptions
from dataserver.planning.layouts.pipelined.placing.transfers import Transfers, problem_transfers
from dataserver.planning.plan.arranging import module_images
from dataserver.planning.stream.samples import StepSamples


@dataclass(frozen=True, slots=True)
class Budgets:
    """Memory for activations: patches or tokens, see `jobspec.Memory`."""

    need: I64
    """int64 [rows, s + 1]: what each sequence takes in each row; of a padded backbone its largest sample. The last
    column is an empty slot."""
    budget: I64
    """int64 [rows]: what a rank of the backbone has, and what all ranks of a component together have in the others; -1
    for no limit."""
    window: I64
    """int64 [rows]: consecutive microbatches that must fit together."""


@dataclass(frozen=True, slots=True)
class PlacementProblem:
    """What the placement of s sequences depends on.

    Rows are the encoders, the backbone, and the generators, in this order.
    """

    dp: int
    """Data-parallel ranks of the backbone."""
    num_waves: int
    """Number of microbatches that each rank runs."""
    slots: int
    """Number of sequences in each microbatch."""
    components: int
    num_stages: int
    """Pipeline stages of the backbone."""
    num_encoders: int
    in_flight: I64
    """int64 [encoders + stages + generators]: microbatches that each encoder, backbone stage and generator holds at
    most, never rising from one to the next in the joined pipeline."""
    own: I64
    """int64 [rows, s + 1]: forward nanoseconds of each sequence in its component's encoder, in a backbone stage, in its
    component's generator; the last column is an empty slot. Of a padded backbone: of the largest sample."""
    way: I64
    """int64 [rows, s]: forward nanoseconds that each sequence takes at least on its way through each row, alone and
    spread over all ranks."""
    base: I64
    """int64 [rows]: forward nanoseconds of a microbatch beside its sequences."""
    percent: I64
    """int64 [rows]: backward time in percent of the forward time."""
    chunks: int
    """Model chunks of a backbone stage; `own`, `way` and `base` of the backbone are multiples of it."""
    items: I64 | None = None
    """int64 [s + 1]: samples of each sequence, where the backbone pads them to the largest of their microbatch."""
    budgets: Budgets | None = None
    """Memory, where a module states it."""
    transfers: Transfers | None = None
    """How long rows take from row to row, where the job has transfers."""
    returns: Bool | None = None
    """bool, as `in_flight`: the stages that run backwards; None if all do."""
    whole: bool = False
    """Whether ranks of the backbone run the encoders too, on their first stage; each of them is a component then."""
    images: I64 | None = None
    """int64 [s + 1]: 1 for each sequence with images, where all ranks of a wave must have some or none."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Ranks, microbatches of each, and slots of these."""
        return self.dp, self.num_waves, self.slots

    @property
    def ranks_per_component(self) -> int:
        """Backbone ranks of one component."""
        return self.dp // self.components

    @property
    def num_sequences(self) -> int:
        """Number of sequences to place."""
        return int(self.own.shape[1]) - 1

    @property
    def work(self) -> I64:
        """int64 [rows, s]: forward nanoseconds of each sequence, alone in its microbatch."""
        work = self.own[:, :-1].copy()
        if self.items is not None:
            work[self.num_encoders] *= self.items[:-1]
        return work

    @property
    def balanced_by(self) -> I64:
        """int64 [s]: time by which ranks of the backbone are balanced, of all that they run."""
        work = self.work
        if self.whole:
            work[self.num_encoders] *= self.num_stages
            total: I64 = (work + work * self.percent[:, None] // 100).sum(axis=0)
        else:
            total = work[self.num_encoders]
        return total


def placement_problem(
    spec: JobSpec, in_flight: I64, samples: StepSamples, sequence: I64, num_waves: int, parity: bool = False
) -> PlacementProblem:
    """The problem of one step of a pipelined job.

    Args:
        spec: the job.
        in_flight: see `PlacementProblem`.
        samples: of the step.
        sequence: int64 [n], the sequence of each sample; all from 0 to the largest have samples.
        num_waves: microbatches of each rank.
        parity: whether all ranks of a wave must have images, or none.
    """
    execution, count = spec.execution, int(sequence.max(initial=-1)) + 1
    modules, num_encoders = execution.by_depth, len(execution.of_kind(ModuleKind.ENCODER))
    chunks = execution.options(PipelinedOptions).chunks
    own, need = (np.zeros((len(modules), count + 1), np.int64) for _ in range(2))
    way, base = np.zeros((len(modules), count), np.int64), np.zeros(len(modules), np.int64)
    for row, module in enumerate(modules):
        if module.kind is ModuleKind.BACKBONE:
            parts = module.pp * chunks
            own[row, :-1], need[row, :-1] = _backbone_loads(module, samples.tokens, sequence, count)
            own[row] = own[row] // parts * chunks
            base[row] = module.cost.microbatch_ns // parts * chunks
        else:
            images = module_images(spec, module, samples)
            held, sizes = sequence[samples.image_sample[images]], samples.patches[images]
            times = items_ns(module.cost, sizes, samples.depths(images))
            np.add.at(own[row], held, times)
            np.add.at(need[row], held, sizes)
            np.maximum.at(way[row], held, times)
            way[row] = np.maximum(way[row], own[row, :-1] // module.dp)
            base[row] = module.cost.microbatch_ns
    whole = bool(execution.identity_routing)
    components = execution.backbone.dp if whole else _components(modules, need)
    for row, module in enumerate(modules):
        if module.kind is not ModuleKind.BACKBONE:
            own[row] //= module.dp // components
    problem = PlacementProblem(
        dp=execution.backbone.dp,
        num_waves=num_waves,
        slots=execution.microbatch,
        components=components,
        num_stages=execution.backbone.pp,
        num_encoders=num_encoders,
        in_flight=in_flight,
        own=own,
        way=way,
        base=base,
        percent=np.array([m.cost.backward_percent for m in modules], np.int64),
        items=_items(execution.backbone, sequence, count),
        budgets=_budgets(modules, need, components),
        chunks=chunks,
        transfers=problem_transfers(spec, modules, samples, sequence, num_waves, components),
        returns=np.repeat([m.runs_backward for m in modules], [m.pp for m in modules]),
        whole=whole,
        images=_with_images(need[:num_encoders]) if parity else None,
    )
    way[num_encoders] = problem.work[num_encoders]
    return problem


def _backbone_loads(module: ModuleSpec, tokens: I64, sequence: I64, count: int) -> tuple[I64, I64]:
    """Forward time in the whole backbone and tokens of each sequence; padded, of its largest sample."""
    times, held = np.zeros(count, np.int64), np.zeros(count, np.int64)
    gather = np.maximum if module.padded else np.add
    gather.at(times, sequence, forward_ns(module.cost, tokens))
    gather.at(held, sequence, tokens)
    return times, held


def _items(module: ModuleSpec, sequence: I64, count: int) -> I64 | None:
    return np.bincount(sequence, minlength=count + 1).astype(np.int64) if module.padded else None


def _components(modules: tuple[ModuleSpec, ...], need: I64) -> int:
    """Components that the ranks form; a single one if one of several could not hold all images of a sequence."""
    components = gcd(*(m.dp for m in modules))
    for module, most in zip(modules, need.max(axis=1, initial=0).tolist(), strict=True):
        if module.kind is not ModuleKind.BACKBONE and module.memory is not None:
            components = components if most <= module.memory.units * (module.dp // components) else 1
    return components


def _with_images(patches: I64) -> I64:
    """1 for each sequence, int64 [s + 1], that has patches in a row of some encoders."""
    return np.where(patches.sum(axis=0) > 0, np.int64(1), np.int64(0))


def _budgets(modules: tuple[ModuleSpec, ...], need: I64, components: int) -> Budgets | None:
    if all(m.memory is None for m in modules):
        return None
    budget = [
        -1 if m.memory is None else m.memory.units * (1 if m.kind is ModuleKind.BACKBONE else m.dp // components)
        for m in modules
    ]
    return Budgets(need, np.array(budget, np.int64), np.ones(len(budget), np.int64))
