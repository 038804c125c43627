"""Rows about pipelines: speed of the simulator, closed forms, what schedules leave idle. Times are scaled."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
from benchmarks.calibration import timed
from benchmarks.rows import Row

from dataserver.planning import I64
from dataserver.planning.layouts.contrastive.options import ContrastiveSchedule
from dataserver.planning.layouts.contrastive.programs import tower_in_flight, with_interactions
from dataserver.planning.layouts.pipelined.programs import interleaved_operations
from dataserver.planning.layouts.shared.waves import one_f_one_b_in_flight
from dataserver.planning.simulation import (
    Operations,
    OrderScorer,
    Pipeline,
    chain_edges,
    simulate,
    stage_operations,
)
from planning_rows.distmm_memory import distmm_max_batch, pipeline_max_microbatch

ORDERS = 10_000
"""Orders scored for each seed."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Pipelines whose orders are scored."""

    stages: int
    microbatches: int
    sigma: float
    """Standard deviation of the logarithms of the times of encoder and generator; backbone stages are equal."""
    seeds: range

    def rate(self, at_scenario_a: int) -> int:
        """Orders a second that are as many operations as so many of ten stages and 32 microbatches."""
        return at_scenario_a * 320 // (self.stages * self.microbatches)


SHAPES = Shape(10, 32, 0.6, range(20)), Shape(6, 48, 1.0, range(100, 120))
"""That of scenario A, and its held-out variant."""


def rows() -> list[Row]:
    """All rows of this part; half a minute. Closed forms and papers' own examples have no held-out variants."""
    return [
        *(row for shape in SHAPES for row in _speeds(shape)),
        _closed_forms(range(1, 9), 1, 2),
        _closed_forms(range(9, 13), 3, 4),
        _chunkflow(),
        _contrastive(4, 8),
        _contrastive(6, 5),
        _contrastive_memory(),
    ]


def _speeds(shape: Shape) -> list[Row]:
    chains = [(f"one rank, {name}", extra) for name, extra in (("1F1B", 0), ("two more in flight", 2))]
    return [
        *(_speed(shape, n, [_chain_problem(shape, s, extra=e) for s in shape.seeds]) for n, e in chains),
        _whole_simulation(shape),
    ]


Problem = tuple[Pipeline, I64]


def _chain_problem(shape: Shape, seed: int, extra: int) -> Problem:
    """Log-normal encoder and generator around equal backbone stages, as in scenario A."""
    random, stages, count = np.random.default_rng(seed), shape.stages, shape.microbatches
    forward = np.full((stages, count), 1_000_000)
    forward[[0, -1]] = random.lognormal(13.5, shape.sigma, (2, count)).astype(np.int64)
    pipeline = Pipeline(
        num_stages=stages,
        stage=np.arange(stages),
        forward_ns=forward,
        backward_ns=2 * forward,
        edges=chain_edges(stages, count),
        operations=_one_f_one_b(shape, extra),
    )
    return pipeline, random.permuted(np.tile(np.arange(count), (ORDERS, 1)), axis=1)


def _one_f_one_b(shape: Shape, extra: int = 0) -> list[Operations]:
    return [stage_operations(held, shape.microbatches) for held in one_f_one_b_in_flight(shape.stages, extra).tolist()]


def _speed(shape: Shape, name: str, problems: list[Problem]) -> Row:
    """Orders scored in a second; every seed's first scores are checked against the simulator."""
    rates = []
    for pipeline, orders in problems:
        scorer = OrderScorer.of(pipeline)
        scores = scorer.makespans(orders[:2])
        for order, score in zip(orders, scores.tolist(), strict=False):
            if score != _simulated(pipeline, order):
                raise RuntimeError(f"an order of {name} has a makespan of {score}; the simulator finds another")
        _, spent = timed(scorer.makespans, orders)
        rates.append(1_000 * len(orders) / spent)
    target = shape.rate(300_000)
    return Row(
        f"orders of {shape.stages} stages x {shape.microbatches} microbatches, sigma {shape.sigma}, scored per second "
        f"and core, {name}",
        f"{statistics.median(rates):,.0f} (worst {min(rates):,.0f})",
        f">= {target:,}",
        min(rates) >= target,
    )


def _simulated(pipeline: Pipeline, order: I64) -> int:
    forward, backward = pipeline.forward_ns[:, order], pipeline.backward_ns[:, order]
    return simulate(replace(pipeline, forward_ns=forward, backward_ns=backward)).makespan_ns


