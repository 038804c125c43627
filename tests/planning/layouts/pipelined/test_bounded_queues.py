"""Law 7: the trainer's queues are bounded, and no plan blocks on them."""

import queue
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from builders.pipelined import steps
from hypothesis import given, settings

from dataserver.planning.job.fields import ModuleKind, Schedule
from dataserver.planning.job.identity import Job
from dataserver.planning.layouts.pipelined.programs import interleaved_operations
from dataserver.planning.plan.plan import StepPlan
from dataserver.planning.plan.views import view_plan
from dataserver.planning.planner import plan_step, timeline
from dataserver.planning.simulation import (
    Operation,
    OperationKind,
    Pipeline,
    forwards,
    simulate,
    stage_operations,
    whole_step,
)
from dataserver.planning.stream.samples import StepSamples

Block = tuple[int, int]
"""Number of a node, and of one of its model chunks."""


class Channel(NamedTuple):
    """From one block to another, one message for each microbatch."""

    source: Block
    target: Block
    kind: OperationKind


class Node(NamedTuple):
    """What a node does, and the blocks that each of its chunks feeds in each microbatch."""

    operations: Sequence[Operation]
    feeds: tuple[tuple[frozenset[Block], ...], ...]
    held: int
    """Messages that it may have ahead of a neighbour that takes or gives them."""
    returns: bool = True
    """Whether it takes gradients of what it feeds."""


def joined_nodes(job: Job, plan: StepPlan) -> list[Node]:
    """The pipeline of a plan, built from views and schedules alone: which ranks feed which others."""
    execution, count = job.spec.execution, plan.num_microbatches
    modules = sorted(execution.modules, key=lambda m: list(ModuleKind).index(m.kind))
    names = [(m.name, s, r) for m in modules for s in range(m.pp) for r in range(m.dp)]
    nodes = []
    for name, stage, rank in names:
        module, held = execution.module(name), int(plan.in_flight(name)[stage])
        chunks = execution.layout.chunks if module.kind is ModuleKind.BACKBONE else 1
        feeds: list[list[set[Block]]] = [[set() for _ in range(count)] for _ in range(chunks)]
        for wave in range(count):
            for chunk in range(chunks):
                if stage + 1 < module.pp:
                    feeds[chunk][wave] = {(names.index((name, stage + 1, rank)), chunk)}
                elif chunk + 1 < chunks:
                    feeds[chunk][wave] = {(names.index((name, 0, rank)), chunk + 1)}
            for routing in view_plan(job.spec, plan, name, rank, wave).routings if stage + 1 == module.pp else ():
                if routing.source_module == name:
                    feeds[-1][wave] |= {(names.index((routing.target_module, 0, r)), 0) for r in routing.target_rank}
        if module.kind is ModuleKind.BACKBONE and execution.layout.schedule is Schedule.INTERLEAVED:
            operations = interleaved_operations(stage, module.pp, chunks, count, held)
        else:
            operations = stage_operations(held, count)
        if not module.runs_backward:
            operations = forwards(operations)
        operations = whole_step(operations, chunks, trained=not module.frozen)
        nodes.append(Node(operations, tuple(tuple(map(frozenset, f)) for f in feeds), held, module.runs_backward))
    return nodes


def run_node(number: int, nodes: Sequence[Node], queues: dict[Channel, "queue.Queue[int]"], patience_s: float) -> int:
    """Run one node's list: take from every channel of the pass, then give to every channel of the pass.

    Returns the operations done until the list ends, or a channel stays empty or full.
    """
    blocks = [(n, c) for n, node in enumerate(nodes) for c in range(len(node.feeds))]
    for done, operation in enumerate(nodes[number].operations):
        if not operation.computes:
            continue
        forward, wave, here = operation.kind is OperationKind.FORWARD, operation.microbatch, (number, operation.chunk)
        fed = sorted(nodes[number].feeds[operation.chunk][wave])
        sources = [(n, c) for n, c in blocks if here in nodes[n].feeds[c][wave]]
        gives, takes = (fed, sources) if forward else ([s for s in sources if nodes[s[0]].returns], fed)
        try:
            received = [queues[Channel(other, here, operation.kind)].get(timeout=patience_s) for other in takes]
            for other in gives:
                queues[Channel(here, other, operation.kind)].put(wave, timeout=patience_s)
        except (queue.Empty, queue.Full):
            return done
        if received != [wave] * len(takes):
            return done
    return len(nodes[number].operations)


