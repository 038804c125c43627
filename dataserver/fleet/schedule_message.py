"""Schedules of a plan's modules as messages, in microbatches and in plans."""

from collections.abc import Iterable

import numpy as np
from disttrain.v1 import microbatch_pb2

from dataserver.planning.plan.plan import ModuleSchedule, StepPlan


def schedule_messages(plan: StepPlan) -> list[microbatch_pb2.ModuleSchedule]:
    """What the stages of all modules do."""
    return [
        microbatch_pb2.ModuleSchedule(
            module=s.module, in_flight=s.in_flight.tolist(), drain_every=s.drain_every, chunks=s.chunks
        )
        for s in plan.schedules
    ]


def schedules_from(messages: Iterable[microbatch_pb2.ModuleSchedule]) -> tuple[ModuleSchedule, ...]:
    """The schedules that messages stand for."""
    return tuple(
        ModuleSchedule(m.module, np.array(list(m.in_flight), np.int64), m.drain_every, m.chunks) for m in messages
    )
