"""Garbage is collected between steps alone."""

import gc
import weakref

import pytest

from trainclient.training.garbage import WARM_UP, collect, collect_young, collected_between_steps


class Ring:
    """Something that only a collector frees."""

    def __init__(self) -> None:
        self.own = self


@pytest.mark.parametrize("steps", [1, WARM_UP + 1, 200])
def test_nothing_is_collected_within_a_step_and_all_of_it_after(steps: int) -> None:
    with collected_between_steps():
        assert not gc.isenabled()
        ring = weakref.ref(Ring())
        assert [Ring() for _ in range(20_000)]  # far more than what a collection by itself would wait for
        assert ring() is not None
        collect(steps)
        assert ring() is None
    assert gc.isenabled()


def test_what_is_young_is_collected_between_steps_of_an_evaluation() -> None:
    with collected_between_steps():
        ring = weakref.ref(Ring())
        assert ring() is not None
        collect_young()
        assert ring() is None


def fail_in_a_step() -> None:
    with collected_between_steps():
        collect(1)
        assert gc.get_freeze_count() > 0
        raise ValueError("step")


def test_the_collector_is_as_before_when_a_step_fails() -> None:
    with pytest.raises(ValueError, match="step"):
        fail_in_a_step()
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
