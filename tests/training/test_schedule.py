"""Learning rates by the step, and the options that name them."""

import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from builders.jobs import module as job_module
from torch import nn

from dataserver.planning.job.fields import ModuleSpec
from trainclient.cli import main
from trainclient.models.encoder import EncoderConfig, ImageEncoder
from trainclient.training.config import ConfigError, checked, validate_config
from trainclient.training.optimizer_config import OptimizerConfig
from trainclient.training.schedule import module_rates, parameter_rates

NAMES = {"vit": "encoder", "docs": "encoder", "llm": "backbone"}
MODULES = [ModuleSpec(**job_module(kind, name=name)) for name, kind in NAMES.items()]


def optimizer(**fields: Any) -> OptimizerConfig:
    return checked(validate_config({"optimizer": fields})).optimizer


def rates(steps: int, **fields: Any) -> list[float]:
    found = module_rates(optimizer(lr=2.0, **fields), MODULES)["llm"]
    return [found.lr(step) for step in range(steps)]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, [2, 2, 2]),
        ({"warmup_steps": 4}, [0.5, 1, 1.5, 2, 2, 2]),
        ({"schedule": "linear", "decay_steps": 4}, [2, 1.5, 1, 0.5, 0, 0]),
        ({"schedule": "linear", "decay_steps": 2, "min_ratio": 0.5, "warmup_steps": 2}, [1, 2, 2, 1.5, 1, 1]),
        ({"schedule": "cosine", "decay_steps": 4}, [2, 1 + math.sqrt(0.5), 1, 1 - math.sqrt(0.5), 0, 0]),
        ({"schedule": "cosine", "decay_steps": 2, "min_ratio": 0.1}, [2, 1.1, 0.2, 0.2]),
        (
            {"schedule": "wsd", "warmup_steps": 2, "stable_steps": 3, "decay_steps": 4, "min_ratio": 0.2},
            [1, 2, 2, 2, 2, 2, 1.2, 2 - 1.6 * math.sqrt(0.5), 2 - 1.6 * math.sqrt(0.75), 0.4, 0.4],
        ),
    ],
)
def test_courses(fields: dict[str, Any], expected: list[float]) -> None:
    assert rates(len(expected), **fields) == pytest.approx(expected, rel=1e-14, abs=1e-15)


def test_a_module_is_as_it_says_then_as_its_kind_says_then_as_all_are() -> None:
    config = optimizer(
        lr=1.0,
        weight_decay=0.5,
        warmup_steps=2,
        encoder={"lr_factor": 0.1, "weight_decay": 0.0},
        modules={"docs": {"lr": 3.0, "warmup_steps": 4}},
    )
    found = module_rates(config, MODULES)
    assert {name: (r.peak, r.weight_decay, r.warmup_steps, r.lr(1)) for name, r in found.items()} == {
        "vit": (0.1, 0.0, 2, 0.1),
        "docs": (3.0, 0.0, 4, 1.5),
        "llm": (1.0, 0.5, 2, 1.0),
    }


def test_projectors_are_as_they_say_then_as_their_encoder() -> None:
    config = optimizer(lr=1.0, encoder={"lr_factor": 0.1, "weight_decay": 0.0}, projector={"lr": 2.0})
    found = module_rates(config, MODULES)
    assert found.keys() == {"vit", "docs", "llm", "vit.projector", "docs.projector"}
    assert {(r.peak, r.weight_decay) for name, r in found.items() if name.endswith(".projector")} == {(2.0, 0.0)}
    assert module_rates(optimizer(encoder={"lr": 3.0}), MODULES).keys() == {"vit", "docs", "llm"}
    network = ImageEncoder(EncoderConfig(layers=1, width=8, heads=2, mlp_width=8, patch=2, merge=1, output_dim=4))
    own = {name: r.peak for name, r in parameter_rates(found, "vit", network).items()}
    assert own == {name: 2.0 if ".merger." in name else 0.1 for name in own}
    assert {"vit.merger.up.weight", "vit.merger_norm.weight", "vit.layers.0.mlp.up.weight"} < own.keys()
    with pytest.raises(ConfigError, match=r"nothing says which parameters of module vit project: give Linear an attr"):
        parameter_rates(found, "vit", nn.Linear(2, 2))
    assert parameter_rates(found, "llm", nn.Linear(2, 2)).keys() == {"llm.weight", "llm.bias"}
    frozen = [m.model_copy(update={"frozen": m.name == "vit"}) for m in MODULES]
    assert "vit.projector" not in module_rates(config, frozen)


