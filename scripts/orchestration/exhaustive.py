"""The best of every layout by trying all of its space: what `trainclient orchestrate` minimises, restated.

Sequences of a microbatch are the divisors of the batch up to 64. Wave by wave there may be 1.5 times as many
microbatches, and 2 to 8 times as many of single sequences, as long as each holds the longest packed sample on average,
or a sequence. Colocated, packed sequences that memory does not hold whole are cut into 2, 4 or 8. Stages have up to 8
model chunks that are interleaved; then waves are a multiple of the stages. Encoders and generators carry whole images,
and even out over two waves.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from math import ceil, inf

import numpy as np

from trainclient.layouts.grouped.degrees import exchange_ps, smallest_degree
from trainclient.orchestrate.choice import Problem
from trainclient.orchestrate.costs import Option, gathering_ns, shard_bytes
from trainclient.orchestrate.whole_images import ItemCost, drawn_items, item_cost
from trainclient.orchestrate.workload import F64, Load

CHUNKS = range(1, 9)


@dataclass(frozen=True, slots=True)
class Beside:
    """What a backbone leaves to encoders, which work beside each other, and generator."""

    gpus: int
    dp: int
    tp: int
    waves: int
    sequences: float
    """Sequences that a wave holds."""
    held: int
    """Waves that the encoder holds."""
    slowest: float
    rest: float
    """What a wave takes besides the slowest stage."""
    alone: float
    sync: float
    interleaved: int = 0
    """Number of stages, if they have several chunks; of as many waves an encoder has 1.5 ready in time."""


def best_pipelined(problem: Problem) -> float:
    """Nanoseconds of the fastest pipelined step; inf where none fits."""
    return min((_best_beside(problem, b, tied=False) for b in _backbones(problem)), default=inf)


def best_monolithic(problem: Problem) -> float:
    """The same with the backbone's degrees for all modules."""
    return min((_best_beside(problem, b, tied=True) for b in _backbones(problem)), default=inf)


def _best_beside(problem: Problem, backbone: Beside, *, tied: bool) -> float:
    """The best degrees and ranks of encoder and generator beside a backbone; inf where none fits."""
    gpus = problem.cluster.gpus - backbone.gpus
    others, encoding, sync = np.array(backbone.slowest), np.array(0.0), np.array(backbone.sync)
    fill, size = np.array(backbone.alone), np.array(0.0)
    for network in (n for n in problem.networks if n.kind != "backbone"):
        ways = [_ways(problem, o, backbone, gpus, tied) for o in problem.options(network)]
        time, devices, sums = np.concatenate(ways, axis=1)
        encodes, sync = network.kind == "encoder", np.maximum(sync[..., None], sums)
        fill, size = fill[..., None] + (0 if encodes else time), size[..., None] + devices
        encoding = np.maximum(encoding[..., None], time if encodes else 0)
        others = np.maximum(others[..., None], 0 if encodes else time)
    slowest = np.maximum(others, encoding)
    in_time = 1.5 / backbone.interleaved * (slowest - others) if backbone.interleaved else 0
    step = fill + encoding + (backbone.waves - 1) * np.maximum(encoding, slowest + backbone.rest - in_time) + sync
    return float(np.where(size <= gpus, step, inf).min(initial=inf))


def _counts(problem: Problem, backbone_load_rows: float, longest_sample: int) -> Iterator[tuple[int, int]]:
    """Sequences of a microbatch, microbatches of a sequence."""
    stream = problem.workload.stream
    yield from ((m, 1) for m in range(1, 65) if stream.global_batch % m == 0)
    if stream.packed:
        yield from ((1, f) for f in (2, 4, 8) if f * longest_sample <= backbone_load_rows)


def _wave_counts(problem: Problem, rows: float, longest_sample: int) -> Iterator[tuple[int, float]]:
    """Sequences of a microbatch, and times as many microbatches."""
    stream = problem.workload.stream
    least = longest_sample / rows if stream.packed else 1
    for m in (m for m in range(1, 65) if stream.global_batch % m == 0):
        times = (1.5, 2, 3, 4, 6, 8) if m == 1 else (1.5,)
        yield from ((m, t) for t in (1, *times) if t == 1 or m / t >= least)


def _backbones(problem: Problem) -> Iterator[Beside]:
    cluster, stream = problem.cluster, problem.workload.stream
    backbone = next(n for n in problem.networks if n.kind == "backbone")
    sides = len(problem.networks) - 1
    for option in problem.options(backbone):
        counts = list(_wave_counts(problem, option.load.rows, option.load.largest))
        for dp, pp, chunks in product(range(1, cluster.gpus + 1), range(1, backbone.size.layers + 1), CHUNKS):
            if dp * pp * option.tp + sides > cluster.gpus or backbone.size.layers % (pp * chunks):
                continue
            for microbatch, finer in counts:
                if stream.global_batch % (dp * microbatch) or (pp == 1 and chunks > 1):
                    continue
                waves = stream.global_batch * finer / (dp * microbatch)
                if waves % (pp if chunks > 1 else 1):
                    continue
                needed = _first_stage_bytes(problem, option, dp, pp, microbatch, finer, chunks)
                if needed <= cluster.memory_bytes:
                    yield _beside(problem, option, dp, pp, (microbatch, finer), chunks)


