"""Runs that are evaluated on a held-out stream: what it computes, that training does not notice, and when it comes."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from program.conftest import Fleet
from program.runtime_cases import Case, Degrees, Pool
from training.runs import steps_of, stored

from dataserver.planning.job.identity import identify

DEGREES = Degrees(2, 1, 2, 1)
SHORT: dict[str, Any] = {"global_batch": 4}
"""Steps of few microbatches."""
HELD_OUT: dict[str, Any] = {"dataset": "more", "seed": 9, **SHORT}
SHARDED = {"encoder": "zero3", "generator": "zero2"}
NO_CHANGE = {"lr": 1e-300}


def run(fleet: Fleet, folder: Path, name: str, steps: int, degrees: Degrees = DEGREES, **training: Any) -> Case:
    """A run in float64 with its metrics, and a checkpoint at its end, in a folder of its own."""
    options = {"steps": steps, "metrics": str(folder / name / "metrics.jsonl"),
               "checkpoint": {"directory": str(folder / name)}, "optimizer": {"lr": 0.01}, **training}  # fmt: skip
    return Case(name, fleet.address, fleet.job(degrees, **SHORT).spec.model_dump(mode="json"), training=options)


def evaluated(fleet: Fleet, case: Case, name: str | None = None, degrees: Degrees = DEGREES, **evaluation: Any) -> Case:
    """The same run, which is evaluated."""
    held_out = identify(fleet.job(degrees, **HELD_OUT).spec.forward_only)
    return replace(
        case,
        name=name or case.name,
        training={**case.training, "evaluation": evaluation},
        held_out=held_out.spec.model_dump(mode="json"),
    )


def metrics(folder: Path, name: str) -> list[dict[str, Any]]:
    return steps_of(folder / name / "metrics.jsonl")


def without_times(evaluation: dict[str, Any] | None) -> dict[str, Any] | None:
    return evaluation and {key: value for key, value in evaluation.items() if key != "seconds"}


def assert_profiled(folder: Path, step: int) -> None:
    """A trace of each process has the operations of one step, and what torch did in them."""
    assert sorted(path.name for path in folder.iterdir()) == [f"rank-{r:05d}.json" for r in range(DEGREES.world_size)]
    for path in folder.iterdir():
        names = [e["name"] for e in json.loads(path.read_text())["traceEvents"] if "name" in e]
        operations = [n for n in names if n.startswith(("forward of microbatch", "backward of microbatch"))]
        assert {int(name.rsplit(" ", 1)[1]) for name in operations} == {step}
        assert "aten::linear" in names


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_losses_of_a_held_out_stream_that_training_does_not_notice(fleet: Fleet, pool: Pool, tmp_path: Path) -> None:
    """On two pipelines of two stages, some of them sharded; a run that resumes evaluates as one that does not."""
    plain = run(fleet, tmp_path, "plain", 2)
    whole = evaluated(fleet, run(fleet, tmp_path, "whole", 2), every=1, steps=2)
    first = evaluated(fleet, run(fleet, tmp_path, "cut", 1), every=1, steps=2)
    rest = evaluated(fleet, run(fleet, tmp_path, "cut", 2), "rest", every=1, steps=2)
    plain.training["profile"] = {"directory": str(tmp_path / "profile"), "first": 1, "steps": 1}
    still = evaluated(fleet, run(fleet, tmp_path, "still", 1, optimizer=NO_CHANGE), every=1, steps=1)
    trained = run(fleet, tmp_path, "trained", 1, optimizer=NO_CHANGE)
    trained = replace(trained, job=fleet.job(DEGREES, **HELD_OUT).spec.model_dump(mode="json"))
    cases = [plain, whole, first, rest, still, trained]
    pool.run([replace(case, sharding=SHARDED) for case in cases], tmp_path)

    ours, theirs = (
        [{k: v for k, v in m.items() if k in ("text_loss", "image_loss", "grad_norm")} for m in metrics(tmp_path, name)]
        for name in ("whole", "plain")
    )
    assert ours == theirs
    assert_profiled(tmp_path / "profile", step=1)
    ends = [stored(tmp_path / name / "step-00000002") for name in ("plain", "whole", "cut")]
    for end in ends[1:]:
        assert end.keys() == ends[0].keys()
        assert all(torch.equal(value, ends[0][name]) for name, value in end.items())
    found = [[without_times(m["evaluation"]) for m in metrics(tmp_path, name)] for name in ("whole", "cut")]
    assert found[0] == found[1]
    first_evaluation, last_evaluation = found[0]
    assert first_evaluation is not None
    assert last_evaluation is not None
    assert first_evaluation["samples"] == last_evaluation["samples"] > 4
    assert first_evaluation["text_loss"] > last_evaluation["text_loss"], "it learns"

    (evaluation,), (step,) = (metrics(tmp_path, name) for name in ("still", "trained"))
    for name in ("text_loss", "image_loss"):
        assert evaluation["evaluation"][name] == pytest.approx(step[name], rel=1e-12)
        assert evaluation["evaluation"][name] != pytest.approx(evaluation[name], rel=1e-3), "of another stream"
    for name in ("samples", "sample_digest", "images"):
        assert evaluation["evaluation"][name] == step[name]


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("degrees", "backbone"),
    [
        (Degrees(2, 2, 1, 2, colocated=True), {"lora": {"rank": 2}}),
        (Degrees(1, 2, 1, 1, group=2), {"sharding": "zero3"}),
        (Degrees(1, 1, 2, 1, sp=2), {"lora": {"rank": 2}}),
    ],
    ids=str,
)
def test_other_layouts_are_evaluated_too(
    fleet: Fleet, pool: Pool, tmp_path: Path, degrees: Degrees, backbone: dict[str, Any]
) -> None:
    """The losses of a held-out step are those of training on it, and those that a pipeline finds."""
    pipelined = Degrees(1, 2, 1, 1)

    def still(name: str, degrees: Degrees) -> Case:
        return run(fleet, tmp_path, name, 1, degrees, optimizer=NO_CHANGE, backbone=backbone)

    trained = replace(still("trained", degrees), job=fleet.job(degrees, **HELD_OUT).spec.model_dump(mode="json"))
    pool.run([trained, evaluated(fleet, still("ours", degrees), degrees=degrees, every=1, steps=1)], tmp_path)
    pool.run([evaluated(fleet, still("pipelined", pipelined), degrees=pipelined, every=1, steps=1)], tmp_path)
    (ours,), (theirs,), (step,) = (metrics(tmp_path, name) for name in ("ours", "pipelined", "trained"))
    for name in ("text_loss", "image_loss"):
        assert ours["evaluation"][name] == pytest.approx(step[name], rel=1e-12)
        assert ours["evaluation"][name] == pytest.approx(theirs["evaluation"][name], rel=1e-12)
    for name in ("samples", "sample_digest", "images"):
        assert ours["evaluation"][name] == theirs["evaluation"][name]
