"""The joined pipeline of a job: encoders, backbone stages, generators, and its simulation."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from dataserver.planning import I64, yield_point
from dataserver.planning.costs.model import transfer_ns
from dataserver.planning.job.fields import ModuleKind, ModuleSpec
from dataserver.planning.job.spec import Execution, JobSpec
from dataserver.planning.layouts.interface import Node, PlannedTimeline
from dataserver.planning.layouts.pipelined.interleaving import interleaved_passes
from dataserver.planning.layouts.pipelined.options import PipelinedOptions
from dataserver.planning.layouts.pipelined.programs import programs
from dataserver.planning.layouts.shared.transfers import routed_ns
from dataserver.planning.plan.expectation import held_units, microbatch_loads
from dataserver.planning.plan.plan import ArrangedStep, ModuleSchedule, Routing
from dataserver.planning.simulation import Pipeline, Program, chunk_transfers, makespan_ns, simulate

Schedules = tuple[ModuleSchedule, ...]


def timeline(spec: JobSpec, plan: ArrangedStep) -> PlannedTimeline:
    """Simulate a plan: every rank of every stage, joined as the routings say."""
    stages, pipeline = _joined(spec, plan)
    nodes = tuple(Node(p.modules, r, p.stage) for p in stages for r in range(spec.execution.module(p.modules[0]).dp))
    return PlannedTimeline(nodes, pipeline, simulate(pipeline))


def makespans_of(spec: JobSpec, plan: ArrangedStep, some_schedules: Iterable[Schedules]) -> Iterator[int]:
    """Nanoseconds that a plan takes with each of some schedules: those of its timeline."""
    pipeline: Pipeline | None = None
    for schedules in some_schedules:
        if pipeline is None:
            _, pipeline = _joined(spec, replace(plan, schedules=schedules), times_alone=True)
        else:
            stages = programs(spec.execution, schedules, plan.num_microbatches)
            pipeline = replace(pipeline, operations=[p.operations for p in stages])
        yield makespan_ns(pipeline)


def _joined(spec: JobSpec, plan: ArrangedStep, *, times_alone: bool = False) -> tuple[tuple[Program, ...], Pipeline]:
    """The program of each stage, and the pipeline of all of them.

    Where images stay on the ranks of their sequences, these run the encoders in turn with their first stage. With
    `times_alone` it has no activations, and may have an edge several times.
    """
    chunks, whole = spec.execution.options(PipelinedOptions).chunks, bool(spec.execution.identity_routing)
    transfers = spec.execution.transfers is not None
    modules = (spec.execution.backbone,) if whole else spec.execution.by_depth
    stages = programs(spec.execution, plan.schedules, plan.num_microbatches)
    forward = np.concatenate([_forward_ns(m, plan, chunks) for m in modules])
    yield_point()
    percent = np.repeat([m.cost.backward_percent for m in modules], [m.dp * m.pp * chunks for m in modules])
    backward = forward * percent[:, None] // 100
    for encoder in spec.execution.of_kind(ModuleKind.ENCODER) if whole else ():
        times, first = microbatch_loads(encoder, plan), slice(0, encoder.dp * chunks, chunks)
        forward[first] += times
        backward[first] += times * encoder.cost.backward_percent // 100
    return stages, Pipeline(
        num_stages=len(stages),
        stage=np.repeat(np.arange(len(stages)), [m.dp for m in modules for _ in range(m.pp)]),
        forward_ns=forward,
        backward_ns=backward,
        edges=_edges(
            modules, () if whole else plan.routings, plan.num_microbatches, chunks, times_alone and not transfers
        ),
        operations=[p.operations for p in stages],
        num_chunks=chunks,
        transfer_ns=_transfer_ns(spec.execution, plan, chunks),
        activation_bytes=None if times_alone else _activation_bytes(modules, plan, chunks),
    )


def _by_block(module: ModuleSpec, values: I64, chunks: int) -> I64:
    """What is true of every stage, for all of a module's blocks: int64 [pp x dp x chunks, microbatches].

    `values` is int64 [dp, chunks or 1, microbatches]. Encoders and generators have one chunk; the others of their nodes
    stay empty.
    """
    blocks = np.zeros((module.pp, module.dp, chunks, values.shape[-1]), np.int64)
    blocks[:, :, : chunks if module.kind is ModuleKind.BACKBONE else 1] = values
    return blocks.reshape(-1, values.shape[-1])


def _forward_ns(module: ModuleSpec, plan: ArrangedStep, chunks: int) -> I64:
    parts = module.pp * (chunks if module.kind is ModuleKind.BACKBONE else 1)
    return _by_block(module, microbatch_loads(module, plan)[:, None] // parts, chunks)


def _activation_bytes(modules: Sequence[ModuleSpec], plan: ArrangedStep, chunks: int) -> I64 | None:
    """int64 [blocks, microbatches], zeros for modules that state no memory; None if none does."""
    if all(m.memory is None for m in modules):
        return None
    found = []
    for m in modules:
        held = np.zeros((m.dp, 1, plan.num_microbatches), np.int64)
        if m.memory is not None:
            own = chunks if m.kind is ModuleKind.BACKBONE else 1
            held = interleaved_passes(m.memory, held_units(m, plan), own)
        found.append(_by_block(m, held, chunks))
    return np.concatenate(found)


def _edges(
    modules: Sequence[ModuleSpec], routings: Sequence[Routing], num_microbatches: int, chunks: int, several: bool
) -> I64:
    """Edges between blocks, whose nodes are numbered by module, stage and rank: int64 [e, 3].

    With `several` there is one for each entry of a routing.
    """
    first = dict(zip([m.name for m in modules], np.cumsum([0, *(m.dp * m.pp for m in modules)]).tolist(), strict=False))
    last = {m.name: first[m.name] + m.dp * (m.pp - 1) for m in modules}
    blocks = sum(m.dp * m.pp for m in modules) * chunks
    backbone = next(m for m in modules if m.kind is ModuleKind.BACKBONE)
    found = [_chains(backbone.dp, backbone.pp, chunks, first[backbone.name], num_microbatches)]
    for r in routings:
        source = (r.source_rank + last[r.source_module]) * chunks
        if r.source_module == backbone.name:
            source = source + chunks - 1
        target = (r.target_rank + first[r.target_module]) * chunks
        yield_point()
        if several:
            found.append(np.stack([r.source_microbatch, source, target], axis=1))
            continue
        key = np.unique((r.source_microbatch * blocks + source) * blocks + target)  # sorted as the three columns are
        found.append(np.stack([key // blocks**2, key // blocks % blocks, key % blocks], axis=1))
    return np.concatenate(found)


@lru_cache(maxsize=2)  # the same for all candidates of a number of microbatches
def _chains(dp: int, pp: int, chunks: int, first: int, num_microbatches: int) -> I64:
    """The edges within the backbone, whose nodes begin with `first`."""
    stage, chunk, next_stage, next_chunk = chunk_transfers(pp, chunks).T[:, :, None]
    ranks = first + np.arange(dp)
    source = ((stage * dp + ranks) * chunks + chunk).ravel()
    target = ((next_stage * dp + ranks) * chunks + next_chunk).ravel()
    wave = np.repeat(np.arange(num_microbatches), len(source))
    found = np.stack([wave, *(np.tile(b, num_microbatches) for b in (source, target))], axis=1)
    found.flags.writeable = False
    return found


def _transfer_ns(execution: Execution, plan: ArrangedStep, chunks: int) -> I64 | None:
    """Nanoseconds of each edge in the order of `_edges`, int64 [e]; None if no transfer takes time."""
    if execution.transfers is None:
        return None
    backbone = execution.backbone
    between = transfer_ns(execution.transfer(backbone.name, backbone.name), held_units(backbone, plan))
    transfers = len(chunk_transfers(backbone.pp, chunks))
    found = [np.repeat(between.T[:, None], transfers, axis=1).ravel()]
    routings = () if execution.identity_routing else plan.routings
    return np.concatenate([*found, *(routed_ns(execution, r) for r in routings)])
