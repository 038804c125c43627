"""What every stage of a tower does in a step, and how many microbatches it holds meanwhile."""

from collections.abc import Sequence

import numpy as np

from dataserver.planning import I64
from dataserver.planning.job.spec import Execution
from dataserver.planning.layouts.contrastive.options import ContrastiveOptions, ContrastiveSchedule
from dataserver.planning.plan.plan import ModuleSchedule
from dataserver.planning.simulation import (
    EXCHANGE,
    FORWARD,
    INTERACTION,
    Operations,
    Program,
    forwards,
    stage_operations,
    whole_step,
)


def programs(execution: Execution, schedules: Sequence[ModuleSchedule], num_microbatches: int) -> tuple[Program, ...]:
    """The program of each stage of each tower, in the order of the job.

    Every contrastive batch is a barrier: its interaction comes right behind the last of its forwards, on the last stage
    of every tower. Under batch_sync (DISTMM, section 4.3) the stages run all forwards of a batch, then all its
    backwards. Under DISTMM-Pipe (section 4.4) they work on the next batch while one sits at its barrier: after the
    forwards of the first batch, backwards of one and forwards of the next alternate. The paper prints no lists; here as
    many forwards as 1F1B begins with run ahead of the first batch, which fills the time that features and gradients
    take to the last stage and back.
    """
    size, found = execution.options(ContrastiveOptions).microbatches, []
    for tower, schedule in zip(execution.modules, schedules, strict=True):
        for stage, held in enumerate(schedule.in_flight.tolist()):
            operations = stage_operations(held, num_microbatches, schedule.drain_every)
            if not tower.runs_backward:
                operations = forwards(operations)
            if stage == tower.pp - 1:
                operations = with_interactions(operations, size)
            found.append(Program((tower.name,), stage, whole_step(operations, trained=not tower.frozen)))
    return tuple(found)


def with_interactions(operations: Operations, batch_size: int) -> Operations:
    """The interaction of each contrastive batch of so many microbatches, for which its features are exchanged, right
    behind the last of its forwards."""
    last = (operations.kind == FORWARD) & (operations.microbatch % batch_size == batch_size - 1)
    place = np.repeat(np.flatnonzero(last) + 1, 2)
    return Operations(
        np.insert(operations.kind, place, np.tile([EXCHANGE, INTERACTION], len(place) // 2)),
        np.insert(operations.microbatch, place, np.repeat(operations.microbatch[last] // batch_size, 2)),
        np.insert(operations.chunk, place, 0),
    )


def tower_in_flight(num_stages: int, batch_size: int, schedule: ContrastiveSchedule, extra: int = 0) -> I64:
    """Microbatches that the stages of a tower hold at most between forward and backward. int64 [stages].

    All of a contrastive batch, since no backward starts before its barrier. `distmm_pipe` lets as many forwards of the
    next batch run ahead as 1F1B begins with, and `extra` more, on all stages but the last (`programs`).
    """
    ahead = np.arange(num_stages - 1, -1, -1)
    if schedule is ContrastiveSchedule.BATCH_SYNC:
        ahead[:] = 0
    ahead[ahead > 0] += extra
    return batch_size + ahead
