"""What would save time, in words, with the command to try: only what the times of all processes show."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from shlex import quote
from statistics import median_low
from typing import Final

from dataserver.planning.plan.naming import counted
from trainclient.run_times.spent import Part, ProcessTimes
from trainclient.training.config import TrainConfig

SHOWN: Final = 3
LEAST_SHARE: Final = 0.03
"""Share of the time after the start that a remedy must be able to save."""
LEAST_STEPS: Final = 3
"""Steps after the first one, below which nothing can be told."""
SLOWER: Final = 1.25
"""How much longer than its peers a process computes for the same work, at least, to be called slow."""
WRONG_COSTS: Final = 1.5
"""How far the modules' ratios of computed to planned time may be apart."""
UNEVEN: Final = 0.25
"""How far the shares of time in which modules compute may be apart."""
RARE: Final = 0.1
"""Share of the steps with the longest waits for data; if these have nearly all of it, waits come in bursts."""
NEARLY_ALL: Final = 0.8
LEAST_STEPS_OF_BURSTS: Final = 20
MOST_GROWTH: Final = 4.0
"""More than so many times as many servers are not asked for at once."""


@dataclass(frozen=True, slots=True)
class Remedy:
    """A change to try, and what it may save."""

    saves: float
    """Share of the time after the start that it saves at most."""
    text: str
    command: str
    """Command for a shell, with dots and capitals for what only its reader knows; a comment says more."""


@dataclass(frozen=True, slots=True, eq=False)
class RunFacts:
    """What is known of a run at its end."""

    config: TrainConfig
    processes: Sequence[ProcessTimes]
    first: int
    """First step of the run."""
    end: int
    """The step after its last one."""
    step_s: float
    """Seconds of all steps but the first one."""
    waits_s: Sequence[float]
    """The longest wait for data of any process, of each of these steps."""
    planned_ns: Sequence[int]
    """What each process was to compute in a step; empty if that is not known."""
    num_servers: int
    server: str
    """HOST:PORT of one that has reports of this run."""
    zero3: Sequence[str]
    """Modules that gather their parameters block by block."""

    @property
    def after_start_ns(self) -> float:
        """Nanoseconds after the start, of the mean process."""
        return max(self.mean([p.total_ns - p.parts[Part.START] for p in self.processes]), 1.0)

    def mean(self, values: Sequence[float]) -> float:
        """Return the mean over all processes of the run."""
        return sum(values) / max(len(self.processes), 1)

    def share(self, part: Part) -> float:
        """Share of a part in the time after the start, of the mean process."""
        return self.mean([p.parts[part] for p in self.processes]) / self.after_start_ns


def remedies(run: RunFacts) -> list[Remedy]:
    """Remedies for a run, the largest first."""
    if len(run.waits_s) < LEAST_STEPS:
        return []
    data, slow = [*_data(run)], [*_slow(run)]
    known = sum(found.saves for found in (*data, *slow))
    found = [*data, *slow, *_others(run, known), *_collectives(run), *_between_steps(run)]
    large = [remedy for remedy in found if remedy.saves >= LEAST_SHARE]
    return sorted(large, key=lambda remedy: -remedy.saves)[:SHOWN]


def _data(run: RunFacts) -> Iterator[Remedy]:
    """More servers, or more that they prepare ahead."""
    waited, steps = sum(run.waits_s), len(run.waits_s)
    longest = sorted(run.waits_s, reverse=True)[: math.ceil(RARE * steps)]
    # A process that waited neither for data nor for others would take as long with any data.
    least = min(idle_ns(run, p) + p.parts[Part.DATA] for p in run.processes)
    saves = min(waited * 1e9, least) / run.after_start_ns
    if steps >= LEAST_STEPS_OF_BURSTS and waited and sum(longest) >= NEARLY_ALL * waited:
        yield Remedy(
            saves,
            f"ranks waited for data in bursts: {len(longest)} of {steps} steps have {sum(longest) / waited:.0%} of the "
            "wait, so servers are fast enough on the whole. Let them prepare more ahead",
            "dataserver serve ... --prefetch-bytes N  # twice what it is now: 1 GiB unless memory is limited",
        )
        return
    growth = min(run.step_s / max(run.step_s - waited, 1e-9), MOST_GROWTH)
    some = sum(wait > 0.01 * run.step_s / steps for wait in run.waits_s)
    yield Remedy(
        saves,
        f"ranks waited for data in {some} of {steps} steps. Servers that keep up need {growth:.1f} times the "
        f"throughput: about {math.ceil(growth * run.num_servers)} like the {run.num_servers} of --servers, or as many "
        "times the cores",
        f"dataserver top {quote(run.config.servers)}{_shown(run.config)}  # names the stage that limits them, and the "
        "cores that are missing",
    )


