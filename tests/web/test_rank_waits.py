"""The share of time for which ranks wait, from counters of servers."""

import pytest
from disttrain.v1 import admin_service_pb2 as pb
from google.protobuf.duration_pb2 import Duration

from dataserver.reporting.fleet_numbers import Answer
from dataserver.web.rank_waits import RankWaits

RANK = ("job", "llm", 3)


def answer(address: str, uptime_s: int, waited_s: int | None) -> Answer:
    rank = pb.RankProgress(job="job", module="llm", rank=3)
    if waited_s is not None:
        rank.waited.CopyFrom(Duration(seconds=waited_s))
    return Answer(address, pb.GetMetricsResponse(uptime=Duration(seconds=uptime_s), ranks=[rank]))


def test_a_share_is_taken_between_looks_of_the_last_minute() -> None:
    waits = RankWaits()
    shares = [waits.note([answer("a", at, waited)]).get(RANK) for at, waited in [(10, 100), (20, 105), (40, 105)]]
    assert shares == [None, 0.5, pytest.approx(5 / 30)]
    assert waits.note([answer("a", 70, 105)])[RANK] == pytest.approx(5 / 60)
    assert waits.note([answer("a", 80, 105)])[RANK] == 0, "what lies longer back counts no more"


@pytest.mark.parametrize(("uptime_s", "waited_s"), [(2, 60), (30, 1), (20, 50), (15, 50)])
def test_a_counter_that_begins_anew_says_nothing_at_first(uptime_s: int, waited_s: int) -> None:
    waits = RankWaits()
    for at in (10, 20):
        waits.note([answer("a", at, 50)])
    assert waits.note([answer("a", uptime_s, waited_s)]) == {}
    assert waits.note([answer("a", uptime_s + 10, waited_s + 1)]) == {RANK: 0.1}


def test_of_several_servers_the_largest_counts_and_none_without_a_report() -> None:
    waits = RankWaits()
    waits.note([answer("a", 10, 0), answer("b", 10, 0), answer("c", 10, None), Answer("d", problem="silent")])
    found = waits.note([answer("a", 20, 1), answer("b", 20, 4), answer("c", 20, None), Answer("d", problem="silent")])
    assert found == {RANK: 0.4}
    assert waits.note([answer("c", 30, None)]) == {}


def test_a_hostile_counter_is_no_more_than_all_of_the_time() -> None:
    waits = RankWaits()
    waits.note([answer("a", -(2**62), -(2**62))])
    assert waits.note([answer("a", 1, 2**62)]) == {RANK: 1.0}
