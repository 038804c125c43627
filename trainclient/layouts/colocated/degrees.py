"""OrchMLLM's layout: every device runs every module, one phase after the other, and all share states."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import nsmallest
from itertools import product
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dataserver.planning import I64
from trainclient.orchestrate.choice import (
    BEST_CHOICES,
    Choice,
    LayoutDegrees,
    ModuleChoice,
    Problem,
    TooLargeError,
    divisors,
    microbatches,
)
from trainclient.orchestrate.costs import Option, gathering_ns, shard_bytes
from trainclient.orchestrate.workload import F64

SPREAD: Final = 1.05
"""Times what a rank keeps of a mean step that it may have to keep of another one, beside the largest item."""


def colocated(problem: Problem) -> list[Choice]:
    """The best of all degrees, microbatches, and modules that compute activations again.

    States are shared in one of two ways: zero2 gathers weights once a step and keeps them whole; zero3 gathers them
    block by block for every microbatch, beside computing. A step that memory does not hold goes through its phases in
    as few rounds as it holds, as servers plan it.

    Raises:
        TooLargeError: nothing fits.
    """
    found = [(float(runs.step_ns[n]), int(runs.gpus[n]), order, runs, n)
             for order, runs in enumerate(_runs(problem)) for n in runs.fastest()]  # fmt: skip
    if not found:
        raise TooLargeError("colocated")
    return [_choice(problem, runs, n) for *_, runs, n in nsmallest(BEST_CHOICES, found, key=lambda f: f[:3])]


@dataclass(frozen=True, slots=True)
class _Runs:
    """All ways to run all modules on all devices at one tensor-parallel degree, each array of one number for each."""

    options: tuple[Option, ...]
    keeps: tuple[bool, ...]
    """Whether a module keeps all its microbatches of a round."""
    fits: NDArray[np.bool_]
    dp: I64
    microbatch: I64
    finer: I64
    """Number of microbatches for each sequence."""
    whole: NDArray[np.bool_]
    """Whether ranks keep whole weights and gradients (zero2)."""
    rounds: I64
    waves: I64
    """Microbatches of each rank, in all rounds."""
    states: F64
    held: F64
    """Bytes of activations of each module. float64 [modules, n]."""
    work: F64
    computing: F64
    """Nanoseconds that each module computes for a microbatch."""
    waiting: F64
    """The same for weights that are not gathered in time."""
    transfer_ns: F64
    sync: F64

    @property
    def gpus(self) -> I64:
        found: I64 = self.dp * self.options[0].tp
        return found

    @property
    def step_ns(self) -> F64:
        each: F64 = self.computing.sum(axis=0) + self.waiting.sum(axis=0)
        return self.waves * each + self.transfer_ns + self.sync

    def fastest(self) -> list[int]:
        """The best of those that memory holds."""
        fitting = np.flatnonzero(self.fits)
        order = np.lexsort((self.gpus[fitting], self.step_ns[fitting]))[:BEST_CHOICES]
        found: list[int] = fitting[order].tolist()
        return found


def _runs(problem: Problem) -> Iterator[_Runs]:
    kinds = [problem.options(n) for n in problem.networks]
    for tp in sorted({o.tp for o in kinds[0]}):
        for chosen in product(*([o for o in options if o.tp == tp] for options in kinds)):
            yield _of_options(problem, chosen)


def _ways(problem: Problem, tp: int) -> tuple[I64, ...]:
    """Every legal data-parallel degree, sequences of a microbatch, microbatches of a sequence, and zero2 or not."""
    batch = problem.workload.stream.global_batch
    counts = np.array(microbatches(problem), np.int64)
    degrees = divisors(batch, problem.cluster.gpus // tp)
    number, dp, whole = (axis.ravel() for axis in np.meshgrid(np.arange(len(counts)), degrees, [1, 0], indexing="ij"))
    legal = batch % (dp * counts[number, 0]) == 0
    return dp[legal], *counts[number[legal]].T, whole[legal]


@dataclass(frozen=True, slots=True)
class _Memory:
    """What a device holds. Each float64 [n], `held` [modules, n]."""

    rounds: I64
    states: F64
    held: F64
    work: F64

    @property
    def total(self) -> F64:
        found: F64 = self.states + self.held.sum(axis=0) + self.work
        return found


def _memory(
    problem: Problem, chosen: Sequence[Option], keeps: Sequence[bool], dp: I64, each: F64, fewest: I64, states: F64
) -> _Memory:
    """Memory for microbatches of `each` sequences, `fewest` of them where a step has one round."""
    batch = problem.workload.stream.global_batch
    rows = [np.maximum(each * o.load.rows, _largest(problem, o)) for o in chosen]
    work = np.maximum.reduce([n * o.work_bytes for n, o in zip(rows, chosen, strict=True)])
    # Of the microbatches of a round, and beside them.
    kept = np.array([SPREAD * batch / dp * o.sequence_bytes * keep for o, keep in zip(chosen, keeps, strict=True)])
    beside = np.array([o.unit_bytes * (np.full(len(dp), _largest(problem, o)) if keep else n)
                       for n, o, keep in zip(rows, chosen, keeps, strict=True)])  # fmt: skip
    rounds = np.ones(len(dp), np.int64)
    if any(keeps):
        free = problem.cluster.memory_bytes - states - work - beside.sum(axis=0)
        needed = np.where(free > 0, np.ceil(kept.sum(axis=0) / np.where(free > 0, free, 1) - 1e-12), np.inf)
        rounds = np.minimum(fewest, np.maximum(1, needed)).astype(np.int64)
    return _Memory(rounds, states, kept / rounds + beside, work)


def _of_options(problem: Problem, chosen: tuple[Option, ...]) -> _Runs:
    cluster, batch = problem.cluster, problem.workload.stream.global_batch
    dp, microbatch, finer, shared = _ways(problem, chosen[0].tp)
    whole = shared.astype(bool)
    keeps = tuple(o.network.gradient_passes > 0 and _is_left(o, chosen) for o in chosen)
    degrees, at = np.unique(dp, return_inverse=True)

    def by_degree(of: list[float]) -> F64:
        found: F64 = np.array(of, np.float64)[at]
        return found

    states = np.where(whole, *(by_degree([sum(shard_bytes(o, d, kind) for o in chosen) for d in degrees.tolist()])
                               for kind in (True, False)))  # fmt: skip

    def memory(finer: I64) -> _Memory:
        return _memory(problem, chosen, keeps, dp, microbatch / finer, batch * finer // (dp * microbatch), states)

    found, needed = memory(finer), memory(np.maximum(1, finer // 2)).total > cluster.memory_bytes
    fewest = batch * finer // (dp * microbatch)
    waves = found.rounds * -(-fewest // found.rounds)
    computing = np.array([o.fixed_ns + batch / (dp * waves) * o.sequence_ns for o in chosen])
    gathering = np.array([by_degree([gathering_ns(o, d, cluster) for d in degrees.tolist()]) for o in chosen])
    sync = by_degree([sum(o.sync_ns(d, 1, cluster) for o in chosen) for d in degrees.tolist()])
    return _Runs(
        chosen, keeps, (found.total <= cluster.memory_bytes) & ((finer == 1) | needed), dp, microbatch, finer, whole,
        found.rounds, waves, states, found.held, found.work, computing,
        waiting=np.where(whole, 0.0, np.maximum(0.0, gathering - computing)),
        transfer_ns=_transfer_bytes(problem, chosen) / dp / cluster.bandwidths(dp * chosen[0].tp),
        sync=np.where(whole, sync, 0.0),
    )  # fmt: skip


def _is_left(option: Option, chosen: Sequence[Option]) -> bool:
    """Whether phases of other modules lie between a module's forward and backward phase."""
    generates = any(o.network.role.generates for o in chosen)
    return option.network.role.feeds or (option.network.role.spine and generates)


