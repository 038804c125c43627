"""A Hypothesis test tries its share of the examples it asks for."""

import os

from hypothesis import given, settings
from hypothesis import strategies as st

tried: list[int] = []


@settings(max_examples=400, database=None)
@given(st.integers())
def test_numbers(number: int) -> None:
    tried.append(number)


@settings(max_examples=15, database=None)
@given(st.integers())
def test_few_numbers(number: int) -> None:
    tried.append(number)


def test_a_share_is_tried_unless_all_are_asked_for_and_few_are_never_fewer() -> None:
    for test, asked in ((test_numbers, 400), (test_few_numbers, 15)):
        tried.clear()
        test()
        share = max(12, asked * float(os.environ.get("DISTTRAIN_TEST_EXAMPLES", 15)) / 100)
        assert len(tried) == min(asked, share)
