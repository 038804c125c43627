"""Ranks that share sequences: gradients are those of one process, and what is executed is what the simulator scored."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from program.conftest import Fleet
from program.reference import reference_gradients
from program.runtime_cases import Case, Degrees, Pool
from program.test_gradients import BOUNDS, KINDS, STEPS, WEIGHTS, a_run, assert_close, metrics, went_on_alike
from program.virtual import assert_as_simulated, execute

from dataserver.dataset import Dataset
from dataserver.jobs import JobPlanner
from dataserver.planning.job.identity import Job, identify
from dataserver.planning.layouts.interface import layout_of
from dataserver.planning.plan.plan import StepPlan

UNPACKED = {"packing": {"enabled": False}}
TEXTS = {**UNPACKED, "dataset": "texts", "generation": {"ratio": "0"}, "seq_len": 384, "seed": 5, "units": 160}
MIXED = {**UNPACKED, "seed": 7, "units": 50, "global_batch": 12}
ALONE = Degrees(0, 4, 1, 0, group=4)
BESIDE = Degrees(1, 4, 1, 1, group=4)
HEADS = {"heads": 8, "groups": 4}
"""Of the backbone: the ranks of the largest group have one of keys and values each."""


def plan_of(fleet: Fleet, case: Case) -> StepPlan:
    job = case.parsed
    return JobPlanner(job, tuple(Dataset.open(fleet.folders[d.name]) for d in job.stream.datasets)).plan(0)


def compositions(plan: StepPlan) -> set[tuple[int, ...]]:
    return {tuple(plan.groups.degree[plan.groups.of(k)].tolist()) for k in range(plan.num_microbatches)}


def idle(plan: StepPlan) -> set[int]:
    """Degrees of the groups that have no sequences."""
    held, groups = plan.arrangement("llm"), plan.groups
    used = set(zip(held.microbatch.tolist(), held.rank.tolist(), strict=True))
    found = zip(groups.microbatch.tolist(), groups.first_rank.tolist(), groups.degree.tolist(), strict=True)
    return {degree for microbatch, first, degree in found if (microbatch, first) not in used}


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("degrees", "options", "sharding"),
    [
        (ALONE, TEXTS, "zero3"),
        pytest.param(BESIDE, MIXED, "zero3", marks=pytest.mark.long),  # in `test_covers.py`
        pytest.param(ALONE, TEXTS, "none", marks=pytest.mark.long),
        pytest.param(BESIDE, MIXED, "zero2", marks=pytest.mark.long),
        pytest.param(replace(BESIDE, recompute=("llm",)), MIXED, "zero3", marks=pytest.mark.long),
        pytest.param(replace(BESIDE, frozen=("llm",)), MIXED, "zero3", marks=pytest.mark.long),
        pytest.param(replace(BESIDE, frozen=("llm",), recompute=("llm",)), MIXED, "none", marks=pytest.mark.long),
        pytest.param(replace(BESIDE, frozen=("vit",)), MIXED, "zero3", marks=pytest.mark.long),
        pytest.param(replace(BESIDE, frozen=("vit", "llm")), MIXED, "zero3", marks=pytest.mark.long),
        pytest.param(replace(BESIDE, frozen=("dit",)), MIXED, "zero2", marks=pytest.mark.long),
    ],
    ids=str,
)
def test_gradients_equal_the_reference(
    fleet: Fleet, pool: Pool, tmp_path: Path, degrees: Degrees, options: dict[str, Any], sharding: str
) -> None:
    """With other groups in every microbatch, and ranks that have nothing; frozen modules have no gradients."""
    ours, reference = fleet.pair_of_jobs(degrees, **options)
    case = Case("grouped", fleet.address, ours, **WEIGHTS, modules={"llm": {**HEADS, "sharding": sharding}})
    plan = plan_of(fleet, case)
    assert compositions(plan) >= {(4,), (2, 1, 1), (1, 1, 1, 1)}
    assert idle(plan) >= {1}
    found = pool.run([case], tmp_path)["grouped"]
    expected = reference_gradients(replace(case, job=reference, modules={"llm": HEADS}))
    trained = {name: g for name, g in expected.items() if name.split(".")[0] not in degrees.frozen}
    assert found.keys() == trained.keys()
    assert_close(found, trained, BOUNDS["float64"])


@pytest.mark.timeout(400)
def test_an_image_that_cannot_be_decoded(fleet: Fleet, pool: Pool, tmp_path: Path) -> None:
    """All ranks that share its sample learn of it."""
    options = {**MIXED, "dataset": "understanding", "global_batch": 16}
    ours, reference = fleet.pair_of_jobs(BESIDE, **options)
    ours["execution"]["layout"]["min_degree"] = 2
    case = Case("broken", fleet.address, ours, **WEIGHTS, modules={"llm": HEADS})
    plan, victim = plan_of(fleet, case), fleet.victims["understanding"]
    assert victim in plan.samples.sample
    assert compositions(plan) == {(4,), (2, 2)}
    expected = reference_gradients(replace(case, job=reference), {victim}.__contains__)
    assert_close(pool.run([case], tmp_path)["broken"], expected, BOUNDS["float64"])


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("degrees", "sharding"),
    [
        (Degrees(1, 1, 2, 1, sp=2), "none"),
        *(
            pytest.param(degrees, sharding, marks=pytest.mark.long)
            for degrees, sharding in (
                (Degrees(1, 1, 1, 1, sp=2), "none"),
                (Degrees(2, 2, 1, 2, sp=2), "zero3"),
                (Degrees(1, 2, 2, 1, sp=2), "zero2"),
                (Degrees(1, 1, 2, 1, sp=4), "zero2"),
                (Degrees(2, 1, 2, 1, chunks=2, sp=2), "none"),
                (Degrees(1, 1, 2, 1, tp=(1, 2, 1), sp=2), "none"),
                (Degrees(1, 2, 1, 1, tp=(2, 2, 1), sp=2), "zero3"),
                (Degrees(1, 1, 2, 1, sp=2, second_encoder=1), "none"),
                (Degrees(1, 1, 2, 1, sp=2, recompute=("llm",)), "none"),
                (Degrees(1, 1, 2, 1, sp=2, frozen=("vit",)), "none"),
                (Degrees(1, 1, 2, 1, sp=2, frozen=("llm",)), "none"),
                (Degrees(1, 2, 1, 1, sp=2, frozen=("vit", "llm")), "zero3"),
                (Degrees(1, 1, 2, 1, sp=2, frozen=("dit",)), "zero2"),
            )
        ),
    ],
    ids=str,
)
def test_processes_of_a_rank_share_all_its_sequences(
    fleet: Fleet, pool: Pool, tmp_path: Path, degrees: Degrees, sharding: str
) -> None:
    """Each hands its tokens on to the next stage; all of them learn of an image that cannot be decoded."""
    ours, reference = fleet.pair_of_jobs(degrees, dataset="understanding")
    shares = dict.fromkeys(KINDS, sharding)
    of_backbone = {"llm": {**HEADS, "sharding": sharding}}
    case = Case("shared", fleet.address, ours, **WEIGHTS, modules=of_backbone, sharding=shares)
    found = pool.run([case], tmp_path)["shared"]
    alone, victim = replace(case, job=reference, modules={"llm": HEADS}, sharding={}), fleet.victims["understanding"]
    expected = reference_gradients(alone, {victim}.__contains__)
    trained = {name: g for name, g in expected.items() if name.split(".")[0] not in degrees.frozen}
    assert found.keys() == trained.keys()
    assert_close(found, trained, BOUNDS["float64"])


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("other", "refusing"), [(0, {1, 2, 3}), (2, {2})])
def test_a_view_of_another_plan_ends_all_ranks(
    fleet: Fleet, pool: Pool, tmp_path: Path, other: int, refusing: set[int]
) -> None:
    """Those that were told of another plan than the first one say so, before gloo meets tensors of other sizes."""
    ours, _ = fleet.pair_of_jobs(ALONE, **TEXTS)
    case = Case("other", fleet.address, ours, modules={"llm": HEADS}, other_plan_rank=other)
    outcomes = pool.outcomes([case], tmp_path)
    assert None not in outcomes
    said = {rank: outcome or "" for rank, outcome in enumerate(outcomes)}
    assert {rank for rank, text in said.items() if "BrokerMismatchError: this rank was sent step 0" in text} == refusing
    assert all("RankLostError: " in text for rank, text in said.items() if rank not in refusing), said


HOPS = {
    "transfers": [
        {"source": "vit", "target": "llm", "latency_ns": 1_000, "bytes_per_ns": "0.01", "row_bytes": 70},
        {"source": "llm", "target": "dit", "latency_ns": 2_000, "bytes_per_ns": "1", "row_bytes": 10},
    ]
}
SEVERAL = Degrees(2, 4, 1, 2, group=4)


@pytest.mark.parametrize(
    ("degrees", "options"),
    [
        (ALONE, TEXTS),
        pytest.param(ALONE, {**TEXTS, "layout": {"policy": "homogeneous"}}, marks=pytest.mark.long),
        pytest.param(BESIDE, {**MIXED, **HOPS}, marks=pytest.mark.long),
        (SEVERAL, {**MIXED, **HOPS, "extra_in_flight": 1}),
        (SEVERAL, {**MIXED, "units": 100, "layout": {"schedule": "gpipe", "max_degree": 4, "order": "disttrain"}}),
        (Degrees(1, 2, 1, 1, group=1, second_encoder=1), {**MIXED, **HOPS, "units": 200}),
        pytest.param(replace(BESIDE, frozen=("llm",)), {**MIXED, **HOPS}, marks=pytest.mark.long),
        (replace(SEVERAL, frozen=("vit", "llm")), {**MIXED, **HOPS}),
        pytest.param(
            replace(SEVERAL, frozen=("vit",)), {**MIXED, **HOPS, "extra_in_flight": 1}, marks=pytest.mark.long
        ),
        pytest.param(replace(SEVERAL, frozen=("dit",)), MIXED, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_the_executed_step_is_the_simulated_one(fleet: Fleet, degrees: Degrees, options: dict[str, Any]) -> None:
    assert_executed(fleet, fleet.job(degrees, **options))


def test_forwards_alone_are_executed_as_simulated(fleet: Fleet) -> None:
    """As an evaluation runs them."""
    assert_executed(fleet, identify(fleet.job(SEVERAL, **MIXED, **HOPS).spec.forward_only))


def assert_executed(fleet: Fleet, job: Job) -> None:
    """What processes execute of a job's first step is what was simulated, and no faster than its bound."""
    case = Case("virtual", fleet.address, job.spec.model_dump(mode="json"))
    layout, plan = layout_of(job.spec.execution), plan_of(fleet, case)
    planned = layout.timeline(job.spec, plan)
    assert layout.lower_bound_ns(job, plan) <= planned.makespan_ns
    assert_as_simulated(job, planned, execute(case, job, planned))


