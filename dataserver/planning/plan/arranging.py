"""Arrangements of a step's samples and images, and the routings between them."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from dataserver.planning import I64, Bool
from dataserver.planning.balancing import BALANCERS, BinBudget, bin_totals
from dataserver.planning.costs.model import items_ns
from dataserver.planning.job.fields import BalancePolicy, Modality, ModuleKind, ModuleSpec, Stream
from dataserver.planning.job.spec import JobSpec
from dataserver.planning.plan.naming import counted
from dataserver.planning.plan.placement import Placement
from dataserver.planning.plan.plan import Arrangement, Routing
from dataserver.planning.stream.item_sizes import item_tokens, token_grids
from dataserver.planning.stream.samples import MODALITY_NUMBERS, StepSamples, Task, ranges
from dataserver.planning.stream.sizing import MicrobatchTooLargeError

if TYPE_CHECKING:  # kernels are imported where they are called
    from dataserver.planning.kernels.placed import Placed

TASK_OF: Mapping[ModuleKind, Task] = MappingProxyType(
    {ModuleKind.ENCODER: Task.UNDERSTANDING, ModuleKind.GENERATOR: Task.GENERATION}
)
"""The task whose images a module handles."""

_SMALLER = "take smaller microbatches, a balance other than none, more ranks, or more memory"


class WaveTooLargeError(MicrobatchTooLargeError):
    """Images of one wave that the memory of a module's ranks cannot hold together."""

    def __init__(self, message: str, wave: int = 0) -> None:
        super().__init__(message)
        self.wave = wave


def arrange_samples(module: ModuleSpec, samples: StepSamples, sequence: I64, placement: Placement) -> Arrangement:
    """The backbone's arrangement; `sequence`, int64 [n], has the sequence of each sample."""
    slot = placement.slot[sequence]
    return arrange_sequences(module, samples, placement.rank[sequence], placement.wave[sequence], slot)


def arrange_sequences(module: ModuleSpec, samples: StepSamples, rank: I64, microbatch: I64, slot: I64) -> Arrangement:
    """The backbone's arrangement, from the place of each sample's sequence, int64 [n]; in canonical order within it."""
    order = in_order_of(rank, microbatch, slot)
    at = _in_places(order, rank, microbatch, samples.tokens)
    return Arrangement(module.name, order, at.rank, at.microbatch, slot[order], at.start)


def arrange_items(module: ModuleSpec, rows: I64, rank: I64, microbatch: I64) -> Arrangement:
    """A tower's arrangement, from rows, rank and microbatch of each item, int64 [k]; in canonical order within them."""
    order = in_order_of(rank, microbatch)
    return Arrangement(module.name, order, *_in_places(order, rank, microbatch, rows))


def in_order_of(*keys: I64) -> I64:
    """The stable order by several keys of small non-negative numbers, the first one most significant. int64 [k].

    Counted 16 bits at a time, which takes a tenth of the time of numpy's `lexsort`.
    """
    from dataserver.planning.kernels.placed import order_of_places

    joined = keys[0]
    for key in keys[1:]:
        joined = joined * (int(key.max(initial=0)) + 1) + key
    order = order_of_places(joined & 0xFFFF)
    for shift in range(16, int(joined.max(initial=0)).bit_length(), 16):
        order = order[order_of_places((joined[order] >> shift) & 0xFFFF)]
    return order


def spread_images(
    module: ModuleSpec,
    sizes: I64,
    backbone_rank: I64,
    wave: I64,
    dp: int,
    components: int,
    depths: I64 | None = None,
) -> I64:
    """The rank of each image of an encoder or generator, as its balance, padding and memory ask for. int64 [k].

    - `none`: the rank beside that of the image's sample.
    - `even`: every wave in canonical order, dealt out in runs over all ranks, whatever the components (`dealt_out`).
    - `lpt`: wave by wave, longest first, to the rank of its component that would finish it first. Finish times run on
      from wave to wave, so that the largest image of every wave does not always meet the same rank.
    - padded modules: every wave of every component is balanced by itself, and its heaviest batch goes to the rank that
      could begin it first.

    Args:
        module: the encoder or generator.
        sizes: int64 [k], patches of each image.
        backbone_rank: int64 [k], where each image's sample is.
        wave: int64 [k].
        dp: backbone ranks.
        components: independent sets of ranks; it divides both degrees.
        depths: int64 [k], groups of frames of videos, where there are any.

    Raises:
        WaveTooLargeError: no way was found to keep every rank's part of every wave within the module's memory.
    """
    width = module.dp // components
    component = backbone_rank * components // dp
    if module.balance is BalancePolicy.NONE:
        rank = backbone_rank * module.dp // dp
    elif module.balance is BalancePolicy.EVEN:
        rank = dealt_out(wave, module.dp)
    elif width == 1:
        rank = component * width
    elif module.padded:
        return _balanced_waves(module, "padded", sizes, depths, wave, component, components)
    else:
        return _first_to_finish(module, sizes, depths, wave, component, components)
    _check_memory(module, sizes, rank, wave)
    return rank


