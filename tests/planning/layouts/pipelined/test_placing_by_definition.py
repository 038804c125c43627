"""Bound, seeds and budgets of placements against plain loops over ranks, microbatches and sequences."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataserver.planning.balancing import BALANCERS, longest_first
from dataserver.planning.balancing import padded as padded_batches
from dataserver.planning.job.fields import BalancePolicy
from dataserver.planning.kernels.pipeline import climb_of, go_on
from dataserver.planning.layouts.pipelined import placing
from dataserver.planning.layouts.pipelined.placing import PlacementProblem, search
from dataserver.planning.layouts.pipelined.placing.problem import Budgets
from dataserver.planning.layouts.pipelined.placing.transfers import Transfers
from dataserver.planning.plan.placement import Placement, in_order, in_slots, of_slots
from dataserver.planning.simulation import disttrain_order
from dataserver.planning.stream.randomness import Operator, draws


@st.composite
def problems(draw: st.DrawFn, padded: bool | None = None, full: bool | None = None) -> PlacementProblem:
    """Up to two encoders and a generator around a backbone; sequences without images, empty slots, transfers."""
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    components, within, waves, slots = (draw(st.integers(1, most)) for most in (2, 2, 3, 2))
    encoders, generators, stages = draw(st.integers(0, 2)), draw(st.integers(0, 1)), draw(st.integers(1, 3))
    chunks = draw(st.sampled_from([1, 2])) if stages > 1 else 1
    places, rows = components * within * waves * slots, encoders + 1 + generators
    count = places if (draw(st.booleans()) if full is None else full) else draw(st.integers(0, places))
    own = random.integers(0, 60, (rows, count + 1)) * (
        random.random((rows, count + 1)) < draw(st.sampled_from([0.5, 1]))
    )
    own[encoders] = random.integers(1, 40, count + 1) * chunks
    own[:, -1] = 0
    base = random.integers(0, 9, rows)
    base[encoders] *= chunks
    items = None
    if draw(st.booleans()) if padded is None else padded:
        items = np.append(random.integers(1, 4, count), 0)
    way = own[:, :-1] + random.integers(0, 9, (rows, count)) * (own[:, :-1] > 0)
    found = PlacementProblem(
        dp=components * within,
        num_waves=waves,
        slots=slots,
        components=components,
        num_stages=stages,
        num_encoders=encoders,
        in_flight=np.arange(encoders + stages + generators, 0, -1),
        own=own,
        way=way,
        base=base,
        percent=random.choice([0, 55, 100, 200, 300], rows),
        items=items,
        chunks=chunks,
        transfers=_transfers(random, rows, count) if draw(st.booleans()) else None,
    )
    way[encoders] = found.work[encoders]
    return found


def _transfers(random: np.random.Generator, rows: int, count: int) -> Transfers:
    """Gradients take some of it back."""
    least, smallest, usual = (
        random.integers(1, 9, (rows, count)),
        random.integers(1, 9, rows),
        random.integers(0, 9, rows),
    )
    return Transfers(least, smallest, usual, random.integers(0, 2, rows))


# --- the bound ------------------------------------------------------------------------------------------------------


class Loops:
    """The bound of `placing.lower_bound_ns`, sequence by sequence."""

    def __init__(self, problem: PlacementProblem) -> None:
        self.p = problem
        self.backbone, self.rows, self.count = problem.num_encoders, len(problem.base), problem.num_sequences
        self.sequences = range(self.count)

    def work(self, row: int, s: int) -> int:
        items = 1 if self.p.items is None or row != self.backbone else int(self.p.items[s])
        return int(self.p.own[row, s]) * items

    def transfer(self, row: int, s: int, backward: bool) -> int:
        if self.p.transfers is None or (backward and not self.p.transfers.returned[row]):
            return 0
        return int(self.p.transfers.least[row, s])

    def back(self, row: int, time: int) -> int:
        return time * int(self.p.percent[row]) // 100

    def both(self, row: int, time: int) -> int:
        if row != self.backbone:
            return time + self.back(row, time)
        part = time // self.p.chunks
        return self.p.chunks * (part + self.back(row, part))

    def passing(self, row: int, s: int, backward: bool) -> int:
        """Of a backbone: one chunk."""
        alone = int(self.p.way[row, s])
        time = alone + int(self.p.base[row]) if alone else 0
        if row == self.backbone:
            time //= self.p.chunks
        return self.back(row, time) if backward else time

    def away(self, row: int, s: int, backward: bool) -> int:
        """From the beginning to the row; for the backbone to its last stage, whose chunks it each passes once."""
        if row < self.backbone:
            return 0
        encoders = [self.passing(r, s, backward) + self.transfer(r, s, backward) for r in range(self.backbone)]
        step, transfer = self.passing(self.backbone, s, backward), self.transfer(self.backbone, s, backward)
        if row == self.backbone:
            return max(encoders, default=0) + (self.p.num_stages - 1) * (step + transfer)
        parts = self.p.num_stages * self.p.chunks
        return max(encoders, default=0) + parts * step + (parts - 1) * transfer + self.transfer(row, s, backward)

    def ends(self) -> int:
        """Of the first wave on its way to the last stage, and of the last one on its way back."""
        if not self.count or self.count < self.p.dp * self.p.num_waves * self.p.slots:
            return 0
        share, apart, together = self.p.dp // self.p.components, [0, 0], 0
        for row in range(self.backbone):
            base, percent, transfers = int(self.p.base[row]), int(self.p.percent[row]), self.least_transfers(row)
            if least := share * self.ends_of(row)[0]:
                apart[0] = max(apart[0], least + base + transfers[0])
                if percent:
                    apart[1] = max(apart[1], self.back(row, least + base) - 1 + transfers[1])
                    both = share * self.ends_of(row)[1] + (100 + percent) * base
                    together = max(together, both // 100 - 1 + sum(transfers))
        base, percent = int(self.p.base[self.backbone]) - self.p.chunks + 1, int(self.p.percent[self.backbone])
        step = (self.ends_of(self.backbone)[1] + (100 + percent) * base) // (100 * self.p.chunks)
        between = max(0, step + sum(self.least_transfers(self.backbone)))
        return max(sum(apart), together) + (self.p.num_stages - 1) * between

    def ends_of(self, row: int) -> tuple[int, int]:
        """The least work of a wave of one rank, and that of a first and a last one in hundredths."""
        slots, percent = self.p.slots, int(self.p.percent[row])
        work = sorted(self.work(row, s) for s in self.sequences)
        one = sum(work[:slots])
        if self.p.num_waves == 1:
            return one, (100 + percent) * one
        other = sum(work[slots : 2 * slots])
        return one, min(100 * one + percent * other, 100 * other + percent * one)

    def least_transfers(self, row: int) -> list[int]:
        if self.p.transfers is None:
            return [0, 0]
        return [
            int(self.p.transfers.smallest[row]),
            int(self.p.transfers.smallest[row] * self.p.transfers.returned[row]),
        ]

    def bound(self) -> int:
        bounds = [0]
        for row in range(self.rows):
            ranks = self.p.dp if row == self.backbone else self.p.components
            base = self.both(row, int(self.p.base[row]))
            total = sum(self.both(row, self.work(row, s)) for s in self.sequences)
            work = total // ranks + base * self.p.num_waves
            bounds.append(work)
            if mine := [s for s in self.sequences if self.p.own[row, s]]:
                away = min(self.away(row, s, False) for s in mine) + min(self.away(row, s, True) for s in mine)
                empty = self.p.num_waves - 1
                if row == self.backbone:
                    empty = min(empty, self.p.dp * self.p.num_waves - -(-len(mine) // self.p.slots))
                bounds.append(work + away - empty * base)
                if row == self.backbone:
                    bounds.append(work + self.ends())
        return max(bounds + [self.there_and_back(s) for s in self.sequences])

    def there_and_back(self, s: int) -> int:
        """Through all modules, while its rank may run other microbatches before its first stage and behind it."""
        encoding, inside, parts = 0, 0, self.p.num_stages * self.p.chunks
        generating = [0] * (self.rows - self.backbone - 1)
        for backward in (False, True):
            rows = [self.passing(r, s, backward) + self.transfer(r, s, backward) for r in range(self.rows)]
            encoding += max(rows[: self.backbone], default=0)
            inside += parts * self.passing(self.backbone, s, backward)
            inside += (parts - 1) * self.transfer(self.backbone, s, backward)
            generating = [sum(pair) for pair in zip(generating, rows[self.backbone + 1 :], strict=True)]
        return inside + max(generating, default=0) + max(encoding, self.beside())

    def beside(self) -> int:
        """The smallest sequences that its rank can have beside it: all other ranks and its own microbatch are full."""
        elsewhere = (self.p.dp - 1) * self.p.num_waves * self.p.slots + self.p.slots
        work, others = sorted(self.work(self.backbone, s) for s in self.sequences), self.p.num_waves - 1
        time = sum(work[: max(0, self.count - elsewhere)]) + others * int(self.p.base[self.backbone])
        chunk = time // self.p.chunks
        return max(0, min(chunk, self.back(self.backbone, chunk)) - others)


@settings(max_examples=150)
@given(problems())
def test_the_bound_is_its_definition(problem: PlacementProblem) -> None:
    assert placing.lower_bound_ns(problem) == Loops(problem).bound()


@settings(max_examples=60)
@given(problems(padded=False, full=True))
def test_full_slots_wait_for_their_first_and_last_wave(problem: PlacementProblem) -> None:
    """Work that varies little, so that waiting decides."""
    even = replace(problem, own=np.where(problem.own > 0, 50 * problem.chunks + problem.own % 2 * problem.chunks, 0))
    even.way[even.num_encoders] = even.work[even.num_encoders]
    assert placing.lower_bound_ns(even) == Loops(even).bound()


# --- seeds ----------------------------------------------------------------------------------------------------------


def rows_of(placement: Placement) -> list[tuple[int, int, int]]:
    return list(zip(placement.rank.tolist(), placement.wave.tolist(), placement.slot.tolist(), strict=True))


def numbered(waves: Sequence[int]) -> list[int]:
    names = list(dict.fromkeys(waves))
    return [names.index(w) for w in waves]


def slots_of(rank: Sequence[int], wave: Sequence[int]) -> list[tuple[int, int, int]]:
    """Sequences of a microbatch in their order."""
    places = list(zip(rank, wave, strict=True))
    return [(*place, places[:s].count(place)) for s, place in enumerate(places)]


def over_waves(problem: PlacementProblem, rank: list[int], policy: BalancePolicy, loads: np.ndarray) -> list[int]:
    wave = [0] * len(rank)
    for r in range(problem.dp):
        mine = [s for s, at in enumerate(rank) if at == r]
        if policy is BalancePolicy.NONE:
            bins = [k * problem.num_waves // len(mine) for k in range(len(mine))]
        else:
            bins = numbered(BALANCERS[policy](loads[mine], problem.num_waves, problem.slots).tolist())
        for s, b in zip(mine, bins, strict=True):
            wave[s] = b
    return wave


def sums_of(problem: PlacementProblem, placement: Placement) -> list[list[list[int]]]:
    places = [(r, w) for r, w, _ in rows_of(placement)]
    found = []
    for row in range(len(problem.base)):
        per_rank = []
        for r in range(problem.dp):
            held = [[s for s, p in enumerate(places) if p == (r, w)] for w in range(problem.num_waves)]
            if problem.items is not None and row == problem.num_encoders:
                items = problem.items
                per_rank.append([
                    sum(int(items[s]) for s in h) * max((int(problem.own[row, s]) for s in h), default=0) for h in held
                ])  # fmt: skip
            else:
                per_rank.append([sum(int(problem.own[row, s]) for s in h) for h in held])
        found.append(per_rank)
    return found


def reordered(problem: PlacementProblem, placement: Placement, orders: list[list[int]]) -> list[tuple[int, int, int]]:
    """Rank r runs first what was its microbatch orders[r][0], and so on."""
    return [(r, orders[r].index(w), slot) for r, w, slot in rows_of(placement)]


def small_ends(problem: PlacementProblem, placement: Placement) -> list[list[int]]:
    times, orders = sums_of(problem, placement), []
    for r in range(problem.dp):
        through = [
            sum(row[r][w] for row in times) + (problem.num_stages - 1) * times[problem.num_encoders][r][w]
            for w in range(problem.num_waves)
        ]
        last, *rest = sorted(range(problem.num_waves), key=lambda w: (through[w], w))
        first = rest[:1]
        orders.append([*first, *(w for w in range(problem.num_waves) if w not in (last, *first)), last])
    return orders


def algorithm_2(problem: PlacementProblem, placement: Placement) -> list[list[int]]:
    times, backbone, orders = sums_of(problem, placement), problem.num_encoders, []
    for r in range(problem.dp):

        def passes(row: int, rank: int = r) -> tuple[list[int], list[int]]:
            scale = 1 if row == backbone else problem.dp // problem.components
            forward = [int(problem.base[row]) + scale * t for t in times[row][rank]]
            return forward, [t * int(problem.percent[row]) // 100 for t in forward]

        def most(rows: range) -> list[tuple[list[int], list[int]]]:
            sides = [passes(row) for row in rows]
            widest = tuple([max(column) for column in zip(*(s[k] for s in sides), strict=True)] for k in (0, 1))
            return [(widest[0], widest[1])] if sides else []

        stages = [*most(range(backbone)), *[passes(backbone)] * problem.num_stages]
        stages += most(range(backbone + 1, len(problem.base)))
        orders.append(disttrain_order([np.array(f) for f, _ in stages], [np.array(b) for _, b in stages]))
    return orders


def test_orders_heed_backward_times_to_the_percent() -> None:
    """Times so large that a hundredth of them decides an order now and then."""
    random = np.random.default_rng(5)
    for _ in range(100):
        own = np.append(random.integers(1_000, 60_000, (2, 16)), [[0], [0]], axis=1)
        problem = PlacementProblem(
            dp=1, num_waves=16, slots=1, components=1, num_stages=3, num_encoders=0, in_flight=np.array([4, 3, 2, 1]),
            own=own, way=own[:, :-1].copy(), base=np.array([0, 0]), chunks=1, percent=np.array([200, 300]),
        )  # fmt: skip
        placed = placing.balanced(problem, BalancePolicy.NONE)
        assert rows_of(placing.in_disttrain_order(problem, placed)) == reordered(
            problem, placed, algorithm_2(problem, placed)
        )


@settings(max_examples=80)
@given(problems(), st.sampled_from([BalancePolicy.NONE, BalancePolicy.LPT]))
def test_seeds_are_their_definitions(problem: PlacementProblem, policy: BalancePolicy) -> None:
    count, dp, waves, backbone = problem.num_sequences, problem.dp, problem.num_waves, problem.num_encoders
    loads = problem.work[backbone]
    if policy is BalancePolicy.NONE:
        rank = [s * dp // count for s in range(count)]
    else:
        rank = BALANCERS[policy](loads, dp, waves * problem.slots).tolist()
    placed = placing.balanced(problem, policy)
    assert rows_of(placed) == slots_of(rank, over_waves(problem, rank, policy, loads))
    assert placing.microbatch_sums(problem, problem.own, placed).tolist() == sums_of(problem, placed)
    in_order_of_2 = placing.in_disttrain_order(problem, placed)
    assert rows_of(in_order_of_2) == reordered(problem, placed, algorithm_2(problem, placed))

    others = sum((problem.work[row] for row in range(len(problem.base)) if row != backbone), np.zeros(count, np.int64))
    dealt = [*range(dp), *reversed(range(dp))]
    rank = [0] * count
    for turn, s in enumerate(sorted(range(count), key=lambda s: (-others[s], s))):
        rank[s] = dealt[turn % (2 * dp)]
    wave = over_waves(problem, rank, BalancePolicy.LPT, others)
    plain = in_order(np.array(rank, np.int64), np.array(wave, np.int64), waves)
    assert rows_of(placing.stratified(problem)) == reordered(problem, plain, small_ends(problem, plain))

    spread = placing.spread_over_waves(problem)
    assert spread.wave.tolist() == [s * waves // count for s in range(count)]
    ranks_of_component = [[i * problem.ranks_per_component + k for i in range(problem.components)] for k in range(dp)]
    turns = [r for turn in ranks_of_component[: problem.ranks_per_component] for r in turn]
    assert spread.rank.tolist() == [turns[s % dp] for s in range(count)]
    assert rows_of(spread) == slots_of(spread.rank.tolist(), spread.wave.tolist())


@settings(max_examples=40)
@given(problems(padded=True))
def test_padded_runs_are_their_definition(problem: PlacementProblem) -> None:
    count, dp, waves = problem.num_sequences, problem.dp, problem.num_waves
    largest, items = problem.own[problem.num_encoders, :-1], problem.items
    assert items is not None
    equal = [0] * count
    for place, s in enumerate(sorted(range(count), key=lambda s: (-largest[s], s))):
        equal[s] = place * dp * waves // count
    even = padded_batches(largest, dp * waves, problem.slots).tolist()
    found = {name: placing.padded_runs(problem, cut) for name, cut in placing.PADDED_RUNS.items()}
    assert set(found) == {"runs of equal length", "even padded runs"}
    for name, batch in (("runs of equal length", equal), ("even padded runs", even)):
        held = [[s for s in range(count) if batch[s] == b] for b in range(dp * waves)]
        times = [sum(int(items[s]) for s in h) * max((int(largest[s]) for s in h), default=0) for h in held]
        rank_of = longest_first(np.array(times), dp, waves).tolist()
        rank = [rank_of[b] for b in batch]
        wave = [0] * count
        for r in range(dp):
            mine = [s for s in range(count) if rank[s] == r]
            for s, w in zip(mine, numbered([batch[s] for s in mine]), strict=True):
                wave[s] = w
        assert rows_of(found[name]) == slots_of(rank, wave)


# --- the search -----------------------------------------------------------------------------------------------------


def one_rank(waves: int, budgets: Budgets | None = None) -> PlacementProblem:
    """An encoder and a backbone of one rank and two stages; as many sequences as microbatches."""
    own = np.array([[*range(10, 10 * waves + 1, 10), 0], [7] * waves + [0]])
    return PlacementProblem(
        dp=1, num_waves=waves, slots=1, components=1, num_stages=2, num_encoders=1, in_flight=np.array([3, 2, 1]),
        own=own, way=own[:, :-1].copy(), base=np.array([1, 2]), chunks=1, percent=np.array([200, 100]), budgets=budgets,
    )  # fmt: skip


def test_numbers_that_the_search_is_bounded_by() -> None:
    found = search.SEARCH_OPERATIONS, search.RESERVED_OPERATIONS, search.FITTING_LOOKS
    assert found == (4_400, 800_000, 32)
    assert (search.PATIENCE_PARTS, search.PATIENCE_SHARE) == (8, 1_024)
    assert (search.OPERATIONS_AT_ONCE, search.LOOKS_AT_ONCE) == (2_097_152, 16_384)
    problem = one_rank(3)
    start = placing.balanced(problem, BalancePolicy.NONE)
    # Stage by stage and wave by wave: two stages of one rank and an encoder, forward and backward, in 3 + 2 + 1 times.
    assert search.component_operations(problem) == 2 * (2 + 1) * (3 + 2 + 1)
    assert search.component_operations(replace(problem, dp=4, components=2)) == 2 * (4 + 1) * (3 + 2 + 1)
    # F: 11 22 33, and after each the backbone takes 9 + 9 and as much back, and the encoder twice its forward.
    makespan = placing.makespan_ns(problem, start)
    best = placing.searched(problem, start, 0, 0)
    assert placing.makespan_ns(problem, best) <= makespan
    assert sorted(best.wave.tolist()) == [0, 1, 2]


def test_sequences_that_memory_does_not_hold_alone() -> None:
    need = np.array([[5, 6, 7, 0], [3, 3, 3, 0]])

    def budgets(encoder: int, backbone: int) -> Budgets:
        return Budgets(need, np.array([encoder, backbone]), np.ones(2, np.int64))

    shortfall = [
        placing.shortfall_alone(one_rank(3, budgets(*budget))) for budget in ((7, 3), (6, 3), (7, 2), (6, 2), (-1, -1))
    ]
    assert shortfall == [None, 0, 1, 0, None]
    assert placing.shortfall_alone(one_rank(3, budgets(0, 3))) == 0
    assert placing.shortfall_alone(one_rank(3)) is None
    start = placing.balanced(one_rank(3), BalancePolicy.NONE)
    for budget, row in (((7, 3), None), ((6, 3), 0), ((7, 2), 1)):
        found, short = placing.fitted(one_rank(3, budgets(*budget)), start)
        assert short == row
        assert sorted(rows_of(found)) == [(0, 0, 0), (0, 1, 0), (0, 2, 0)]
    assert placing.fitted(one_rank(3), start) == (start, None)


def crowded(seed: int, memory: bool = False) -> PlacementProblem:
    """An encoder, two stages and a generator; four ranks in two components, 48 sequences that no search evens out."""
    random = np.random.default_rng(seed)
    own = np.concatenate(
        [(random.lognormal(0, 1, (3, 48)) * 1000).astype(np.int64), np.zeros((3, 1), np.int64)], axis=1
    )
    need, budget = own // 100, np.array([300, 100, 300])
    budgets = Budgets(need, np.maximum(budget, need.max(axis=1)), np.ones(3, np.int64)) if memory else None
    return PlacementProblem(
        dp=4, num_waves=6, slots=2, components=2, num_stages=2, num_encoders=1, in_flight=np.array([4, 3, 2, 1]),
        own=own, way=own[:, :-1].copy(), base=np.array([1, 2, 3]), chunks=1,
        percent=np.array([200, 200, 100]), budgets=budgets,
    )  # fmt: skip


def test_a_search_tries_what_its_budget_allows() -> None:
    """Exactly as many components as it may simulate: one more or less would end elsewhere."""
    for seed, most in ((0, None), (1, 30), (2, 400), (3, 47)):
        problem = crowded(seed)
        start = placing.balanced(problem, BalancePolicy.LPT)
        allowed = 4_400 * min(48, most or 48) * (2 + 2)
        budget = (allowed - min(800_000, allowed // 2)) // (2 * (2 * 2 + 2) * (6 + 2 + 2))
        slots = np.full((4, 6, 2), -1)
        slots[start.rank, start.wave, start.slot] = np.arange(48)
        search._improve(problem, slots, draws(seed, Operator.PLAN_SEARCH, 0, 0, 7, 2 * budget), budget)
        found = placing.searched(problem, start, 7, seed, most)
        assert slots[found.rank, found.wave, found.slot].tolist() == list(range(48))
        assert placing.makespan_ns(problem, found) <= placing.makespan_ns(problem, start)
        lower = placing.lower_bound_ns(problem)
        assert lower <= placing.makespan_ns(problem, found)


def one_stage(seed: int) -> PlacementProblem:
    """One rank with an encoder and a generator, whose backbone takes longest: its bound can be reached."""
    random = np.random.default_rng(seed)
    own = np.concatenate([random.integers(100, 1_000, (3, 64)), np.zeros((3, 1), np.int64)], axis=1)
    own[1, :-1] *= 100
    return PlacementProblem(
        dp=1, num_waves=8, slots=8, components=1, num_stages=1, num_encoders=1, in_flight=np.array([3, 2, 1]),
        own=own, way=own[:, :-1].copy(), base=np.array([1, 2, 3]), chunks=1,
        percent=np.array([200, 200, 100]), budgets=None,
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(3))
def test_a_search_ends_at_its_goal(seed: int) -> None:
    """With the first placement that is near enough, which it comes to before its budget is used up, and no later."""
    problem = one_stage(seed)
    goal, start = placing.goal_ns(problem), placing.balanced(problem, BalancePolicy.NONE)
    bound = placing.lower_bound_ns(problem)
    assert goal == bound + bound // 4_096
    found, best = (placing.searched(problem, start, 7, seed, goal=g) for g in (goal, placing.NO_GOAL))
    climb = climb_of(in_slots(problem.shape, start), search._costs(problem))
    go_on(climb, np.zeros(0, np.uint64), 1)
    trials = 0
    for word in draws(seed, Operator.PLAN_SEARCH, 0, 0, 7, 100_000):
        if climb.makespan_ns <= goal:
            break
        assert go_on(climb, np.array([word]), 1, goal)[1] == 1
        trials += 1
    assert go_on(climb, draws(0, Operator.PLAN_SEARCH, 0, 0, 7, 10), 10, goal) == (0, 0)
    assert rows_of(found) == rows_of(of_slots(climb.slots.at)) != rows_of(best)
    assert 20 < trials < 100_000
    assert bound <= placing.makespan_ns(problem, best) <= placing.makespan_ns(problem, found) <= goal


@pytest.mark.parametrize("seed", range(3))
def test_a_search_without_patience_ends_where_it_gains_next_to_nothing(seed: int) -> None:
    """Behind the first eighth of its budget that gains less than a part in 1,024."""
    problem = one_stage(seed)
    problem = replace(problem, own=problem.own // [[1], [100], [1]])  # as long as the encoder: there is much to gain
    start = placing.balanced(problem, BalancePolicy.NONE)
    budget = (4_400 * 64 * 3 // 2) // search.component_operations(problem)
    climb = climb_of(in_slots(problem.shape, start), search._costs(problem))
    go_on(climb, np.zeros(0, np.uint64), 1)
    words, last, parts = draws(seed, Operator.PLAN_SEARCH, 0, 0, 7, 2 * budget), climb.makespan_ns, 0
    while parts == 0 or last - climb.makespan_ns >= last // 1_024:
        last, due = climb.makespan_ns, budget // 8
        while due > 0:
            simulated, used = go_on(climb, words[:1], due)
            due, words = due - simulated, words[used:]
        parts += 1
    assert 1 < parts < 8
    sooner, whole = (placing.searched(problem, start, 7, seed, patient=patient) for patient in (False, True))
    assert rows_of(sooner) == rows_of(of_slots(climb.slots.at)) != rows_of(whole)
    assert placing.makespan_ns(problem, whole) <= placing.makespan_ns(problem, sooner)


def test_a_search_without_a_goal_goes_on_at_the_bound() -> None:
    """Where nothing takes any time, all placements are at the bound."""
    timeless = replace(one_stage(0), own=one_stage(0).own * 0, way=one_stage(0).way * 0, base=np.zeros(3, np.int64))
    start = placing.balanced(timeless, BalancePolicy.NONE)
    assert placing.goal_ns(timeless) == placing.makespan_ns(timeless, start) == 0
    assert rows_of(placing.searched(timeless, start, 7, 0, goal=0)) == rows_of(start)
    assert rows_of(placing.searched(timeless, start, 7, 0)) != rows_of(start)


def test_exchanges_until_memory_holds_all_of_it() -> None:
    for seed in range(3):
        problem = crowded(seed, memory=True)
        start = placing.balanced(problem, BalancePolicy.NONE)
        found, shortfall = placing.fitted(problem, start)
        assert problem.budgets is not None
        need = placing.microbatch_sums(problem, problem.budgets.need, found)
        need[[0, 2]] = need[[0, 2]].reshape(2, 2, 2, 6).sum(axis=2, keepdims=True).repeat(2, axis=2).reshape(2, 4, 6)
        fits = bool((need.max(axis=(1, 2)) <= problem.budgets.budget).all())
        assert fits == (shortfall is None)
        assert sorted(set(rows_of(found))) == sorted(rows_of(found))
