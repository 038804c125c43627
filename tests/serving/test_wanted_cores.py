"""Cores that a fleet is told to have: as many as its trainers can use."""

import pytest
from disttrain.v1.admin_service_pb2 import GetMetricsResponse
from hypothesis import given
from hypothesis import strategies as st

from dataserver.reporting.fleet_numbers import cores_missing
from dataserver.serving.wanted_cores import FULL, MOST_GROWTH, SAMPLE_S, WINDOW_S, CoresWanted, Usage, wanted_cores

START = Usage(0, 0, 0, 0)
SHARES = st.floats(0, 1)
CORES = st.just(0.0) | st.floats(1e-9, 64)
"""Cores that are busy: none, or a time that a clock can tell."""


def test_trainers_that_never_wait_leave_what_is_not_used_idle() -> None:
    # 100 s with 8 s of CPU a second over 4 streams, and nobody waited: 8 cores suffice, at 80 % of 10.
    assert wanted_cores(START, Usage(100, 800, 0, 400)) == pytest.approx(10)


def test_trainers_that_wait_half_of_the_time_want_twice_the_cores() -> None:
    assert wanted_cores(START, Usage(100, 800, 200, 400)) == pytest.approx(20)


def test_without_streams_nothing_is_wanted() -> None:
    assert wanted_cores(START, Usage(100, 800, 0, 0)) == 0
    assert wanted_cores(START, START) == 0


@given(st.floats(1, 1e5), CORES, SHARES, SHARES, st.integers(1, 256))
def test_more_waiting_never_wants_fewer(elapsed: float, busy: float, one: float, other: float, streams: int) -> None:
    def at(share: float) -> float:
        return wanted_cores(START, Usage(elapsed, busy * elapsed, share * streams * elapsed, streams * elapsed))

    less, more = sorted((one, other))
    assert at(less) <= at(more) * (1 + 1e-9)
    assert busy / FULL * (1 - 1e-9) <= at(one) <= busy / FULL * MOST_GROWTH * (1 + 1e-9)


def test_the_need_is_that_of_the_last_minute() -> None:
    wanted = CoresWanted(START)
    usage = START
    for busy, seconds in ((1, 10 * WINDOW_S), (8, 2 * WINDOW_S)):
        end = usage.at_s + seconds
        while usage.at_s < end:
            usage = Usage(usage.at_s + SAMPLE_S, usage.cpu_s + busy * SAMPLE_S, 0, usage.stream_s + SAMPLE_S)
            found = wanted.at(usage)
    assert found == pytest.approx(8 / FULL)


def test_two_who_ask_do_not_shorten_the_time_for_each_other() -> None:
    wanted = CoresWanted(START)
    usage = Usage(WINDOW_S, 4 * WINDOW_S, 0, WINDOW_S)
    assert wanted.at(usage) == wanted.at(usage) == pytest.approx(4 / FULL)


def test_a_fleet_is_summed_up_in_a_line() -> None:
    waiting = GetMetricsResponse(cores=12, wanted_cores=20)
    idle = GetMetricsResponse(cores=12, wanted_cores=1.5)
    older = GetMetricsResponse()
    assert cores_missing([waiting, older]) == "trainers want 20.0 cores and have 12: 8.0 are missing"
    assert cores_missing([waiting, idle]) == "trainers want 21.5 cores and have 24: 2.5 are idle"
    assert cores_missing([older, GetMetricsResponse(cores=12)]) == ""
