"""Tasks in processes, without the processes: which are begun, and when."""

from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any

import pytest

from dataserver.dataset.machine import workers
from dataserver.dataset.machine.workers import in_processes


class Held(Executor):
    """Does what is submitted when it is told to."""

    def __init__(self) -> None:
        self.futures, self.tasks = list[Future[Any]](), list[Callable[[], Any]]()

    def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.tasks.append(partial(work, *args, **kwargs))
        self.futures.append(Future())
        self.futures[-1].set_running_or_notify_cancel()
        return self.futures[-1]

    def end(self, position: int) -> None:
        """Do a task."""
        self.futures[position].set_result(self.tasks[position]())


@pytest.mark.parametrize(("ahead", "begun"), [(4, [4, 4, 4, 4, 8, 8, 8, 9, 9]), (None, [9] * 9)])
def test_tasks_are_begun_so_far_ahead_of_the_first_that_is_not_done(
    monkeypatch: pytest.MonkeyPatch, ahead: int | None, begun: list[int]
) -> None:
    held, order, counts = Held(), [3, 1, 2, 0, 5, 4, 6, 7, 8], list[int]()
    monkeypatch.setattr(workers, "_pool", lambda *_: held)
    monkeypatch.setattr(workers, "LOOK_S", 0)

    def look() -> None:
        if order and order[0] < len(held.futures):
            counts.append(len(held.futures))
            held.end(order.pop(0))

    found = list(in_processes(str, list(range(9)), 2, look, ahead=ahead))
    assert sorted(found) == [(n, str(n)) for n in range(9)]
    assert counts == begun
