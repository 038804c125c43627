"""The planner as a library: samplers over a map-style data set."""

from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.data_loader import prepare_data_loader
from adapters.examples import ExampleRun, calm_and_killed, example
from adapters.whole_jobs import whole_job
from torch.utils.data import DataLoader, Dataset

from trainclient.adapters.loader_planner import LoaderPlanner, PlannedBatches, PlannedSamples, SampleSizes
from trainclient.stream.errors import StateError


def own_job(ranks: int, end: dict[str, int], **stream: Any) -> dict[str, Any]:
    return whole_job(ranks, end, **{"datasets": [{"name": "own"}], "seq_len": 512, "global_batch": 32, **stream})


def scattered_sizes(count: int, seed: int = 0) -> SampleSizes:
    """Texts and images of very unequal sizes, one sample in five without image, one in ten with two."""
    draw = np.random.default_rng(seed)
    tokens = np.clip(np.exp(draw.normal(3.5, 1, count)), 1, 300).astype(int).tolist()
    images = np.repeat([1, 0, 1, 2, 1], -(-count // 5))[:count].tolist()
    sides = iter(draw.integers(28, 200, (sum(images), 2)).tolist())
    return SampleSizes.of((t, [(*next(sides),) for _ in range(n)]) for t, n in zip(tokens, images, strict=True))


class Own(Dataset[int]):
    """A data set whose samples are their positions."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize("count", [400, pytest.param(70_000, marks=pytest.mark.long)])
def test_loaders_of_all_ranks_hold_every_sample_of_a_pass_once(count: int) -> None:
    sizes = scattered_sizes(count)
    end = {"epochs": 1}
    planners = [LoaderPlanner(sizes, own_job(4, end, global_batch=32 if count < 1000 else 2048)) for _ in range(2)]
    assert planners[0].plan(0).hash == planners[1].plan(0).hash, "every rank plans for itself"
    found, lengths = Counter[int](), set()
    for rank in range(4):
        loader = DataLoader(Own(count), batch_sampler=PlannedBatches(planners[0], rank, 4), collate_fn=list)
        batches = list(loader)
        lengths.add(len(batches))
        found.update(chain.from_iterable(batches))
    assert found == Counter(range(count))
    assert len(lengths) == 1, "no rank runs dry alone"


def example_job(ranks: int) -> dict[str, Any]:
    """A pass in 6 steps; in each microbatch all ranks have images or none has."""
    job = own_job(ranks, {"epochs": 1}, seq_len=128, global_batch=8)
    job["execution"]["modality_parity"] = True
    return job


@pytest.mark.long
@pytest.mark.timeout(900)
def test_killed_and_resumed_twice_once_with_another_number_of_processes(tmp_path: Path) -> None:
    """The example of the documentation: every sample once, and the parameters of a run that nobody disturbed."""
    script = example("SampleSizes.of")
    calm, killed = calm_and_killed(
        lambda folder: ExampleRun(script, None, None, folder, example_job), tmp_path, [0, 3, 5]
    )
    found, expected = (torch.load(run.out)["model"] for run in (killed, calm))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_a_sampler_has_the_same_samples_one_by_one() -> None:
    """Without packing, a loader's own batches of constant size are those of the plan."""
    planner = LoaderPlanner(scattered_sizes(300), own_job(2, {"steps": 4}, packing={"enabled": False}))
    size = planner.job.spec.execution.microbatch
    for rank in range(2):
        planned = list(PlannedBatches(planner, rank, 2))
        assert list(DataLoader(Own(300), sampler=PlannedSamples(planner, rank, 2), collate_fn=list)) == [
            [sample] for batch in planned for sample in batch
        ]
        assert {len(batch) for batch in planned} == {size}


def test_ranks_that_lack_images_are_told() -> None:
    """Without packing, where a wave has images on one rank alone."""
    job = own_job(2, {"steps": 6}, packing={"enabled": False})
    job["execution"]["modality_parity"] = True
    sizes = scattered_sizes(300)
    planner, images = LoaderPlanner(sizes, job), np.diff(sizes.image_offsets) > 0
    told = 0
    for step in range(planner.num_steps):
        for number, held in enumerate(zip(*(planner.batches(step, rank) for rank in range(2)), strict=True)):
            have = [bool(images[batch].any()) for batch in held]
            lacks = [planner.lacks_images(step, rank, number) for rank in range(2)]
            assert lacks == [any(have) and not own for own in have]
            told += sum(lacks)
    assert told


@pytest.mark.parametrize(("kind", "dispatch"), [("batch_sampler", False), ("batch_sampler", True), ("sampler", False)])
def test_loaders_that_would_be_shared_out_once_more(kind: str, dispatch: bool) -> None:
    """As accelerate does with all that it prepares in several processes."""
    planner = LoaderPlanner(scattered_sizes(100), own_job(2, {"steps": 1}))
    samplers = {"batch_sampler": PlannedBatches(planner, 0, 2), "sampler": PlannedSamples(planner, 0, 2)}
    loader = DataLoader(Own(100), **{kind: samplers[kind]})
    assert len(next(iter(loader)))
    options = {"num_processes": 2, "process_index": 0, "dispatch_batches": dispatch, "put_on_device": True}
    with pytest.raises(ValueError, match="out to ranks once more: leave the loader out of accelerate's prepare"):
        prepare_data_loader(loader, **options)


def test_how_many_batches_there_are_is_not_asked_for() -> None:
    """By whom torch's loader is asked; what only wonders gets no answer."""
    planner = LoaderPlanner(scattered_sizes(100), own_job(2, {"steps": 1}))
    batches, found = PlannedBatches(planner, 0, 2), PlannedSamples(planner, 0, 2)
    for loader in (DataLoader(Own(100), batch_sampler=batches), DataLoader(Own(100), sampler=found, batch_size=1)):
        with pytest.raises(TypeError, match=r"known step by step.*count the steps \(planner\.num_steps\)"):
            len(loader)
        assert list(loader)
    assert batches
    assert found
    assert list(chain.from_iterable(batches)) == list(found)


def test_batches_are_balanced() -> None:
    """Tokens of each rank in a step, largest over mean, beside samples dealt out in turn."""
    sizes = scattered_sizes(2000)
    planner = LoaderPlanner(sizes, own_job(4, {"steps": 10}))
    ours, dealt = [], []
    for step in range(10):
        plan = planner.plan(step)
        tokens = dict(zip(plan.samples.sample.tolist(), plan.samples.tokens.tolist(), strict=True))
        held = [[tokens[s] for b in planner.batches(step, rank) for s in b] for rank in range(4)]
        every = list(chain.from_iterable(held))
        ours.append(max(map(sum, held)) / (sum(every) / 4))
        dealt.append(max(sum(every[rank::4]) for rank in range(4)) / (sum(every) / 4))
    assert np.median(ours) < 1.03 < 1.08 < np.median(dealt)


def test_a_state_goes_on_with_other_ranks_and_refuses_other_data() -> None:
    sizes = scattered_sizes(300)
    two, three = (LoaderPlanner(sizes, own_job(ranks, {"steps": 6}, global_batch=24)) for ranks in (2, 3))
    step = three.step_of(two.state_dict(4))

    def held(planner: LoaderPlanner, ranks: int, step: int) -> list[int]:
        return sorted(s for rank in range(ranks) for b in PlannedBatches(planner, rank, ranks, step) for s in b)

    assert held(two, 2, 4) == held(three, 3, step)
    with pytest.raises(StateError, match="stream_id"):
        LoaderPlanner(scattered_sizes(300, seed=1), own_job(2, {"steps": 6}, global_batch=24)).step_of(
            two.state_dict(4)
        )
    with pytest.raises(StateError, match="step 7; this job has 0 to 6"):
        two.step_of(two.state_dict(7))


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        (([5, 5], [0, 1], [30], [30]), "2 samples, 2 offsets"),
        (([5], [0, 2], [30], [30]), "end at the number of images"),
        (([5], [0, 1], [0], [30]), "images without pixels"),
        (([-5], [0, 1], [30], [30]), "negative numbers of tokens"),
    ],
)
def test_sizes_that_contradict_themselves(sizes: tuple[list[int], ...], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        SampleSizes(*(np.array(column) for column in sizes))


def test_other_ranks_other_data_sets_and_samples_that_do_not_fit() -> None:
    sizes = scattered_sizes(100)
    planner = LoaderPlanner(sizes, own_job(2, {"steps": 1}))
    for rank, ranks in ((0, 1), (1, 4)):
        with pytest.raises(ValueError, match=f"rank {rank} of {ranks}, and module llm has dp 2: set its dp"):
            PlannedBatches(planner, rank, ranks)
    with pytest.raises(ValueError, match="no rank 2 of 2: number the processes from 0 to 1"):
        PlannedBatches(planner, 2, 2)
    assert LoaderPlanner(sizes, planner.job.text).job.job_id == planner.job.job_id
    with pytest.raises(ValueError, match="other sizes than these 99 samples: hand all ranks the same data"):
        LoaderPlanner(scattered_sizes(99), planner.job.text)
    with pytest.raises(ValueError, match="one entry, such as"):
        LoaderPlanner(sizes, whole_job(2, {"steps": 1}))
    split = {"datasets": [{"name": "own", "documents": {}}]}
    for stream in (split, {**split, "packing": {"max_images": 4}}):
        with pytest.raises(ValueError, match=r"the job splits documents, or .* leave stream.datasets\[0\].documents"):
            LoaderPlanner(sizes, own_job(2, {"steps": 1}, **stream))
    many = SampleSizes.of([(5, [(300, 300)] * 40)])
    with pytest.raises(ValueError, match="samples from 0 on"):
        LoaderPlanner(many, own_job(1, {"steps": 1}))