def dealt_out(wave: I64, num_ranks: int) -> I64:
    """The items of every wave in their order, in runs over all ranks; `wave` is int64 [k].

    In a wave the counts of two ranks differ by one at most, and so do those of all waves together: the longer runs of a
    wave begin at the rank where those of the wave before end.

    Returns:
        int64 [k], the rank of each.
    """
    order = np.argsort(wave, kind="stable")
    waves, number = wave[order], np.arange(len(wave))
    first = np.searchsorted(waves, waves)
    turn = (number - first) % num_ranks
    rank = np.empty_like(wave)
    rank[order] = (turn[np.lexsort((turn, waves))] + first) % num_ranks
    return rank


def _first_to_finish(
    module: ModuleSpec, sizes: I64, depths: I64 | None, wave: I64, component: I64, components: int
) -> I64:
    """`lpt`; where that runs out of memory, LPT of each wave by itself, which is repaired by exchanges."""
    from dataserver.planning.kernels.spreading import first_to_finish

    loads = items_ns(module.cost, sizes, depths)
    order = np.argsort(-loads, kind="stable")
    order = order[in_order_of(wave[order])]
    need, budget = (np.zeros_like(sizes), 0) if module.memory is None else (sizes, module.memory.units)
    rank, left_over = first_to_finish(loads, need, order, wave, component, components, module.dp // components, budget)
    return rank if left_over < 0 else _balanced_waves(module, "lpt", sizes, depths, wave, component, components)


def _balanced_waves(
    module: ModuleSpec,
    balancer: str,
    sizes: I64,
    depths: I64 | None,
    wave: I64,
    component: I64,
    components: int,
) -> I64:
    """Every wave of every component by a balancer of that name."""
    width = module.dp // components
    loads, rank = items_ns(module.cost, sizes, depths), np.empty_like(sizes)
    finish = np.zeros((components, width), np.int64)
    key = wave * components + component
    order = np.argsort(key, kind="stable")
    for mine in np.split(order, np.flatnonzero(np.diff(key[order])) + 1) if len(order) else ():
        here = int(component[mine[0]])
        budget = None if module.memory is None else BinBudget(sizes[mine], module.memory.units)
        try:
            batch = BALANCERS[balancer](loads[mine], width, None, budget)
        except ValueError as error:
            if budget is None:
                raise
            raise WaveTooLargeError(
                f"module {module.name}, wave {wave[mine[0]]}: its {counted(len(mine), 'image')} of "
                f"{sizes[mine].sum()} patches do not fit {counted(width, 'rank')}"
                f"{', padded,' if module.padded else ''} with memory for {budget.cap} each; {_SMALLER}",
                int(wave[mine[0]]),
            ) from error
        times = bin_totals(loads[mine], batch, width, padded=module.padded)
        rank_of = np.empty(width, np.int64)
        rank_of[np.argsort(-times, kind="stable")] = np.argsort(finish[here], kind="stable")
        finish[here, rank_of] += times
        rank[mine] = here * width + rank_of[batch]
    return rank


def _check_memory(module: ModuleSpec, sizes: I64, rank: I64, wave: I64) -> None:
    """Refuse a rank's part of a wave that its memory does not hold."""
    if module.memory is None or not len(sizes):
        return
    batches, batch = np.unique(wave * module.dp + rank, return_inverse=True)
    held = bin_totals(sizes, batch, len(batches), padded=module.padded)
    worst = int(held.argmax())
    if held[worst] > module.memory.units:
        at_wave, at_rank = divmod(int(batches[worst]), module.dp)
        raise WaveTooLargeError(
            f"module {module.name}, wave {at_wave}: the images of rank {at_rank} have {held[worst]} patches"
            f"{', padding included' if module.padded else ''}, but its memory holds {module.memory.units}; {_SMALLER}",
            at_wave,
        )


def _in_places(order: I64, rank: I64, microbatch: I64, rows: I64) -> "Placed":
    from dataserver.planning.kernels.placed import in_places

    return in_places(order, rank, microbatch, rows)


def module_images(spec: JobSpec, module: ModuleSpec, samples: StepSamples) -> I64:
    """The images that an encoder or generator handles: by their task, by dataset, and by modality.

    Returns:
        int64 [k], ascending indices into the step's images.
    """
    first, end = samples.images_with(TASK_OF[module.kind])
    found = ranges(first, (end - first) * _handled(spec, module, samples))
    if samples.image_modality is not None:
        found = found[samples.image_modality[found] == MODALITY_NUMBERS[module.reads]]
    return found


def _handled(spec: JobSpec, module: ModuleSpec, samples: StepSamples) -> Bool:
    """The samples whose images of its task an encoder or generator handles. bool [n]."""
    if samples.image_modality is None and module.reads is not Modality.IMAGE:
        return np.zeros(len(samples), np.bool_)
    of_dataset = spec.module_of_dataset(module.kind, module.reads)
    datasets = np.array([m is not None and m.name == module.name for m in of_dataset])
    found: Bool = datasets[samples.dataset]
    return found


def image_rows(stream: Stream, samples: StepSamples, images: I64, task: Task) -> I64:
    """Rows that each image contributes to the routing: embeddings, or conditions. int64 [k]."""
    if task is Task.GENERATION:
        return np.full(len(images), stream.generation.query_tokens, np.int64)
    return item_tokens(samples, stream.sizing)[images]


@dataclass(frozen=True, slots=True, eq=False)
class BesideBackbone:
    """The k images that a module handles, in backbone order, and where the backbone has their rows. int64 [k] each."""

    image: I64
    """Index into the step's images."""
    item: I64
    """Which of the module's images it is, in canonical order."""
    rank: I64
    microbatch: I64
    start: I64
    """First row in the backbone's microbatch, over the images of all modules of the kind."""
    rows: I64


def images_beside(spec: JobSpec, module: ModuleSpec, samples: StepSamples, backbone: Arrangement) -> BesideBackbone:
    """The images of an encoder or generator and their places in the backbone."""
    from dataserver.planning.kernels.placed import Beside, images_of

    task, stream = TASK_OF[module.kind], spec.stream
    image_rows, image_columns, merged = token_grids(samples, stream.sizing)
    first, end = samples.images_with(task)
    beside = Beside(
        item=backbone.item,
        rank=backbone.rank,
        microbatch=backbone.microbatch,
        first=first,
        end=end,
        mine=_handled(spec, module, samples),
        image_rows=image_rows,
        image_columns=image_columns,
    )
    given = stream.generation.query_tokens if task is Task.GENERATION else -1
    found = BesideBackbone(*images_of(beside, merged, given))
    if samples.image_modality is None:
        return found
    mine = samples.image_modality[found.image] == MODALITY_NUMBERS[module.reads]
    image = found.image[mine]
    picked = (a[mine] for a in (found.rank, found.microbatch, found.start, found.rows))
    return BesideBackbone(image, np.searchsorted(np.sort(image), image), *picked)


def without_places(
    module: ModuleSpec, backbone: ModuleSpec, beside: BesideBackbone, rank: I64
) -> tuple[Arrangement, Routing]:
    """What a simulation asks of the arrangement and routing of an encoder or generator, in a fifth of the time.

    Images are in the order of `beside`, and have no places in their microbatches. Arguments are those of
    `arrange_and_route`.
    """
    none, wave = np.zeros(0, np.int64), beside.microbatch
    arrangement = Arrangement(module.name, beside.image, rank, wave, none, none)
    ends = [(module.name, rank), (backbone.name, beside.rank)]
    if module.kind is ModuleKind.GENERATOR:
        ends.reverse()
    (source, source_rank), (target, target_rank) = ends
    return arrangement, Routing(source, target, wave, source_rank, none, wave, target_rank, none, beside.rows)


def arrange_and_route(
    module: ModuleSpec, backbone: Arrangement, beside: BesideBackbone, rank: I64, microbatch: I64
) -> tuple[Arrangement, Routing]:
    """The arrangement of an encoder or generator, and the routing between it and the backbone.

    Args:
        module: the encoder or generator.
        backbone: its arrangement.
        beside: the k images (`images_beside`).
        rank: int64 [k], the rank of the module that gets each.
        microbatch: int64 [k], and the microbatch; in a pipeline the backbone's.
    """
    order, start = in_order_of(rank, microbatch), np.empty_like(rank)
    at = _in_places(order, rank, microbatch, beside.rows)
    start[order] = at.start
    arrangement = Arrangement(module.name, beside.image[order], *at)
    ends = [(module.name, (microbatch, rank, start)), (backbone.module, (beside.microbatch, beside.rank, beside.start))]
    if module.kind is ModuleKind.GENERATOR:
        ends.reverse()
    (source, first), (target, then) = ends
    by_source = in_order_of(*first[:2])  # within them the images are in the order of their first rows already
    moved = [a[by_source] for a in (*first, *then, beside.rows)]
    if np.array_equal(moved[0], moved[3]):
        moved[3] = moved[0]  # in a pipeline both are the wave, which is kept once
    return arrangement, Routing(source, target, *moved)
