"""What interleaved stages hold, against loops over their operations, one at a time."""

from typing import Any

import numpy as np
from builders.jobs import make_job
from hypothesis import given, settings
from hypothesis import strategies as st

from dataserver.planning import I64
from dataserver.planning.job.fields import Memory
from dataserver.planning.job.spec import Execution
from dataserver.planning.layouts.pipelined.interleaving import interleaved_passes, stages_in_flight, too_small
from dataserver.planning.layouts.pipelined.programs import interleaved_in_flight, interleaved_operations

UNIT = 3
"""Bytes of a patch or token."""


def execution(pp: int, chunks: int, memory: dict[str, int], generator: bool) -> Execution:
    """An encoder, an interleaved backbone, perhaps a generator; memory in patches or tokens."""
    modules: list[dict[str, Any]] = [{"name": "vit", "kind": "encoder"}, {"name": "llm", "kind": "backbone", "pp": pp}]
    modules += [{"name": "dit", "kind": "generator"}] if generator else []
    for module in modules:
        if module["name"] in memory:
            module["memory"] = {"budget_bytes": memory[module["name"]] * UNIT + UNIT - 1, "unit_bytes": UNIT}
    layout = {"kind": "pipelined", "schedule": "interleaved", "chunks": chunks}
    return make_job(execution={"modules": modules, "layout": layout}).spec.execution


def passes_of(held: list[int], chunks: int) -> list[list[int]]:
    """Bytes of each microbatch in each chunk."""
    return [[u * UNIT * (c + 1) // chunks - u * UNIT * c // chunks for u in held] for c in range(chunks)]


def peak(pp: int, chunks: int, held: list[int], passes: int) -> int:
    """Most bytes that the first stage holds."""
    now = most = 0
    for operation in interleaved_operations(0, pp, chunks, len(held), passes):
        size = passes_of(held, chunks)[operation.chunk][operation.microbatch]
        now += size if operation.kind.value == "forward" else -size
        most = max(most, now)
    return most


def ahead(pp: int, chunks: int, count: int, passes: int) -> int:
    """Most microbatches that the first stage has taken from the encoder whenever it returns a gradient."""
    held, most = 0, 0
    for operation in interleaved_operations(0, pp, chunks, count, passes):
        if operation.chunk == 0:
            if operation.kind.value == "forward":
                held += 1
            else:
                most = max(most, held)
                held -= 1
    return most


def windows(held: list[int], budget: int, wanted: int) -> int:
    for number in range(min(wanted, len(held)), 1, -1):
        if all(sum(held[k : k + number]) <= budget for k in range(len(held) - number + 1)):
            return wanted if number == len(held) else number
    return 1


def expected(
    pp: int, chunks: int, count: int, memory: dict[str, int], units: dict[str, list[int]], generator: bool
) -> dict[str, list[int]] | None:
    """Word by word: as many passes as the schedule asks for and memory holds, not fewer than its lists need."""
    total, extra = count * chunks, 2 if generator else 0
    wanted = [min(n + extra, total) for n in interleaved_in_flight(pp, chunks).tolist()]
    for top in range(wanted[0], min((chunks - 1) * pp + 1, total) - 1, -1):
        taken = ahead(pp, chunks, count, top)
        fits = "llm" not in memory or peak(pp, chunks, units["llm"], top) <= memory["llm"] * UNIT + UNIT - 1
        encoder = windows(units["vit"], memory["vit"], count) if "vit" in memory else count
        if fits and ("vit" not in memory or encoder >= taken):
            most = min(ahead(pp, chunks, count, wanted[0]) + 1, count)
            found = {"vit": [min(most, encoder)], "llm": [min(n, top) for n in wanted]}
            return found | ({"dit": [1]} if generator else {})
    return None


@settings(max_examples=60)
@given(
    st.integers(1, 3),
    st.sampled_from([2, 3]),
    st.integers(1, 3),
    st.dictionaries(st.sampled_from(["vit", "llm"]), st.integers(8, 60)),
    st.booleans(),
    st.integers(0, 2**32 - 1),
)
def test_interleaved_stages_hold_what_loops_find(
    pp: int, chunks: int, rounds: int, memory: dict[str, int], generator: bool, seed: int
) -> None:
    count, draw = pp * rounds, np.random.default_rng(seed)
    units = {name: draw.integers(1, 9, count).tolist() for name in memory}
    held: dict[str, I64] = {name: np.array([row]) for name, row in units.items()}
    job = execution(pp, chunks, memory, generator)
    found = stages_in_flight(job, count, 0, held)
    wanted = expected(pp, chunks, count, memory, units, generator)
    if found is None:
        assert wanted is None
        least = min((chunks - 1) * pp + 1, count * chunks)
        fits = "llm" not in memory or peak(pp, chunks, units["llm"], least) <= memory["llm"] * UNIT + UNIT - 1
        assert too_small(job, count, held).name == ("vit" if fits else "llm")
        return
    assert {name: numbers.tolist() for name, numbers in found.held.items()} == wanted
    assert dict(found.chunks) == {"llm": chunks}
    assert [s.chunks for s in found.schedules(job)] == [1, chunks, 1][: len(job.modules)]
    free = stages_in_flight(execution(pp, chunks, {}, generator), count, 0, {})
    assert free is not None
    assert {name: numbers.tolist() for name, numbers in found.wanted.items()} == {
        name: numbers.tolist() for name, numbers in free.held.items()
    }
    if "llm" in memory:
        assert found.most["llm"] == max(found.held["llm"].tolist())


def test_passes_together_hold_what_their_microbatch_holds() -> None:
    memory = Memory(budget_bytes=100, unit_bytes=UNIT)
    units = np.array([[5, 0, 7], [1, 2, 4]])
    for chunks in (1, 2, 3, 4):
        found = interleaved_passes(memory, units, chunks)
        assert found.tolist() == [passes_of(row, chunks) for row in units.tolist()]
        assert (found.sum(axis=1) == UNIT * units).all()
