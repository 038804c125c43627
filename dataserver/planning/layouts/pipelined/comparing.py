"""The plans of one step among which the fastest is taken: those of several numbers of microbatches."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dataserver.planning.job.fields import BalancePolicy, ModuleSpec, OrderPolicy
from dataserver.planning.job.identity import Job
from dataserver.planning.layouts.pipelined.attempts import Probe, attempt, probe, search
from dataserver.planning.layouts.pipelined.candidates import CandidatePlan
from dataserver.planning.layouts.pipelined.counts import Counts
from dataserver.planning.layouts.pipelined.options import PipelinedOptions
from dataserver.planning.layouts.pipelined.packed import PackedStep
from dataserver.planning.layouts.shared.alternatives import edit_layout, edit_modules
from dataserver.planning.layouts.shared.candidates import ranked

SLOWER = 2
"""So many numbers in a row whose rule-based plans are slower than with fewer microbatches end the ladder."""

NEVER = 1 << 62
"""Longer than any step."""

SEARCHED_SHARE = 32
"""Numbers are planned whole whose rule-based plan is slower than the fastest by no more than one part in so many: about
what a search gains over rules."""


@dataclass(frozen=True, slots=True)
class Compared:
    """What was tried for one step."""

    candidates: Sequence[CandidatePlan]
    """Fastest first."""
    fewest: int
    """Microbatches of each rank that the samples need."""
    fitting: int
    """The fewest that memory holds, of those that were tried."""


@dataclass(frozen=True, slots=True)
class TooShort:
    """Memory holds none of the plans that were tried."""

    module: ModuleSpec | None
    """Whose memory it is."""
    num_microbatches: int
    """The most that were tried."""


def compare(counts: Counts) -> Compared | TooShort:
    """Make the plans of a step; without modality parity where memory holds none that has it."""
    found = _compare(counts)
    if isinstance(found, TooShort) and counts.parity:
        found = _compare(replace(counts, parity=False))
    return found


def _compare(counts: Counts) -> Compared | TooShort:
    execution = counts.job.spec.execution
    fewest = execution.options(PipelinedOptions).fewest_microbatches
    return (None if fewest else _of_ladder(counts)) or _of_memory(counts)


def _of_ladder(counts: Counts) -> Compared | None:
    """The plans of all numbers of the ladder that may be the fastest; None if memory holds no plan of any of them.

    What is tried with a number depends on no other: neither its sequences nor the budget of its search. Which numbers
    are tried depends on no policy but packing, so that no other policy finds a faster one. The fewest always are.
    """
    probes = _probes(counts)
    fewest, candidates = probes[0].packed, list[CandidatePlan]()
    fastest_ns = min((found.makespan_ns for found in probes if found.makespan_ns is not None), default=0)
    for found in probes:
        is_close = found.makespan_ns is not None and found.makespan_ns <= fastest_ns + fastest_ns // SEARCHED_SHARE
        promises = is_close and all(found.bound_ns < c.makespan_ns for c in candidates)
        if promises or found.packed is fewest:
            made = attempt(found.packed, found.known)
            plans = (*made.candidates, *(search(made, fewest.num_sequences) if promises else ()))
            candidates += plans if found.packed is fewest else _named(found.packed, plans)
    if not candidates:
        return None
    fitting = min(c.num_microbatches for c in candidates)
    return Compared(ranked(candidates), fewest.num_microbatches, fitting)


def _probes(counts: Counts) -> list[Probe]:
    """The numbers of the ladder, until two in a row are slower than fewer microbatches.

    Where stages hold less than the schedule asks for, more microbatches let them hold more, so that the ladder goes on.
    """
    probes, slower, fastest_ns, usual = list[Probe](), 0, NEVER, _with_usual_policies(counts.job)
    for packed in counts.ladder():
        found = replace(probe(replace(packed, job=usual), fastest_ns), packed=packed)
        probes.append(found)
        if found.makespan_ns is None:
            slower += found.bound_ns >= fastest_ns
        elif found.makespan_ns < fastest_ns or found.is_short:
            slower, fastest_ns = 0, min(fastest_ns, found.makespan_ns)
        else:
            slower += 1
        if slower == SLOWER:
            break
    return probes


def _with_usual_policies(job: Job) -> Job:
    """A job that balances and orders the same sequences by the papers' rules, whatever this one does."""
    execution = job.spec.execution
    balanced = [m.name for m in execution.modules if not (execution.identity_routing and m.handles_images)]
    usual = edit_modules(balanced, balance=BalancePolicy.LPT)(edit_layout(order=OrderPolicy.DISTTRAIN)(execution))
    return replace(job, spec=job.spec.model_copy(update={"execution": usual}))


def _of_memory(counts: Counts) -> Compared | TooShort:
    """The plans of as few microbatches as memory holds; finer ones where it holds fewer at once than the schedule asks.

    Twice as many are compared then, and twice as many again, as long as rule-based plans get faster. Only the number
    that is chosen is searched. The way of jobs that want the fewest, and where memory holds none of the ladder.
    """
    first = counts.first()
    fitting = counts.fitting(first)
    if not fitting.candidates:
        return TooShort(fitting.shortfall, fitting.num_microbatches)
    best, candidates = fitting, list(fitting.candidates)
    finer = counts.finer(fitting) if fitting.is_short else None
    while finer is not None:
        candidates += _named(finer.packed, finer.candidates)
        if not finer.candidates or finer.fastest_ns >= best.fastest_ns:
            break
        best, finer = finer, counts.finer(finer) if finer.is_short else None
    searched = search(best, 2 * first.num_sequences)
    candidates += searched if best is fitting else _named(best.packed, searched)
    return Compared(ranked(candidates), first.num_microbatches, fitting.num_microbatches)


def _named(packed: PackedStep, candidates: Sequence[CandidatePlan]) -> list[CandidatePlan]:
    """The candidates of a number of microbatches beside those of fewer."""
    return [replace(c, name=f"{c.name}, {packed.num_microbatches} microbatches") for c in candidates]
