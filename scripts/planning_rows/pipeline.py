"""Rows about pipelines: speed of the simulator, closed forms, what schedules leave idle. CPU time of one core."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import numpy as np
from benchmarks.rows import Row

from dataserver.planning.contrastive.options import ContrastiveSchedule
from dataserver.planning.contrastive.programs import tower_in_flight, with_interactions
from dataserver.planning.pipelined.programs import interleaved_operations
from dataserver.planning.samples import I64
from dataserver.planning.simulation import (
    Operation,
    Operations,
    OrderScorer,
    OrderTimes,
    Pipeline,
    chain_edges,
    simulate,
    stage_operations,
)
from dataserver.planning.waves import one_f_one_b_in_flight
from planning_rows.distmm_memory import distmm_max_batch, pipeline_max_microbatch

SEEDS = range(20)
STAGES, MICROBATCHES = 10, 32
ORDERS = 10_000
"""Orders scored for each seed."""


def rows() -> list[Row]:
    """All rows of this part; takes about ten seconds."""
    return [
        _speed("one rank, 1F1B", [_chain_problem(seed, extra=0) for seed in SEEDS], 300_000),
        _speed("one rank, two more in flight", [_chain_problem(seed, extra=2) for seed in SEEDS], 300_000),
        *(
            _speed(
                f"{ranks} backbone ranks with orders of their own share one encoder and one generator rank",
                [_joined_problem(seed, ranks) for seed in SEEDS],
                100_000 if ranks == 2 else None,
            )
            for ranks in (2, 4)
        ),
        _whole_simulation(),
        _closed_forms(),
        _chunkflow(),
        _contrastive(),
        _contrastive_memory(),
    ]


Problem = tuple[Pipeline, OrderTimes, I64]


def _chain_problem(seed: int, extra: int) -> Problem:
    """Log-normal encoder and generator around eight equal backbone stages, as in scenario A."""
    random = np.random.default_rng(seed)
    forward = np.full((STAGES, MICROBATCHES), 1_000_000)
    forward[[0, -1]] = random.lognormal(13.5, 0.6, (2, MICROBATCHES)).astype(np.int64)
    pipeline = Pipeline(
        num_stages=STAGES,
        stage=np.arange(STAGES),
        forward_ns=forward,
        backward_ns=2 * forward,
        edges=chain_edges(STAGES, MICROBATCHES),
        operations=_one_f_one_b(extra),
    )
    orders = random.permuted(np.tile(np.arange(MICROBATCHES), (ORDERS, 1)), axis=1)
    return pipeline, OrderTimes.of(pipeline), orders


def _one_f_one_b(extra: int = 0) -> list[Operations]:
    return [stage_operations(held, MICROBATCHES) for held in one_f_one_b_in_flight(STAGES, extra).tolist()]


def _joined_problem(seed: int, ranks: int) -> Problem:
    """Ten stages of unequal degrees: encoder and generator 1, backbone `ranks`."""
    random = np.random.default_rng(seed)
    middle = STAGES - 2
    last = 1 + ranks * middle
    paths = [[0, *range(1 + r * middle, 1 + (r + 1) * middle), last] for r in range(ranks)]
    edges = [(m, a, b) for m in range(MICROBATCHES) for path in paths for a, b in pairwise(path)]
    block, line = np.array(paths).ravel(), np.repeat(np.arange(ranks), STAGES)
    forward = np.full((len(block), MICROBATCHES), 1_000_000)
    ends = (block == 0) | (block == last)
    forward[ends] = random.lognormal(13.5, 0.6, (2 * ranks, MICROBATCHES)).astype(np.int64) // ranks
    blank = np.zeros((last + 1, MICROBATCHES), np.int64)
    stage = np.concatenate([[0], np.tile(np.arange(1, STAGES - 1), ranks), [STAGES - 1]])
    pipeline = Pipeline(STAGES, stage, blank, blank, np.array(edges, np.int64), _one_f_one_b())
    orders = random.permuted(np.tile(np.arange(MICROBATCHES), (ORDERS // ranks, ranks, 1)), axis=2)
    return pipeline, OrderTimes(block, line, forward, 2 * forward), orders


def _speed(name: str, problems: list[Problem], target: int | None) -> Row:
    """Orders scored in a second; every seed's first scores are checked against the simulator."""
    rates = []
    for pipeline, times, orders in problems:
        scorer = OrderScorer.of(pipeline)
        scores = scorer.makespans(times, orders[:2])
        for order, score in zip(orders, scores.tolist(), strict=False):
            if score != _simulated(pipeline, times, order):
                raise RuntimeError(f"an order of {name} has a makespan of {score}; the simulator finds another")
        started = time.process_time()
        scorer.makespans(times, orders)
        rates.append(len(orders) / (time.process_time() - started))
    return Row(
        f"orders of {STAGES} stages x {MICROBATCHES} microbatches scored per second and core, {name}",
        f"{statistics.median(rates):,.0f} (worst {min(rates):,.0f})",
        "" if target is None else f">= {target:,}",
        None if target is None else min(rates) >= target,
    )


