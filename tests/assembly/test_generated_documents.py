"""Documents that are generated, over real shards: what is read before a target, and which module gets which image."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from assembly.test_document_parts import MASK, folder, job_of
from assembly.test_prepared_views import Run, tensors_of
from images.pictures import decode

from dataserver.assembly.document_parts import WHOLE, PartError, part_of
from dataserver.dataset import Dataset, TokenizedDocument
from dataserver.images import ImageShape
from dataserver.jobs import JobCache, JobPlanner
from dataserver.planning.job.fields import ModuleKind
from dataserver.planning.job.identity import parse_job
from dataserver.planning.plan.plan import StepPlan
from dataserver.planning.plan.views import view_plan
from dataserver.planning.stream.samples import ROW_BITS, Task

__all__ = ["folder"]
QUERIES = 3
LAYOUTS: dict[str, dict[str, Any]] = {
    "pipelined": {"kind": "pipelined"},
    "colocated": {"kind": "colocated", "ranks_per_node": 2},
    "grouped": {"kind": "grouped", "max_degree": 2, "exchange": [{"degree": 2, "unit_ps": 10**9}]},
}


def open_run(folder: Path, layout: str, documents: dict[str, Any] | None) -> Run:
    dataset = Dataset.open(folder)
    generation = {"ratio": "0.6", "query_tokens": QUERIES, "interleaved": True}
    whole = {} if documents else {"seq_len": 400}
    data = job_of(dataset, {"epochs": 1}, documents, generation=generation, **whole)
    modules = [*data["execution"]["modules"], {"name": "dit", "kind": "generator", "dp": 2}]
    if layout == "grouped":
        del data["execution"]["microbatch"]
        modules[1]["memory"] = {"budget_bytes": 160, "unit_bytes": 1}
    data["execution"] |= {"modules": modules, "layout": LAYOUTS[layout]}
    job = parse_job(data)
    return Run(job, [dataset], JobPlanner(job, [dataset], JobCache()))


def expected(run: Run, plan: StepPlan, i: int) -> list[int]:
    """The tokens of a sample that is generated, from its document item by item."""
    of, ids = plan.samples, run.job.stream.tokenizer
    shard, row = run.datasets[0].shards[int(of.sample[i]) >> ROW_BITS], int(of.sample[i]) & MASK
    document = shard.document(row, ids.digest)
    bodies, units = iter(document.texts), list[int | None]()
    for kind in document.kinds:
        units += [None] if kind else next(bodies).tolist()
    part = WHOLE if of.parts is None else tuple(of.parts[i].tolist())
    images = range(*of.image_offsets[i : i + 2].tolist())
    if part[1] == 1 and document.kinds.count(1) == 1:  # a pair
        texts = [token for token in units if token is not None][: int(of.text_tokens[i])]
        return [ids.bos, *texts, ids.boi, *[ids.query] * QUERIES]
    found, at = [ids.bos], iter(images)
    for unit in units[part[2] + part[3] :]:
        if unit is not None:
            found.append(unit)
            continue
        found.append(ids.boi)
        image = next(at)
        if image == images[-1]:
            return [*found, *[ids.query] * QUERIES]
        found += [*[ids.image] * int(of.patches[image] // 4), ids.eoi]
    raise AssertionError("the document has no image where its target should be")


@pytest.mark.parametrize(
    ("layout", "documents"),
    [
        ("pipelined", {"max_images": 5}),
        ("colocated", {"max_images": 5}),
        ("grouped", {"max_images": 5}),
        ("pipelined", None),
    ],
)
def test_each_image_is_read_or_learned_where_the_plan_says(
    folder: Path, layout: str, documents: dict[str, Any] | None
) -> None:
    run = open_run(folder, layout, documents)
    spec, read_before = run.job.spec, 0
    for step in range(run.planner.num_steps):
        plan = run.planner.plan(step)
        of = plan.samples
        had: dict[ModuleKind, list[int]] = {kind: [] for kind in ModuleKind}
        rows = {"embedding_slots": 0, "condition_slots": 0}
        for module in spec.execution.modules:
            for rank in range(module.dp):
                for microbatch in range(plan.num_microbatches):
                    view = view_plan(spec, plan, module.name, rank, microbatch)
                    arrays = tensors_of(run.prepare(plan, view))
                    is_leader = plan.groups.holder(module.name, rank, microbatch) == rank
                    had[module.kind] += view.items.tolist() if is_leader else []
                    if module.kind is not ModuleKind.BACKBONE:
                        check_pixels(run, plan, view.items.tolist(), arrays)
                        continue
                    ends = arrays["cu_lengths"].tolist()
                    for n, i in enumerate(view.items.tolist()):
                        where = slice(ends[n], ends[n + 1])
                        assert ends[n + 1] - ends[n] == of.tokens[i]
                        if of.task[i] == Task.GENERATION:
                            assert arrays["token_ids"][where].tolist() == expected(run, plan, i)
                            assert set(arrays["labels"][where].tolist()) == {-100}
                            read_before += int(np.diff(of.image_offsets)[i]) - 1
                    for name in rows if is_leader else ():
                        rows[name] += len(arrays[name])
        last = of.image_offsets[1:][of.task == Task.GENERATION] - 1
        assert sorted(had[ModuleKind.BACKBONE]) == list(range(len(of)))
        assert sorted(had[ModuleKind.GENERATOR]) == sorted(last.tolist())
        assert sorted(had[ModuleKind.ENCODER]) == sorted(set(range(len(of.image_rows))) - set(last.tolist()))
        assert rows["embedding_slots"] == of.patches[had[ModuleKind.ENCODER]].sum() // 4
        assert rows["condition_slots"] == len(last) * QUERIES
    assert read_before > 3


def check_pixels(run: Run, plan: StepPlan, items: list[int], arrays: dict[str, Any]) -> None:
    """Patches are those of the image with that number in the whole document."""
    of, ends = plan.samples, arrays["cu_patches"].tolist()
    sample, number = of.locate(np.array(items, np.int64))
    for n, item in enumerate(items):
        i = int(sample[n])
        ref = run.datasets[0].shards[int(of.sample[i]) >> ROW_BITS].image(int(of.sample[i]) & MASK, int(number[n]))
        shape = ImageShape(
            ref.width, ref.height, ref.orientation, int(of.image_rows[item]), int(of.image_columns[item])
        )
        _, pixels = decode(run.datasets[0].read(ref), shape, run.job.stream.sizing)
        assert np.array_equal(arrays["patches"][ends[n] : ends[n + 1]], pixels)


def test_a_document_that_is_not_the_planned_one_is_refused() -> None:
    texts = (np.arange(5, dtype=np.int32), np.arange(5, 9, dtype=np.int32))
    document = TokenizedDocument((0, 1, 0, 1), texts)
    assert part_of(document, WHOLE, 5, 1, 4).kinds == (0, 1)
    assert part_of(document, WHOLE, 9, 2, 0).kinds == (0, 1, 0, 1)
    for tokens, images, left_out in ((5, 1, 3), (5, 1, 5), (9, 3, 0)):
        with pytest.raises(PartError, match="it has 9 text tokens and 2 images"):
            part_of(document, WHOLE, tokens, images, left_out)