def run_of(fleet: Fleet, degrees: Degrees, folder: Path, steps: int, sharding: str = "zero3") -> Case:
    """A run of one stream in any layout of a backbone."""
    job = {key: value for key, value in MIXED.items() if degrees.group or key != "units"}
    return a_run(fleet, degrees, folder, steps, job=job, modules={"llm": {**HEADS, "sharding": sharding}})


PIPELINED, COLOCATED = Degrees(1, 2, 1, 1), Degrees(2, 2, 1, 2, colocated=True)


@pytest.mark.timeout(400)
def test_steps_are_alike_in_all_layouts(fleet: Fleet, pool: Pool, tmp_path: Path) -> None:
    found = {}
    for name, degrees in {"pipelined": PIPELINED, "colocated": COLOCATED, "grouped": BESIDE}.items():
        folder = tmp_path / name
        folder.mkdir()
        pool.run([run_of(fleet, degrees, folder, 2)], tmp_path)
        found[name] = metrics(folder)
    expected = found["pipelined"]
    assert len({m["text_loss"] for m in expected}) == 2
    for lines in found.values():
        assert [m["sample_digest"] for m in lines] == [m["sample_digest"] for m in expected]
        for key in ("text_loss", "image_loss", "grad_norm"):
            assert [m[key] for m in lines] == pytest.approx([m[key] for m in expected], rel=1e-9)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_run_goes_on_with_another_sp(fleet: Fleet, pool: Pool, tmp_path: Path) -> None:
    """From two stages of two shares to none, and from none to shares of split layers; bit by bit in the same layout.

    Nothing counts twice."""
    folders = {name: tmp_path / name for name in ("straight", "again", "none", "back")}
    for folder in folders.values():
        folder.mkdir()
    shared, split = Degrees(1, 1, 2, 1, sp=2), Degrees(1, 2, 1, 1, tp=(1, 2, 1), sp=2)

    def run(degrees: Degrees, name: str, steps: int) -> Case:
        return run_of(fleet, degrees, folders[name], steps, "zero2")

    pool.run([run(shared, "straight", STEPS), run(shared, "again", 2)], tmp_path)
    shutil.copytree(folders["again"], folders["none"], dirs_exist_ok=True)
    pool.run([run(PIPELINED, "none", STEPS), run(PIPELINED, "back", 2)], tmp_path)
    pool.run([run(shared, "again", STEPS)], tmp_path)
    pool.run([run(split, "back", STEPS)], tmp_path)

    expected = went_on_alike(folders)
    sizes = [int((tmp_path / f"straight-{STEPS}.{rank}.bytes").read_text()) for rank in range(shared.world_size)]
    whole = sum(2 * 8 * t.numel() for key, t in expected.items() if key.startswith("llm."))
    assert sum(sizes[1:5]) == whole


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_run_goes_on_in_other_layouts(fleet: Fleet, pool: Pool, tmp_path: Path) -> None:
    """From groups, and into groups; bit by bit in the same layout."""
    folders = {name: tmp_path / name for name in ("straight", "again", "pipelined", "colocated", "back", "home")}
    for folder in folders.values():
        folder.mkdir()

    def run(degrees: Degrees, name: str, steps: int) -> Case:
        return run_of(fleet, degrees, folders[name], steps)

    pool.run([run(BESIDE, "straight", STEPS), run(BESIDE, "again", 2)], tmp_path)
    for name in ("pipelined", "colocated"):
        shutil.copytree(folders["again"], folders[name], dirs_exist_ok=True)
    pool.run([run(PIPELINED, "pipelined", STEPS), run(PIPELINED, "back", 2)], tmp_path)
    pool.run([run(COLOCATED, "colocated", STEPS), run(COLOCATED, "home", 2)], tmp_path)
    pool.run([run(BESIDE, name, STEPS) for name in ("again", "back", "home")], tmp_path)
    went_on_alike(folders)
