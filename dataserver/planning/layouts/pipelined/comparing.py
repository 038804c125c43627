"""The plans of one step among which the fastest is taken: those of several numbers of microbatches."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from dataserver.planning.job.fields import BalancePolicy, ModuleSpec, OrderPolicy
from dataserver.planning.job.identity import Job
from dataserver.planning.layouts.pipelined.attempts import Probe, attempt, probe, search
from dataserver.planning.layouts.pipelined.candidates import CandidatePlan, with_fewer_in_flight
from dataserver.planning.layouts.pipelined.counts import Counts
from dataserver.planning.layouts.pipelined.options import PipelinedOptions
from dataserver.planning.layouts.pipelined.packed import PackedStep
from dataserver.planning.layouts.pipelined.starts import Known
from dataserver.planning.layouts.shared.alternatives import edit_layout, edit_modules
from dataserver.planning.layouts.shared.candidates import ranked

SLOWER = 2
"""So many numbers in a row whose rule-based plans are slower than with fewer microbatches end the ladder."""

NEVER = 1 << 62
"""A time in nanoseconds that no step takes."""

MEMORY_SINCE = 7
"""The first plan_version whose plans are compared with what less memory would do."""

SEARCHED_SHARE = 32
"""Numbers are planned whole whose rule-based plan is slower than the fastest by no more than one part in so many: about
what a search gains over rules."""


@dataclass(frozen=True, slots=True)
class Compared:
    """What was tried for one step."""

    candidates: Sequence[CandidatePlan]
    """Candidates that were compared, the fastest first."""
    fewest: int
    """Microbatches of each rank that the samples need."""
    fitting: int
    """The fewest that memory holds, of those that were tried."""


@dataclass(frozen=True, slots=True)
class TooShort:
    """Memory holds none of the plans that were tried."""

    module: ModuleSpec | None
    """The module whose memory is too small, where one is known."""
    num_microbatches: int
    """The most that were tried."""


def compare(counts: Counts) -> Compared | TooShort:
    """Make the plans of a step; without modality parity where memory holds none that has it."""
    found = _compare(counts)
    if isinstance(found, TooShort) and counts.parity:
        found = _compare(replace(counts, parity=False))
    if isinstance(found, Compared) and counts.job.spec.execution.plan_version >= MEMORY_SINCE:
        best, *_ = found.candidates
        found = replace(found, candidates=ranked([*found.candidates, *with_fewer_in_flight(best)]))
    return found


def _compare(counts: Counts) -> Compared | TooShort:
    execution = counts.job.spec.execution
    fewest = execution.options(PipelinedOptions).fewest_microbatches
    return (None if fewest else _of_ladder(counts)) or _of_memory(counts)


def _of_ladder(counts: Counts) -> Compared | None:
    """The plans of all numbers of the ladder that may be the fastest; None if memory holds no plan of any of them.

    What is tried with a number depends on no other: neither its sequences nor the budget of its search. Which numbers
    are tried depends on no policy but packing, so that no other policy finds a faster one; where memory is stated, on
    the balances too. The fewest always are.
    """
    probes, close = dict[int, Probe](), set[int]()
    ladder = _Ladder(counts)
    for judge in _judges(counts.job):
        own = _probes(ladder, judge)
        fastest_ns = min((found.makespan_ns for found in own if found.makespan_ns is not None), default=0)
        for found in own:
            probes.setdefault(found.packed.num_microbatches, found)
            if found.makespan_ns is not None and found.makespan_ns <= fastest_ns + fastest_ns // SEARCHED_SHARE:
                close.add(found.packed.num_microbatches)
    fewest, candidates = min(probes), list[CandidatePlan]()
    for number, found in sorted(probes.items()):
        promises = number in close and all(found.bound_ns < c.makespan_ns for c in candidates)
        if promises or number == fewest:
            made = attempt(found.packed, found.known)
            plans = (*made.candidates, *(search(made, probes[fewest].packed.num_sequences) if promises else ()))
            candidates += plans if number == fewest else _named(found.packed, plans)
    if not candidates:
        return None
    fitting = min(c.num_microbatches for c in candidates)
    return Compared(ranked(candidates), fewest, fitting)


class _Ladder:
    """The numbers of a ladder, each packed once, and what is known of them."""

    def __init__(self, counts: Counts) -> None:
        self._packed, self._found = counts.ladder(), list[tuple[PackedStep, Known]]()

    def __iter__(self) -> Iterator[tuple[PackedStep, Known]]:
        """Yield packed steps, those of the fewest microbatches first."""
        yield from self._found
        for packed in self._packed:
            self._found.append((packed, Known(packed)))
            yield self._found[-1]


def _probes(ladder: _Ladder, judge: Job) -> list[Probe]:
    """The numbers of the ladder, until two in a row are slower than fewer microbatches.

    Where stages hold less than the schedule asks for, more microbatches let them hold more, so that the ladder goes on.
    """
    probes, slower, fastest_ns = list[Probe](), 0, NEVER
    for packed, known in ladder:
        found = replace(probe(replace(packed, job=judge), known, fastest_ns), packed=packed)
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


def _judges(job: Job) -> list[Job]:
    """Jobs whose probes say which numbers are planned: one that balances and orders the same sequences by the papers'
    rules, whatever this one does. Where memory is stated, also one that balances as this one.

    Memory holds other numbers for each balance, and by the papers' balances alone less of it would try some that are
    faster by the job's. All balances of the ablation are compared anyway (`layout._finalists`).
    """
    execution = job.spec.execution
    balanced = [m.name for m in execution.modules if not (execution.identity_routing and m.handles_images)]
    own = edit_layout(order=OrderPolicy.DISTTRAIN)(execution)
    usual = edit_modules(balanced, balance=BalancePolicy.LPT)(own)
    limited = execution.plan_version >= MEMORY_SINCE and any(m.memory is not None for m in execution.modules)
    ways = [usual, own] if limited and own != usual else [usual]
    return [replace(job, spec=job.spec.model_copy(update={"execution": way})) for way in ways]


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