def _slow(run: RunFacts) -> Iterator[Remedy]:
    """A machine that is slower than others, or a process of it."""
    factors = slow_factors(run.processes)
    slow = {rank: factor for rank, factor in factors.items() if factor >= SLOWER}
    if not slow:
        return
    lost = {rank: run.processes[rank].parts[Part.COMPUTED] * (1 - 1 / factor) for rank, factor in slow.items()}
    others = [idle_ns(run, p) for rank, p in enumerate(run.processes) if rank not in slow]
    worst = max(slow, key=lambda rank: lost[rank])
    times, host = f"{slow[worst]:.1f} times as long as its peers", run.processes[worst].host
    of_host = {rank for rank in factors if run.processes[rank].host == host}
    if of_host == set(slow) and len(of_host) > 1 and of_host != set(factors):
        what = f"all {len(of_host)} processes on {host} compute longer than their peers elsewhere, up to {times}"
    else:
        more = f"; so do {len(slow) - 1} more" if len(slow) > 1 else ""
        what = f"global rank {worst} ({run.processes[worst].name}) on {host} computes {times} for the same work{more}"
    yield Remedy(
        min([lost[worst], *others]) / run.after_start_ns,
        f"{what}, and all others wait. Look for other programs, heat or a worse device there, or leave it out",
        f"trainclient train ... --timeline.directory DIR --timeline.first {run.end}  # names the operations",
    )


def slow_factors(processes: Sequence[ProcessTimes]) -> dict[int, float]:
    """How many times as long as its peers a process computes for the same work, by its global rank.

    Peers hold the same modules and stage. Work is counted in operations or tokens where all of them count these.
    """
    found = dict[int, float]()
    peers = sorted(range(len(processes)), key=lambda rank: _peers(processes[rank]))
    for _, group in groupby(peers, key=lambda rank: _peers(processes[rank])):
        ranks = [*group]
        works = next(
            (w for w in ([processes[r].flops for r in ranks], [processes[r].tokens for r in ranks]) if all(w)),
            [1] * len(ranks),
        )
        costs = {r: processes[r].parts[Part.COMPUTED] / (work or 1) for r, work in zip(ranks, works, strict=True)}
        usual = median_low(costs.values())
        if len(ranks) > 1 and usual:
            found |= {rank: cost / usual for rank, cost in costs.items()}
    return found


def _peers(process: ProcessTimes) -> tuple[str, int]:
    return process.holds, process.stage


def idle_ns(run: RunFacts, process: ProcessTimes) -> int:
    """How long a process waited for others: for rows, or in a collective for later ranks. One alone waits for none."""
    if len(run.processes) == 1:
        return 0
    soonest = min(p.parts[Part.STEP_END] for p in run.processes)
    late = process.parts[Part.STEP_END] - soonest + process.parts[Part.COLLECTIVES] - _pure_ns(run, process)
    return process.rows.total() + late


def _pure_ns(run: RunFacts, process: ProcessTimes) -> int:
    """What the collectives of a process take without waiting: those of the peer that comes last, for whom all wait."""
    return min(p.parts[Part.COLLECTIVES] for p in run.processes if _peers(p) == _peers(process))


def _others(run: RunFacts, known: float) -> Iterator[Remedy]:
    """Better costs, degrees or policies, where processes wait for each other longer than `known` causes explain."""
    job, shares = quote(str(run.config.job)), busy_shares(run)
    busiest, laziest = (choose(shares, key=lambda name: shares[name]) for choose in (max, min))
    anywhere = run.mean([idle_ns(run, p) for p in run.processes]) / run.after_start_ns - known
    if costs := _wrong_costs(run):
        yield Remedy(
            anywhere,
            f"ranks waited for each other, and plans balance by wrong costs: {costs} as long as the job says. Fit them",
            f"dataserver fit --job {job} --server {run.server} --config SERVER.yaml{_shown(run.config)}",
        )
    elif shares[busiest] - shares[laziest] >= UNEVEN:
        said = ", ".join(f"{name} {share:.0%}" for name, share in sorted(shares.items(), key=lambda s: -s[1]))
        yield Remedy(
            anywhere,
            f"devices waited for each other's rows; they computed: {said} of the time. Give {busiest} more of the "
            f"devices and {laziest} fewer, or another layout",
            f"trainclient orchestrate --gpus {len(run.processes)} --sizes SIZES.json ...",
        )
    else:
        own = [idle_ns(run, p) for p in run.processes if p.holds == busiest]
        yield Remedy(
            sum(own) / len(own) / run.after_start_ns - known,
            "ranks waited for each other, though all compute about as much as their peers. Compare policies, orders "
            "and numbers of microbatches on the same samples",
            f"dataserver simulate --job {job} --config SERVER.yaml --first-step {run.first}",
        )


