"""Searches over many components go on in rounds of pairs, which threads share: the same plan for any number of them."""

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from builders.jobs import job_data, make_job
from builders.samples import make_samples
from planning.scattered import digest

from dataserver import planning
from dataserver.planning import computing_on, cores, shared_out, side_by_side, yielding_to
from dataserver.planning.job.fields import BalancePolicy
from dataserver.planning.job.identity import parse_job
from dataserver.planning.kernels.pipeline import Climb, climb_of, go_on, go_on_in
from dataserver.planning.layouts.pipelined import attempts, packed, placing, starts
from dataserver.planning.layouts.pipelined.placing import search
from dataserver.planning.layouts.pipelined.placing.problem import Budgets, PlacementProblem
from dataserver.planning.plan.placement import Placement, in_slots
from dataserver.planning.planner import plan_step
from dataserver.planning.stream.randomness import Operator, draws


def spread_out(seed: int, components: int = 9, *, memory: bool = False) -> PlacementProblem:
    """Two ranks of two stages in each of many components, with an encoder and a generator."""
    random, count = np.random.default_rng(seed), components * 2 * 6 * 2
    own = np.concatenate([random.integers(100, 9_000, (3, count)), np.zeros((3, 1), np.int64)], axis=1)
    need = own // 100
    budgets = Budgets(need, np.full(3, 300), np.ones(3, np.int64)) if memory else None
    return PlacementProblem(
        dp=2 * components, num_waves=6, slots=2, components=components, num_stages=2, num_encoders=1,
        in_flight=np.array([4, 3, 2, 1]), own=own, way=own[:, :-1].copy(), base=np.array([1, 2, 3]), chunks=1,
        percent=np.array([200, 200, 100]), budgets=budgets,
    )  # fmt: skip


def start_of(problem: PlacementProblem) -> Placement:
    return search.fitted(problem, placing.balanced(problem, BalancePolicy.NONE))[0]


def begun(problem: PlacementProblem) -> Climb:
    climb = climb_of(in_slots(problem.shape, start_of(problem)), search._costs(problem))
    go_on(climb, np.zeros(0, np.uint64), problem.components)
    return climb


@pytest.mark.parametrize("memory", [False, True])
@pytest.mark.parametrize("components", [4, 9])
def test_threads_find_what_one_finds(components: int, memory: bool) -> None:
    problem = spread_out(components, components, memory=memory)
    start, found = start_of(problem), []
    for count in (1, 2, 3, 16):
        with computing_on(count):
            found.append(placing.searched(problem, start, 7, 0, in_rounds=True))
    for other in found[1:]:
        assert all(np.array_equal(getattr(other, f), getattr(found[0], f)) for f in ("rank", "wave", "slot"))
    before, after = placing.makespan_ns(problem, start), placing.makespan_ns(problem, found[0])
    assert 20 * after < 19 * before
    assert placing.lower_bound_ns(problem) <= after
    assert search.fitted(problem, found[0])[1] is None
    in_turn = placing.searched(problem, start, 7, 0)
    assert 100 * after <= 101 * placing.makespan_ns(problem, in_turn)


def test_what_rounds_find_stays_what_it_is() -> None:
    """Servers of the same release plan alike, and so do those of the next one."""
    found = placing.searched(problem := spread_out(4, 4), start_of(problem), 7, 0, in_rounds=True)
    assert digest([found.rank.tolist(), found.wave.tolist(), found.slot.tolist()]) == "eb37c90b88616dc4"


