"""What every stage of a pipelined step does."""

from collections.abc import Sequence

import numpy as np

from dataserver.planning import I64
from dataserver.planning.job.fields import ModuleKind
from dataserver.planning.job.spec import Execution
from dataserver.planning.layouts.shared.waves import wave_programs
from dataserver.planning.plan.plan import ModuleSchedule
from dataserver.planning.simulation import (
    BACKWARD,
    FORWARD,
    Operations,
    Program,
    alternating,
    passes,
    whole_step,
)


def programs(execution: Execution, schedules: Sequence[ModuleSchedule], num_microbatches: int) -> tuple[Program, ...]:
    """The program of each stage of the joined pipeline.

    Stages of one chunk alternate (`simulation.stage_operations`); those of several interleave them. Encoders whose
    images stay on the ranks of their sequences are part of what its first stage does (`identity_routing`).
    """
    several = {s.module: s for s in schedules if s.chunks > 1}
    beside = {m.name for m in execution.of_kind(ModuleKind.ENCODER) if execution.identity_routing}
    found = []
    for program in wave_programs(execution, schedules, num_microbatches):
        if program.modules[0] in beside:
            continue
        schedule, module = several.get(program.modules[0]), execution.module(program.modules[0])
        if schedule is not None:
            held, chunks = int(schedule.in_flight[program.stage]), schedule.chunks
            operations = interleaved_operations(program.stage, module.pp, chunks, num_microbatches, held)
            operations = whole_step(operations, chunks, runs_backward=module.runs_backward, trained=not module.frozen)
            program = Program(program.modules * chunks, program.stage, operations)
        found.append(program)
    return tuple(found)


def interleaved_in_flight(num_stages: int, num_chunks: int) -> I64:
    """Passes of a microbatch through one chunk that each stage holds under interleaved 1F1B. int64 [stages].

    No list works with fewer than (num_chunks - 1) x num_stages + 1, or with more than on the stage before.
    """
    behind = np.arange(num_stages - 1, -1, -1)
    return 1 + (2 * behind + (num_chunks - 1) * num_stages if num_chunks > 1 else behind)


def interleaved_operations(
    stage: int, num_stages: int, num_chunks: int, num_microbatches: int, in_flight: int | None = None
) -> Operations:
    """The interleaved 1F1B operations of one stage (Narayanan et al. 2021, section 2.2, in Megatron-LM's order).

    Each of the `num_stages` stages holds `num_chunks` model chunks, virtual stages `stage + chunk * num_stages`. Runs
    of `num_stages` microbatches go through one chunk, then through the next. With equal times the bubble is
    (num_stages - 1) / (num_chunks x num_microbatches + num_stages - 1) of the makespan.

    Args:
        stage: from 0.
        num_stages: p.
        num_chunks: model chunks of each stage.
        num_microbatches: a multiple of p.
        in_flight: passes that the stage holds at most, `interleaved_in_flight` unless given.

    Raises:
        ValueError: the microbatches are no multiple of the stages.
    """
    if num_microbatches % num_stages:
        raise ValueError(
            f"{num_microbatches} microbatches on {num_stages} stages; interleaving needs a multiple of the stages: "
            "change the microbatches or use 1F1B"
        )
    microbatch = np.arange(num_microbatches, dtype=np.int64).reshape(-1, 1, num_stages).repeat(num_chunks, axis=1)
    chunk = np.broadcast_to(np.arange(num_chunks)[:, None], microbatch.shape)
    forward = passes(FORWARD, microbatch.ravel(), chunk.ravel())
    backward = passes(BACKWARD, microbatch.ravel(), num_chunks - 1 - chunk.ravel())
    held = int(interleaved_in_flight(num_stages, num_chunks)[stage]) if in_flight is None else in_flight
    return alternating(forward, backward, held - 1)
