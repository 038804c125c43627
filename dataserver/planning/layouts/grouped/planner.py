"""A backbone whose ranks share sequences in groups of unequal degrees (FlexSP, arXiv 2412.01523), wave by wave.

Encoders and generators stand beside it on devices of their own: a wave of theirs holds the images of one microbatch of
all groups, spread over all their ranks.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from dataserver.planning import I64
from dataserver.planning.balancing import bin_loads
from dataserver.planning.job.fields import ModuleKind
from dataserver.planning.job.identity import Job, JobSpecError
from dataserver.planning.job.limits import most_microbatches
from dataserver.planning.job.spec import Execution
from dataserver.planning.layouts.grouped.candidates import CandidatePlan, plain_candidate, with_fewer_in_flight
from dataserver.planning.layouts.grouped.costs import GroupCosts
from dataserver.planning.layouts.grouped.options import GroupedOptions, GroupPolicy
from dataserver.planning.layouts.grouped.policies import (
    compositions_text,
    idle_groups,
    is_quick,
    plans_of,
    quick_plan,
)
from dataserver.planning.layouts.grouped.refining import refined
from dataserver.planning.layouts.grouped.sequence_plan import SequencePlan
from dataserver.planning.layouts.grouped.sequences import group_costs, rank_tokens
from dataserver.planning.layouts.shared import waves
from dataserver.planning.layouts.shared.candidates import fastest, ranked, shown
from dataserver.planning.layouts.shared.sequences import pack_sequences
from dataserver.planning.plan.limits import check_microbatches
from dataserver.planning.plan.naming import milliseconds, sample_name
from dataserver.planning.plan.plan import Decision, StepPlan, make_plan
from dataserver.planning.stream.samples import StepSamples
from dataserver.planning.stream.sizing import SampleTooLargeError

Found = TypeVar("Found")

LADDER_SINCE = 7
"""The first plan_version whose groups are also sought within less memory than devices have, in steps of one ladder."""

STATIC_SINCE = 8
"""The first plan_version that also does so where all groups have the largest degree."""

SLOWER = 2
"""So many steps in a row without a faster plan end the ladder."""


def plan(job: Job, step: int, samples: StepSamples) -> StepPlan:
    """Plan one step.

    Raises:
        SampleTooLargeError: the largest group does not hold a sample; names it and the limit.
        WaveTooLargeError: an encoder or generator does not hold the images of a sample; names it.
        JobSpecError: costs are beyond int64.
    """
    packed = _packed(job, step, samples)
    plans = _by_policy(packed, packed.costs, plans_of)
    found = compared = [_plain(packed, name, plan) for name, plan in plans.items()]
    if len(job.spec.execution.modules) > 1:
        seek = _with_less_memory if job.spec.execution.plan_version >= LADDER_SINCE else _with_two_in_flight
        less = list(seek(packed, compared, plans))
        # Static groups are refined by themselves too: those that are slower as found may be faster in the end.
        sets = [compared, less] if less and _is_static(job.spec.execution) else [[*compared, *less]]
        found = [*compared, *less, *(candidate for plain in sets for candidate in refined(job, plain))]
    candidates = ranked(found)  # equals stay in order: the policy's own comes first
    best = candidates[0]
    said = _decisions(job.spec.execution, packed.costs, best, [c for c in compared if c is not best])
    return replace(make_plan(job, step, best.plan), candidates=shown(candidates), decisions=said)


@dataclass(frozen=True, slots=True)
class _PackedStep:
    """The samples of one step in their sequences."""

    job: Job
    step: int
    samples: StepSamples
    costs: GroupCosts
    sequence: I64
    """int64 [n]: the sequence of each sample."""
    lengths: I64
    """int64 [s]: tokens of each sequence."""
    squares: I64
    """int64 [s]: the squares of the tokens of its samples."""


def _packed(job: Job, step: int, samples: StepSamples) -> _PackedStep:
    costs = group_costs(job.spec.execution)
    capacity = costs.device_tokens * costs.degrees[-1]
    _refuse_too_large(job, samples, capacity)
    sequence, _ = pack_sequences(job, samples, min(job.stream.seq_len, capacity), 1)
    tokens, count = samples.tokens, int(sequence.max(initial=-1)) + 1
    lengths, squares = bin_loads(tokens, sequence, count), bin_loads(tokens * tokens, sequence, count)
    check_microbatches(job.spec, -(-int(lengths.sum()) // costs.cluster_tokens))
    return _PackedStep(job, step, samples, costs, sequence, lengths, squares)


def _by_policy(
    packed: _PackedStep, costs: GroupCosts, find: Callable[[GroupPolicy, I64, I64, GroupCosts], Found]
) -> Found:
    """What is found for the step by the job's policy: `plans_of` or `quick_plan`."""
    policy = packed.job.spec.execution.options(GroupedOptions).policy
    try:
        return find(policy, packed.lengths, packed.squares, costs)
    except ValueError as error:
        raise JobSpecError(f"step {packed.step}: {error}") from error


