"""Simulation of a backbone whose ranks share sequences in groups.

All ranks of the backbone exchange parameters in every layer (ZeRO-3), so that a pass of a microbatch begins and ends
for all of them together and lasts as long as its slowest group: the time of a step without encoders and generators is
the sum over microbatches of FlexSP's eq. 18. One node therefore stands for the backbone in the simulator; afterwards it
becomes its ranks: each computes for its group's time and waits for the rest.
"""

from dataclasses import replace
from functools import lru_cache

import numpy as np

from dataserver.planning import I64
from dataserver.planning.costs.model import backward_ns
from dataserver.planning.job.fields import ModuleKind, ModuleSpec
from dataserver.planning.job.spec import Execution, JobSpec
from dataserver.planning.layouts.grouped.sequences import rank_times_ns, units_held
from dataserver.planning.layouts.interface import Node, PlannedTimeline
from dataserver.planning.layouts.shared.transfers import routed_ns
from dataserver.planning.layouts.shared.waves import wave_programs
from dataserver.planning.plan.expectation import microbatch_loads
from dataserver.planning.plan.plan import ArrangedStep
from dataserver.planning.simulation import Pipeline, Timeline, pass_times, peak_bytes, simulate
from dataserver.planning.stream.samples import ranges

NODE_BITS = 20
"""Bits of the number of a node: a step has 2^21 operations at most, two or more of each node."""


def timeline(spec: JobSpec, plan: ArrangedStep) -> PlannedTimeline:
    """Simulate a plan: every rank of every module."""
    backbone, modules = spec.execution.backbone, spec.execution.by_depth
    times = [_times(spec.execution, m, plan) for m in modules]
    edges, transfer = _joins(spec.execution, plan)
    pipeline = Pipeline(
        num_stages=len(modules),
        stage=np.repeat(np.arange(len(modules)), [m.dp for m in modules]),
        forward_ns=np.concatenate([forward for forward, _ in times]),
        backward_ns=np.concatenate([backward for _, backward in times]),
        edges=edges,
        operations=[p.operations for p in wave_programs(spec.execution, plan.schedules, plan.num_microbatches)],
        transfer_ns=transfer,
        activation_bytes=np.concatenate([_held_bytes(spec.execution, m, plan) for m in modules]),
    )
    first = int(np.flatnonzero(pipeline.stage == modules.index(backbone))[0])
    return PlannedTimeline(
        _nodes(tuple((m.name, m.dp) for m in modules)), pipeline, _in_step(pipeline, first, backbone.dp)
    )


@lru_cache(maxsize=2)  # the same for all candidates of a job
def _nodes(ranks: tuple[tuple[str, int], ...]) -> tuple[Node, ...]:
    return tuple(Node((name,), rank, 0) for name, dp in ranks for rank in range(dp))


def _times(execution: Execution, module: ModuleSpec, plan: ArrangedStep) -> tuple[I64, I64]:
    """Forward and backward, int64 [dp, microbatches] each."""
    if module.kind is ModuleKind.BACKBONE:
        return rank_times_ns(execution, plan)
    forward = microbatch_loads(module, plan)
    return forward, backward_ns(module.cost, forward)


def _held_bytes(execution: Execution, module: ModuleSpec, plan: ArrangedStep) -> I64:
    """What each microbatch holds on a device, where the module states its memory. int64 [dp, microbatches]."""
    return units_held(execution, module, plan) * (0 if module.memory is None else module.memory.unit_bytes)


