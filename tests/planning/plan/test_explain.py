"""What was planned can be explained: the baseline plans every step, however little memory there is."""

from builders.layouts import STEPS
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dataserver.planning.job.identity import Job
from dataserver.planning.planner import explain, plan_step
from dataserver.planning.stream.samples import StepSamples
from dataserver.planning.stream.sizing import MicrobatchTooLargeError, SampleTooLargeError


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(STEPS)).flatmap(STEPS.__getitem__))
def test_every_planned_step_can_be_explained(step: tuple[Job, StepSamples]) -> None:
    job, samples = step
    try:
        plan = plan_step(job, 3, samples)
    except (SampleTooLargeError, MicrobatchTooLargeError):
        assume(False)
    summary = explain(job, plan)
    assert summary.plan is plan
    assert summary.bound_ns <= summary.after.makespan_ns
    assert sorted(summary.loads_before) == sorted(summary.loads_after)
