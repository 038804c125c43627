"""DISTMM's layout: towers on devices of their own, which meet between the forwards and backwards of each batch."""

from dataclasses import dataclass

import numpy as np

from dataserver.planning import I64
from trainclient.orchestrate.choice import (
    BEST_CHOICES,
    MAX_MICROBATCH,
    Choice,
    LayoutDegrees,
    ModuleChoice,
    Problem,
    TooLargeError,
    divisors,
    insert,
)
from trainclient.orchestrate.costs import Option
from trainclient.orchestrate.networks import FEATURES, Network
from trainclient.orchestrate.workload import F64


def contrastive(problem: Problem) -> list[Choice]:
    """The best replicas and degrees of each tower, and microbatches of all: every choice is tried.

    Raises:
        TooLargeError: nothing fits.
    """
    return _choices(problem, "contrastive")


def equal_towers(problem: Problem) -> list[Choice]:
    """The best where all towers have the same degrees: the baseline.

    Raises:
        TooLargeError: nothing fits.
    """
    return _choices(problem, "monolithic")


def _choices(problem: Problem, layout: str) -> list[Choice]:
    best: list[Choice] = []
    for count in divisors(_batch(problem), MAX_MICROBATCH):
        towers = [_Tower.of(problem, network, count) for network in problem.networks]
        made = np.meshgrid(*(np.arange(len(t.dp)) for t in towers), indexing="ij")
        chosen = [axis.ravel() for axis in made]
        gpus = sum(t.gpus[at] for t, at in zip(towers, chosen, strict=True))
        legal = np.asarray(gpus) <= problem.cluster.gpus
        if layout == "monolithic":
            for name in ("dp", "gpus"):
                degrees = [getattr(t, name)[at] for t, at in zip(towers, chosen, strict=True)]
                legal &= np.all([d == degrees[0] for d in degrees], axis=0)
        chosen = [at[legal] for at in chosen]
        times = sum(_parts(problem, towers, chosen, np.asarray(gpus)[legal]).values(), np.zeros(1))
        for n in np.lexsort((np.asarray(gpus)[legal], times))[:BEST_CHOICES].tolist():
            best = insert(best, _choice(problem, layout, towers, [at[n : n + 1] for at in chosen], count))
    if not best:
        raise TooLargeError(layout)
    return best


@dataclass(frozen=True, slots=True)
class _Tower:
    """All ways to run a tower that memory holds, each array of one number for each."""

    options: list[Option]
    number: I64
    """Number of the option that each entry is of."""
    dp: I64
    gpus: I64
    states: F64
    work: F64
    held: F64
    forward_ns: F64
    """Nanoseconds of the forward of a contrastive batch."""
    backward_ns: F64
    sync_ns: F64

    @classmethod
    def of(cls, problem: Problem, network: Network, count: int) -> "_Tower":
        """With so many microbatches of a contrastive batch."""
        cluster, batch, options = problem.cluster, _batch(problem), problem.options(network)
        ways = [(n, dp) for n, o in enumerate(options) for dp in divisors(batch // count, cluster.gpus // o.tp)]
        number, dp = np.array(ways, np.int64).reshape(-1, 2).T

        def each(of: list[float]) -> F64:
            found: F64 = np.array(of, np.float64)[number]
            return found

        rows = batch / dp * each([o.load.rows for o in options])
        states = each([o.static_bytes(1) for o in options]) + each([o.optimizer_bytes(1) for o in options])
        work = rows / count * each([o.work_bytes for o in options])
        held = rows * each([float(o.unit_bytes) for o in options])
        whole = count * each([o.fixed_ns for o in options]) + batch / dp * each([o.sequence_ns for o in options])
        forward = whole * 100 / (100 + each([float(o.cost.backward_percent) for o in options]))
        sync = np.array([options[n].sync_ns(ranks, 1, cluster) for n, ranks in ways], np.float64)
        tp = np.array([o.tp for o in options], np.int64)[number]
        fits = states + work + held <= cluster.memory_bytes
        return cls(
            options, number[fits], dp[fits], (dp * tp)[fits], states[fits], work[fits], held[fits],
            forward[fits], (whole - forward)[fits], sync[fits],
        )  # fmt: skip


def _parts(problem: Problem, towers: list[_Tower], chosen: list[I64], gpus: I64) -> dict[str, F64]:
    """What adds up to a step. Each float64 [n]."""
    count = problem.workload.stream.global_batch // _batch(problem)

    def most(name: str) -> F64:
        found: F64 = np.max([getattr(t, name)[at] for t, at in zip(towers, chosen, strict=True)], axis=0, initial=0)
        return found

    return {
        "waves": count * (most("forward_ns") + most("backward_ns")),  # all towers meet between the two
        "interactions": count * _interaction_ns(problem, _batch(problem), gpus),
        "gradients": most("sync_ns"),
    }


def _choice(problem: Problem, layout: str, towers: list[_Tower], chosen: list[I64], count: int) -> Choice:
    """The only one of the chosen ways."""
    modules = []
    for tower, at in zip(towers, chosen, strict=True):
        option, dp = tower.options[tower.number[at].item()], tower.dp[at].item()
        states, work, held = (values[at].item() for values in (tower.states, tower.work, tower.held))
        wave = (tower.forward_ns[at].item() + tower.backward_ns[at].item()) / count
        modules.append(ModuleChoice(option, dp, 1, states + work + held, states, work, wave))
    gpus = sum(m.gpus for m in modules)
    parts = {name: float(ns.item()) for name, ns in _parts(problem, towers, chosen, np.array([gpus])).items()}
    batches = problem.workload.stream.global_batch // _batch(problem)
    extras = {"interaction_ns": round(parts["interactions"] / batches)} | ({"microbatches": count} if count > 1 else {})
    return Choice(
        layout, tuple(modules), gpus, 1, batches * count, sum(parts.values()), parts, "none",
        kind="contrastive", extras=extras, end={"epochs": 1, "last": "drop"},
    )  # fmt: skip


def _batch(problem: Problem) -> int:
    stream = problem.workload.stream
    return stream.contrastive_batch or stream.global_batch


def _interaction_ns(problem: Problem, batch: int, gpus: I64) -> F64:
    """Features of all samples to all devices, and each device's share of the products, forward and backward."""
    cluster = problem.cluster
    sent = 2 * 2 * FEATURES * batch * len(problem.networks) / cluster.bandwidths(gpus)
    found: F64 = sent + 6 * batch * batch * FEATURES / (gpus * cluster.peak_flops_ns * 0.3)
    return found


DEGREES = LayoutDegrees(has_backbone=False, best=contrastive, equal=equal_towers)
