"""Law 7: the trainer's queues are bounded, and no plan blocks on them."""

import queue
import threading
from typing import NamedTuple

from hypothesis import given, settings
from planning.builders import steps

from dataserver.planning.expectation import timeline
from dataserver.planning.identity import Job
from dataserver.planning.jobspec import ModuleKind
from dataserver.planning.pipeline import OperationKind, stage_operations
from dataserver.planning.plan import StepPlan
from dataserver.planning.planner import plan_step
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


def run_node(number: int, nodes: list[Node], num_stages: int, queues: dict[Channel, queue.Queue[int]]) -> int:
    """Run one node's list: take from every channel of the wave, then give to every channel of the wave."""
    feeds = nodes[number].feeds
    waves = len(feeds)
    sources = [[m for m, node in enumerate(nodes) if number in node.feeds[w]] for w in range(waves)]
    done = 0
    for operation in stage_operations(nodes[number].stage, num_stages, waves):
        forward, wave = operation.kind is OperationKind.FORWARD, operation.microbatch
        gives, takes = (feeds[wave], sources[wave]) if forward else (sources[wave], feeds[wave])
        for other in takes:
            assert queues[other, number, operation.kind].get(timeout=20) == wave
        for other in gives:
            queues[number, other, operation.kind].put(wave, timeout=20)
        done += 1
    return done


@settings(max_examples=40, deadline=None)
@given(steps())
def test_every_plan_finishes_on_bounded_queues(step: tuple[Job, StepSamples]) -> None:
    """Law 7: one thread for each node, and room for a single message between any two. A deadlock would time out."""
    job, samples = step
    plan = plan_step(job, 0, samples)
    nodes, num_stages = joined_nodes(job, plan)
    channels = {(n, m, k) for n, node in enumerate(nodes) for fed in node.feeds for m in fed for k in OperationKind}
    queues: dict[Channel, queue.Queue[int]] = {
        ((n, m, k) if k is OperationKind.FORWARD else (m, n, k)): queue.Queue(maxsize=1) for n, m, k in channels
    }
    finished = [0] * len(nodes)

    def run(number: int) -> None:
        finished[number] = run_node(number, nodes, num_stages, queues)

    threads = [threading.Thread(target=run, args=(n,), daemon=True) for n in range(len(nodes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert finished == [2 * plan.num_microbatches] * len(nodes)
    assert all(q.empty() for q in queues.values())
    # The simulator joins the same nodes in the same way.
    assert timeline(job.spec, plan).num_stages == num_stages
