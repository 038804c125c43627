"""Jobs of an evaluation: what is refused, and what servers get; and that nothing is disturbed."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from program.conftest import Fleet
from program.runtime_cases import Degrees, job_data
from torch import nn

from dataserver.planning.job.identity import JobSpecError, parse_job
from trainclient.training.config import ConfigError, validate_config
from trainclient.training.evaluation import undisturbed
from trainclient.training.jobs import prepare

DEGREES = Degrees(2, 1, 2, 1)


@pytest.mark.parametrize(
    ("degrees", "stream", "error", "message"),
    [
        (Degrees(2, 2, 2, 1), {}, JobSpecError, "module llm with dp 2, the training job 1; both run on the same"),
        (Degrees(2, 1, 2, 0), {"generation": {"ratio": "0"}}, JobSpecError, r"modules \['vit', 'llm'\], the training"),
        (Degrees(2, 1, 2, 1, chunks=2), {}, JobSpecError, "chunks 2, the training job 1"),
        (
            DEGREES,
            {"sizing": {"patch": 8, "merge": 1, "max_patches": 64}},
            ConfigError,
            "other models than are trained .*vit.merge: 1 there, 2 in training.* the same tokenizer, sizing",
        ),
        (DEGREES, {"dataset": "nothing"}, JobSpecError, r"evaluation.job .*held\.yaml: .*nothing"),
    ],
)
def test_other_modules_or_models_are_refused(
    fleet: Fleet, tmp_path: Path, degrees: Degrees, stream: dict[str, Any], error: type[Exception], message: str
) -> None:
    files = {"job": tmp_path / "job.yaml", "held": tmp_path / "held.yaml"}
    files["job"].write_text(yaml.safe_dump(job_data(DEGREES)))
    files["held"].write_text(yaml.safe_dump(job_data(degrees, **stream)))
    config = {"job": files["job"], "servers": fleet.address, "evaluation": {"job": files["held"]}}
    with pytest.raises(error, match=message):
        prepare(validate_config(config))


def test_groups_that_the_run_does_not_have_are_refused(fleet: Fleet, tmp_path: Path) -> None:
    files = {"job": tmp_path / "job.yaml", "held": tmp_path / "held.yaml"}
    for file, most in zip(files.values(), (1, 2), strict=True):
        file.write_text(yaml.safe_dump(job_data(Degrees(1, 2, 1, 1, group=most), units=200)))
    config = {"job": files["job"], "servers": fleet.address, "evaluation": {"job": files["held"]}}
    with pytest.raises(JobSpecError, match=r"groups of degrees \(1, 2\), the training job \(1,\); both run"):
        prepare(validate_config(config))


def test_the_held_out_job_is_one_of_forwards_that_servers_take(fleet: Fleet, tmp_path: Path) -> None:
    """Even where the training job states times and memory of backwards."""
    file = tmp_path / "job.yaml"
    data = job_data(DEGREES)
    for module in data["execution"]["modules"]:
        module |= {"recompute": True, "cost": {"linear_ps": 1, "quadratic_fs": 1, "backward_percent": 250}}
    file.write_text(yaml.safe_dump(data))
    jobs, _ = prepare(validate_config({"job": file, "servers": fleet.address, "evaluation": {"job": file}}))
    held_out = jobs.held_out
    assert held_out is not None
    assert not any(m.runs_backward or m.recompute for m in held_out.spec.execution.modules)
    assert parse_job(json.loads(held_out.text)).job_id == held_out.job_id != jobs.training.job_id
    assert held_out.stream_id == jobs.training.stream_id
    assert type(jobs).parse(jobs.text) == jobs


def test_a_job_of_which_nothing_is_trained_is_refused(fleet: Fleet, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(job_data(replace(DEGREES, frozen=("vit", "llm", "dit")))))
    with pytest.raises(ConfigError, match="all modules of the job are frozen, so nothing would be trained"):
        prepare(validate_config({"job": file, "servers": fleet.address}))


def test_modes_and_random_numbers_are_as_before() -> None:
    network = nn.Sequential(nn.Dropout(0.5), nn.Linear(2, 2), nn.Dropout(0.5).eval())
    modes, state, drawn = [m.training for m in network.modules()], torch.get_rng_state(), []
    for _ in range(2):
        with undisturbed([network], torch.device("cpu"), seed=3):
            assert not any(m.training for m in network.modules())
            drawn.append(torch.rand(3))
        assert [m.training for m in network.modules()] == modes
        assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(drawn[0], drawn[1])
