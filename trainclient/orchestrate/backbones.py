"""Every choice for a pipelined backbone, as arrays: degrees, stages, model chunks, microbatches.

Of W waves that take L in each of S stages, a step of V interleaved chunks takes W L + (S - 1) L / V in the backbone
(Narayanan et al. 2021). Encoder and generator work for one chunk of V: while the others are run they wait, but for what
they may hold. So the slowest of a chunk, encoder and generator counts for each wave, beside L (V - 1) / V. Of every S
waves an encoder has `READY` ready by then, whose time counts no longer than a chunk's. The way through further stages
is that of a large microbatch (`LARGEST`): samples are whole.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import numpy as np

from dataserver.planning import I64
from trainclient.orchestrate.choice import Problem, divisors, wave_microbatches
from trainclient.orchestrate.costs import Option
from trainclient.orchestrate.sharing import Spine
from trainclient.orchestrate.whole_images import busiest_share_of
from trainclient.orchestrate.workload import F64

MAX_CHUNKS: Final = 8
"""Model chunks of a stage that are tried."""
READY: Final = 1.5
"""As simulated with equal waves, between 1 and 3 where an encoder takes up to three times as long as a chunk of 2 to 8
stages. Steps are then estimated within 15 percent, most within 8 (`test_interleaved_steps_are_estimated`)."""
LARGEST: Final = 0.5
"""How much longer a step of single chunks takes for its largest microbatch: this share of the time that the largest
microbatch takes longer than a mean one in the stages behind the first. Where all stages take the same time a step takes
all microbatches in one stage, and the largest in the others (a proportionate flow shop); with microbatches beyond those
of 1F1B in flight others fill a part of that. Interleaved chunks come in an order that leaves it whole. That it is half
is fitted, as `whole_images.AHEAD` is and to the same choices."""


@dataclass(frozen=True, slots=True)
class Backbone:
    """A choice for the backbone."""

    option: Option
    dp: int
    pp: int
    microbatch: int
    finer: float
    """Times as many microbatches as it takes with so many sequences, each as much smaller."""
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
    """int64 [5, n]: dp, pp, sequences of a microbatch, twice the times as many microbatches there are, chunks."""
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
        dp, _, microbatch, halves, _ = self.degrees
        found: F64 = 2 * dp * microbatch / halves
        return found

    @property
    def ahead(self) -> F64:
        """Share of waves that an encoder has ready while other chunks are run. float64 [n]."""
        _, pp, _, _, chunks = self.degrees
        return np.where(chunks > 1, READY / pp, 0.0)

    def __len__(self) -> int:
        return len(self.waves)

    def __getitem__(self, n: int) -> Backbone:
        dp, pp, microbatch, halves, chunks = (int(d) for d in self.degrees[:, n])
        finer = halves // 2 if halves % 2 == 0 else halves / 2
        sequences = 2 * dp * microbatch / halves
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
    counts = np.array(wave_microbatches(problem), np.int64)
    made = np.meshgrid(
        np.arange(len(counts)), divisors(stream.global_batch, most), divisors(layers, most),
        np.arange(1, MAX_CHUNKS + 1), indexing="ij",
    )  # fmt: skip
    count, dp, pp, chunks = (axis.ravel() for axis in made)
    microbatch, halves = counts[count].T
    degrees = np.array([dp, pp, microbatch, halves, chunks])
    slots = dp * microbatch
    divided = (stream.global_batch % slots == 0) & (stream.global_batch * halves % (2 * slots) == 0)
    whole = divided & (layers % (pp * chunks) == 0) & (dp * pp <= most)
    interleaved = (chunks == 1) | ((pp > 1) & (_waves(problem, degrees) % pp == 0))
    return degrees[:, whole & interleaved]


def _waves(problem: Problem, degrees: I64) -> I64:
    """Microbatches of each rank. int64 [n]."""
    dp, _, microbatch, halves, _ = degrees
    found: I64 = problem.workload.stream.global_batch * halves // (2 * dp * microbatch)
    return found


def _fitting(problem: Problem, option: Option, degrees: I64, sides: int) -> Backbones:
    """The backbones that memory holds."""
    cluster, network = problem.cluster, option.network
    dp, pp, microbatch, _, _ = degrees
    longest = microbatch * problem.workload.stream.seq_len
    held = np.maximum(_activations(problem, option, degrees), longest * option.unit_bytes / pp)
    by_stages = {stages: option.static_bytes(stages) for stages in np.unique(pp).tolist()}
    optimizer = {stages: option.optimizer_bytes(stages) for stages in np.unique(pp).tolist()}
    states = _of(pp, by_stages) + _of(pp, optimizer) / dp
    work = longest * option.work_bytes
    chosen = states + work + held <= cluster.memory_bytes
    degrees, states, work, held = degrees[:, chosen], states[chosen], work[chosen], held[chosen]
    dp, pp, microbatch, halves, chunks = degrees
    sequences, waves = 2 * microbatch / halves, _waves(problem, degrees)
    stage = (option.fixed_ns + sequences * option.sequence_ns) / pp
    transfer = 2 * 2 * network.size.width * sequences * option.load.rows
    between = (pp - 1) / problem.cluster.bandwidths(option.tp * pp) + sides / cluster.between_bytes_ns
    after = stage * (pp - 1) / chunks + transfer * between
    larger = np.where(chunks > 1, 1.0, LARGEST) * (_largest(problem, option, waves * dp) - 1)
    return Backbones(
        option, degrees, waves,
        gpus=dp * pp * option.tp,
        held=_encoder_waves(problem, degrees, waves),
        stage_ns=stage / chunks,
        rest_ns=stage * (1 - 1 / chunks),
        alone_ns=stage + after * (1 + larger),
        sync_ns=_sync_ns(problem, option, dp, pp),
        states=states, work=work, activations=held,
    )  # fmt: skip


def _largest(problem: Problem, option: Option, microbatches: I64) -> F64:
    """How many times the mean the largest microbatch takes, if all ranks run so many and samples are whole.
    float64 [n]."""
    if not len(microbatches):
        return np.zeros(0)
    unique, which = np.unique(microbatches, return_inverse=True)
    shares = busiest_share_of(option.load, option.cost, problem.workload.stream.global_batch, unique)
    found: F64 = shares[which.ravel()] * microbatches
    return found


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


def _after(problem: Problem) -> int:
    return 1 if problem.network("generator") else 0


def _activations(problem: Problem, option: Option, degrees: I64) -> F64:
    """Bytes that the first stage holds of the microbatches in flight. float64 [n]."""
    _, pp, microbatch, halves, chunks = degrees
    passes = np.where(chunks > 1, _passes(problem, pp, chunks), pp + _after(problem))
    first = np.minimum(_waves(problem, degrees), passes / chunks) if option.network.gradient_passes else 1 / chunks
    found: F64 = first * (2 * microbatch / halves * option.load.rows * option.unit_bytes / pp)
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
