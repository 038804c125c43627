"""What comes of one number of microbatches of a pipelined step, and how compared plans are ranked and shown."""

from dataclasses import dataclass

import numpy as np
from builders.jobs import job_data
from builders.samples import make_samples

from dataserver.planning.job.identity import Job, parse_job
from dataserver.planning.layouts.pipelined.attempts import Attempt, attempt, search
from dataserver.planning.layouts.pipelined.packed import PackedStep
from dataserver.planning.layouts.shared.candidates import fastest, ranked, shown
from dataserver.planning.plan.plan import Candidate
from dataserver.planning.planner import plan_step
from dataserver.planning.stream.samples import StepSamples
from dataserver.planning.stream.sizing import shard_table, size_samples


def job_with(units: dict[str, int], **layout: str) -> Job:
    """Two encoder and two backbone ranks, with memory for so many tokens or patches of some modules."""
    data = job_data(encoder=2, backbone=(2, 2), stream={"global_batch": 8, "packing": {"enabled": False}})
    for module in data["execution"]["modules"]:
        if module["name"] in units:
            module["memory"] = {"budget_bytes": units[module["name"]], "unit_bytes": 1}
    data["execution"]["layout"] = {"kind": "pipelined", **layout}
    return parse_job(data)


def alone(job: Job, samples: StepSamples, num_microbatches: int) -> Attempt:
    """Every sample a sequence of its own."""
    return attempt(PackedStep(job, 3, samples, np.arange(len(samples)), num_microbatches))


def biggest_images(samples: StepSamples) -> int:
    """Patches of the sample that has most."""
    patches = np.zeros(len(samples), np.int64)
    np.add.at(patches, samples.image_sample, samples.patches)
    return int(patches.max())


def test_an_attempt_without_limits_lacks_nothing() -> None:
    job = job_with({}, order="disttrain")
    samples = make_samples(job, 8)
    made = alone(job, samples, 4)
    assert (made.shortfall, made.starts.is_hopeless, made.is_short, made.is_alone) == (None, False, False, True)
    assert made.num_sequences == 8
    assert {c.num_microbatches for c in made.candidates} == {4}
    assert made.fastest_ns == min(c.makespan_ns for c in made.candidates)
    assert search(made, 8) == ()


def test_a_sequence_that_nothing_holds_is_hopeless_and_names_the_module() -> None:
    samples = make_samples(job_with({}), 8)
    for name, most in {"llm": int(samples.tokens.max()), "vit": biggest_images(samples) // 2}.items():
        made = alone(job_with({name: most - 1}), samples, 8)
        assert made.starts.is_hopeless
        assert made.shortfall is not None
        assert made.shortfall.name == name
        assert made.candidates == search(made, 8) == ()


def test_too_few_microbatches_name_the_module_that_more_of_them_satisfy() -> None:
    samples = make_samples(job_with({}), 16, max_images=3)
    job = job_with({"vit": biggest_images(samples)})
    coarse = attempt(PackedStep(job, 3, samples, np.zeros(16, np.int64), 1))  # one sequence has all images
    assert coarse.shortfall is not None
    assert coarse.shortfall.name == "vit"
    assert not coarse.candidates
    assert alone(job, samples, 16).candidates


def test_images_that_no_spread_fits_name_their_module() -> None:
    """Three images of 5 take no more than two ranks with room for 8 have together, yet two of them must share one."""
    sides = np.full(3, 300, np.int32)
    stream = job_with({}).stream
    table = shard_table(stream, np.zeros(1, np.int64), np.array([10]), np.array([0, 3]), sides, sides)
    samples = size_samples(stream, 0, 0, np.zeros(1, np.uint64), table)
    made = alone(job_with({"vit": int(samples.patches[0]) * 8 // 5}), samples, 1)
    assert made.starts.shortfall is None
    assert made.shortfall is not None
    assert made.shortfall.name == "vit"
    assert not made.candidates


def test_a_search_starts_from_placements_that_memory_holds() -> None:
    job = job_with({"llm": 600})
    samples = make_samples(job, 8)
    made = alone(job, samples, 4)
    found = search(made, 8)
    assert {c.name.partition(",")[0] for c in found} == {"search"}
    assert min(c.makespan_ns for c in found) <= made.fastest_ns
    assert fastest([*made.candidates, *found]).makespan_ns == plan_step(job, 3, samples).candidates[0].makespan_ns


@dataclass(frozen=True)
class Named:
    name: str
    makespan_ns: int


def test_ranking_keeps_the_order_of_equals() -> None:
    plans = [Named("a", 3), Named("b", 1), Named("c", 3), Named("d", 1)]
    assert [p.name for p in ranked(plans)] == ["b", "d", "a", "c"]
    assert fastest(plans).name == "b"
    assert shown(ranked(plans))[0] == Candidate("b", 1)


def test_a_single_plan_was_not_compared() -> None:
    assert shown([Named("a", 3)]) == ()
