"""A plan as servers of one fleet send it to each other, and back; what comes in is checked."""

from collections.abc import Iterable
from typing import Final

import numpy as np
from disttrain.v1 import peer_service_pb2 as pb
from disttrain.v1 import plan_pb2

from dataserver.fleet.integer_arrays import PackedError, packed, unpacked
from dataserver.fleet.schedule_message import schedule_messages, schedules_from
from dataserver.planning import I64
from dataserver.planning.job.identity import Job
from dataserver.planning.plan.compact import CompactPlan, Positions, UnfitPlanError, compact, expand
from dataserver.planning.plan.plan import (
    NO_GROUPS,
    Candidate,
    Decision,
    RankGroups,
    StepPlan,
)
from dataserver.planning.stream.samples import StepSamples

MAX_TEXTS: Final = 4096
"""Candidates and decisions of a plan; planning makes a few for each module."""


def compact_message(job: Job, plan: StepPlan, build: str) -> pb.FetchPlanResponse:
    """The message of one plan."""
    found = compact(job, plan)
    groups = found.groups
    return pb.FetchPlanResponse(
        job_id=plan.job_id,
        step=plan.step,
        build=build,
        plan_hash=plan.hash,
        num_microbatches=found.num_microbatches,
        sequences_per_microbatch=found.sequences_per_microbatch,
        arrangements=[
            pb.CompactArrangement(
                items=len(p.rank), rank=packed(p.rank), microbatch=packed(p.microbatch), slot=packed(p.slot)
            )
            for p in found.positions
        ],
        schedules=schedule_messages(plan),
        groups=plan_pb2.PlannedGroups(
            module=groups.module,
            microbatch=groups.microbatch.tolist(),
            first_rank=groups.first_rank.tolist(),
            degree=groups.degree.tolist(),
        ),
        candidates=[plan_pb2.Candidate(name=c.name, makespan_ns=c.makespan_ns) for c in found.candidates],
        decisions=[plan_pb2.Decision(subject=d.subject, chosen=d.chosen, reason=d.reason) for d in found.decisions],
    )


def plan_from_message(job: Job, step: int, samples: StepSamples, build: str, message: pb.FetchPlanResponse) -> StepPlan:
    """The plan that a message stands for.

    Args:
        job: the job.
        step: the step that was asked for.
        samples: its samples, as gathered here.
        build: of this server.
        message: what a peer answered.

    Raises:
        UnfitPlanError: it is not the plan that was asked for, or does not have the hash that it says.
    """
    if (message.job_id, message.step) != (job.job_id, step):
        raise UnfitPlanError(f"it is of job {message.job_id[:64]!r}, step {message.step}")
    if message.build != build:
        raise UnfitPlanError(f"it was made by build {message.build[:64]!r}, and this server is {build}")
    if len(message.candidates) + len(message.decisions) > MAX_TEXTS:
        raise UnfitPlanError(f"it has {len(message.candidates)} candidates and {len(message.decisions)} decisions")
    plan = expand(
        job,
        step,
        samples,
        CompactPlan(
            num_microbatches=message.num_microbatches,
            sequences_per_microbatch=message.sequences_per_microbatch,
            positions=tuple(map(_positions, message.arrangements)),
            schedules=schedules_from(message.schedules),
            groups=_groups(message.groups),
            candidates=tuple(Candidate(c.name, c.makespan_ns) for c in message.candidates),
            decisions=tuple(Decision(d.subject, d.chosen, d.reason) for d in message.decisions),
        ),
    )
    if plan.hash != message.plan_hash:
        raise UnfitPlanError(
            f"it has hash {plan.hash.hex()} with the samples of this server, and says {message.plan_hash[:32].hex()}"
        )
    return plan


def _positions(message: pb.CompactArrangement) -> Positions:
    try:
        return Positions(
            rank=unpacked("ranks", message.rank, message.items),
            microbatch=unpacked("microbatches", message.microbatch, message.items),
            slot=unpacked("slots", message.slot, message.items if message.slot else 0),
        )
    except PackedError as error:
        raise UnfitPlanError(str(error)) from error


def _groups(message: plan_pb2.PlannedGroups) -> RankGroups:
    if not message.module:
        return NO_GROUPS
    return RankGroups(message.module, *map(_array, (message.microbatch, message.first_rank, message.degree)))


def _array(values: Iterable[int]) -> I64:
    return np.array(list(values), np.int64)