def _first_stage_bytes(
    problem: Problem, option: Option, dp: int, pp: int, microbatch: int, finer: float, chunks: int
) -> float:
    stream, after = problem.workload.stream, sum(n.kind == "generator" for n in problem.networks)
    waves = stream.global_batch * finer / (dp * microbatch)
    if not option.network.gradient_passes:
        held = 1 / chunks
    elif chunks == 1:
        held = min(waves, pp + after)
    else:
        held = min(waves, (1 + 2 * (pp - 1) + (chunks - 1) * pp + 2 * after) / chunks)
    full = microbatch * stream.seq_len
    rows = max(held * microbatch / finer * option.load.rows, full)
    states = option.static_bytes(pp) + option.optimizer_bytes(pp) / dp
    return states + rows * option.unit_bytes / pp + full * option.work_bytes


def _beside(problem: Problem, option: Option, dp: int, pp: int, count: tuple[int, float], chunks: int) -> Beside:
    cluster, (microbatch, finer) = problem.cluster, count
    sides, after = len(problem.networks) - 1, sum(n.kind == "generator" for n in problem.networks)
    sequences = microbatch / finer
    waves = int(problem.workload.stream.global_batch * finer) // (dp * microbatch)
    stage = (option.fixed_ns + sequences * option.sequence_ns) / pp
    between = (pp - 1) / (cluster.within_bytes_ns if option.tp * pp <= cluster.gpus_per_node
                          else cluster.between_bytes_ns)  # fmt: skip
    transfers = (
        4 * option.network.size.width * sequences * option.load.rows * (between + sides / cluster.between_bytes_ns)
    )
    held = pp + 1 + after
    if chunks > 1:
        held = 1 + _taken_ahead(pp, chunks, waves, 1 + 2 * (pp - 1) + (chunks - 1) * pp + 2 * after)
    items, ranks = round(option.load.items * problem.workload.stream.global_batch), waves * dp
    largest = ranks * _busiest(option.load, item_cost(option.cost), max(1, items), ranks)
    way = ((pp - 1) * stage / chunks + transfers) * (1 + (largest - 1) * (1 if chunks > 1 else 0.5))
    return Beside(
        option.tp * dp * pp, dp, option.tp, waves, dp * sequences, min(waves, held), stage / chunks,
        stage - stage / chunks, stage + way, option.sync_ns(dp, pp, cluster),
        pp if chunks > 1 else 0,
    )  # fmt: skip


