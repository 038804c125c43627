"""A colocated job over a real server: what its ranks hand to each other, carried out with pixels for embeddings."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from disttrain.v1 import data_service_pb2 as pb
from disttrain.v1 import microbatch_pb2
from disttrain.v1.plan_pb2 import TASK_GENERATION
from serving.harness import TIMEOUT_S, Running, job_data, running, tensors

from dataserver.dataset import Dataset
from dataserver.images import ImageShape, decode_patches
from dataserver.planning.job.fields import Sizing
from dataserver.planning.stream.samples import ROW_BITS

RANKS, STEPS, QUERIES, MERGED = 4, 2, 8, 4
ENCODERS = {"vit": "pairs", "vit-docs": "docs"}
DATASETS = ("pairs", "docs")
Header = microbatch_pb2.MicrobatchHeader
Place = tuple[int, int]
"""Rank and microbatch."""
Sample = tuple[int, int, int]
"""Dataset, pass, sample."""


def colocated_data() -> dict[str, Any]:
    modules = [
        {"name": "vit", "kind": "encoder", "dp": RANKS, "datasets": ["pairs"], "padded": True},
        {"name": "vit-docs", "kind": "encoder", "dp": RANKS, "balance": "lpt"},
        {"name": "llm", "kind": "backbone", "dp": RANKS, "balance": "lpt"},
        {"name": "gen", "kind": "generator", "dp": RANKS},
    ]
    modules[0]["memory"] = {"budget_bytes": 512, "unit_bytes": 1}
    data = job_data(modules=modules, end={"steps": STEPS}, microbatch=1, generation={"ratio": "0.4", "query_tokens": 8})
    data["execution"]["layout"] = {"kind": "colocated", "ranks_per_node": 2}
    return data


class Step:
    """The views of one step by module, rank and microbatch."""

    def __init__(self, views: dict[tuple[str, int, int], tuple[Header, dict[str, np.ndarray]]], plan: Any) -> None:
        self.views, self.plan = views, plan

    def of(self, module: str) -> Iterator[tuple[Place, Header, dict[str, np.ndarray]]]:
        for (name, rank, microbatch), found in self.views.items():
            if name == module:
                yield (rank, microbatch), *found

    def routings(self, module: str, pair: tuple[str, str]) -> set[tuple[int, ...]]:
        """The entries between two modules in all views of one of them."""
        return {entry for _, header, _ in self.of(module) for entry in entries(header, pair)}


def entries(header: Header, pair: tuple[str, str]) -> list[tuple[int, ...]]:
    """Rank, microbatch and first row of the source, the same of the target, rows."""
    found = []
    for r in header.routings:
        if (r.source_module, r.target_module) == pair:
            source, target = (r.source_rank, r.source_microbatch, r.source_start), (r.target_rank, r.target_microbatch)
            found += list(zip(*source, *target, r.target_start, r.rows, strict=True))
    return found


@pytest.fixture(scope="module")
def server(datasets: dict[str, Path]) -> Iterator[Running]:
    with running(datasets) as found:
        yield found


@pytest.fixture(scope="module")
def steps(server: Running) -> list[Step]:
    job_id = server.create(colocated_data()).job_id
    found: list[dict[tuple[str, int, int], Any]] = [{} for _ in range(STEPS)]
    for module in (*ENCODERS, "llm", "gen"):
        for rank in range(RANKS):
            for header, body in server.read(job_id, module, rank).microbatches:
                found[header.step][module, rank, header.microbatch] = header, tensors(header, body)
    plans = [
        server.stub.GetPlan(pb.GetPlanRequest(job_id=job_id, step=s), timeout=TIMEOUT_S).plan for s in range(STEPS)
    ]
    return [Step(*pair) for pair in zip(found, plans, strict=True)]


def test_all_ranks_run_as_many_microbatches(steps: list[Step]) -> None:
    for step in steps:
        count = step.plan.num_microbatches
        assert set(step.views) == {
            (m, r, k) for m in (*ENCODERS, "llm", "gen") for r in range(RANKS) for k in range(count)
        }
        assert {header.num_microbatches for header, _ in step.views.values()} == {count}
        for _, _, found in step.of("vit"):
            grids = found["grid"].astype(int)
            assert len(grids) * int(grids.prod(axis=1).max(initial=0)) <= 512


def test_pixels_reach_the_embedding_slots_of_their_image(server: Running, steps: list[Step]) -> None:
    """An embedding is four patches: every rank sends its own, and each backbone view gets its images in order."""
    moved = crossed = 0
    for step in steps:
        received: dict[Place, dict[int, np.ndarray]] = {}
        for module in ENCODERS:
            assert step.routings(module, (module, "llm")) == step.routings("llm", (module, "llm"))
            for place, header, found in step.of(module):
                rows = found["patches"].reshape(-1, MERGED, 14 * 14 * 3)
                sent = 0
                for rank, microbatch, start, to_rank, to_microbatch, to_start, count in entries(
                    header, (module, "llm")
                ):
                    assert (rank, microbatch, start) == (*place, sent)
                    slots = received.setdefault((to_rank, to_microbatch), {})
                    assert not slots.keys() & set(range(to_start, to_start + count))
                    slots.update(zip(range(to_start, to_start + count), rows[start : start + count], strict=True))
                    sent += count
                    moved += rank != to_rank
                    crossed += microbatch != to_microbatch
                assert sent == len(rows)
        for place, header, found in step.of("llm"):
            expected = understood(server, step, header)
            slots = received.get(place, {})
            assert sorted(slots) == list(range(len(expected))) == list(range(len(found["embedding_slots"])))
            assert all(np.array_equal(slots[i], row) for i, row in enumerate(expected))
    assert moved
    assert crossed


def understood(server: Running, step: Step, header: Header) -> list[np.ndarray]:
    """The patches of all images to understand of a backbone view, four by four, decoded here."""
    s = step.plan.samples
    samples = zip(s.dataset, s.epoch, s.sample, strict=True)
    facts = dict(zip(samples, zip(s.task, s.images, strict=True), strict=True))
    items = header.items
    found: list[np.ndarray] = []
    for sample in zip(items.dataset, items.epoch, items.sample, strict=True):
        task, images = facts[sample]
        for number in range(images if task != TASK_GENERATION else 0):
            patches = decoded(
                server.catalog.datasets[DATASETS[sample[0]]], sample, number, grid_of(step, sample, number)
            )
            found += list(patches.reshape(-1, MERGED, 14 * 14 * 3))
    return found


def grid_of(step: Step, sample: Sample, number: int) -> list[int]:
    """The grid of an image, from the one view of the one encoder that has it."""
    found = [
        (module, tensors_["grid"][n].tolist())
        for module in ENCODERS
        for _, header, tensors_ in step.of(module)
        for n, image in enumerate(
            zip(header.items.dataset, header.items.epoch, header.items.sample, header.items.image, strict=True)
        )
        if image == (*sample, number)
    ]
    assert [ENCODERS[module] for module, _ in found] == [DATASETS[sample[0]]]
    return list(found[0][1])


def decoded(dataset: Dataset, sample: Sample, number: int, grid: list[int]) -> np.ndarray:
    shard, row = divmod(sample[2], 1 << ROW_BITS)
    ref = dataset.shards[shard].image(row, number)
    out = np.empty((grid[0] * grid[1], 14 * 14 * 3), np.uint8)
    shape = ImageShape(ref.width, ref.height, ref.orientation, *grid)
    assert decode_patches(dataset.read(ref), shape, Sizing(max_patches=256), out)
    return out


def test_conditions_reach_the_image_of_their_sample(steps: list[Step]) -> None:
    generated = 0
    for step in steps:
        s = step.plan.samples
        tasks = dict(zip(zip(s.dataset, s.epoch, s.sample, strict=True), s.task, strict=True))
        received: dict[Place, dict[int, tuple[Sample, int]]] = {}
        assert step.routings("llm", ("llm", "gen")) == step.routings("gen", ("llm", "gen"))
        for _, header, found in step.of("llm"):
            items = zip(header.items.dataset, header.items.epoch, header.items.sample, strict=True)
            rows = [(sample, q) for sample in items if tasks[sample] == TASK_GENERATION for q in range(QUERIES)]
            assert len(found["condition_slots"]) == len(rows)
            for _, _, start, rank, microbatch, to_start, count in entries(header, ("llm", "gen")):
                slots = received.setdefault((rank, microbatch), {})
                slots.update(zip(range(to_start, to_start + count), rows[start : start + count], strict=True))
        for place, header, found in step.of("gen"):
            items = zip(header.items.dataset, header.items.epoch, header.items.sample, strict=True)
            expected = [(sample, q) for sample in items for q in range(QUERIES)]
            assert received.get(place, {}) == dict(enumerate(expected))
            assert found["condition_offsets"].tolist() == list(range(0, len(expected) + 1, QUERIES))
            generated += len(expected)
    assert generated


def test_the_plan_says_what_was_decided(steps: list[Step]) -> None:
    for step in steps:
        said = {(d.subject, d.chosen) for d in step.plan.decisions}
        assert ("llm", "lpt") in said or ("llm", "canonical order") in said
        assert {d.subject for d in step.plan.decisions} == {"step", *ENCODERS, "llm", "gen"}
        assert [s.in_flight for s in step.plan.schedules] == [[step.plan.num_microbatches]] * 3 + [[1]]
