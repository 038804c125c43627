"""How full the sequences of a plan are."""

from builders.jobs import job_data
from builders.samples import make_samples

from dataserver.planning.job.identity import parse_job
from dataserver.planning.layouts.shared.sequences import empty_percent, fill_percent
from dataserver.planning.planner import plan_step


def test_slots_are_those_of_all_microbatches_of_all_ranks() -> None:
    """Five samples, each a sequence, of two ranks with two microbatches of two."""
    stream = {"global_batch": 8, "packing": {"enabled": False}}
    layout = {"kind": "pipelined", "fewest_microbatches": True}
    job = parse_job(job_data(stream=stream, execution={"microbatch": 2, "layout": layout}, backbone=(2, 1)))
    plan = plan_step(job, 0, make_samples(job, 5))
    assert empty_percent(job, plan) == {"empty_sequences_percent": 37.5}
    assert empty_percent(job, plan_step(job, 0, make_samples(job, 0))) == {"empty_sequences_percent": 100.0}


def test_a_step_without_samples_fills_nothing() -> None:
    stream = {"global_batch": 8, "seq_len": 512, "packing": {"enabled": True}}
    job = parse_job(job_data(stream=stream))
    assert fill_percent(job, plan_step(job, 0, make_samples(job, 0))) == {"fill_percent": 0.0}
