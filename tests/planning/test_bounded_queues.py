"""Law 7: the trainer's queues are bounded, and no plan blocks on them."""

import queue
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from hypothesis import given, settings
from planning.builders import one_f_one_b, steps
from planning.test_pipeline import Node as TimedNode
from planning.test_pipeline import run

from dataserver.planning.identity import Job
from dataserver.planning.jobspec import ModuleKind
from dataserver.planning.pipeline import OperationKind
from dataserver.planning.plan import StepPlan
from dataserver.planning.planner import plan_step, timeline
from dataserver.planning.samples import StepSamples
from dataserver.planning.views import view_plan

Channel = tuple[int, int, OperationKind]


class Node(NamedTuple):
    """A node, with the nodes that it feeds in each microbatch."""

    stage: int
    feeds: tuple[tuple[int, ...], ...]


def joined_nodes(job: Job, plan: StepPlan) -> tuple[list[Node], int]:
    """The pipeline of a plan, built from the views alone: which rank of which stage feeds which in every wave."""
    modules = sorted(job.spec.execution.modules, key=lambda m: list(ModuleKind).index(m.kind))
    names = [(m.name, s, r) for m in modules for s in range(m.pp) for r in range(m.dp)]
    stages = [(m.name, s) for m in modules for s in range(m.pp)]
    nodes = []
    for name, stage, rank in names:
        last = stage == job.spec.execution.module(name).pp - 1
        feeds: list[set[int]] = [set() for _ in range(plan.num_microbatches)]
        for wave in range(plan.num_microbatches):
            if not last:
                feeds[wave].add(names.index((name, stage + 1, rank)))
            for routing in view_plan(job.spec, plan, name, rank, wave).routings if last else ():
                if routing.source_module == name:
                    feeds[wave] |= {names.index((routing.target_module, 0, r)) for r in routing.target_rank.tolist()}
        nodes.append(Node(stages.index((name, stage)), tuple(tuple(sorted(f)) for f in feeds)))
    return nodes, len(stages)


def run_node(
    number: int,
    nodes: list[Node],
    num_stages: int,
    extra: int,
    queues: dict[Channel, queue.Queue[int]],
    patience_s: float,
) -> int:
    """Run one node's list: take from every channel of the wave, then give to every channel of the wave.

    Returns the operations done until the list ends, or a channel stays empty or full.
    """
    feeds = nodes[number].feeds
    sources = [[m for m, node in enumerate(nodes) if number in node.feeds[w]] for w in range(len(feeds))]
    operations = one_f_one_b(nodes[number].stage, num_stages, len(feeds), extra)
    for done, operation in enumerate(operations):
        forward, wave = operation.kind is OperationKind.FORWARD, operation.microbatch
        gives, takes = (feeds[wave], sources[wave]) if forward else (sources[wave], feeds[wave])
        try:
            received = [queues[other, number, operation.kind].get(timeout=patience_s) for other in takes]
            for other in gives:
                queues[number, other, operation.kind].put(wave, timeout=patience_s)
        except (queue.Empty, queue.Full):
            return done
        if received != [wave] * len(takes):
            return done
    return len(operations)


def run_all(nodes: list[Node], num_stages: int, extra: int, patience_s: float) -> list[int]:
    """One thread for each node, room for 1 + extra messages between any two in each direction; operations done by each.

    With more in flight the last stage, which holds nothing back, may be that many backwards ahead of the one before it.
    """
    pairs = {(n, m) for n, node in enumerate(nodes) for fed in node.feeds for m in fed}
    queues: dict[Channel, queue.Queue[int]] = {}
    for source, target in pairs:
        queues[source, target, OperationKind.FORWARD] = queue.Queue(maxsize=1 + extra)
        queues[target, source, OperationKind.BACKWARD] = queue.Queue(maxsize=1 + extra)
    with ThreadPoolExecutor(max_workers=len(nodes)) as pool:
        futures = [pool.submit(run_node, n, nodes, num_stages, extra, queues, patience_s) for n in range(len(nodes))]
        return [future.result() for future in futures]


@settings(max_examples=40)
@given(steps())
def test_every_plan_finishes_on_bounded_queues(step: tuple[Job, StepSamples]) -> None:
    """A deadlock would leave nodes short of the end of their lists."""
    job, samples = step
    plan = plan_step(job, 0, samples)
    nodes, num_stages = joined_nodes(job, plan)
    extra = job.spec.execution.layout.extra_in_flight
    assert run_all(nodes, num_stages, extra, patience_s=20) == [2 * plan.num_microbatches] * len(nodes)


def test_the_run_notices_a_deadlock() -> None:
    # The last stage's list in front: it waits for a gradient that the other gives back only after one more forward.
    nodes = [Node(1, ((1,), (1,))), Node(0, ((), ()))]
    assert run_all(nodes, 2, 0, patience_s=0.2) != [4, 4]


@settings(max_examples=60)
@given(steps())
def test_the_simulator_joins_the_nodes_as_the_views_do(step: tuple[Job, StepSamples]) -> None:
    job, samples = step
    plan = plan_step(job, 0, samples)
    nodes, num_stages = joined_nodes(job, plan)
    simulated = timeline(job.spec, plan)
    times = zip(simulated.pipeline.forward_ns, simulated.pipeline.backward_ns, strict=True)
    timed = [TimedNode(n.stage, *t, n.feeds) for n, t in zip(nodes, times, strict=True)]
    expected = run(timed, num_stages, plan.num_microbatches, job.spec.execution.layout.extra_in_flight)
    assert simulated.pipeline.num_stages == num_stages
    assert simulated.makespan_ns == expected.makespan_ns
    assert np.array_equal(simulated.timeline.start_ns, expected.start_ns)
