"""The best degrees by trying all of them: the objective and the legal space of `trainclient orchestrate`, restated.

step = fill + sum of modules' waves + (waves - 1) x slowest stage + slowest sum of gradients
"""

from collections.abc import Iterator, Sequence
from math import inf

import numpy as np

from trainclient.orchestrate.choice import Problem
from trainclient.orchestrate.costs import Option

SEQUENCES = (1, 2, 4, 8)


def best_pipelined(problem: Problem) -> float:
    """Nanoseconds of the fastest pipelined step; inf where none fits."""
    cluster = problem.cluster
    others = [n for n in problem.networks if n.kind != "backbone"]
    best = inf
    for option, dp, pp, microbatch, waves in _backbones(problem, len(others)):
        gpus = cluster.gpus - option.tp * dp * pp
        stage = (option.fixed_ns + microbatch * option.sequence_ns) / pp
        width, rows = option.network.size.width, microbatch * option.load.rows
        between = (pp - 1) / (cluster.within_bytes_ns if option.tp * pp <= cluster.gpus_per_node
                              else cluster.between_bytes_ns)  # fmt: skip
        alone = stage * pp + 4 * width * rows * (between + len(others) / cluster.between_bytes_ns)
        for chosen in _products([problem.options(n) for n in others]):
            times, sizes, legal = [np.zeros(1)], [np.zeros(1)], True
            syncs = [np.array([option.sync_ns(dp, pp, cluster)])]
            for axis, other in enumerate(chosen):
                ranks = _ranks(problem, other, dp * microbatch, waves, pp, gpus)
                legal &= len(ranks) > 0
                shape = [1] * len(chosen)
                shape[axis] = -1
                ranks = ranks.reshape(shape)
                times.append(other.fixed_ns + other.sequence_ns * dp * microbatch / ranks)
                sizes.append(ranks * other.tp)
                syncs.append(np.where(ranks > 1, other.sync_ns(2, 1, cluster), 0))
            if not legal:
                continue
            slowest, sync = np.array([stage]), syncs[0]
            for time in times:
                slowest = np.maximum(slowest, time)
            for other_sync in syncs:
                sync = np.maximum(sync, other_sync)
            step = alone + sum(times, np.zeros(1)) + (waves - 1) * slowest + sync
            fits = np.broadcast_to(sum(sizes, np.zeros(1)) <= gpus, step.shape)
            best = min(best, float(np.where(fits, step, inf).min()))
    return best


def _backbones(problem: Problem, sides: int) -> Iterator[tuple[Option, int, int, int, int]]:
    cluster, stream = problem.cluster, problem.workload.stream
    backbone = next(n for n in problem.networks if n.kind == "backbone")
    after = sum(n.kind == "generator" for n in problem.networks)
    for option in problem.options(backbone):
        for microbatch in SEQUENCES:
            for dp in range(1, cluster.gpus + 1):
                for pp in range(1, backbone.size.layers + 1):
                    if stream.global_batch % (dp * microbatch) or backbone.size.layers % pp:
                        continue
                    if dp * pp * option.tp + sides > cluster.gpus:
                        continue
                    waves = stream.global_batch // (dp * microbatch)
                    held = min(waves, pp + after) if backbone.gradient_passes else 1
                    states = option.static_bytes(pp) + option.optimizer_bytes(pp) / dp
                    full = microbatch * stream.seq_len
                    rows = max(held * microbatch * option.load.rows, full)
                    if states + rows * option.unit_bytes / pp + full * option.work_bytes <= cluster.memory_bytes:
                        yield option, dp, pp, microbatch, waves


def _ranks(problem: Problem, option: Option, sequences: int, waves: int, pp: int, gpus: int) -> np.ndarray:
    """The legal numbers of ranks of an encoder or generator."""
    after = sum(n.kind == "generator" for n in problem.networks)
    encodes = option.network.kind == "encoder" and option.network.gradient_passes
    held = min(waves, pp + 1 + after) if encodes else 1
    most = max(1, int(option.load.items * sequences))
    found = []
    for ranks in range(1, min(most, gpus // option.tp) + 1):
        rows = sequences * option.load.rows / ranks
        states = option.static_bytes(1) + option.optimizer_bytes(1) / ranks
        work = max(rows, option.load.largest) * option.work_bytes
        if states + work + max(held * rows, option.load.largest) * option.unit_bytes <= problem.cluster.memory_bytes:
            found.append(ranks)
    return np.array(found, np.float64)


def _products(options: Sequence[Sequence[Option]]) -> Iterator[tuple[Option, ...]]:
    if not options:
        yield ()
        return
    for first in options[0]:
        for rest in _products(options[1:]):
            yield (first, *rest)