def _choice(problem: Problem, runs: _Runs, n: int) -> Choice:
    dp, rounds, waves = int(runs.dp[n]), int(runs.rounds[n]), int(runs.waves[n])
    states, work, held = float(runs.states[n]), float(runs.work[n]), runs.held[:, n].tolist()
    slack = (problem.cluster.memory_bytes - states - work) / sum(held)
    modules = tuple(
        ModuleChoice(
            o, dp, 1, states + sum(held) + work, states, work, c, w,
            budget_bytes=h * slack, step_bytes=h * slack if keep else None,
        )
        for o, h, keep, c, w in zip(
            runs.options, held, runs.keeps, runs.computing[:, n].tolist(), runs.waiting[:, n].tolist(), strict=True
        )
    )  # fmt: skip
    parts = {
        "computing": waves * sum(m.wave_ns for m in modules),
        "waiting for weights": waves * sum(m.waiting_ns for m in modules),
        "rows between phases": float(runs.transfer_ns[n]),
        "gradients": float(runs.sync[n]),
    }
    return Choice(
        "colocated", modules, int(runs.gpus[n]), int(runs.microbatch[n]), waves, float(runs.step_ns[n]), parts,
        "zero2" if runs.whole[n] else "zero3", rounds=rounds, finer=int(runs.finer[n]), kind="colocated",
        extras={
            "ranks_per_node": max(1, problem.cluster.gpus_per_node // runs.options[0].tp),
            "row_bytes": 2 * next(o.network.size.width for o in runs.options if o.network.role.spine),
        },
    )  # fmt: skip


def _largest(problem: Problem, option: Option) -> int:
    """Rows of the largest item, of a backbone the longest sequence."""
    return problem.workload.stream.seq_len if option.network.role.spine else option.load.largest


def _transfer_bytes(problem: Problem, chosen: Sequence[Option]) -> float:
    """Bytes of the embeddings and conditions of a step, there and back."""
    stream = problem.workload.stream
    width = next(o.network.size.width for o in chosen if o.network.role.spine)
    rows = sum(
        o.load.tokens if o.network.role.feeds else o.load.items * stream.query_tokens
        for o in chosen
        if not o.network.role.spine
    )
    return 2 * 2 * width * rows * stream.global_batch


DEGREES = LayoutDegrees(has_backbone=True, best=colocated)
