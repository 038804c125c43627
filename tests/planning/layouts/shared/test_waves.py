"""What stages hold of microbatches, against loops over windows and ranks; and what people read about it."""

from typing import Any

import numpy as np
from builders.jobs import make_job
from hypothesis import given
from hypothesis import strategies as st

from dataserver.planning.job.identity import Job
from dataserver.planning.layouts.shared.waves import (
    AUTOMATIC_EXTRA,
    decisions,
    evenly,
    extras,
    in_flight,
    most_in_flight,
    one_f_one_b_in_flight,
    wave_programs,
)
from dataserver.planning.plan.naming import counted, listed, milliseconds
from dataserver.planning.plan.plan import ModuleSchedule


def job(memory: dict[str, int] | None = None, stages: int = 3, generator: bool = True, **layout: Any) -> Job:
    """An encoder, a backbone of so many stages, a generator; memory in patches or tokens."""
    modules: list[dict[str, Any]] = [
        {"name": "vit", "kind": "encoder"},
        {"name": "llm", "kind": "backbone", "pp": stages},
    ]
    modules += [{"name": "dit", "kind": "generator"}] if generator else []
    for module in modules:
        if module["name"] in (memory or {}):
            module["memory"] = {"budget_bytes": (memory or {})[module["name"]], "unit_bytes": 1}
    return make_job(execution={"modules": modules, "layout": {"kind": "pipelined", **layout}})


def ones(memory: dict[str, int], waves: int = 8) -> dict[str, np.ndarray]:
    return {name: np.full((1, waves), 10) for name in memory}


@given(
    st.lists(st.lists(st.integers(0, 9), min_size=4, max_size=4), min_size=1, max_size=3),
    st.integers(0, 4),
    st.integers(0, 40),
    st.integers(1, 7),
)
def test_most_in_flight_tries_every_window(units: list[list[int]], waves: int, budget: int, wanted: int) -> None:
    held = np.array(units)[:, :waves]

    def fits(number: int) -> bool:
        windows = [row[k : k + number] for row in held.tolist() for k in range(waves - number + 1)]
        return all(sum(window) <= budget for window in windows)

    found = next((n for n in range(min(wanted, waves), 1, -1) if fits(n)), 1)
    expected = wanted if found == waves and found > 1 else found
    assert most_in_flight(held, budget, wanted) == expected


def stages_in_digits() -> None:
    assert AUTOMATIC_EXTRA == 4
    assert one_f_one_b_in_flight(1).tolist() == [1]
    assert one_f_one_b_in_flight(4).tolist() == [4, 3, 2, 1]
    assert one_f_one_b_in_flight(4, 2).tolist() == [6, 5, 4, 1]
    falling = np.array([8, 7, 6, 5, 4, 3, 2, 1])
    assert evenly(falling, falling).tolist() == falling.tolist()
    assert evenly(falling, np.full(8, 5)).tolist() == [5, 5, 4, 4, 3, 2, 2, 1]
    assert evenly(falling, np.array([8, 7, 6, 2, 9, 9, 9, 9])).tolist() == [8, 7, 6, 2, 2, 2, 1, 1]
    assert evenly(np.array([3, 2, 1]), np.array([2, 2, 1])).tolist() == [2, 2, 1]
    assert evenly(np.array([6, 5, 1]), np.array([6, 1, 1])).tolist() == [6, 1, 1]


HELD: list[Any] = [
    ({}, {}, {"vit": [5], "llm": [4, 3, 2], "dit": [1]}),
    ({}, {"schedule": "gpipe"}, {"vit": [8], "llm": [8, 8, 8], "dit": [8]}),
    ({"llm": 29}, {}, {"vit": [5], "llm": [2, 2, 1], "dit": [1]}),
    ({"llm": 30}, {}, {"vit": [5], "llm": [3, 3, 2], "dit": [1]}),
    ({"vit": 40}, {}, {"vit": [4], "llm": [4, 3, 2], "dit": [1]}),
    ({"vit": 39}, {}, {"vit": [3], "llm": [3, 2, 2], "dit": [1]}),
    ({"dit": 20}, {"schedule": "gpipe"}, {"vit": [8], "llm": [8, 8, 8], "dit": [2]}),
]