def test_options_for_modules_that_are_not_there_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"optimizer\.modules names \['vti'\], which are not in the job; it has"):
        module_rates(optimizer(modules={"vti": {"lr": 1}}), MODULES)
    with pytest.raises(ConfigError, match=r"optimizer\.generator is given, but the job has no generator"):
        module_rates(optimizer(generator={"lr": 1}), MODULES)
    with pytest.raises(ConfigError, match=r"optimizer\.projector is given, but no module trains one; the job's mod"):
        module_rates(optimizer(projector={"lr": 1}), MODULES[2:])


PROBLEMS = [
    ({"schedule": "cosine"}, "optimizer.decay_steps: schedule cosine needs the steps"),
    ({"schedule": "wsd", "decay_steps": 3}, "optimizer.stable_steps: schedule wsd needs the steps between"),
    ({"decay_steps": 3}, "optimizer.decay_steps: schedule constant has none"),
    ({"min_ratio": 0.5}, "optimizer.min_ratio: schedule constant has none"),
    ({"schedule": "linear", "decay_steps": 3, "stable_steps": 2}, "optimizer.stable_steps: schedule linear has none"),
    ({"encoder": {"lr": 1, "lr_factor": 2}}, "optimizer.encoder.lr_factor: 2 is given beside lr 1"),
    ({"encoder": {"lr_factor": 0}}, "optimizer.encoder.lr_factor: Input should be greater than 0"),
    ({"projector": {"lr": 1, "lr_factor": 2}}, "optimizer.projector.lr_factor: 2 is given beside lr 1"),
    ({"decay_steps": 0}, "optimizer.decay_steps: Input should be greater than or equal to 1"),
]


@pytest.mark.parametrize(("fields", "message"), PROBLEMS)
@pytest.mark.parametrize("by_flags", [False, True])
def test_errors_name_the_field(
    tmp_path: Path,
    fields: dict[str, Any],
    message: str,
    by_flags: bool,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    file = tmp_path / "train.yaml"
    file.write_text(yaml.safe_dump({"optimizer": {} if by_flags else fields}))
    assert main(["train", "--config", str(file), *(_flags("optimizer", fields) if by_flags else [])]) == 2
    errors = capsys.readouterr().err
    if by_flags and "Input should" in message:  # said of the flag
        path, _, problem = message.partition(":")
        message = f"--{path.replace('_', '-')}:{problem}"
    assert message in errors
    assert len(errors.splitlines()) == 1
    assert "pydantic" not in errors


def _flags(prefix: str, fields: dict[str, Any]) -> list[str]:
    found: list[str] = []
    for name, value in fields.items():
        key = f"{prefix}.{name.replace('_', '-')}"
        found += _flags(key, value) if isinstance(value, dict) else [f"--{key}", str(value)]
    return found


def test_single_modules_and_modules_of_their_own_only_in_files() -> None:
    config = optimizer(modules={"docs": {"lr_factor": 0.5}})
    assert config.modules["docs"].lr_factor == 0.5
    with pytest.raises(ConfigError, match=r"optimizer\.modules\.docs\.lr: Input should be greater than 0"):
        optimizer(modules={"docs": {"lr": 0}})
    with pytest.raises(ConfigError, match=r"optimizer\.modules\.docs\.lr_factor: 2 is given beside lr 1"):
        optimizer(modules={"docs": {"lr": 1, "lr_factor": 2}})


def test_a_file_gives_one_half_and_flags_the_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "train.yaml"
    file.write_text("optimizer: {schedule: cosine}")
    assert main(["train", "--config", str(file), "--optimizer.decay-steps", "5"]) == 2
    assert "no job is given" in capsys.readouterr().err
