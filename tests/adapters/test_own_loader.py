"""The planner as a library: samplers over a map-style data set."""

from collections import Counter
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml
from adapters.examples import example
from adapters.whole_jobs import whole_job
from torch.utils.data import DataLoader, Dataset

from trainclient.adapters.own_loader import LoaderPlanner, PlannedBatches, SampleSizes
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
    end = {"passes": 1}
    planners = [LoaderPlanner(sizes, own_job(4, end, global_batch=32 if count < 1000 else 2048)) for _ in range(2)]
    assert planners[0].plan(0).hash == planners[1].plan(0).hash, "every rank plans for itself"
    found, lengths = Counter[int](), set()
    for rank in range(4):
        loader = DataLoader(Own(count), batch_sampler=PlannedBatches(planners[0], rank), collate_fn=list)
        batches = list(loader)
        lengths.add(len(batches))
        found.update(chain.from_iterable(batches))
    assert found == Counter(range(count))
    assert len(lengths) == 1, "no rank runs dry alone"


def test_the_example_of_the_documentation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text(yaml.safe_dump(own_job(2, {"passes": 1})))
    draw = np.random.default_rng(0)
    samples = [([number] * 9, [SimpleNamespace(size=(*draw.integers(28, 200, 2).tolist(),))]) for number in range(100)]
    found = Counter[int]()
    for rank in range(2):
        names: dict[str, Any] = {"samples": samples, "rank": rank, "start_step": 0, "collate": list}
        exec(example("SampleSizes.of"), names)
        found.update(ids[0] for batch in names["loader"] for ids, _ in batch)
    assert found == Counter(range(100))


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
        return sorted(s for rank in range(ranks) for b in PlannedBatches(planner, rank, step) for s in b)

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
    with pytest.raises(ValueError, match="rank 2 does not exist; dp of module llm is 2"):
        PlannedBatches(LoaderPlanner(sizes, own_job(2, {"steps": 1})), 2)
    with pytest.raises(ValueError, match="one entry, such as"):
        LoaderPlanner(sizes, whole_job(2, {"steps": 1}))
    many = SampleSizes.of([(5, [(300, 300)] * 40)])
    with pytest.raises(ValueError, match="samples from 0 on"):
        LoaderPlanner(many, own_job(1, {"steps": 1}))
