"""Several encoders and generators, each for datasets of its own, over a real server."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from disttrain.v1 import data_service_pb2 as pb
from disttrain.v1 import microbatch_pb2
from disttrain.v1.plan_pb2 import TASK_GENERATION, TASK_UNDERSTANDING
from serving.harness import TIMEOUT_S, Running, job_data, running, tensors

from dataserver.dataset import Dataset
from dataserver.images import ImageShape, decode_patches
from dataserver.planning.job.fields import Sizing
from dataserver.planning.stream.samples import ROW_BITS

DATASETS = ("pairs", "docs")
DEGREES = {"vit-docs": 1, "vit": 2, "llm": 2, "gen": 2, "gen-docs": 1}
OWN = {"vit-docs": "docs", "vit": "pairs", "gen": "pairs", "gen-docs": "docs"}
STEPS = 3
SIZING = Sizing(max_patches=256)

Image = tuple[int, int, int, int]
"""Dataset, pass, sample, number of the image within the sample."""


def modules(**changes: Any) -> list[dict[str, Any]]:
    return [
        {"name": "vit-docs", "kind": "encoder", "datasets": ["docs"], **changes},
        {"name": "vit", "kind": "encoder", "dp": 2, **changes},
        {"name": "llm", "kind": "backbone", "dp": 2, "pp": 2},
        {"name": "gen", "kind": "generator", "dp": 2, "datasets": ["pairs"], **changes},
        {"name": "gen-docs", "kind": "generator", "datasets": ["docs"], **changes},
    ]


class Views:
    """Every view of a job, decoded."""

    def __init__(self, server: Running, data: dict[str, Any]) -> None:
        self.datasets = server.catalog.datasets
        self.job_id = server.create(data).job_id
        self.of: dict[tuple[str, int, int, int], tuple[Any, dict[str, np.ndarray]]] = {}
        for module, dp in DEGREES.items():
            for rank in range(dp):
                for header, body in server.read(self.job_id, module, rank).microbatches:
                    self.of[module, rank, header.step, header.microbatch] = header, tensors(header, body)
        self.plans = [
            server.stub.GetPlan(pb.GetPlanRequest(job_id=self.job_id, step=step), timeout=TIMEOUT_S).plan
            for step in range(STEPS)
        ]

    def images(self, header: microbatch_pb2.MicrobatchHeader) -> list[Image]:
        items = header.items
        return list(zip(items.dataset, items.epoch, items.sample, items.image, strict=True))

    def planned(self, step: int, task: int) -> list[Image]:
        """The images of all samples of a task."""
        s = self.plans[step].samples
        samples = zip(s.dataset, s.epoch, s.sample, s.task, s.images, strict=True)
        return [(d, p, n, i) for d, p, n, t, count in samples if t == task for i in range(count)]

    def in_step(self, step: int, module: str) -> list[tuple[int, int, Any, dict[str, np.ndarray]]]:
        """Rank, microbatch, header and tensors of every view of a module."""
        return [(r, m, *found) for (name, r, s, m), found in self.of.items() if (name, s) == (module, step)]


@pytest.fixture(scope="module", params=["lpt", "none", "padded"])
def views(datasets: dict[str, Path], request: pytest.FixtureRequest) -> Views:
    changes = {"padded": True} if request.param == "padded" else {"balance": request.param}
    data = job_data(modules=modules(**changes), end={"steps": STEPS}, microbatch=2, generation={"ratio": "0.5"})
    with running(datasets) as server:
        return Views(server, data)


def test_every_image_is_served_once_by_the_module_of_its_dataset_with_its_pixels(views: Views) -> None:
    for step in range(STEPS):
        served: dict[str, list[Image]] = {}
        for module in OWN:
            for _, _, header, found in views.in_step(step, module):
                served.setdefault(module, []).extend(views.images(header))
                assert set(header.items.validity) <= {microbatch_pb2.VALIDITY_VALID}
                for n, image in enumerate(views.images(header)):
                    assert DATASETS[image[0]] == OWN[module]
                    first, last = found["cu_patches"][n : n + 2]
                    expected = reference(views.datasets[OWN[module]], image, found["grid"][n])
                    assert np.array_equal(found["patches"][first:last], expected)
        assert sorted(served["vit"] + served["vit-docs"]) == sorted(views.planned(step, TASK_UNDERSTANDING))
        assert sorted(served["gen"] + served["gen-docs"]) == sorted(views.planned(step, TASK_GENERATION))
        assert served["vit"]
        assert served["vit-docs"]


def reference(dataset: Dataset, image: Image, grid: np.ndarray) -> np.ndarray:
    """The patches of an image, decoded here."""
    shard, row = divmod(image[2], 1 << ROW_BITS)
    ref = dataset.shards[shard].image(row, image[3])
    rows, columns = int(grid[0]), int(grid[1])
    out = np.empty((rows * columns, 14 * 14 * 3), np.uint8)
    assert decode_patches(
        dataset.read(ref), ImageShape(ref.width, ref.height, ref.orientation, rows, columns), SIZING, out
    )
    return out


def test_the_routings_of_all_modules_fill_every_slot_of_the_backbone_once(views: Views) -> None:
    """Slot j of a microbatch gets the row of that image that stands there, from whichever module has it."""
    generated = 0
    for step in range(STEPS):
        s = views.plans[step].samples
        task_of = dict(zip(zip(s.dataset, s.epoch, s.sample, strict=True), s.task, strict=True))
        images_of = dict(zip(zip(s.dataset, s.epoch, s.sample, strict=True), s.images, strict=True))
        grids = {
            image: found["grid"][n].tolist()
            for module in ("vit", "vit-docs")
            for _, _, header, found in views.in_step(step, module)
            for n, image in enumerate(views.images(header))
        }
        for rank, microbatch, header, found in views.in_step(step, "llm"):
            items = list(zip(header.items.dataset, header.items.epoch, header.items.sample, strict=True))
            understood = [(*k, i) for k in items if task_of[k] == TASK_UNDERSTANDING for i in range(images_of[k])]
            targets = [(*k, 0) for k in items if task_of[k] == TASK_GENERATION]
            slots = [(image, row) for image in understood for row in range(grids[image][0] * grids[image][1] // 4)]
            queries = [(image, row) for image in targets for row in range(64)]
            assert len(found["embedding_slots"]) == len(slots)
            assert len(found["condition_slots"]) == len(queries)
            assert routed(views, step, rank, microbatch, header, ("vit-docs", "vit"), into=True) == dict(
                enumerate(slots)
            )
            assert routed(views, step, rank, microbatch, header, ("gen", "gen-docs"), into=False) == dict(
                enumerate(queries)
            )
            generated += len(targets)
    assert generated


def routed(
    views: Views, step: int, rank: int, microbatch: int, header: Any, names: tuple[str, ...], into: bool
) -> dict[int, tuple[Image, int]]:
    """For each row of the backbone's embeddings (conditions): the image and its row, as the routings say."""
    filled: dict[int, tuple[Image, int]] = {}
    for routing in header.routings:
        module = routing.source_module if into else routing.target_module
        if module not in names:
            continue
        here, there = (
            (routing.target_start, routing.source_start) if into else (routing.source_start, routing.target_start)
        )
        ranks = routing.source_rank if into else routing.target_rank
        assert set(routing.target_rank if into else routing.source_rank) <= {rank}
        for first, other, other_rank, rows in zip(here, there, ranks, routing.rows, strict=True):
            theirs, found = views.of[module, other_rank, step, microbatch]
            sizes = np.diff(found["cu_patches"]) // 4 if into else np.diff(found["condition_offsets"])
            starts = (np.cumsum(sizes) - sizes).tolist()
            image = views.images(theirs)[starts.index(other)]
            assert sizes[starts.index(other)] == rows
            for row in range(rows):
                assert first + row not in filled
                filled[first + row] = image, row
    return dict(sorted(filled.items()))


def test_modules_know_only_their_own_routing(views: Views) -> None:
    for (module, rank, _, _), (header, _) in views.of.items():
        ends = [(r.source_module, r.target_module) for r in header.routings]
        if module == "llm":
            assert ends == [("vit-docs", "llm"), ("vit", "llm"), ("llm", "gen"), ("llm", "gen-docs")]
        else:
            assert ends == [(module, "llm") if module.startswith("vit") else ("llm", module)]
            own = header.routings[0].source_rank if module.startswith("vit") else header.routings[0].target_rank
            assert set(own) <= {rank}
        assert {s.module for s in header.schedules} == set(DEGREES)