def test_what_stages_hold_and_what_is_said_about_it() -> None:
    """All of the module in one test."""
    stages_in_digits()
    for case in HELD:
        what_a_job_holds(*case)
    extras_that_are_compared()
    what_people_read()


def what_a_job_holds(memory: dict[str, int], layout: dict[str, Any], held: dict[str, list[int]]) -> None:
    execution = job(memory, **layout).spec.execution
    found = in_flight(execution, 8, 0, ones(memory))
    assert {name: numbers.tolist() for name, numbers in found.held.items()} == held
    wanted = {"vit": [8], "llm": [8] * 3, "dit": [8]} if layout else {"vit": [5], "llm": [4, 3, 2], "dit": [1]}
    assert {name: numbers.tolist() for name, numbers in found.wanted.items()} == wanted
    assert found.is_short == (held != wanted)
    assert set(found.most) == set(memory)
    schedules = found.schedules(execution)
    assert [(s.module, s.in_flight.tolist(), s.chunks) for s in schedules] == [(n, held[n], 1) for n in wanted]
    programs = wave_programs(execution, schedules, 8)
    assert [(p.modules, p.stage) for p in programs] == [
        (("vit",), 0),
        *[(("llm",), s) for s in range(3)],
        (("dit",), 0),
    ]
    for program in programs:
        kinds = [o.kind.value for o in program.operations]
        assert (kinds[0], kinds[-1], len(kinds)) == ("unshard", "reduce", 18)
        assert kinds.index("backward") == 1 + held[program.modules[0]][program.stage]


def extras_that_are_compared() -> None:
    everything = {"vit": 100, "llm": 100, "dit": 100}
    jobs = [
        job(memory, **layout)
        for memory, layout in (
            ({}, {}),
            (everything, {}),
            ({"vit": 100, "llm": 100}, {}),
            ({}, {"extra_in_flight": 0}),
            ({}, {"extra_in_flight": 1}),
            ({}, {"extra_in_flight": 2}),
            (everything, {"extra_in_flight": 3}),
            (everything, {"schedule": "gpipe"}),
        )
    ]
    found = [extras(j.spec.execution) for j in jobs]
    assert found == [(0,), (0, 1, 2, 4), (0,), (0,), (0, 1), (0, 1, 2), (0, 1, 2), (0,)]
    assert in_flight(job().spec.execution, 8, 2, {}).held["vit"].tolist() == [7]


def what_people_read() -> None:
    memory = {"vit": 1000, "llm": 29}
    execution = job(memory).spec.execution
    said = decisions(execution, in_flight(execution, 8, 0, ones(memory)))
    assert [(d.subject, d.chosen, d.reason) for d in said] == [
        ("vit", "in flight: 5", "1f1b asks for 5, and memory for 1,000 patches holds them"),
        (
            "llm",
            "in flight: 2, 2, 1",
            "1f1b asks for 4, 3, 2; memory for 29 tokens holds 2; the number falls evenly towards the last stage, so "
            "that few neighbours wait for each other",
        ),
        ("dit", "in flight: 1", "1f1b asks for 1"),
    ]
    memory = {"llm": 40}
    execution = job(memory).spec.execution
    said = decisions(execution, in_flight(execution, 8, 0, ones(memory)))
    assert said[1].reason == "1f1b asks for 4, 3, 2, and memory for 40 tokens holds them"


def test_words_for_numbers() -> None:
    assert listed(np.arange(8)) == "0, 1, 2, 3, 4, 5, 6, 7"
    assert listed(np.arange(9)) == "0 to 8"
    assert [counted(n, "rank") for n in (0, 1, 2, 2048)] == ["0 ranks", "1 rank", "2 ranks", "2,048 ranks"]
    times = (0, 49_999, 50_000, 912_149_999, 912_150_000, 1_234_567_890_123)
    assert [milliseconds(t) for t in times] == ["0.0 ms", "0.0 ms", "0.1 ms", "912.1 ms", "912.2 ms", "1,234,567.9 ms"]


def test_a_schedule_has_one_chunk_unless_it_says_more() -> None:
    assert ModuleSchedule("llm", np.array([1])).chunks == 1
