"""The routings of colocated plans, carried out: one transfer takes every row where it is wanted, and back."""

from collections.abc import Iterable
from itertools import product

import numpy as np
import torch
from builders.colocated import colocated_job, colocated_steps, samples_of
from hypothesis import given, settings
from torch import Tensor, nn

from dataserver.planning.job.fields import ModuleKind
from dataserver.planning.job.identity import Job
from dataserver.planning.plan.arranging import module_images
from dataserver.planning.plan.plan import StepPlan
from dataserver.planning.plan.views import view_plan
from dataserver.planning.planner import plan_step
from dataserver.planning.stream.samples import StepSamples, Task

Place = tuple[int, int]
"""Rank and microbatch."""
Entry = tuple[Place, int, Place, int, int]
"""Source place and row, target place and row, rows."""

WIDTH = 4


def places(job: Job, plan: StepPlan) -> list[Place]:
    return list(product(range(job.spec.execution.backbone.dp), range(plan.num_microbatches)))


def entries(job: Job, plan: StepPlan, sender: str, pair: tuple[str, str]) -> list[Entry]:
    """What the views of one of two modules say of the rows between them."""
    found: list[Entry] = []
    for place in places(job, plan):
        for r in view_plan(job.spec, plan, sender, *place).routings:
            if (r.source_module, r.target_module) == pair:
                source = zip(r.source_rank.tolist(), r.source_microbatch.tolist(), strict=True)
                target = zip(r.target_rank.tolist(), r.target_microbatch.tolist(), strict=True)
                starts = r.source_start.tolist(), r.target_start.tolist()
                found += zip(source, starts[0], target, starts[1], r.rows.tolist(), strict=True)
    return found


def backwards(found: Iterable[Entry]) -> list[Entry]:
    return [(target, to, source, start, rows) for source, start, target, to, rows in found]


def num_rows(job: Job, plan: StepPlan, image: int) -> int:
    understood = plan.samples.task[plan.samples.image_sample[image]] == Task.UNDERSTANDING
    return int(plan.samples.patches[image]) // 4 if understood else job.stream.generation.query_tokens


def rows_of(job: Job, plan: StepPlan, images: Iterable[int]) -> np.ndarray:
    """What the rows of these images hold: int64 [rows, 2], image and number."""
    found = [(image, i) for image in images for i in range(num_rows(job, plan, image))]
    return np.array(found, np.int64).reshape(-1, 2)


def images_of(job: Job, plan: StepPlan, name: str, place: Place, task: Task) -> list[int]:
    """The images of a view in its order; the backbone's are those of its samples."""
    items = view_plan(job.spec, plan, name, *place).items.tolist()
    if name != job.spec.execution.backbone.name:
        return items
    samples = plan.samples
    return [
        i for s in items if samples.task[s] == task for i in range(*samples.image_offsets[s : s + 2].tolist())
    ]  # fmt: skip


@settings(max_examples=80, deadline=None)
@given(colocated_steps())
def test_rows_arrive_where_the_backbone_wants_them_and_come_back(step: tuple[Job, StepSamples]) -> None:
    """Forward as the senders' views say, backward as the receivers' do; every buffer is filled once, without a gap."""
    job, samples = step
    plan, backbone = plan_step(job, 3, samples), job.spec.execution.backbone.name
    for kind, task in ((ModuleKind.ENCODER, Task.UNDERSTANDING), (ModuleKind.GENERATOR, Task.GENERATION)):
        modules = [m.name for m in job.spec.execution.of_kind(kind)]
        held = {
            (name, place): rows_of(job, plan, images_of(job, plan, name, place, task))
            for name, place in product([backbone, *modules], places(job, plan))
        }
        into = kind is ModuleKind.ENCODER
        pairs = [((name, backbone) if into else (backbone, name)) for name in modules]
        there = [(*p, e) for p in pairs for e in entries(job, plan, p[0], p)]
        back = [(*reversed(p), e) for p in pairs for e in backwards(entries(job, plan, p[1], p))]
        for moves in (there, back):
            received = {key: np.full_like(rows, -1) for key, rows in held.items()}
            for source, target, (at, start, to_place, to, count) in moves:
                assert (received[target, to_place][to : to + count] == -1).all()
                received[target, to_place][to : to + count] = held[source, at][start : start + count]
            filled = {target for _, target, _ in moves}
            for (name, place), rows in held.items():
                if name in filled:
                    assert np.array_equal(received[name, place], rows)
        assert {t for _, t, _ in there} | {t for _, t, _ in back} == {n for (n, _), rows in held.items() if len(rows)}


def nets(job: Job) -> nn.ModuleDict:
    torch.manual_seed(5)
    made = {m.name: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for m in job.spec.execution.modules}
    return nn.ModuleDict(made).double()


def drawn(seed: int, rows: int) -> Tensor:
    """The inputs of an item, the same wherever it goes."""
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def joined(parts: list[Tensor]) -> Tensor:
    return torch.cat([torch.zeros(0, WIDTH, dtype=torch.float64), *parts])


