"""The joined pipeline of a job: encoders, backbone stages, generators, and its simulation."""

from collections.abc import Sequence

import numpy as np

from dataserver.planning.expectation import microbatch_loads
from dataserver.planning.jobspec import Execution, JobSpec, Memory, ModuleKind, ModuleSpec, PipelineLayout
from dataserver.planning.layouts.held import held_units
from dataserver.planning.layouts.interface import Node, PlannedTimeline
from dataserver.planning.pipeline import (
    Operation,
    Pipeline,
    chunk_hops,
    interleaved_operations,
    simulate,
    stage_operations,
)
from dataserver.planning.plan import ArrangedStep
from dataserver.planning.samples import I64

_DEPTH = (ModuleKind.ENCODER, ModuleKind.BACKBONE, ModuleKind.GENERATOR)


def pipeline_layout(execution: Execution) -> PipelineLayout:
    """The layout of a pipelined job; TypeError for another one."""
    if not isinstance(execution.layout, PipelineLayout):
        raise TypeError(f"found a {execution.layout.kind} layout where a pipeline is planned")
    return execution.layout


def pipeline_modules(execution: Execution) -> list[ModuleSpec]:
    """The modules in the order of the joined pipeline: encoders, backbone, generators."""
    return [m for kind in _DEPTH for m in execution.of_kind(kind)]


def depths(execution: Execution) -> dict[str, I64]:
    """For each module int64 [pp]: place of its stages in the joined pipeline; encoders all stand at 0."""
    first, found = 0, {}
    for kind in _DEPTH:
        modules = execution.of_kind(kind)
        for module in modules:
            found[module.name] = first + np.arange(module.pp)
        first += max((m.pp for m in modules), default=0)
    return found


def timeline(spec: JobSpec, plan: ArrangedStep) -> PlannedTimeline:
    """Simulate a plan: every rank of every stage, joined as the routings say."""
    modules, chunks = pipeline_modules(spec.execution), pipeline_layout(spec.execution).chunks
    stages = [(m, s) for m in modules for s in range(m.pp)]
    forward = np.concatenate([_forward_ns(m, plan, chunks) for m in modules])
    percent = [m.cost.backward_percent for m in modules for _ in range(m.dp * m.pp * chunks)]
    pipeline = Pipeline(
        num_stages=len(stages),
        stage=np.repeat(np.arange(len(stages)), [m.dp for m, _ in stages]),
        forward_ns=forward,
        backward_ns=forward * np.array(percent, np.int64)[:, None] // 100,
        edges=_edges(modules, plan, chunks),
        in_flight=np.concatenate([plan.in_flight(m.name) for m in modules]),
        operations=None if chunks == 1 else _lists(modules, plan, chunks),
        num_chunks=chunks,
        activation_bytes=_activation_bytes(modules, plan, chunks),
    )
    names = {m.name: (m.name,) * (chunks if m.kind is ModuleKind.BACKBONE else 1) for m in modules}
    nodes = tuple(Node(names[m.name], r, s) for m, s in stages for r in range(m.dp))
    return PlannedTimeline(nodes, pipeline, simulate(pipeline))


def interleaved_passes(memory: Memory, units: I64, chunks: int) -> I64:
    """Bytes that a pass of each microbatch through each of a stage's chunks holds; together those of the microbatch.

    int64 [ranks, chunks, microbatches] for `units` int64 [ranks, microbatches].
    """
    upto = units[:, None] * memory.unit_bytes * np.arange(chunks + 1)[:, None] // chunks
    return np.diff(upto, axis=1)


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


def _lists(modules: Sequence[ModuleSpec], plan: ArrangedStep, chunks: int) -> list[list[Operation]]:
    """The operations of every stage where the backbone's chunks are interleaved."""
    found = []
    for m in modules:
        for stage, held in enumerate(plan.in_flight(m.name).tolist()):
            if m.kind is ModuleKind.BACKBONE:
                found.append(interleaved_operations(stage, m.pp, chunks, plan.num_microbatches, held))
            else:
                found.append(stage_operations(held, plan.num_microbatches))
    return found


def _edges(modules: Sequence[ModuleSpec], plan: ArrangedStep, chunks: int) -> I64:
    """Edges between blocks, whose nodes are numbered by module, stage and rank: int64 [e, 3]."""
    first = dict(zip([m.name for m in modules], np.cumsum([0, *(m.dp * m.pp for m in modules)]).tolist(), strict=False))
    last = {m.name: first[m.name] + m.dp * (m.pp - 1) for m in modules}
    blocks = sum(m.dp * m.pp for m in modules) * chunks
    backbone = next(m for m in modules if m.kind is ModuleKind.BACKBONE)
    stage, chunk, next_stage, next_chunk = chunk_hops(backbone.pp, chunks).T[:, :, None]
    ranks = first[backbone.name] + np.arange(backbone.dp)
    source = ((stage * backbone.dp + ranks) * chunks + chunk).ravel()
    target = ((next_stage * backbone.dp + ranks) * chunks + next_chunk).ravel()
    wave = np.repeat(np.arange(plan.num_microbatches), len(source))
    found = [np.stack([wave, *(np.tile(b, plan.num_microbatches) for b in (source, target))], axis=1)]
    for r in plan.routings:
        source = (r.source_rank + last[r.source_module]) * chunks
        if r.source_module == backbone.name:
            source = source + chunks - 1
        target = (r.target_rank + first[r.target_module]) * chunks
        key = np.unique((r.source_microbatch * blocks + source) * blocks + target)  # sorted as the three columns are
        found.append(np.stack([key // blocks**2, key // blocks % blocks, key % blocks], axis=1))
    return np.concatenate(found)
