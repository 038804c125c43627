"""OrchMLLM's layout: every device runs every module, one phase after the other, and all share states."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import nsmallest
from itertools import product
from typing import Final

from trainclient.orchestrate.choice import (
    BEST_CHOICES,
    MICROBATCHES,
    Choice,
    ModuleChoice,
    Problem,
    TooLargeError,
    at_least,
    divisors,
)
from trainclient.orchestrate.costs import Option, gathering_ns, shard_bytes

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
    fitting = (run for run in _runs(problem) if run.memory_bytes <= problem.cluster.memory_bytes)
    found = nsmallest(BEST_CHOICES, fitting, key=lambda run: (run.step_ns, run.gpus))
    if not found:
        raise TooLargeError("colocated")
    return [_choice(problem, run) for run in found]


@dataclass(frozen=True, slots=True)
class _Run:
    """One way to run all modules on all devices."""

    options: tuple[Option, ...]
    dp: int
    microbatch: int
    rounds: int
    waves: int
    """Microbatches of each rank, in all rounds."""
    sharding: str
    keeps: tuple[bool, ...]
    """Whether a module keeps all its microbatches of a round."""
    states: float
    held: tuple[float, ...]
    """Bytes of activations of each module."""
    work: float
    computing: tuple[float, ...]
    """Of a microbatch in each module, nanoseconds."""
    waiting: tuple[float, ...]
    """The same for weights that are not gathered in time."""
    transfer_ns: float
    sync: float

    @property
    def gpus(self) -> int:
        return self.dp * self.options[0].tp

    @property
    def memory_bytes(self) -> float:
        return self.states + sum(self.held) + self.work

    @property
    def step_ns(self) -> float:
        return self.waves * (sum(self.computing) + sum(self.waiting)) + self.transfer_ns + self.sync


def _runs(problem: Problem) -> Iterator[_Run]:
    cluster, stream = problem.cluster, problem.workload.stream
    kinds = [problem.options(n) for n in problem.networks]
    for tp in sorted({o.tp for o in kinds[0]}):
        for chosen in product(*([o for o in options if o.tp == tp] for options in kinds)):
            transfer_bytes = _transfer_bytes(problem, chosen)
            for microbatch in (m for m in MICROBATCHES if stream.global_batch % m == 0):
                for dp in divisors(stream.global_batch // microbatch, cluster.gpus // tp):
                    for sharding in ("zero2", "zero3"):
                        yield _run(problem, chosen, dp, microbatch, sharding, transfer_bytes)


def _run(
    problem: Problem, chosen: tuple[Option, ...], dp: int, microbatch: int, sharding: str, transfer_bytes: float
) -> _Run:
    cluster, batch, whole = problem.cluster, problem.workload.stream.global_batch, sharding == "zero2"
    keeps = tuple(o.network.gradient_passes > 0 and _is_left(o, chosen) for o in chosen)
    rows = [max(microbatch * o.load.rows, _largest(problem, o)) for o in chosen]
    states = sum(shard_bytes(o, dp, whole) for o in chosen)
    work = max(n * o.work_bytes for n, o in zip(rows, chosen, strict=True))
    # Of the microbatches of a round, and beside them.
    kept = [SPREAD * batch / dp * o.sequence_bytes * keep for o, keep in zip(chosen, keeps, strict=True)]
    beside = [o.unit_bytes * (_largest(problem, o) if keep else n)
              for n, o, keep in zip(rows, chosen, keeps, strict=True)]  # fmt: skip
    fewest = batch // (dp * microbatch)
    rounds = min(fewest, at_least(sum(kept), cluster.memory_bytes - states - work - sum(beside))) if any(kept) else 1
    waves = rounds * -(-fewest // rounds)
    computing = tuple(o.fixed_ns + batch / (dp * waves) * o.sequence_ns for o in chosen)
    return _Run(
        options=chosen,
        dp=dp,
        microbatch=microbatch,
        rounds=rounds,
        waves=waves,
        sharding=sharding,
        keeps=keeps,
        states=states,
        held=tuple(k / rounds + b for k, b in zip(kept, beside, strict=True)),
        work=work,
        computing=computing,
        waiting=tuple(
            0.0 if whole else max(0.0, gathering_ns(o, dp, cluster) - c) for o, c in zip(chosen, computing, strict=True)
        ),
        transfer_ns=transfer_bytes / dp / cluster.bandwidth(dp * chosen[0].tp),
        sync=sum(o.sync_ns(dp, 1, cluster) for o in chosen) if whole else 0.0,
    )


def _is_left(option: Option, chosen: Sequence[Option]) -> bool:
    """Whether phases of other modules lie between a module's forward and backward phase."""
    generates = any(o.network.role.generates for o in chosen)
    return option.network.role.feeds or (option.network.role.spine and generates)


def _choice(problem: Problem, run: _Run) -> Choice:
    slack = (problem.cluster.memory_bytes - run.states - run.work) / sum(run.held)
    modules = tuple(
        ModuleChoice(
            o, run.dp, 1, run.memory_bytes, run.states, run.work, c, w,
            budget_bytes=h * slack, step_bytes=h * slack if keep else None,
        )
        for o, h, keep, c, w in zip(run.options, run.held, run.keeps, run.computing, run.waiting, strict=True)
    )  # fmt: skip
    parts = {
        "computing": run.waves * sum(run.computing),
        "waiting for weights": run.waves * sum(run.waiting),
        "rows between phases": run.transfer_ns,
        "gradients": run.sync,
    }
    return Choice(
        "colocated", modules, run.gpus, run.microbatch, run.waves, run.step_ns, parts, run.sharding, rounds=run.rounds
    )


def _largest(problem: Problem, option: Option) -> int:
    """Rows of the largest item, of a backbone the longest sequence."""
    return problem.workload.stream.seq_len if option.network.role.spine else option.load.largest


def _transfer_bytes(problem: Problem, chosen: Sequence[Option]) -> float:
    """Bytes of the embeddings and conditions of a step, there and back."""
    stream = problem.workload.stream
    width = next(o.network.size.width for o in chosen if o.network.role.spine)
    rows = sum(
        o.load.rows / stream.merge**2 if o.network.role.feeds else o.load.items * stream.query_tokens
        for o in chosen
        if not o.network.role.spine
    )
    return 2 * 2 * width * rows * stream.global_batch
