"""Contrastive towers: gradients are those of the full batches in one process; what is executed was simulated."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from cli.server_process import run
from program.conftest import Fleet
from program.runtime_cases import Case, Pool
from program.test_gradients import BOUNDS, assert_close
from program.towers import SINGLE, recall_in_one_process, tower_data, tower_job, towers_in_one_process
from program.virtual import assert_as_simulated, execute
from training.runs import steps_of

from dataserver.dataset import Dataset
from dataserver.jobs import JobPlanner
from dataserver.planning.job.identity import identify
from dataserver.planning.layouts.interface import layout_of

Degrees = Mapping[str, tuple[int, ...]]
"""dp, pp and tp of each tower."""
SMALL: Degrees = {"image": (2, 1), "text": (1, 1)}
STAGED: Degrees = {"image": (1, 2), "text": (2, 1)}
TENSOR_PARALLEL: Degrees = {"image": (1, 1, 2), "text": (2, 1)}
SPLIT: Degrees = {"image": (1, 2, 2), "text": (2, 1, 2)}
LOCKED: Degrees = {"text": (1, 2), "image": (1, 1)}
WIDE: Degrees = {"image": (2, 2), "text": (1, 2)}
THREE: Degrees = {"text": (1, 1), "image": (2, 1), "text_more": (1, 1)}


def case_of(fleet: Fleet, name: str, degrees: Degrees, loss: str, **options: Any) -> Case:
    job = tower_job(fleet, degrees, **options).spec.model_dump(mode="json")
    return Case(name, fleet.address, job, contrastive={"loss": loss, "features": 16})


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("degrees", "options"),
    [
        pytest.param(SMALL, {}, marks=pytest.mark.long),
        pytest.param(STAGED, {"microbatches": 2}, marks=pytest.mark.long),
        pytest.param(STAGED, {"microbatches": 2, "schedule": "batch_sync"}, marks=pytest.mark.long),
        pytest.param(TENSOR_PARALLEL, {"microbatches": 2}, marks=pytest.mark.long),
        pytest.param(LOCKED, {"microbatches": 2, "frozen": ("image",)}, marks=pytest.mark.long),
        pytest.param(STAGED, {"microbatches": 2, "frozen": ("image",)}, marks=pytest.mark.long),
        pytest.param(SPLIT, {"microbatches": 2}, marks=pytest.mark.long),
        pytest.param(WIDE, {"microbatches": 2, "extra_in_flight": 1}, marks=pytest.mark.long),
        pytest.param(THREE, {"microbatches": 4}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_loss_gradients_equal_those_of_full_batches(
    fleet: Fleet, pool: Pool, tmp_path: Path, degrees: Degrees, options: dict[str, Any]
) -> None:
    """With an image that cannot be decoded, whose pair does not count; `test_covers.py` has the two towers."""
    kinds = {"clip": "pairs", "siglip": "understanding"}
    cases = [case_of(fleet, loss, degrees, loss, dataset=data, **options) for loss, data in kinds.items()]
    cases.append(case_of(fleet, "broken", degrees, "clip", dataset="understanding", **options))
    found = pool.run(cases, tmp_path)
    single = dict.fromkeys(degrees, (1, 1))
    for case in cases:
        dataset = case.job["stream"]["datasets"][0]["name"]
        skip = frozenset({fleet.victims[dataset]} if dataset in fleet.victims else ())
        alone = case_of(fleet, "alone", single, case.contrastive["loss"], dataset=dataset)
        _, expected = towers_in_one_process(alone, skip)
        expected = {name: g for name, g in expected.items() if name.split(".")[0] not in options.get("frozen", ())}
        assert found[case.name].keys() == expected.keys()
        assert_close(found[case.name], expected, BOUNDS["float64"])


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("loss", ["clip", pytest.param("siglip", marks=pytest.mark.long)])
def test_sharded_towers_and_bfloat16(fleet: Fleet, pool: Pool, tmp_path: Path, loss: str) -> None:
    """Sums are those of whole towers, and in float32; `test_covers.py` has float64."""
    whole = case_of(fleet, "whole", {"image": (2, 1), "text": (2, 1)}, loss, microbatches=2)
    shards = ("none", "zero2", "zero3")
    kinds = ("encoder", "backbone")
    cases = [replace(whole, name=s, dtype="bfloat16", sharding=dict.fromkeys(kinds, s)) for s in shards]
    found = pool.run(cases, tmp_path)
    _, expected = towers_in_one_process(case_of(fleet, "alone", SINGLE, loss))
    for sharding in shards:
        assert {g.dtype for g in found[sharding].values()} == {torch.float32}
        assert_close(found[sharding], found["none"], 1e-6)
    assert_close(found["none"], expected, 0.5)


@pytest.mark.timeout(400)
def test_what_dataserver_towers_prints_is_run_as_it_stands(fleet: Fleet, pool: Pool, tmp_path: Path) -> None:
    """Memory for the states of half an image tower: it chooses tensor parallelism."""
    file, data = tmp_path / "job.yaml", tower_data(SINGLE, microbatches=2)
    file.write_text(yaml.safe_dump(data))
    cluster = ("--devices", "3", "--devices-per-node", "2", "--device-bytes", "1000", "--state-bytes", "image=1500")
    shown = run("towers", "--job", file, "--dataset", f"pairs={fleet.folders['pairs']}", *cluster, "--steps", "1")
    data["execution"] |= yaml.safe_load(shown.stdout[shown.stdout.index("# The towers") :])["execution"]
    assert [m.get("tp", 1) for m in data["execution"]["modules"]] == [2, 1]
    case = case_of(fleet, "alone", SINGLE, "clip")
    _, expected = towers_in_one_process(case)
    found = pool.run([replace(case, name="chosen", job=fleet.completed(data).spec.model_dump(mode="json"))], tmp_path)
    assert_close(found["chosen"], expected, BOUNDS["float64"])


HOP = {"source": "image", "target": "image", "latency_ns": 3_000, "bytes_per_ns": "0.1", "row_bytes": 70}
HOPS = {"transfers": [HOP]}


@pytest.mark.parametrize(
    ("degrees", "options"),
    [
        pytest.param(SMALL, {"interaction_ns": 5_000}, marks=pytest.mark.long),
        pytest.param(STAGED, {"microbatches": 2, "interaction_ns": 70_000, **HOPS}, marks=pytest.mark.long),
        (STAGED, {"microbatches": 4, "schedule": "batch_sync", **HOPS}),
        ({"image": (2, 3), "text": (1, 2)}, {"microbatches": 2, "extra_in_flight": 1, "interaction_ns": 9_000, **HOPS}),
        (THREE, {"microbatches": 2, "interaction_ns": 5_000}),
        (SPLIT, {"microbatches": 2, "interaction_ns": 5_000, **HOPS}),
        (WIDE, {"microbatches": 2, "interaction_ns": 5_000, "frozen": ("image",), **HOPS}),
    ],
    ids=str,
)
def test_the_executed_step_is_the_simulated_one(fleet: Fleet, degrees: Degrees, options: dict[str, Any]) -> None:
    job = tower_job(fleet, degrees, **options, global_batch=24)
    plan = JobPlanner(job, (Dataset.open(fleet.folders["pairs"]),)).plan(0)
    planned = layout_of(job.spec.execution).timeline(job.spec, plan)
    executed = execute(Case("virtual", fleet.address, job.spec.model_dump(mode="json")), job, planned)
    assert_as_simulated(job, planned, executed)


def a_run(fleet: Fleet, degrees: Degrees, folder: Path, steps: int, **options: Any) -> Case:
    """A run to a step that saves every second one."""
    training = {
        "steps": steps,
        "metrics": str(folder / "metrics.jsonl"),
        "checkpoint": {"directory": str(folder / "checkpoints"), "every": 2},
        "optimizer": {"lr": 0.01},
        **options,
    }
    folder.mkdir(exist_ok=True)
    job = tower_job(fleet, degrees, dataset="understanding", microbatches=2)
    contrastive = {"loss": "siglip", "features": 16}
    name = f"{folder.name}-{steps}"
    return Case(name, fleet.address, job.spec.model_dump(mode="json"), training=training, contrastive=contrastive)


@pytest.mark.timeout(400)
@pytest.mark.filterwarnings("ignore:torch.distributed:UserWarning")
def test_a_run_resumes_and_goes_on_with_other_degrees(fleet: Fleet, pool: Pool, tmp_path: Path) -> None:
    straight, again = tmp_path / "straight", tmp_path / "again"
    pool.run([a_run(fleet, STAGED, straight, 4), a_run(fleet, STAGED, again, 2)], tmp_path)
    shutil.copytree(again, tmp_path / "moved")
    pool.run([a_run(fleet, STAGED, again, 4, backbone={"sharding": "zero3"})], tmp_path)
    pool.run([a_run(fleet, TENSOR_PARALLEL, tmp_path / "moved", 4)], tmp_path)
    expected = metrics(straight)
    assert [m["samples"] for m in expected] == [m["images"] for m in expected] == [16] * 4
    assert expected[0]["invalid_images"] == 1
    alone = case_of(fleet, "alone", SINGLE, "siglip", dataset="understanding")
    loss, _ = towers_in_one_process(alone, frozenset({fleet.victims["understanding"]}))
    assert expected[0]["contrastive_loss"] == pytest.approx(loss, rel=1e-9)
    assert all(m["contrastive_loss"] > 0 and m["text_loss"] is m["image_loss"] is None for m in expected)
    for folder in (again, tmp_path / "moved"):
        found = metrics(folder)
        assert [m["sample_digest"] for m in found] == [m["sample_digest"] for m in expected]
        for key in ("contrastive_loss", "grad_norm"):
            assert [m[key] for m in found] == pytest.approx([m[key] for m in expected], rel=1e-9)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("degrees", [STAGED, pytest.param(TENSOR_PARALLEL, marks=pytest.mark.long)], ids=str)
def test_losses_and_recall_of_a_held_out_stream_are_those_of_one_process(
    fleet: Fleet, pool: Pool, tmp_path: Path, degrees: Degrees
) -> None:
    """With an image that cannot be decoded, which is neither asked for nor found; over several contrastive batches."""
    options: dict[str, Any] = {"dataset": "understanding", "global_batch": 48, "contrastive_batch": 16}
    training = {"evaluation": {"every": 1, "steps": 1}, "optimizer": {"lr": 1e-300}}
    case = replace(
        a_run(fleet, degrees, tmp_path / "evaluated", 1, **training),
        held_out=json.loads(identify(tower_job(fleet, degrees, microbatches=2, **options).spec.forward_only).text),
    )
    pool.run([case], tmp_path)
    (line,) = metrics(tmp_path / "evaluated")
    found, skip = line["evaluation"], frozenset({fleet.victims["understanding"]})
    alone = case_of(fleet, "alone", SINGLE, "siglip", **options)
    assert found["contrastive_loss"] == pytest.approx(towers_in_one_process(alone, skip)[0], rel=1e-9)
    assert found["recall"] == recall_in_one_process(alone, skip)
    assert 0 < found["recall"]["text_to_image_r5"] < found["recall"]["text_to_image_r10"] < 1
    assert (found["samples"], found["images"], found["invalid_images"]) == (48, 48, 1)


def metrics(folder: Path) -> list[dict[str, Any]]:
    return steps_of(folder / "metrics.jsonl")