def loss(net: nn.Module, rows: Tensor, seed: int) -> Tensor:
    """Depends on which rows an item gets, and on their order."""
    place = torch.arange(1, len(rows) + 1, dtype=torch.float64)[:, None]
    total: Tensor = (net(torch.cumsum(rows * torch.cos(place), 0)) * drawn(seed, len(rows))).sum()
    return total


def arranged_loss(job: Job, plan: StepPlan, modules: nn.ModuleDict) -> Tensor:
    """Every rank runs its microbatches of each module in one batch; routings move the rows between them."""
    execution, total = job.spec.execution, torch.zeros((), dtype=torch.float64)
    backbone = execution.backbone.name

    def moved(pair: tuple[str, str], buffers: dict[Place, Tensor]) -> dict[Place, list[tuple[int, Tensor]]]:
        found: dict[Place, list[tuple[int, Tensor]]] = {place: [] for place in places(job, plan)}
        for source, start, target, to, rows in entries(job, plan, pair[0], pair):
            found[target].append((to, buffers[source][start : start + rows]))
        return found

    def in_order(parts: list[tuple[int, Tensor]]) -> Tensor:
        return joined([rows for _, rows in sorted(parts, key=lambda part: part[0])])

    embeddings: dict[Place, list[tuple[int, Tensor]]] = {place: [] for place in places(job, plan)}
    for m in execution.of_kind(ModuleKind.ENCODER):
        images = {p: images_of(job, plan, m.name, p, Task.UNDERSTANDING) for p in places(job, plan)}
        outputs = {p: modules[m.name](joined([drawn(i, num_rows(job, plan, i)) for i in images[p]])) for p in images}
        for place, parts in moved((m.name, backbone), outputs).items():
            embeddings[place] += parts
    conditions = {}
    for place in places(job, plan):
        hidden, rows, used = [], in_order(embeddings[place]), 0
        for sample in view_plan(job.spec, plan, backbone, *place).items.tolist():
            images_here = range(*plan.samples.image_offsets[sample : sample + 2].tolist())
            count = sum(num_rows(job, plan, i) for i in images_here)
            if plan.samples.task[sample] == Task.UNDERSTANDING:
                total, used = total + loss(modules[backbone], rows[used : used + count], sample), used + count
            else:
                hidden.append(modules[backbone](drawn(sample, count)))
        assert used == len(rows)
        conditions[place] = joined(hidden)
    for m in execution.of_kind(ModuleKind.GENERATOR):
        for place, parts in moved((backbone, m.name), conditions).items():
            images_here = images_of(job, plan, m.name, place, Task.GENERATION)
            rows = in_order(parts).split([num_rows(job, plan, i) for i in images_here])
            total = total + sum(loss(modules[m.name], r, i) for r, i in zip(rows, images_here, strict=True))
    return total


def plain_loss(job: Job, plan: StepPlan, modules: nn.ModuleDict) -> Tensor:
    """One sample after the other in one place."""
    samples, execution, total = plan.samples, job.spec.execution, torch.zeros((), dtype=torch.float64)
    backbone = execution.backbone.name
    net_of = {
        i: modules[m.name]
        for m in execution.modules
        if m.name != backbone
        for i in module_images(job.spec, m, samples).tolist()
    }
    for sample in range(len(samples)):
        images = range(*samples.image_offsets[sample : sample + 2].tolist())
        counts = [num_rows(job, plan, i) for i in images]
        if samples.task[sample] == Task.UNDERSTANDING:
            rows = joined([net_of[i](drawn(i, n)) for i, n in zip(images, counts, strict=True)])
            total = total + loss(modules[backbone], rows, sample)
        else:
            conditions = modules[backbone](drawn(sample, sum(counts))).split(counts)
            total = total + sum(loss(net_of[i], rows, i) for i, rows in zip(images, conditions, strict=True))
    return total


def test_arranged_ranks_train_like_one_place() -> None:
    """Loss and every gradient in float64: two encoders, the backbone, a generator, four ranks on two nodes."""
    modules = [
        {"name": "vit", "kind": "encoder", "dp": 4, "padded": True},
        {"name": "vit-docs", "kind": "encoder", "dp": 4, "balance": "lpt", "datasets": ["docs"]},
        {"name": "llm", "kind": "backbone", "dp": 4, "balance": "lpt"},
        {"name": "dit", "kind": "generator", "dp": 4},
    ]
    job = colocated_job(modules, global_batch=24, generation={"ratio": "0.4", "query_tokens": 3})
    plan = plan_step(job, 0, samples_of(job, (20, 16), 0, 3))
    assert all((r.source_rank != r.target_rank).any() for r in plan.routings)
    assert any((r.source_microbatch != r.target_microbatch).any() for r in plan.routings)
    found = []
    for run in (arranged_loss, plain_loss):
        made = nets(job)
        total = run(job, plan, made)
        total.backward()  # type: ignore[no-untyped-call]
        gradients = [p.grad for p in made.parameters() if p.grad is not None]
        assert len(gradients) == 2 * len(modules)
        found.append((total.detach(), gradients))
    (ours, our_gradients), (whole, whole_gradients) = found
    torch.testing.assert_close(ours, whole, rtol=1e-11, atol=0)
    for mine, theirs in zip(our_gradients, whole_gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-10)