def with_empty_slots(seed: int) -> PlacementProblem:
    """70 very unequal sequences on eight ranks with room for 192: many trials meet an empty slot, and simulate nothing.

    So some pairs use up words, others what may be simulated.
    """
    times = np.exp(np.random.default_rng(seed).normal(8, 2, (3, 70))).astype(np.int64)
    own = np.concatenate([times, np.zeros((3, 1), np.int64)], axis=1)
    return PlacementProblem(
        dp=8, num_waves=4, slots=6, components=8, num_stages=4, num_encoders=1, in_flight=np.array([6, 4, 3, 2, 1, 1]),
        own=own, way=own[:, :-1].copy(), base=np.array([1, 2, 3]), chunks=1, percent=np.array([200, 200, 100]),
    )  # fmt: skip


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Of each round: what it made of the slowest component, and what it left of the budget."""
    seen, ends = list[tuple[int, int]](), search._Patience.ends

    def look(patience: search._Patience, makespan_ns: int, left: int) -> bool:
        seen.append((makespan_ns, left))
        return ends(patience, makespan_ns, left)

    monkeypatch.setattr(search._Patience, "ends", look)
    return seen


@pytest.mark.parametrize("patient", [False, True])
def test_threads_find_what_one_finds_among_empty_slots(rounds: list[tuple[int, int]], patient: bool) -> None:
    """What a round takes of the budget, and so where a search ends, is the same however threads divide the pairs."""
    for seed in range(4):
        problem, found = with_empty_slots(seed), []
        start = placing.balanced(problem, BalancePolicy.LPT)
        for count in (1, 2, 3, 4):
            rounds.clear()
            with computing_on(count):
                improved = placing.searched(problem, start, 7, seed, patient=patient, in_rounds=True)
            found.append((improved.rank.tolist(), improved.wave.tolist(), improved.slot.tolist(), rounds.copy()))
        assert all(other == found[0] for other in found[1:])


def test_threads_plan_what_one_plans(rounds: list[tuple[int, int]]) -> None:
    stream = {"global_batch": 64, "packing": {"enabled": False}}
    job = make_job(encoder=8, backbone=(8, 4), generator=8, stream=stream, execution={"microbatch": 8})
    samples, found = make_samples(job, 64, 3), []
    for count in (1, 4):
        rounds.clear()
        with computing_on(count):
            found.append((plan_step(job, 0, samples).hash, rounds.copy()))
    assert rounds
    assert found[0] == found[1]


@pytest.mark.parametrize("memory", [None, 3_000])
def test_threads_that_share_candidates_plan_what_one_plans(monkeypatch: pytest.MonkeyPatch, memory: int | None) -> None:
    """The same candidates in the same order, those that memory leaves out too; the first of equals is chosen. Threads
    share placements, too."""
    data = job_data(encoder=2, backbone=(2, 2), generator=2, stream={"global_batch": 16, "packing": {"enabled": False}})
    data["execution"]["layout"] = {"kind": "pipelined", "extra_in_flight": 2}
    for module in data["execution"]["modules"] if memory else ():
        module["memory"] = {"budget_bytes": memory, "unit_bytes": 1}
    job = parse_job(data)
    samples, found, threads = make_samples(job, 16, 3), [], defaultdict[str, set[str]](set)

    def look(call: Callable[..., Any], *arguments: Any) -> Any:
        time.sleep(0.002)  # so that one thread alone does not take all calls before others begin
        threads[call.__name__].add(threading.current_thread().name)
        return call(*arguments)

    for module, name in ((attempts, "candidates_of"), (starts, "fitted"), (starts, "makespan_ns")):
        monkeypatch.setattr(module, name, partial(look, getattr(module, name)))
    monkeypatch.setattr(packed, "SHARED_OPERATIONS", 0)
    for count in (1, 3):
        threads.clear()
        with computing_on(count):
            plan = plan_step(job, 0, samples)
        found.append((plan.hash, plan.candidates, plan.decisions))
        assert {name: len(seen) > 1 for name, seen in threads.items()} == dict.fromkeys(
            ("candidates_of", "fitted", "makespan_ns"), count > 1
        )
    assert len(found[0][1]) > 4
    assert all(other == found[0] for other in found[1:])


def test_candidates_of_small_steps_are_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "shared_out", None)
    job = make_job(encoder=2, backbone=(2, 2), stream={"global_batch": 8, "packing": {"enabled": False}})
    with computing_on(4):
        plan_step(job, 0, make_samples(job, 8))


def test_a_search_of_few_components_is_the_same_in_rounds() -> None:
    problem = spread_out(0, 3)
    start = start_of(problem)
    found, in_turn = (placing.searched(problem, start, 7, 0, in_rounds=rounds) for rounds in (True, False))
    assert np.array_equal(found.rank, in_turn.rank)
    assert np.array_equal(found.wave, in_turn.wave)


def test_a_group_of_all_components_is_the_whole() -> None:
    problem, words = spread_out(1, 5), draws(0, Operator.PLAN_SEARCH, 0, 0, 1, 4_000)
    whole, group = begun(problem), begun(problem)
    assert go_on(whole, words, 2_000) == go_on_in(group, np.arange(5)[None], words[None], 2_000, -1)
    assert np.array_equal(whole.slots.at, group.slots.at)
    assert whole.makespan.tolist() == group.makespan.tolist()


def test_groups_change_nothing_of_others_and_end_at_their_goal() -> None:
    problem = spread_out(2, 6)
    climb, words = begun(problem), draws(0, Operator.PLAN_SEARCH, 0, 0, 1, 4_000)
    before, times = climb.slots.at.copy(), climb.makespan.copy()
    pairs = np.array([[4, 1], [0, 5]])
    goal = int(times[pairs].max()) * 99 // 100
    go_on_in(climb, pairs, words.reshape(2, -1), 2_000, goal)
    changed = np.unique(np.nonzero((climb.slots.at != before).any(axis=(1, 2)))[0] // 2)
    assert set(changed.tolist()) <= {0, 1, 4, 5}
    assert climb.makespan[[2, 3]].tolist() == times[[2, 3]].tolist()
    assert climb.makespan[pairs].max() <= goal
    for pair in pairs.tolist():
        held = np.concatenate([climb.slots.at[2 * c : 2 * c + 2].ravel() for c in pair])
        assert sorted(held) == sorted(np.concatenate([before[2 * c : 2 * c + 2].ravel() for c in pair]))
    assert climb.makespan.tolist() == begun_from(problem, climb).makespan.tolist()


def begun_from(problem: PlacementProblem, other: Climb) -> Climb:
    climb = climb_of(other.slots.at.copy(), search._costs(problem))
    go_on(climb, np.zeros(0, np.uint64), problem.components)
    return climb


def test_calls_side_by_side_return_in_order() -> None:
    assert cores() == 1
    with computing_on(3):
        assert cores() == 3
        assert side_by_side([partial(pow, 2, n) for n in range(7)], 3) == [2**n for n in range(7)]
        with pytest.raises(ZeroDivisionError):
            side_by_side([partial(pow, 2, 1), partial(divmod, 1, 0)], 2)
    assert cores() == 1


def test_where_no_thread_can_be_started_the_one_that_plans_makes_all_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once there is one, it finds nothing left to do."""
    made, runs = list[int](), list[Callable[[], None]]()

    def refuse(run: Callable[[], None]) -> None:
        runs.append(run)
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(planning, "_threads", lambda: SimpleNamespace(submit=refuse))
    with pytest.raises(ZeroDivisionError):
        side_by_side([partial(divmod, 1, 0), partial(made.append, 1)], 2)
    assert side_by_side([partial(pow, 2, n) for n in range(7)], 3) == [2**n for n in range(7)]
    assert len(runs) == 3
    for run in runs:
        run()
    assert made == []