def _simulated(pipeline: Pipeline, times: OrderTimes, order: I64) -> int:
    lines = order.reshape(-1, MICROBATCHES)
    forward, backward = np.zeros_like(pipeline.forward_ns), np.zeros_like(pipeline.backward_ns)
    np.add.at(forward, times.block, np.take_along_axis(times.forward_ns, lines[times.line], axis=1))
    np.add.at(backward, times.block, np.take_along_axis(times.backward_ns, lines[times.line], axis=1))
    return simulate(replace(pipeline, forward_ns=forward, backward_ns=backward)).makespan_ns


def _whole_simulation() -> Row:
    """Everything: graph, starts, memory, causes."""
    spent = []
    for seed in SEEDS:
        pipeline, _, _ = _chain_problem(seed, extra=0)
        simulate(pipeline)
        started = time.process_time()
        for _ in range(20):
            simulate(pipeline)
        spent.append((time.process_time() - started) * 50)
    return Row(
        "one simulation with graph, every start, memory and causes, 10 stages x 32 microbatches",
        f"{statistics.median(spent):.2f} ms (worst {max(spent):.2f})",
        "",
        None,
    )


def _equal(lists: Sequence[Sequence[Operation]], count: int, chunks: int = 1) -> Pipeline:
    """Stages with forward 1, backward 2."""
    ones = np.ones((len(lists) * chunks, count), np.int64)
    edges = chain_edges(len(lists), count, chunks)
    return Pipeline(len(lists), np.arange(len(lists)), ones, 2 * ones, edges, operations=lists, num_chunks=chunks)


def _closed_forms() -> Row:
    """Makespans of equal stages: GPipe and 1F1B (l + p - 1)(f + b), interleaved (v l + p - 1)(f + b) chunk times."""
    wrong, checked = 0, 0
    for stages in range(1, 9):
        for count in range(1, 33):
            lists = (
                [stage_operations(count, count)] * stages,
                [stage_operations(stages - s, count) for s in range(stages)],
            )
            found = [simulate(_equal(x, count)).makespan_ns for x in lists]
            wrong += sum(makespan != 3 * (count + stages - 1) for makespan in found)
            checked += 2
            for chunks in (2, 4) if count % stages == 0 else ():
                interleaved = [interleaved_operations(s, stages, chunks, count) for s in range(stages)]
                makespan = simulate(_equal(interleaved, count, chunks)).makespan_ns
                wrong += makespan != 3 * (chunks * count + stages - 1)
                checked += 1
    name = "equal stages: GPipe, 1F1B and interleaved 1F1B against the closed forms"
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


def _contrastive() -> Row:
    """Eight batches of 8 microbatches on 4 stages; DISTMM-Pipe with half the microbatch, twice as many."""
    idle = []
    for schedule, size in ((ContrastiveSchedule.BATCH_SYNC, 8), (ContrastiveSchedule.DISTMM_PIPE, 16)):
        drain = size if schedule is ContrastiveSchedule.BATCH_SYNC else 0
        held = tower_in_flight(4, size, schedule).tolist()
        *first, last = (stage_operations(n, 8 * size, drain) for n in held)
        pipeline = _equal([*first, with_interactions(last, size)], 8 * size)
        idle.append(simulate(replace(pipeline, interaction_ns=np.zeros((4, 8), np.int64))).bubble_ppm)
    return Row(
        "8 contrastive batches of 8 microbatches on 4 stages: idle, batch-sync / DISTMM-Pipe of 16 half microbatches",
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