def _plain(packed: _PackedStep, name: str, plan: SequencePlan) -> CandidatePlan:
    microbatches = [m.groups for m in plan.microbatches] or [idle_groups(packed.costs)]
    return plain_candidate(packed.job, packed.samples, name, microbatches, packed.sequence)


def _with_two_in_flight(
    packed: _PackedStep, plain: Sequence[CandidatePlan], plans: Mapping[str, SequencePlan]
) -> Iterator[CandidatePlan]:
    """The same plans for half of the memory, if that holds all sequences and there is time to win.

    Two microbatches then fit: the backbone works on one while a generator works on the other.
    """
    execution, best, longest = packed.job.spec.execution, fastest(plain), int(packed.lengths.max(initial=1))
    waits = 20 * best.makespan_ns > 21 * plans[best.groups].time_ns
    half = replace(packed.costs, device_tokens=packed.costs.device_tokens // 2)
    fits = longest <= half.device_tokens * half.degrees[-1]
    if waits and fits and not _is_static(execution) and execution.of_kind(ModuleKind.GENERATOR):
        for name, plan in _by_policy(packed, half, plans_of).items():
            yield _plain(packed, f"{name}, in half the memory", plan)


def _with_less_memory(
    packed: _PackedStep, compared: Sequence[CandidatePlan], plans: Mapping[str, SequencePlan]
) -> Iterator[CandidatePlan]:
    """The plans for smaller and smaller memory of one ladder, until two in a row bring none that is faster, or so many
    microbatches would take longer to plan than the policy's own search may.

    Groups are sought for the time of the backbone alone. More memory makes microbatches fewer and larger, until the
    others have nothing to work on beside the backbone. Each plan is the fastest with as many in flight as memory holds
    or fewer: else a schedule that fills all memory would make plans slow that less of it makes fast.
    """
    best, longest = fastest(compared), int(packed.lengths.max(initial=1))
    execution = packed.job.spec.execution
    is_static = _is_static(execution)
    sought = not is_static or execution.plan_version >= STATIC_SINCE
    if not sought or 50 * best.makespan_ns <= 51 * plans[best.groups].time_ns:
        return
    how = "static groups" if is_static else "groups by search"
    best_ns, slower, all_tokens = best.makespan_ns, 0, int(packed.lengths.sum())
    for tokens in _smaller(int(rank_tokens(execution, best.plan).max(initial=0))):
        costs = replace(packed.costs, device_tokens=tokens)
        if longest > tokens * costs.degrees[-1] or slower == SLOWER or not is_quick(all_tokens, costs):
            return
        less = _by_policy(packed, costs, quick_plan)
        if len(less.microbatches) > most_microbatches(execution):
            return
        plain = _plain(packed, f"{how} in {tokens:,} tokens of a device", less)
        found = fastest([plain, *with_fewer_in_flight(packed.job, plain)])
        yield found
        slower = slower + 1 if found.makespan_ns >= best_ns else 0
        best_ns = min(best_ns, found.makespan_ns)


def _is_static(execution: Execution) -> bool:
    return execution.options(GroupedOptions).policy is GroupPolicy.STATIC


def _smaller(tokens: int) -> Iterator[int]:
    """Powers of two, and one and a half times these, that are less; from the largest on."""
    power = 1 << max(0, tokens - 1).bit_length()
    while power:
        yield from (size for size in (power, 3 * power // 4) if 0 < size < tokens)
        power //= 2


def _decisions(
    execution: Execution, costs: GroupCosts, best: CandidatePlan, others: Iterable[CandidatePlan]
) -> tuple[Decision, ...]:
    """Why these groups, and what is in flight."""
    plan, tokens = best.plan, rank_tokens(execution, best.plan)
    rank, fullest = (int(n) for n in np.unravel_index(tokens.argmax(), tokens.shape))
    here = plan.groups.of(fullest)
    degree = plan.groups.degree[here][np.searchsorted(plan.groups.first_rank[here], rank, side="right") - 1]
    times = [f"{milliseconds(c.makespan_ns)} for {c.name}" for c in (best, *others)]
    reason = (
        f"simulated {'; '.join(times)}. The fullest device holds {tokens[rank, fullest]:,} of "
        f"{costs.device_tokens:,} tokens, in a group of {degree} in microbatch {fullest}"
    )
    compositions = [plan.groups.degree[plan.groups.of(k)].tolist() for k in range(plan.num_microbatches)]
    groups = Decision(execution.backbone.name, f"groups {compositions_text(compositions)}", reason)
    return groups, *(waves.decisions(execution, best.held) if len(execution.modules) > 1 else ())


def _refuse_too_large(job: Job, samples: StepSamples, capacity: int) -> None:
    """Refuse a sample that no group holds, even alone."""
    over = np.flatnonzero(samples.tokens > capacity)
    if len(over):
        worst = int(over[samples.tokens[over].argmax()])
        backbone = job.spec.execution.backbone
        raise SampleTooLargeError(
            f"{sample_name(job.stream, samples, worst)}: the sample has {samples.tokens[worst]} tokens, but the "
            f"largest sequence group of module {backbone.name} holds {capacity}; raise layout.max_degree or "
            "the module's memory, lower stream.seq_len, or leave such samples out with a filter or a quarantine list"
        )
