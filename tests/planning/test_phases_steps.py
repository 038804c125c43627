"""The phases of a job with colocated modules."""

from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning.builders import job_data, make_job, make_samples

from dataserver.planning.costs import forward_ns
from dataserver.planning.identity import Job, parse_job
from dataserver.planning.jobspec import ModuleKind
from dataserver.planning.packing import best_fit_decreasing
from dataserver.planning.phases import Link, Phase, PhaseOptions, arrange_phases, colocated_phases
from dataserver.planning.samples import StepSamples, Task

BYTES = 1_024
NODE = np.arange(4) // 2


def colocated_job(generator: bool = True) -> Job:
    stream = {"seq_len": 900, "global_batch": 64, "sizing": {"max_patches": 256}, "generation": {"query_tokens": 16}}
    stream["generation"]["ratio"] = "0.4" if generator else "0"  # type: ignore[index]
    return make_job(stream=stream, encoder=4, backbone=(4, 1), generator=4 * generator)


def step(seed: int = 0, generator: bool = True, num_samples: int = 60) -> tuple[Job, StepSamples]:
    job = colocated_job(generator)
    return job, make_samples(job, num_samples, seed, max_images=3)


@given(st.integers(0, 2**32), st.booleans(), st.booleans())
@settings(max_examples=30)
def test_phases_hold_what_the_step_holds(seed: int, generator: bool, packed: bool) -> None:
    job, samples = step(seed, generator)
    sequence = best_fit_decreasing(samples.tokens, 900) if packed else np.arange(len(samples))
    phases, links = colocated_phases(job.spec, samples, BYTES, sequence if packed else None)
    assert [p.name for p in phases] == ["vit", "llm", "dit"][: 2 + generator]
    understood = samples.task[samples.image_sample] == Task.UNDERSTANDING
    for phase, module in zip(phases, job.spec.execution.modules, strict=True):
        assert phase.constant_ns == module.cost.microbatch_ns
        if module.kind is ModuleKind.BACKBONE:
            loads = forward_ns(module.cost, samples.tokens)
            expected = [int(loads[sequence == s].sum()) for s in range(int(sequence.max()) + 1)]
            assert sequence[phase.sample].tolist() == list(range(len(expected)))
        else:
            images = np.flatnonzero(understood == (module.kind is ModuleKind.ENCODER))
            expected = forward_ns(module.cost, samples.patches[images]).tolist()
            assert phase.sample.tolist() == samples.image_sample[images].tolist()
        assert phase.loads.tolist() == expected
    assert links[0].target_item.tolist() == sequence[samples.image_sample[understood]].tolist()
    assert links[0].rows.tolist() == (samples.patches[understood] // 4).tolist()
    assert links[0].source_item.tolist() == list(range(int(understood.sum())))
    if generator:
        assert (links[1].source, links[1].target) == ("llm", "dit")
        assert links[1].source_item.tolist() == sequence[samples.image_sample[~understood]].tolist()
        assert set(links[1].rows.tolist()) == {16}


def test_phases_are_balanced_each_for_itself() -> None:
    """Far closer to its bound than the backbone's arrangement would leave the encoder."""
    job, samples = step(num_samples=400)
    phases, links = colocated_phases(job.spec, samples, BYTES)
    plan = arrange_phases(phases, links, NODE)
    for arrangement in plan.arrangements:
        assert int(arrangement.loads.max()) * 1_000 <= arrangement.bound_ns * 1_001
    vit, backbone = phases[0], plan.arrangement("llm").places
    beside = vit.rank_loads(backbone.rank[links[0].target_item], 4)
    assert int(beside.max()) * 100 > plan.arrangement("vit").bound_ns * 103
    assert plan.bytes_between_nodes < plan.identity_bytes


def test_another_encoder_is_one_more_phase_and_link() -> None:
    job, samples = step(generator=False)
    phases, links = colocated_phases(job.spec, samples, BYTES)
    frames = np.random.default_rng(1).integers(10, 1_500, 50)
    clip_sample = np.sort(np.random.default_rng(2).integers(0, len(samples), 50))
    audio = Phase("whisper", forward_ns(job.spec.execution.modules[0].cost, frames), clip_sample, padded=True)
    link = Link("whisper", "llm", np.arange(50), clip_sample, frames // 4, BYTES)
    plan = arrange_phases((*phases, audio), (*links, link), NODE)
    alone = arrange_phases(phases, links, NODE)
    assert sorted(plan.arrangement("vit").loads.tolist()) == sorted(alone.arrangement("vit").loads.tolist())
    loads = plan.arrangement("whisper").loads
    assert int(loads.max()) == plan.arrangement("whisper").bound_ns
    assert plan.routing("whisper", "llm").routing.rows.sum() == (frames // 4).sum()


def test_options() -> None:
    job, samples = step(generator=False)
    options = {
        "vit": PhaseOptions(equal_counts=True, max_size=2**20),
        "llm": PhaseOptions(padded=True, max_size=2**20),
    }
    phases, _ = colocated_phases(job.spec, samples, BYTES, options=options)
    assert [(p.padded, p.equal_counts) for p in phases] == [(False, True), (True, False)]
    for phase, sizes in zip(phases, (samples.patches, samples.tokens), strict=True):
        assert phase.memory is not None
        assert (phase.memory.need.tolist(), phase.memory.cap) == (sizes.tolist(), 2**20)


def test_a_sample_that_fits_no_rank_is_named() -> None:
    job, samples = step(generator=False)
    worst = int(samples.tokens.argmax())
    phases, links = colocated_phases(job.spec, samples, BYTES, options={"llm": PhaseOptions(max_size=300)})
    message = (
        f"phase llm: item {worst} of sample {worst} alone needs {samples.tokens[worst]} of memory, but a rank has 300"
    )
    with pytest.raises(ValueError, match=message):
        arrange_phases(phases, links, NODE)


@pytest.mark.parametrize("degrees", [{"encoder": 2, "backbone": (4, 1)}, {"encoder": 4, "backbone": (4, 2)}])
def test_modules_that_are_not_colocated_are_refused(degrees: Mapping[str, object]) -> None:
    job = parse_job(job_data(**degrees))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"colocated modules need the same degrees and pp 1"):
        colocated_phases(job.spec, make_samples(job, 4), BYTES)


def test_refusals() -> None:
    job, samples = step(generator=False, num_samples=4)
    with pytest.raises(ValueError, match=r"options for \['dit'\]; the job has modules \['vit', 'llm'\]"):
        colocated_phases(job.spec, samples, BYTES, options={"dit": PhaseOptions()})
    for sequence in ([0, 1, 2], [0, 1, 3, 3], [-1, 0, 1, 2]):
        with pytest.raises(ValueError, match="numbered from 0 without gaps"):
            colocated_phases(job.spec, samples, BYTES, np.array(sequence))
    with pytest.raises(ValueError, match="pad or pack, not both"):
        colocated_phases(job.spec, samples, BYTES, np.array([0, 0, 1, 1]), {"llm": PhaseOptions(padded=True)})


def test_a_step_without_samples() -> None:
    job, samples = step(num_samples=0)
    phases, links = colocated_phases(job.spec, samples, BYTES)
    plan = arrange_phases(phases, links, NODE)
    for phase, arrangement in zip(phases, plan.arrangements, strict=True):
        assert arrangement.loads.tolist() == [phase.constant_ns] * 4
    assert plan.bytes_between_nodes == plan.identity_bytes == 0
