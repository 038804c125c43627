"""What matters beside encoders and generators: the order of microbatches, finer waves, more of them in flight."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from dataserver.planning.job.fields import ModuleKind, OrderPolicy
from dataserver.planning.job.identity import Job
from dataserver.planning.job.spec import Execution
from dataserver.planning.layouts.grouped.candidates import (
    CandidatePlan,
    with_extra,
    with_fewer_in_flight,
    with_microbatches,
)
from dataserver.planning.layouts.grouped.options import GroupedOptions
from dataserver.planning.layouts.grouped.policies import halved
from dataserver.planning.layouts.grouped.wave_order import algorithm_2, chain, searched_order
from dataserver.planning.layouts.shared import waves
from dataserver.planning.layouts.shared.candidates import fastest, ranked
from dataserver.planning.simulation import Pipeline

NUM_SEEDS = 2
"""Candidates whose microbatches are put into another order."""

MAX_HALVINGS = 16
"""Microbatches that are halved for the sake of encoders and generators, at most."""

ALGORITHM_2 = "Algorithm 2"

_ORDERS: Mapping[OrderPolicy, tuple[Callable[[Pipeline], list[int]], str]] = MappingProxyType(
    {OrderPolicy.DISTTRAIN: (algorithm_2, ALGORITHM_2), OrderPolicy.SEARCH: (searched_order, "order searched")}
)


def refined(job: Job, plain: Sequence[CandidatePlan]) -> Iterator[CandidatePlan]:
    """The fastest candidates in a better order; the best of all with waves halved, and with fewer and more in flight.

    Algorithm 2 orders them beside the search, and the best of either policy, as of none, is compared with fewer and
    more in flight, too: no policy for the order is faster than the search.
    """
    seeds = ranked(plain)[:NUM_SEEDS]
    ordered = [candidate for seed in seeds for candidate in _ordered(job, seed)]
    yield from ordered
    best = fastest([*seeds, *ordered])
    compared = [fastest(seeds), fastest([*seeds, *(c for c in ordered if ALGORITHM_2 in c.changes)])]
    searches = job.spec.execution.options(GroupedOptions).order is OrderPolicy.SEARCH
    for number in range(1, MAX_HALVINGS + 1 if searches else 1):
        finer = _halved(job, best, number)
        found = fastest([finer, *_ordered(job, finer)])
        if found.makespan_ns >= best.makespan_ns:
            break
        yield found
        best = found
    others = [c for n, c in enumerate(compared) if all(c is not other for other in (best, *compared[:n]))]
    for base in (best, *others):
        yield from with_fewer_in_flight(job, base)
        for extra in waves.extras(job.spec.execution)[1:]:
            yield with_extra(job, base, extra)


def _ordered(job: Job, seed: CandidatePlan) -> Iterator[CandidatePlan]:
    """The same microbatches in a better order, as the job's policy finds it."""
    execution, groups = job.spec.execution, seed.arranged.microbatches
    policy = execution.options(GroupedOptions).order
    for one in (policy, OrderPolicy.DISTTRAIN) if policy is OrderPolicy.SEARCH else (policy,):
        find, title = _ORDERS.get(one, (None, ""))
        if find is not None:
            order = find(_chain(execution, seed))
            yield with_microbatches(job, seed, [groups[k] for k in order], *seed.changes, title)


def _halved(job: Job, seed: CandidatePlan, number: int) -> CandidatePlan:
    """Two microbatches instead of the one whose images take an encoder or generator longest.

    Sequences of similar lengths share a microbatch, so that one can have most of the images.
    """
    outer = [node.modules != (job.spec.execution.backbone.name,) for node in seed.planned.nodes]
    pipeline, groups = seed.planned.pipeline, seed.arranged.microbatches
    wave = int((pipeline.forward_ns + pipeline.backward_ns)[outer].max(axis=0).argmax())
    microbatches = [*groups[:wave], *halved(groups[wave]), *groups[wave + 1 :]]
    return with_microbatches(job, seed, microbatches, f"{number} {'wave' if number == 1 else 'waves'} halved")


def _chain(execution: Execution, seed: CandidatePlan) -> Pipeline:
    """Encoders, backbone and generators as one node each, which takes as long as its slowest rank.

    Transfers take their mean over the microbatches: an order is scored with the same transfers for all (`OrderScorer`).
    """
    pipeline, kinds = seed.planned.pipeline, [execution.module(n.modules[0]).kind for n in seed.planned.nodes]
    stages = [np.array([k is kind for k in kinds]) for kind in ModuleKind if kind in kinds]
    held = [min(seed.plan.in_flight(m.name)[0] for m in execution.of_kind(k)) for k in ModuleKind if k in kinds]
    times = [(pipeline.forward_ns[here].max(axis=0), pipeline.backward_ns[here].max(axis=0)) for here in stages]
    returns = [any(m.runs_backward for m in execution.of_kind(k)) for k in ModuleKind if k in kinds]
    if pipeline.transfer_ns is None:
        return chain(times, np.array(held), returns=returns)
    microbatch, source, _ = pipeline.edges.T
    slowest = np.zeros((len(stages) - 1, pipeline.forward_ns.shape[1]), np.int64)
    np.maximum.at(slowest, (np.array(stages).argmax(axis=0)[source], microbatch), pipeline.transfer_ns)
    return chain(times, np.array(held), slowest.sum(axis=1) // slowest.shape[1], returns)