def _wrong_costs(run: RunFacts) -> str:
    """What computes in another ratio to its plan than what others hold, in words; else empty.

    What a process holds is computed one after the other, whatever it costs. Slow ranks tell nothing of costs.
    """
    slow = {run.processes[rank].holds for rank, factor in slow_factors(run.processes).items() if factor >= SLOWER}
    computed, planned = Counter[str](), Counter[str]()
    for process, planned_ns in zip(run.processes, run.planned_ns, strict=False):
        if process.holds not in slow:
            computed[process.holds] += process.parts[Part.COMPUTED]
            planned[process.holds] += planned_ns * process.steps
    ratios = {holds: computed[holds] / ns for holds, ns in planned.items() if ns and computed[holds]}
    if not ratios or max(ratios.values()) < WRONG_COSTS * min(ratios.values()):
        return ""
    told = sorted(ratios.items(), key=lambda ratio: -ratio[1])
    return ", ".join(f"{holds} computes {ratio:.3g} times" for holds, ratio in told)


def _shown(config: TrainConfig) -> str:
    """Flags of what this run shows servers, for commands that ask the same ones."""
    files = {name: getattr(config, name) for name in ("tls_ca", "tls_cert", "tls_key", "token_file")}
    return "".join(f" --{name.replace('_', '-')} {quote(str(file))}" for name, file in files.items() if file)


def busy_shares(run: RunFacts) -> dict[str, float]:
    """The share of the time after the start in which processes compute, by what they hold."""
    found = {}
    for holds in dict.fromkeys(p.holds for p in run.processes):
        own = [p.parts[Part.COMPUTED] for p in run.processes if p.holds == holds]
        found[holds] = sum(own) / len(own) / run.after_start_ns
    return found


def _collectives(run: RunFacts) -> Iterator[Remedy]:
    """Fewer or faster sums and gathers, where these take long without waiting for anybody."""
    saves = max(_pure_ns(run, p) / max(p.total_ns - p.parts[Part.START], 1) for p in run.processes)
    if run.zero3:
        yield Remedy(
            saves,
            f"parameters of {' and '.join(run.zero3)} are gathered for every pass of every microbatch. Where memory "
            "permits, gather them once a step",
            f"trainclient train ... --config TRAIN.yaml  # with sharding: zero2 of {' and '.join(run.zero3)}",
        )
        return
    yield Remedy(
        saves,
        "gathers and sums between ranks take long though nobody is late: look whether they use the fastest network, or "
        "give each update more samples (stream.global_batch of the next job)",
        "NCCL_DEBUG=INFO trainclient train ...  # says which network each rank uses",
    )


def _between_steps(run: RunFacts) -> Iterator[Remedy]:
    """Checkpoints and evaluations that are made less often."""
    checkpoint, evaluation = run.config.checkpoint, run.config.evaluation
    for part, what, flag, every in (
        (Part.CHECKPOINTS, "saving checkpoints", "checkpoint.every", checkpoint.every),
        (Part.EVALUATION, "evaluating", "evaluation.every", evaluation.every),
    ):
        number, rarer = (run.end // n - run.first // n for n in (every, 2 * every))
        share = run.share(part)
        if part is Part.CHECKPOINTS and not checkpoint.asynchronous and number:
            text = "training stood still while checkpoints were written. Write them beside it"
            yield Remedy(share, text, "trainclient train ... --checkpoint.asynchronous")
        elif number > 1:
            text = f"{what} took {share:.0%} of the time, {counted(number, 'time')}. Do it half as often"
            yield Remedy(share * (1 - rarer / number), text, f"trainclient train ... --{flag} {2 * every}")
