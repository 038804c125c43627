"""Receives that are posted ahead: no process waits for ever, and no send waits for its receive."""

import random
from dataclasses import replace
from functools import cache
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from program.deadlocks import Act, Pair, Transfer, acts, stuck
from program.runtime_cases import Degrees, job_data
from topology.test_process_grid import parsed

from dataserver.planning.layouts.interface import layout_of
from dataserver.planning.layouts.pipelined.interleaving import stages_in_flight
from trainclient.program.step_programs import StepPrograms
from trainclient.topology.process_grid import Topology


def step(degrees: Degrees, microbatches: int, extra: int = 0, **options: Any) -> tuple[StepPrograms, Topology]:
    """What all stages do in a step, and which they are."""
    data = job_data(degrees, extra_in_flight=extra, global_batch=degrees.backbone * microbatches, **options)
    spec = parsed(data).spec
    execution = spec.execution
    held = stages_in_flight(execution, microbatches, extra, {})
    assert held is not None
    programs = layout_of(execution).programs(execution, held.schedules(execution), microbatches)
    return StepPrograms(programs, microbatches), Topology.of(spec)


def lists(programs: StepPrograms, topology: Topology, *, ahead: bool = True) -> list[list[Act]]:
    return [acts(programs, topology, rank, ahead=ahead) for rank in range(topology.world_size)]


def dense(topology: Topology) -> Any:
    """Every rank sends to every rank that it may send to."""
    edges = {str(edge): topology.pairs(edge) for edge in topology.edges}

    @cache
    def pairs(transfer: Transfer) -> tuple[Pair, ...]:
        found = edges[transfer.edge]
        return tuple((b, a) for a, b in found) if transfer.back else found

    return pairs


def sparse(topology: Topology, seed: int) -> Any:
    """Between modules some ranks share no rows, other ones in every microbatch."""
    all_of, straight = dense(topology), {str(edge) for edge in topology.edges if edge.is_straight}

    @cache
    def pairs(transfer: Transfer) -> tuple[Pair, ...]:
        found = all_of(transfer)
        if transfer.edge in straight:
            return found
        keys = ((pair, f"{seed} {transfer.edge} {transfer.microbatch} {sorted(pair)}") for pair in found)
        return tuple(pair for pair, key in keys if random.Random(key).random() < 0.5)

    return pairs


def by_edge(transfer: Transfer) -> object:
    """As the trainer has them: one for each direction of each edge."""
    return transfer.edge, transfer.back


@st.composite
def steps(draw: st.DrawFn) -> tuple[StepPrograms, Topology]:
    """Those of random jobs."""
    stages = draw(st.sampled_from([1, 2, 4]))
    chunks = draw(st.sampled_from([1, 1, 2, 3]))
    encoder, generator = draw(st.integers(0, 3)), draw(st.integers(1, 2))
    frozen = draw(st.sets(st.sampled_from(["vit", "llm", "dit", "vit_more", "dit_more"])))
    seconds = draw(st.integers(0, 2)) if encoder else 0, draw(st.integers(0, 2))
    backbone, marked = draw(st.integers(1, 3)), tuple(sorted(frozen))
    degrees = Degrees(encoder, backbone, stages, generator, chunks, *seconds, marked, sp=draw(st.integers(1, 2)))
    microbatches = stages * draw(st.integers(1, 4)) if chunks > 1 else draw(st.integers(1, 9))
    schedule = {} if chunks > 1 else {"schedule": draw(st.sampled_from(["1f1b", "gpipe"]))}
    extra = draw(st.integers(0, 3)) if schedule.get("schedule") == "1f1b" else 0
    return step(degrees, microbatches, extra, layout=schedule)


@settings(max_examples=25, deadline=None)
@given(found=steps(), seed=st.integers(0, 99))
def test_no_process_waits_for_ever(found: tuple[StepPrograms, Topology], seed: int) -> None:
    programs, topology = found
    for ahead in (True, False):
        for pairs in (dense(topology), sparse(topology, seed)):
            found_lists = lists(programs, topology, ahead=ahead)
            assert stuck(found_lists, pairs, by_edge, sends_block=False) == []
            behind_headers = list(map(when_needed, found_lists))  # as on GPUs
            assert stuck(behind_headers, pairs, by_edge, sends_block=False) == []


@settings(max_examples=25, deadline=None)
@given(found=steps(), seed=st.integers(0, 99))
def test_not_even_if_nothing_is_kept_between_processes_and_sends_wait(
    found: tuple[StepPrograms, Topology], seed: int
) -> None:
    programs, topology = found
    for pairs in (dense(topology), sparse(topology, seed)):
        assert stuck(lists(programs, topology), pairs, by_edge, sends_block=True) == []


def when_needed(found: list[Act]) -> list[Act]:
    """The same list, with receives posted by those who wait for them."""
    kept = [act for act in found if act.sends or not act.begins]
    return [a for act in kept for a in ([act] if act.begins else [replace(act, begins=True), act])]


def test_the_model_finds_circles() -> None:
    """Sends that wait for receives which nobody posts yet; and communicators in which something else is before."""
    for degrees, change, communicator, sends_block in (
        (Degrees(1, 1, 2, 1), when_needed, by_edge, True),
        (Degrees(1, 1, 2, 1), list, lambda t: t.edge, False),
        (Degrees(1, 1, 2, 1, chunks=2), list, lambda t: t.back, False),
    ):
        programs, topology = step(degrees, 4)
        found = [change(own) for own in lists(programs, topology)]
        assert stuck(found, dense(topology), by_edge, sends_block=False) == []
        assert len(stuck(found, dense(topology), communicator, sends_block=sends_block)) > 1  # type: ignore[arg-type]