def _taken_ahead(pp: int, chunks: int, waves: int, passes: int) -> int:
    """Waves that the first stage takes from the encoder, less those whose gradients it has returned, at most."""
    forward = [chunk for _ in range(waves // pp) for chunk in range(chunks) for _ in range(pp)]
    backward = [chunk for _ in range(waves // pp) for chunk in reversed(range(chunks)) for _ in range(pp)]
    most = taken = ran = 0
    for done, chunk in enumerate(backward):
        while ran < len(forward) and ran < passes + done:
            taken += forward[ran] == 0
            ran += 1
        if chunk == 0:
            most = max(most, taken)
            taken -= 1
    return most


def _ways(problem: Problem, option: Option, backbone: Beside, gpus: int, tied: bool) -> np.ndarray:
    """Time of a wave, devices and sum of gradients of each legal number of ranks of an encoder or generator."""
    held = backbone.held if option.network.kind == "encoder" and option.network.gradient_passes else 1
    most = min(max(1, int(option.load.items * backbone.sequences)), gpus // option.tp)
    ranks = np.arange(1, most + 1, dtype=np.float64)
    rows = backbone.sequences * option.load.rows / ranks
    states = option.static_bytes(1) + option.optimizer_bytes(1) / ranks
    work = np.maximum(rows, option.load.largest) * option.work_bytes
    needed = states + work + np.maximum(held * rows, option.load.largest) * option.unit_bytes
    legal = needed <= problem.cluster.memory_bytes
    if tied:  # as many ranks as the backbone, also where there are fewer images
        legal = np.full(int(legal[: backbone.dp].any() and option.tp == backbone.tp), True)
        ranks = np.full(len(legal), float(backbone.dp))
    ranks = ranks[legal]
    images = round(option.load.items * backbone.sequences * min(2, backbone.waves))
    busiest = _all_busiest(option.load, item_cost(option.cost), max(1, images), problem.cluster.gpus)
    time = option.fixed_ns + option.sequence_ns * backbone.sequences * busiest[ranks.astype(np.int64) - 1]
    return np.stack([time, ranks * option.tp, np.where(ranks > 1, option.sync_ns(2, 1, problem.cluster), 0.0)])


@cache
def _all_busiest(load: Load, cost: ItemCost, count: int, most: int) -> F64:
    """`_busiest` of 1 to `most` ranks."""
    return np.array([_busiest(load, cost, count, ranks) for ranks in range(1, most + 1)])


@cache
def _busiest(load: Load, cost: ItemCost, count: int, ranks: int) -> float:
    """The part of so many items that the busiest rank has at least, on average."""
    drawn = drawn_items(load, cost, count)
    others = range(min(8, (count - 1) // ranks) + 1)
    crowds = [drawn[:, o * ranks - o : o * ranks + 1].sum(axis=1) for o in others]
    return float(np.maximum(np.maximum.reduce(crowds) / drawn.sum(axis=1), 1 / ranks).mean())


def best_colocated(problem: Problem) -> float:
    """Nanoseconds of the fastest colocated step; inf where none fits."""
    best, batch = inf, problem.workload.stream.global_batch
    backbone = problem.workload.load(next(n for n in problem.networks if n.kind == "backbone"))
    counts = list(_counts(problem, backbone.rows, backbone.largest))
    for chosen in product(*(problem.options(n) for n in problem.networks)):
        if len({o.tp for o in chosen}) > 1:
            continue
        for dp, (microbatch, finer), whole in product(
            range(1, problem.cluster.gpus // chosen[0].tp + 1), counts, (True, False)
        ):
            if batch % (dp * microbatch):
                continue
            fewest = batch * finer // (dp * microbatch)
            found = _rounds(problem, chosen, dp, microbatch / finer, fewest, whole)
            coarser = finer > 1 and _rounds(problem, chosen, dp, 2 * microbatch / finer, fewest // 2, whole)
            if found and not coarser:
                best = min(best, _colocated_ns(problem, chosen, dp, found * ceil(fewest / found), whole))
    return best


def _rounds(
    problem: Problem, chosen: Sequence[Option], dp: int, sequences: float, fewest: int, whole: bool
) -> int | None:
    """The first number of rounds that memory holds; None if it holds none."""
    stream, generates = problem.workload.stream, any(o.network.kind == "generator" for o in chosen)
    kept = beside = work = 0.0
    for o in chosen:
        kind = o.network.kind
        largest = stream.seq_len if kind == "backbone" else o.load.largest
        rows = max(sequences * o.load.rows, largest)
        if (kind == "encoder" or (kind == "backbone" and generates)) and o.network.gradient_passes:
            kept += 1.05 * stream.global_batch / dp * o.load.rows * o.unit_bytes
            beside += largest * o.unit_bytes
        else:
            beside += rows * o.unit_bytes
        work = max(work, rows * o.work_bytes)
    states = sum(shard_bytes(o, dp, whole) for o in chosen)
    for rounds in range(1, fewest + 1):
        if kept / rounds + beside + work + states <= problem.cluster.memory_bytes:
            return rounds
    return None


def _colocated_ns(problem: Problem, chosen: Sequence[Option], dp: int, waves: int, whole: bool) -> float:
    devices, batch, step, moved = problem.cluster, problem.workload.stream.global_batch, 0.0, 0.0
    for o in chosen:
        wave = o.fixed_ns + batch / dp / waves * o.sequence_ns
        step += waves * (wave if whole else max(wave, gathering_ns(o, dp, devices)))
        step += o.sync_ns(dp, 1, devices) if whole else 0
        queries = o.load.items * problem.workload.stream.query_tokens
        moved += {"encoder": o.load.tokens, "generator": queries}.get(o.network.kind, 0)
    width = next(o.network.size.width for o in chosen if o.network.kind == "backbone")
    return step + 4 * width * moved * batch / dp / devices.bandwidth(dp * chosen[0].tp)


def best_grouped(problem: Problem) -> float:
    """Nanoseconds of the fastest grouped step; inf where none fits."""
    best, cluster = inf, problem.cluster
    backbone = next(n for n in problem.networks if n.kind == "backbone")
    sides = len(problem.networks) - 1
    numbers = {1 << p for p in range(20) if 1 << p < cluster.gpus_per_node}
    nodes = range(1, cluster.gpus // cluster.gpus_per_node + 1)  # of more than 31, those of five binary digits
    numbers |= {n * cluster.gpus_per_node for n in nodes if n % (1 << max(0, n.bit_length() - 5)) == 0}
    for option in (o for o in problem.options(backbone) if o.tp == 1):
        for ranks in sorted(n for n in numbers if n <= cluster.gpus - sides):
            for largest in (1 << p for p in range(7)):
                if ranks % largest or not backbone.divides_heads(largest):
                    break
                smallest = smallest_degree(ranks, largest)
                if smallest is None:
                    continue
                for finer, whole in product((1, 2, 4, 8, 16), (True, False)):
                    found = _groups(problem, option, ranks, (smallest, largest), finer, whole)
                    if found is not None and _groups(problem, option, ranks, (1, largest), finer, whole) is not None:
                        best = min(best, _best_beside(problem, found, tied=False))
    return best


def _groups(
    problem: Problem, option: Option, ranks: int, degrees: tuple[int, int], finer: int, whole: bool
) -> Beside | None:
    """Each sequence is in the smallest group that holds it, or that there are enough of for every group to have one."""
    cluster, stream, sides = problem.cluster, problem.workload.stream, len(problem.networks) - 1
    after = sum(n.kind == "generator" for n in problem.networks)
    states = shard_bytes(option, ranks, whole)
    tokens = int((cluster.memory_bytes - states) / (option.unit_bytes * (1 + after) + option.work_bytes))
    if tokens * degrees[1] < stream.seq_len:
        return None
    shares, lengths, squares = problem.workload.lengths.tolist()
    mean = sum(s * n for s, n in zip(shares, lengths, strict=True))
    waves = finer * max(1, ceil(stream.global_batch * mean / (ranks * tokens)))
    needed = 1
    while needed < ranks * waves / stream.global_batch - 1e-9:
        needed *= 2
    if needed > degrees[1]:
        return None
    total = longest = 0.0
    for share, length, square in zip(shares, lengths, squares, strict=True):
        degree = max(degrees[0], needed)
        while degree * tokens < length * (1 - 1e-9):
            degree *= 2
        time = (1 + option.cost.backward_percent / 100) * (
            option.cost.linear_ps * length / 1e3 + option.cost.quadratic_fs * square / 1e6
        )
        passes = 1.0 if option.network.gradient_passes else 0.5
        time += passes * exchange_ps(problem, option, degree) * length / 1e3
        total, longest = total + stream.global_batch * share * time, max(longest, time / degrees[1])
    stage = option.fixed_ns + max(total / (ranks * waves), longest)
    stage += 0 if whole else gathering_ns(option, ranks, cluster)
    sequences = stream.global_batch / waves
    transfers = 4 * option.network.size.width * sequences * mean / ranks * sides / cluster.between_bytes_ns
    sync = option.sync_ns(ranks, 1, cluster) if whole else 0
    return Beside(ranks, ranks, 1, waves, sequences, min(waves, 2 + after), stage, 0, stage + transfers, sync)


def best_towers(problem: Problem, *, tied: bool) -> float:
    """Nanoseconds of the fastest contrastive step; inf where none fits. `tied`: with the same degrees for all."""
    stream, cluster, best = problem.workload.stream, problem.cluster, inf
    batch = stream.contrastive_batch or stream.global_batch
    for count in (n for n in range(1, 65) if batch % n == 0):
        ways = []
        for network in problem.networks:
            tried = product(problem.options(network), range(1, min(cluster.gpus, batch) + 1))
            ways.append([(o, dp) for o, dp in tried if batch % (dp * count) == 0
                         and _tower_bytes(o, batch / dp, count) <= cluster.memory_bytes])  # fmt: skip
        for chosen in product(*ways):
            gpus = sum(o.tp * dp for o, dp in chosen)
            if gpus <= cluster.gpus and not (tied and len({(o.tp, dp) for o, dp in chosen}) > 1):
                best = min(best, _towers_ns(problem, chosen, batch, count, gpus))
    return best


def _tower_bytes(option: Option, samples: float, count: int) -> float:
    states = option.static_bytes(1) + option.optimizer_bytes(1)
    return states + samples * option.load.rows * (option.unit_bytes + option.work_bytes / count)


def _towers_ns(problem: Problem, chosen: Sequence[tuple[Option, int]], batch: int, count: int, gpus: int) -> float:
    cluster, forward, backward, sync = problem.cluster, 0.0, 0.0, 0.0
    for option, dp in chosen:
        whole = count * option.fixed_ns + batch / dp * option.sequence_ns
        ahead = whole / (1 + option.cost.backward_percent / 100)
        forward, backward = max(forward, ahead), max(backward, whole - ahead)
        sync = max(sync, option.sync_ns(dp, 1, cluster))
    together = 4 * 1024 * batch * len(chosen) / cluster.bandwidth(gpus)
    together += 6 * batch**2 * 1024 / (gpus * 0.3 * cluster.peak_flops_ns)
    return problem.workload.stream.global_batch / batch * (forward + backward + together) + sync