def _whole_simulation(shape: Shape) -> Row:
    """Everything: graph, starts, memory, causes."""
    spent = []
    for seed in shape.seeds:
        pipeline, _ = _chain_problem(shape, seed, extra=0)
        simulate(pipeline)
        spent.append(timed(lambda p=pipeline: [simulate(p) for _ in range(20)])[1] / 20)
    return Row(
        f"one simulation with graph, every start, memory and causes, {shape.stages} stages x {shape.microbatches} "
        "microbatches",
        f"{statistics.median(spent):.2f} ms (worst {max(spent):.2f})",
        "",
        None,
    )


def _equal(lists: Sequence[Operations], count: int, chunks: int = 1, forward: int = 1, backward: int = 2) -> Pipeline:
    """Stages that take as long as each other."""
    ones = np.ones((len(lists) * chunks, count), np.int64)
    edges = chain_edges(len(lists), count, chunks)
    return Pipeline(
        len(lists), np.arange(len(lists)), forward * ones, backward * ones, edges, operations=lists, num_chunks=chunks
    )


def _closed_forms(numbers: range, forward: int, backward: int) -> Row:
    """Makespans of equal stages: GPipe and 1F1B (l + p - 1)(f + b), interleaved (v l + p - 1)(f + b) chunk times."""
    wrong, checked = 0, 0
    both = forward + backward
    for stages in numbers:
        for count in range(1, 33):
            lists = (
                [stage_operations(count, count)] * stages,
                [stage_operations(stages - s, count) for s in range(stages)],
            )
            found = [simulate(_equal(x, count, 1, forward, backward)).makespan_ns for x in lists]
            wrong += sum(makespan != both * (count + stages - 1) for makespan in found)
            checked += 2
            for chunks in (2, 4) if count % stages == 0 else ():
                interleaved = [interleaved_operations(s, stages, chunks, count) for s in range(stages)]
                makespan = simulate(_equal(interleaved, count, chunks, forward, backward)).makespan_ns
                wrong += makespan != both * (chunks * count + stages - 1)
                checked += 1
    name = f"{numbers[0]} to {numbers[-1]} equal stages: GPipe, 1F1B and interleaved 1F1B against the closed forms"
    return Row(name, f"{checked - wrong} of {checked} equal", "all equal", wrong == 0)


def _chunkflow() -> Row:
    pipeline = _equal([stage_operations(4 - s, 4) for s in range(4)], 4)
    lengths = np.tile(np.array([4, 2, 1, 1]), (4, 1))
    unequal = replace(pipeline, forward_ns=lengths, backward_ns=2 * lengths)
    found = [simulate(p).bubble_ppm for p in (pipeline, unequal)]
    return Row(
        "ChunkFlow's toy, 4 microbatches on 4 stages: idle, equal / lengths 4, 2, 1, 1",
        " / ".join(f"{ppm / 10_000:.2f} %" for ppm in found),
        "42.8 % / 57.14 %",
        found == [428_571, 571_428],
    )


def _contrastive(stages: int, count: int) -> Row:
    """Eight batches of `count` microbatches; DISTMM-Pipe with half the microbatch, twice as many."""
    idle = []
    for schedule, size in ((ContrastiveSchedule.BATCH_SYNC, count), (ContrastiveSchedule.DISTMM_PIPE, 2 * count)):
        drain = size if schedule is ContrastiveSchedule.BATCH_SYNC else 0
        held = tower_in_flight(stages, size, schedule).tolist()
        *first, last = (stage_operations(n, 8 * size, drain) for n in held)
        pipeline = _equal([*first, with_interactions(last, size)], 8 * size)
        idle.append(simulate(replace(pipeline, interaction_ns=np.zeros((stages, 8), np.int64))).bubble_ppm)
    return Row(
        f"8 contrastive batches of {count} microbatches on {stages} stages: idle, batch-sync / DISTMM-Pipe of "
        f"{2 * count} half microbatches",
        " / ".join(f"{ppm / 10_000:.2f} %" for ppm in idle),
        "less than batch-sync",
        idle[1] < idle[0],
    )


def _contrastive_memory() -> Row:
    """The formulas at 40 GB, states 64 GB, 1 GB of activations for each sample."""
    found = [(pipeline_max_microbatch(40, 64, 1, stages), distmm_max_batch(40, 64, 1, stages)) for stages in (2, 4, 8)]
    wanted = [(Fraction(8), Fraction(8)), (Fraction(24), Fraction(48)), (Fraction(32), Fraction(128))]
    return Row(
        "DISTMM memory, 40 GB, states 64 GB, 1 GB per sample, 2 / 4 / 8 stages: microbatch of a pipeline, batch of "
        "DISTMM-Pipe",
        " / ".join(f"{plain}, {distmm}" for plain, distmm in found),
        " / ".join(f"{plain}, {distmm}" for plain, distmm in wanted),
        found == wanted,
    )
