"""Operation lists of pipeline stages: what a stage does in a step, one operation after the other.

Lists are data: every generator here returns one for a stage, the simulator runs any, and the trainer runs the list that
was simulated.
"""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from dataserver.planning.samples import I64


class OperationKind(StrEnum):
    """What an operation does."""

    FORWARD = "forward"
    BACKWARD = "backward"
    INTERACTION = "interaction"
    """Forward and backward of what couples all samples of a contrastive group: a barrier of all its microbatches."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One pass of one microbatch, or the interaction of one group."""

    kind: OperationKind
    microbatch: int
    """Number of the microbatch; of an interaction, the number of its contrastive group."""
    chunk: int = 0
    """Which of the stage's model chunks; a stage has several where virtual stages are interleaved."""


def stage_operations(in_flight: int, num_microbatches: int) -> list[Operation]:
    """The list of one stage that holds at most `in_flight` microbatches between forward and backward.

    `in_flight - 1` forwards fill the pipeline, then forwards and backwards alternate, then the remaining backwards
    drain it (PipeDream-Flush, Narayanan et al. 2021, section 2.2). Waves go in order in both directions. No stage may
    hold more than the one before it, or it would wait for what that one cannot send yet.
    """
    forward, backward = _passes(num_microbatches)
    return _alternating(forward, backward, in_flight - 1)


def one_f_one_b_in_flight(num_stages: int, extra: int = 0) -> I64:
    """Microbatches that each stage holds under 1F1B, int64 [stages]: one on the last stage, one more on each before.

    With `extra`, every stage but the last holds as many more: that smooths over microbatches of unequal size and costs
    their activations. The last stage always runs a backward as soon as it can, or all others would wait for it.
    Queues of 1 + `extra` waves between neighbours never deadlock.
    """
    held = np.arange(num_stages, 0, -1)
    held[:-1] += extra
    return held


def gpipe_in_flight(num_stages: int, num_microbatches: int) -> I64:
    """The same under GPipe (Huang et al. 2019, section 2.3): all forwards, then all backwards. int64 [stages].

    Every microbatch is in flight at once. Backwards go in wave order, as everywhere here.
    """
    return np.full(num_stages, num_microbatches)


def interleaved_in_flight(num_stages: int, num_chunks: int) -> I64:
    """Passes of a microbatch through one chunk that each stage holds under interleaved 1F1B. int64 [stages].

    No list works with fewer than (num_chunks - 1) x num_stages + 1, or with more than on the stage before.
    """
    behind = np.arange(num_stages - 1, -1, -1)
    return 1 + (2 * behind + (num_chunks - 1) * num_stages if num_chunks > 1 else behind)


def interleaved_operations(
    stage: int, num_stages: int, num_chunks: int, num_microbatches: int, in_flight: int | None = None
) -> list[Operation]:
    """The interleaved 1F1B list of one stage (Narayanan et al. 2021, section 2.2, in Megatron-LM's order).

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
    runs = [range(m, m + num_stages) for m in range(0, num_microbatches, num_stages)]
    chunks = range(num_chunks)
    forward = [Operation(OperationKind.FORWARD, m, c) for run in runs for c in chunks for m in run]
    backward = [Operation(OperationKind.BACKWARD, m, c) for run in runs for c in reversed(chunks) for m in run]
    held = int(interleaved_in_flight(num_stages, num_chunks)[stage]) if in_flight is None else in_flight
    return _alternating(forward, backward, held - 1)


def batch_sync_operations(stage: int, num_stages: int, group_size: int, num_groups: int) -> list[Operation]:
    """The batch-sync list of one stage (DISTMM, NSDI 2024, section 4.3).

    For one contrastive group after the other: forwards of its K = `group_size` microbatches, on the last stage one
    interaction over all their features, backwards of the K microbatches.
    """
    forward, backward = _passes(group_size * num_groups)
    groups = [slice(g * group_size, (g + 1) * group_size) for g in range(num_groups)]
    operations = [o for group in groups for o in forward[group] + backward[group]]
    return _with_interactions(operations, group_size) if stage == num_stages - 1 else operations


def distmm_operations(
    stage: int, num_stages: int, group_size: int, num_groups: int, extra_in_flight: int = 0
) -> list[Operation]:
    """The DISTMM-Pipe list of one stage (DISTMM, NSDI 2024, section 4.4).

    Every contrastive group keeps its barrier, but while one sits there the stages work on the next: after the forwards
    of the first group, backwards of one group and forwards of the next alternate. DISTMM halves its microbatches for
    this, since two groups share the memory (`contrastive.distmm_max_batch`). The paper prints no lists; here as many
    forwards as 1F1B begins with run ahead of the first group, which fills the time that features and gradients take to
    the last stage and back. So a stage holds up to `group_size + num_stages - 1 - stage + extra_in_flight`
    microbatches, no more than two groups if a group has as many as there are stages.

    Every group is a contrastive batch of its own. The two halves of one batch cannot be interleaved so: no backward of
    either may start before all forwards of both.
    """
    forward, backward = _passes(group_size * num_groups)
    behind = num_stages - 1 - stage
    ahead = behind + extra_in_flight if behind else 0
    operations = _alternating(forward, backward, group_size - 1 + ahead)
    return _with_interactions(operations, group_size) if stage == num_stages - 1 else operations


def _passes(num_microbatches: int) -> tuple[list[Operation], list[Operation]]:
    """All forwards and all backwards, in wave order."""
    return (
        [Operation(OperationKind.FORWARD, m) for m in range(num_microbatches)],
        [Operation(OperationKind.BACKWARD, m) for m in range(num_microbatches)],
    )


def _alternating(forward: list[Operation], backward: list[Operation], warmup: int) -> list[Operation]:
    """`warmup` forwards, then a forward and a backward in turn, then the backwards that are left."""
    warmup = min(warmup, len(forward))
    steady = [operation for pair in zip(forward[warmup:], backward, strict=False) for operation in pair]
    return forward[:warmup] + steady + backward[len(backward) - warmup :]


def _with_interactions(operations: list[Operation], group_size: int) -> list[Operation]:
    """The interaction of each group right after the last of its forwards."""
    found = []
    for operation in operations:
        found.append(operation)
        if operation.kind is OperationKind.FORWARD and operation.microbatch % group_size == group_size - 1:
            found.append(Operation(OperationKind.INTERACTION, operation.microbatch // group_size))
    return found
