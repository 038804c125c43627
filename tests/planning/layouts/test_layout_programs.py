"""The programs that a header stands for are those that the simulator scores, in every layout."""

from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module

import numpy as np
import pytest
from builders.jobs import LAYOUT_KINDS
from builders.layouts import STEPS
from builders.pipelined import Step
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from dataserver.planning.job.identity import Job
from dataserver.planning.job.spec import Execution
from dataserver.planning.layouts.interface import layout_of
from dataserver.planning.plan.plan import ModuleSchedule, StepPlan
from dataserver.planning.planner import plan_step
from dataserver.planning.simulation import (
    FORWARD,
    Operation,
    OperationKind,
    Operations,
    PipelineDeadlockError,
    Program,
)
from dataserver.planning.stream.sizing import MicrobatchTooLargeError, SampleTooLargeError


def planned(step: Step) -> StepPlan:
    try:
        return plan_step(step[0], 0, step[1])
    except (MicrobatchTooLargeError, SampleTooLargeError):
        assume(False)
        raise


def programs_of(execution: Execution, plan: StepPlan) -> tuple[Program, ...]:
    return layout_of(execution).programs(execution, plan.schedules, plan.num_microbatches)


@pytest.mark.parametrize("kind", LAYOUT_KINDS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_programs_of_a_step(kind: str, data: st.DataObject) -> None:
    step = data.draw(STEPS[kind])
    (job, _), plan = step, planned(step)
    execution = job.spec.execution
    assert execution.layout.kind == kind
    programs = programs_of(execution, plan)
    check_the_simulator_runs_them(job, plan, programs)
    check_every_pass_is_there_once(execution, plan.num_microbatches, programs)


def check_the_simulator_runs_them(job: Job, plan: StepPlan, programs: tuple[Program, ...]) -> None:
    found = layout_of(job.spec.execution).timeline(job.spec, plan)
    assert [list(p.operations) for p in programs] == [list(o) for o in found.pipeline.operations]
    stages = [programs[s] for s in found.pipeline.stage.tolist()]
    assert [(node.modules, node.stage) for node in found.nodes] == [(p.modules, p.stage) for p in stages]


def check_every_pass_is_there_once(execution: Execution, num_microbatches: int, programs: tuple[Program, ...]) -> None:
    """Every stage and chunk runs each microbatch forward once, and backward once and later, unless it has none.

    Its parameters are gathered before all that, and its gradients summed behind it, unless it is frozen.
    """
    stages: dict[str, list[int]] = {m.name: [] for m in execution.modules}
    for program in programs:
        operations = list(program.operations)
        found = {(o.kind, o.microbatch, o.chunk): n for n, o in enumerate(operations) if o.computes}
        assert len(found) == sum(o.computes for o in operations)
        for chunk, name in enumerate(program.modules):
            forward, backward = (
                [found.get((k, m, chunk)) for m in range(num_microbatches)]
                for k in (OperationKind.FORWARD, OperationKind.BACKWARD)
            )
            assert None not in forward
            if None in backward:
                assert set(backward) == {None}
                assert execution.module(name).cost.backward_percent == 0
            else:
                assert all(f < b for f, b in zip(forward, backward, strict=True))
            own = [o.kind for o in operations if o.chunk == chunk]
            assert (own[0], own.count(OperationKind.UNSHARD)) == (OperationKind.UNSHARD, 1)
            summed = [] if execution.module(name).frozen else [OperationKind.REDUCE]
            assert [k for k in own if k is OperationKind.REDUCE] == summed == own[len(own) - len(summed) :]
        for name in set(program.modules):
            stages[name].append(program.stage)
    assert stages == {m.name: list(range(m.pp)) for m in execution.modules}


@pytest.mark.parametrize("kind", LAYOUT_KINDS)
@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_the_timeline_breaks_with_the_programs(kind: str, data: st.DataObject, monkeypatch: pytest.MonkeyPatch) -> None:
    """A timeline that built lists of its own would not notice that the programs are wrong."""
    step = data.draw(STEPS[kind])
    (job, _), plan = step, planned(step)
    execution = job.spec.execution
    module = import_module(f"dataserver.planning.layouts.{kind}.timeline")
    name = "wave_programs" if kind == "grouped" else "programs"
    made = getattr(module, name)
    assert made is layout_of(execution).programs

    def without_the_first_forward(
        execution: Execution, schedules: Sequence[ModuleSchedule], num_microbatches: int
    ) -> tuple[Program, ...]:
        first, *others = made(execution, schedules, num_microbatches)
        operations = first.operations
        kept = np.arange(len(operations)) != int(np.argmax(operations.kind == FORWARD))
        broken = Operations(operations.kind[kept], operations.microbatch[kept], operations.chunk[kept])
        return (replace(first, operations=broken), *others)

    whole = layout_of(execution).timeline(job.spec, plan)
    with monkeypatch.context() as patched:
        patched.setattr(module, name, without_the_first_forward)
        try:
            broken = layout_of(execution).timeline(job.spec, plan)
        except (ValueError, PipelineDeadlockError):
            return
    assert Operation(OperationKind.FORWARD, 0, 0) not in list(broken.pipeline.operations[0])
    assert len(broken.pipeline.operations[0]) == len(whole.pipeline.operations[0]) - 1