def _joins(execution: Execution, plan: ArrangedStep) -> tuple[I64, I64 | None]:
    """From encoder ranks to all ranks of the groups that take their rows, and on to generator ranks. int64 [e, 3].

    Also the nanoseconds of each, int64 [e], or None if no transfer takes time: a group's ranks share its rows evenly.
    """
    backbone, modules = execution.backbone, execution.by_depth
    first = dict(zip([m.name for m in modules], np.cumsum([0, *(m.dp for m in modules)]).tolist(), strict=False))
    degrees = np.zeros((plan.num_microbatches, backbone.dp), np.int64)
    degrees[plan.groups.microbatch, plan.groups.first_rank] = plan.groups.degree
    edges, transfers = [np.zeros((0, 3), np.int64)], [np.zeros(0, np.int64)]
    for r in plan.routings:
        pairs = _edges(np.unique(_keys(r.source_microbatch, r.source_rank, r.target_rank)))
        end = 2 if r.target_module == backbone.name else 1
        peers = degrees[pairs[:, 0], pairs[:, end]]
        found = np.repeat(pairs, peers, axis=0)
        found[:, end] = ranges(pairs[:, end], peers)
        edges.append(found + np.array([0, first[r.source_module], first[r.target_module]]))
        if execution.transfers is not None:
            transfers.append(np.repeat(routed_ns(execution, r, peers), peers))
    return np.concatenate(edges), None if execution.transfers is None else np.concatenate(transfers)


def _keys(microbatch: I64, source: I64, target: I64) -> I64:
    """A number for each edge, which sorts as its three columns do. int64 [e]."""
    return (microbatch.astype(np.int64) << 2 * NODE_BITS) + (source.astype(np.int64) << NODE_BITS) + target


def _edges(keys: I64) -> I64:
    """The edges of such numbers. int64 [e, 3]."""
    mask = (1 << NODE_BITS) - 1
    return np.stack([keys >> 2 * NODE_BITS, keys >> NODE_BITS & mask, keys & mask], axis=1)


def _in_step(pipeline: Pipeline, first: int, dp: int) -> Timeline:
    """Simulate with one node for the `dp` nodes from `first` on: all take part in each of its passes."""
    node = np.arange(len(pipeline.stage))
    inside = (node >= first) & (node < first + dp)
    kept = np.flatnonzero(~inside | (node == first))
    row = np.searchsorted(kept, node, side="right") - 1  # of each node among those that are kept
    forward, backward = (np.zeros((len(kept), pipeline.forward_ns.shape[1]), np.int64) for _ in range(2))
    np.maximum.at(forward, row, pipeline.forward_ns)
    np.maximum.at(backward, row, pipeline.backward_ns)
    microbatch, source, target = pipeline.edges.T
    keys = _keys(microbatch, row[source], row[target])
    order = np.argsort(keys, kind="stable")
    starts = np.flatnonzero(np.diff(keys[order], prepend=-1))
    edges, transfer = _edges(keys[order][starts]), None
    if pipeline.transfer_ns is not None:  # a pass waits for the slowest transfer of any rank
        transfer = np.maximum.reduceat(pipeline.transfer_ns[order], starts) if len(starts) else starts
    smaller = replace(
        pipeline,
        stage=pipeline.stage[kept],
        forward_ns=forward,
        backward_ns=backward,
        edges=edges,
        transfer_ns=transfer,
        activation_bytes=None,
    )
    found, durations = simulate(smaller), _durations(pipeline)
    slowest = np.tile(kept[:, None], durations.shape[1])  # the node that each operation of a kept one stands for
    slowest[row[first]] = first + durations[inside].argmax(axis=0)
    operation = slowest * durations.shape[1] + np.arange(durations.shape[1])
    cause = np.where(found.cause < 0, -1, operation.ravel()[found.cause])
    return Timeline(
        makespan_ns=found.makespan_ns,
        start_ns=found.start_ns[row],
        end_ns=found.start_ns[row] + durations,
        busy_ns=durations.sum(axis=1),
        peak_bytes=peak_bytes(pipeline),
        cause=cause[row],
    )


def _durations(pipeline: Pipeline) -> I64:
    """Duration of each operation of each node, 0 after a shorter list. int64 [nodes, operations]."""
    durations = np.zeros((len(pipeline.stage), max(len(listed) for listed in pipeline.operations)), np.int64)
    for stage, operations in enumerate(pipeline.operations):
        here = np.flatnonzero(pipeline.stage == stage)
        both = (times[here][:, None] for times in (pipeline.forward_ns, pipeline.backward_ns))
        durations[here, : len(operations)] = pass_times(operations, *both)
    return durations
