"""Every choice for a pipelined backbone, as arrays: degrees, stages, model chunks, microbatches.

Of W waves that take L in each of S stages, a step of V interleaved chunks takes W L + (S - 1) L / V in the backbone
(Narayanan et al. 2021). Encoder and generator work for one chunk of V: while the others are run they wait, but for what
they may hold. So the slowest of a chunk, encoder and generator counts for each wave, beside L (V - 1) / V. Of every S
waves an encoder has `READY` ready by then, whose time counts no longer than a chunk's.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from trainclient.orchestrate.choice import Problem, divisors, microbatches
from trainclient.orchestrate.costs import Option
from trainclient.orchestrate.sharing import F64, Spine

I64 = NDArray[np.int64]

MAX_CHUNKS: Final = 8
"""Model chunks of a stage that are tried."""
READY: Final = 1.5
"""As simulated with equal waves, between 1 and 3 where an encoder takes up to three times as long as a chunk of 2 to 8
stages. Steps are then estimated within 15 percent, most within 8 (`test_interleaved_steps_are_estimated`)."""


@dataclass(frozen=True, slots=True)
class Backbone:
    """A choice for the backbone."""

    option: Option
    dp: int
    pp: int
    microbatch: int
    finer: int
    """Microbatches of a sequence, where memory does not hold it whole."""
    chunks: int
    spine: Spine
    bytes: float
    states: float
    work: float


@dataclass(frozen=True, slots=True)
class Backbones:
    """All choices for the backbone at one tensor-parallel degree, each array of one number for each of them."""

    option: Option
    degrees: I64
    """int64 [5, n]: dp, pp, sequences of a microbatch, microbatches of a sequence, chunks."""
    waves: I64
    gpus: I64
    held: I64
    """Waves that the encoder holds at once."""
    stage_ns: F64
    rest_ns: F64
    alone_ns: F64
    sync_ns: F64
    states: F64
    work: F64
    activations: F64

    @property
    def sequences(self) -> F64:
        """Sequences of a wave in all ranks. float64 [n]."""
        dp, _, microbatch, finer, _ = self.degrees
        found: F64 = dp * microbatch / finer
        return found

    @property
    def ahead(self) -> F64:
        """Share of waves that an encoder has ready while other chunks are run. float64 [n]."""
        _, pp, _, _, chunks = self.degrees
        return np.where(chunks > 1, READY / pp, 0.0)

    def __len__(self) -> int:
        return len(self.waves)

    def __getitem__(self, n: int) -> Backbone:
        dp, pp, microbatch, finer, chunks = (int(d) for d in self.degrees[:, n])
        sequences = dp * microbatch if finer == 1 else dp * microbatch / finer
        spine = Spine(
            int(self.gpus[n]), int(self.waves[n]), sequences, float(self.stage_ns[n]), float(self.alone_ns[n]),
            float(self.sync_ns[n]), int(self.held[n]), float(self.rest_ns[n]), float(self.ahead[n]),
        )  # fmt: skip
        states, work = float(self.states[n]), float(self.work[n])
        whole = states + work + float(self.activations[n])
        return Backbone(self.option, dp, pp, microbatch, finer, chunks, spine, whole, states, work)


def backbones(problem: Problem, sides: int) -> list[Backbones]:
    """All choices for the backbone that memory holds and that leave a device for each module beside it."""
    network = problem.network("backbone")
    if network is None:
        return []
    return [_fitting(problem, option, _degrees(problem, option, sides), sides) for option in problem.options(network)]


def fastest_first(made: Sequence[Backbones], bounds: Sequence[F64]) -> Iterator[tuple[float, Backbone]]:
    """All choices with their bounds, the least first; of equal ones that of fewer devices."""
    if not made:
        return
    which = np.repeat(np.arange(len(made)), [len(m) for m in made])
    at = np.concatenate([np.arange(len(m)) for m in made])
    bound = np.concatenate(bounds)
    for n in np.lexsort((np.concatenate([m.gpus for m in made]), bound)).tolist():
        yield float(bound[n]), made[which[n]][int(at[n])]


def _degrees(problem: Problem, option: Option, sides: int) -> I64:
    """Every legal choice, whatever it takes. int64 [5, n]."""
    stream, layers = problem.workload.stream, option.network.size.layers
    most = (problem.cluster.gpus - sides) // option.tp
    counts = np.array(microbatches(problem), np.int64)
    made = np.meshgrid(
        np.arange(len(counts)), divisors(stream.global_batch, most), divisors(layers, most),
        np.arange(1, MAX_CHUNKS + 1), indexing="ij",
    )  # fmt: skip
    count, dp, pp, chunks = (axis.ravel() for axis in made)
    microbatch, finer = counts[count].T
    waves = stream.global_batch * finer // (dp * microbatch)
    whole = (stream.global_batch % (dp * microbatch) == 0) & (layers % (pp * chunks) == 0) & (dp * pp <= most)
    interleaved = (chunks == 1) | ((pp > 1) & (waves % pp == 0))
    return np.array([dp, pp, microbatch, finer, chunks])[:, whole & interleaved]


def _fitting(problem: Problem, option: Option, degrees: I64, sides: int) -> Backbones:
    """What memory holds: finer microbatches only where it does not hold sequences twice as long."""
    cluster, network = problem.cluster, option.network
    held = _activations(problem, option, degrees)
    dp, pp, microbatch, finer, _ = degrees
    by_stages = {stages: option.static_bytes(stages) for stages in np.unique(pp).tolist()}
    optimizer = {stages: option.optimizer_bytes(stages) for stages in np.unique(pp).tolist()}
    states = _of(pp, by_stages) + _of(pp, optimizer) / dp
    longest = microbatch * problem.workload.stream.seq_len
    work = longest * option.work_bytes
    beside, least = states + work, longest * option.unit_bytes / pp
    fits = beside + np.maximum(held, least) <= cluster.memory_bytes
    coarser = np.array([dp, pp, microbatch, np.maximum(1, finer // 2), degrees[4]])
    needed = beside + np.maximum(_activations(problem, option, coarser), least) > cluster.memory_bytes
    chosen = fits & ((finer == 1) | needed)
    degrees, states, work, held = degrees[:, chosen], states[chosen], work[chosen], held[chosen]
    dp, pp, microbatch, finer, chunks = degrees
    waves = problem.workload.stream.global_batch * finer // (dp * microbatch)
    stage = (option.fixed_ns + microbatch / finer * option.sequence_ns) / pp
    transfer = 2 * 2 * network.size.width * microbatch / finer * option.load.rows
    between = (pp - 1) / _bandwidths(problem, option.tp * pp) + sides / cluster.between_bytes_ns
    return Backbones(
        option, degrees, waves,
        gpus=dp * pp * option.tp,
        held=_encoder_waves(problem, degrees, waves),
        stage_ns=stage / chunks,
        rest_ns=stage * (1 - 1 / chunks),
        alone_ns=stage * (1 + (pp - 1) / chunks) + transfer * between,
        sync_ns=_sync_ns(problem, option, dp, pp),
        states=states, work=work, activations=held,
    )  # fmt: skip


def _of(keys: I64, values: dict[int, float]) -> F64:
    """The value of each key. float64 [n]."""
    known = np.array(sorted(values), np.int64)
    found: F64 = np.array([values[k] for k in known.tolist()], np.float64)[np.searchsorted(known, keys)]
    return found


def _sync_ns(problem: Problem, option: Option, dp: I64, pp: I64) -> F64:
    pairs, which = np.unique(np.stack([dp, pp]), axis=1, return_inverse=True)
    each = [option.sync_ns(ranks, stages, problem.cluster) for ranks, stages in pairs.T.tolist()]
    found: F64 = np.array(each, np.float64)[which.ravel()]
    return found


def _bandwidths(problem: Problem, devices: I64) -> F64:
    cluster = problem.cluster
    return np.where(devices <= cluster.gpus_per_node, cluster.within_bytes_ns, cluster.between_bytes_ns)


def _after(problem: Problem) -> int:
    return 1 if problem.network("generator") else 0


def _activations(problem: Problem, option: Option, degrees: I64) -> F64:
    """Bytes that the first stage holds of the microbatches in flight. float64 [n]."""
    dp, pp, microbatch, finer, chunks = degrees
    waves = problem.workload.stream.global_batch * finer // (dp * microbatch)
    passes = np.where(chunks > 1, _passes(problem, pp, chunks), pp + _after(problem))
    first = np.minimum(waves, passes / chunks) if option.network.gradient_passes else 1 / chunks
    found: F64 = first * (microbatch / finer * option.load.rows * option.unit_bytes / pp)
    return found


def _passes(problem: Problem, pp: Any, chunks: Any) -> Any:
    """Passes of a microbatch through a chunk that the first of interleaved stages holds: two more before a generator,
    from which gradients take longer."""
    return 1 + 2 * (pp - 1) + (chunks - 1) * pp + 2 * _after(problem)


def _encoder_waves(problem: Problem, degrees: I64, waves: I64) -> I64:
    """Waves that an encoder holds, until gradients come back through all stages. int64 [n].

    Of interleaved chunks a stage takes as many waves from the encoder as stages, then runs the other chunks; one more
    is held than it has taken before it returns the first gradient.
    """
    _, pp, _, _, chunks = degrees
    found: I64 = np.minimum(waves, pp + 1 + _after(problem))
    several = chunks > 1
    rows = np.stack([pp, chunks, np.minimum(waves, 5 * pp)])[:, several]  # further waves change nothing
    unique, which = np.unique(rows, axis=1, return_inverse=True)
    ahead = [taken_ahead(s, c, w, _passes(problem, s, c)) for s, c, w in unique.T.tolist()]
    found[several] = np.minimum(waves[several], 1 + np.array(ahead, np.int64)[which.ravel()])
    return found


@lru_cache(maxsize=4096)
def taken_ahead(stages: int, chunks: int, waves: int, passes: int) -> int:
    """Waves that the first of interleaved stages takes from an encoder before it returns the gradient of the first."""
    passes, turn = min(passes, waves * chunks), stages * chunks

    def taken(forwards: int) -> int:
        return min(waves, forwards // turn * stages + min(forwards % turn, stages))

    return max(taken(min(waves * chunks, passes + (chunks - 1) * stages + i)) - i for i in range(stages))
