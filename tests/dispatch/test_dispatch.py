"""The dispatcher: balanced arrangements, and rows that move with their gradients between ranks over gloo."""

import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from builders.gloo_threads import in_threads

from trainclient.dispatch import Arrangement, arrange
from trainclient.dispatch.dispatcher import Dispatcher

RANKS = 3
LENGTHS = [[3, 1, 4, 1], [], [5, 9, 2, 6, 0]]
LAYERS = [[1, 2, 1, 1], [], [2, 1, 1, 1, 3]]
"""Rows of each item in another module."""


def test_a_balanced_arrangement_is_never_worse_than_as_sampled() -> None:
    draw = np.random.default_rng(3)
    for ranks, policy in ((1, "lpt"), (4, "search"), (5, "search")):
        loads = [draw.integers(1, 200, draw.integers(0, 9)).tolist() for _ in range(ranks)]
        sampled = Arrangement.as_sampled([len(found) for found in loads])
        found = arrange(loads, policy=policy)
        assert found.imbalance(loads) <= sampled.imbalance(loads)
        assert found.loads(loads).sum() == sum(map(sum, loads))
        assert sorted(i for rank in range(ranks) for i in found.of(rank).tolist()) == list(range(len(found.home)))
    already = [[5, 5], [5, 5]]
    assert np.array_equal(arrange(already).rank, [0, 0, 1, 1]), "nothing moves without need"
    assert arrange([[], []]).imbalance([[], []]) == 1.0


def test_a_limit_of_items_holds_also_where_sampling_did_not() -> None:
    loads = [[9], [1, 1, 1, 1, 1]]
    found = arrange(loads, at_most=3)
    assert np.bincount(found.rank).tolist() == [3, 3]
    assert found.loads(loads).max() == 11


def test_batches_go_where_fewest_bytes_leave_their_node() -> None:
    draw = np.random.default_rng(4)
    loads = [draw.integers(1, 100, 12).tolist() for _ in range(8)]
    numbered, near = arrange(loads, policy="lpt"), arrange(loads, policy="lpt", ranks_per_node=2)
    flat = np.concatenate(loads)

    def between(found: Arrangement) -> int:
        return int(flat[found.home // 2 != found.rank // 2].sum())

    assert sorted(near.loads(loads)) == sorted(numbered.loads(loads))
    assert between(near) < between(numbered)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "best"}, "there is no policy 'best'; choose one of lpt, search, padded"),
        ({"at_most": 2}, "9 items"),
        ({"ranks_per_node": 0}, "3 ranks, 0 of them on a node; at least 1 each is required"),
        ({"ranks_per_node": 2, "num_bytes": [[1], [], []]}, "num_bytes has 1 items and loads 9; give both"),
    ],
)
def test_what_cannot_be_arranged_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        arrange(LENGTHS, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("loads", "message"),
    [
        ([], "0 ranks, 2 of them on a node"),
        ([[1], [2, 1.5]], r"rank 1 has numbers of shape \[2\] and type float64; one integer for each of its items"),
        ([[[1, 2]]], r"rank 0 has numbers of shape \[1, 2\] and type int64"),
        ([["a"]], "one integer for each"),
    ],
)
def test_loads_are_an_integer_for_each_item(loads: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        arrange(loads, ranks_per_node=2)


def test_without_processes_there_is_nothing_to_move_in() -> None:
    with pytest.raises(ValueError, match=r"call torch\.distributed\.init_process_group"):
        Dispatcher()


def test_rows_move_and_their_gradients_return() -> None:
    """Out to one arrangement, on to another, and home: values and gradients are those of one process."""
    balanced, other = arrange(LENGTHS), arrange(LAYERS, policy="lpt")
    assert all((found.home != found.rank).any() for found in (balanced, other))

    def process(group: dist.ProcessGroup, rank: int) -> None:
        dispatcher = Dispatcher(group)
        assert dispatcher.gather(LENGTHS[rank]) == LENGTHS
        before = sum(map(sum, LENGTHS[:rank]))
        values = torch.arange(before, before + sum(LENGTHS[rank]), dtype=torch.float64).requires_grad_()
        mine = dispatcher.move(values, LENGTHS, to=balanced)
        assert mine.tolist() == expected(balanced, rank)
        on = dispatcher.move(mine * mine, LENGTHS, source=balanced, to=other)
        assert on.tolist() == [row**2 for row in expected(other, rank)]
        home = dispatcher.move(on, LENGTHS, source=other)
        assert torch.equal(home, values**2)
        home.backward(torch.full_like(home, rank + 1))
        assert values.grad is not None
        assert torch.equal(values.grad, 2 * values * (rank + 1))
        with pytest.raises(ValueError, match="the arrangement is of 9 items on 3 ranks, or otherwise sampled"):
            dispatcher.move(values[:1], [[2], [0], [0]], to=balanced)
        with pytest.raises(ValueError, match=f"rank {rank} has {len(values) + 1} rows, but its items should have"):
            dispatcher.move(torch.zeros(len(values) + 1), LENGTHS, to=balanced)

    in_threads(RANKS, process)


def expected(found: Arrangement, rank: int) -> list[float]:
    """The rows of a rank's items, each with its number among all rows as its value."""
    counts = np.concatenate([np.array(lengths, np.int64) for lengths in LENGTHS])
    first = counts.cumsum() - counts
    return [float(first[i] + row) for i in found.of(rank) for row in range(counts[i])]


def test_nothing_keeps_a_group_that_is_destroyed() -> None:
    """Neither the dispatcher nor a graph: gloo's threads end with the group, before the interpreter does."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = weakref.ref(dist.group.WORLD)
    dispatcher, values = Dispatcher(), torch.ones(4, requires_grad=True)
    moved = dispatcher.move(values, [[3, 1]])
    dist.destroy_process_group()
    assert group() is None
    for late in (lambda: dispatcher.gather([1]), lambda: dispatcher.move(values, [[3, 1]]), moved.sum().backward):
        with pytest.raises(RuntimeError, match="the process group was destroyed; rows move, also back in backward, on"):
            late()


ENDS = """
import os, sys
import numpy as np, torch, torch.distributed as dist
from trainclient.dispatch import Arrangement, Dispatcher
away, codes = Arrangement(np.arange(3), np.array([1, 2, 0]), 3), []
cores = sorted(os.sched_getaffinity(0))
for number in range(20):
    ranks = {}
    for rank in range(3):
        ranks[os.fork()] = rank
        if 0 in ranks:
            break
    if 0 in ranks:
        break
    codes += [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in ranks]
else:
    sys.exit(0 if codes == [0] * 60 else f"they ended with {codes}")
os.sched_setaffinity(0, {cores[rank % len(cores)]})  # so that the thread of a group lags behind
store = dist.FileStore(f"{sys.argv[1]}/{number}", 3)
dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
dispatcher = Dispatcher()
sys.setswitchinterval(1000)  # and waits for the interpreter's lock until the end
for _ in range(20):
    there = dispatcher.move(torch.ones(100, 64), [[100]] * 3, to=away)
dist.destroy_process_group()
"""


@pytest.mark.long
def test_processes_that_moved_rows_end_in_order(tmp_path: Path) -> None:
    """Where groups outlive their destruction, some of the sixty end in SIGABRT."""
    command = [sys.executable, "-X", "faulthandler", "-c", ENDS, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