def test_what_another_thread_has_begun_by_then_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, others = threading.Event(), list[threading.Thread]()

    def refuse(run: Callable[[], None]) -> None:
        others.append(threading.Thread(target=run))
        others[-1].start()
        assert begun.wait(5)
        raise RuntimeError("can't start new thread")

    def first() -> int:
        begun.set()
        time.sleep(0.05)  # so that who would not wait for it is found
        return 1

    monkeypatch.setattr(planning, "_threads", lambda: SimpleNamespace(submit=refuse))
    assert side_by_side([first, lambda: 2], 2) == [1, 2]
    others[0].join()


def test_threads_take_calls_as_they_come() -> None:
    """One thread has a call that lasts until the other one has done all the rest."""
    done = threading.Semaphore(0)

    def last() -> bool:
        return all(done.acquire(timeout=5) for _ in range(4))

    assert side_by_side([last, *[done.release] * 4], 2) == [True, *[None] * 4]


def test_a_plan_that_is_given_up_leaves_no_thread_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """As its own thread comes to a yield point in a call, the others end the calls that they have, and take none."""
    begun, ended = list[int](), list[int]()
    all_at_work, given_up = threading.Barrier(3), threading.Event()

    def call(number: int) -> None:
        begun.append(number)
        if number < 3:
            all_at_work.wait(5)
        if threading.current_thread() is threading.main_thread():
            given_up.set()
            raise InterruptedError
        given_up.wait(5)
        time.sleep(0.05)  # so that who would not wait for it is found
        ended.append(number)

    with ThreadPoolExecutor(2) as threads:
        monkeypatch.setattr(planning, "_threads", lambda: threads)
        with pytest.raises(InterruptedError):
            side_by_side([partial(call, n) for n in range(12)], 3)
        assert (len(begun), len(ended)) == (3, 2)
    assert len(begun) == 3, "nor did they since"


def test_the_error_is_that_of_the_first_call_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the thread that plans has another one before."""
    begun, failed, threads = threading.Event(), threading.Event(), planning._threads()

    def submit(take: Callable[[], None]) -> Any:
        found = threads.submit(take)
        assert begun.wait(5)
        return found

    def first() -> None:
        begun.set()
        assert failed.wait(5)
        raise ValueError("the first")

    def second() -> None:
        failed.set()
        raise ValueError("the second")

    monkeypatch.setattr(planning, "_threads", lambda: SimpleNamespace(submit=submit))
    with pytest.raises(ValueError, match="the first"):
        side_by_side([first, second], 2)


def test_calls_that_are_shared_out_are_as_many_at_once_as_there_are_cores() -> None:
    at_once, before = list[int](), list[int]()
    lock, running = threading.Lock(), 0

    def call(number: int) -> int:
        nonlocal running
        with lock:
            running += 1
            at_once.append(running)
        both.wait(10)
        with lock:
            running -= 1
        return number

    both = threading.Barrier(2)
    with computing_on(2), yielding_to(lambda: before.append(len(at_once))):
        assert shared_out([partial(call, n) for n in range(12)]) == list(range(12))
    assert max(at_once) == 2
    assert before == [0, 8]
    assert shared_out([]) == []