def run_all(nodes: Sequence[Node], patience_s: float) -> list[int]:
    """One thread for each node; operations done by each.

    Between two nodes there is room for as many messages as one of them holds more than the other, and for one at least.
    Between the chunks of interleaved stages there is room for what the first stage holds.
    """
    queues: dict[Channel, queue.Queue[int]] = {}
    for number, node in enumerate(nodes):
        for chunk, waves in enumerate(node.feeds):
            for target in frozenset().union(*waves):
                interleaved = len(node.feeds) > 1 or len(nodes[target[0]].feeds) > 1
                room = max(node.held, nodes[target[0]].held) if interleaved else node.held - nodes[target[0]].held
                forward = Channel((number, chunk), target, OperationKind.FORWARD)
                backward = Channel(target, (number, chunk), OperationKind.BACKWARD)
                queues |= {c: queue.Queue(maxsize=max(1, room)) for c in (forward, backward)}
    with ThreadPoolExecutor(max_workers=len(nodes)) as pool:
        futures = [pool.submit(run_node, n, nodes, queues, patience_s) for n in range(len(nodes))]
        return [future.result() for future in futures]


@settings(max_examples=60)
@given(steps(several=True, schedules=("1f1b", "gpipe", "interleaved")))
def test_every_plan_finishes_on_bounded_queues(step: tuple[Job, StepSamples]) -> None:
    """A deadlock would leave nodes short of the end of their lists."""
    job, samples = step
    nodes = joined_nodes(job, plan_step(job, 0, samples))
    assert run_all(nodes, patience_s=20) == [len(node.operations) for node in nodes]


def test_the_run_notices_a_deadlock() -> None:
    # The second stage waits for a forward that the first runs only behind the gradient that it waits for itself.
    feeds = ((frozenset({(1, 0)}), frozenset({(1, 0)})),)
    nodes = [Node(stage_operations(1, 2), feeds, 1), Node(stage_operations(2, 2), ((frozenset(), frozenset()),), 2)]
    assert run_all(nodes, patience_s=0.2) != [4, 4]


@settings(max_examples=80)
@given(steps(several=True, schedules=("1f1b", "gpipe", "interleaved")))
def test_the_simulator_joins_the_nodes_as_the_views_do(step: tuple[Job, StepSamples]) -> None:
    job, samples = step
    plan = plan_step(job, 0, samples)
    nodes, simulated = joined_nodes(job, plan), timeline(job.spec, plan)
    chunks = simulated.pipeline.num_chunks
    edges = [
        (wave, source * chunks + chunk, target * chunks + target_chunk)
        for source, node in enumerate(nodes)
        for chunk, waves in enumerate(node.feeds)
        for wave, targets in enumerate(waves)
        for target, target_chunk in targets
    ]
    expected = Pipeline(
        num_stages=len(nodes),
        stage=np.arange(len(nodes)),
        forward_ns=simulated.pipeline.forward_ns,
        backward_ns=simulated.pipeline.backward_ns,
        edges=np.array(sorted(edges), np.int64).reshape(-1, 3),
        operations=[node.operations for node in nodes],
        num_chunks=chunks,
    )
    assert sorted(edges) == sorted(map(tuple, simulated.pipeline.edges.tolist()))
    found = simulate(expected)
    assert simulated.makespan_ns == found.makespan_ns
    assert np.array_equal(simulated.timeline.start_ns, found.start_ns)
