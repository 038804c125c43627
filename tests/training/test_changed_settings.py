"""What is said where a run resumes with other rates or other frozen modules."""

import json
from dataclasses import replace
from typing import Any

import pytest
from builders.jobs import module

from dataserver.planning.job.fields import ModuleSpec
from trainclient.checkpoint.state import TrainerState
from trainclient.training.changed_settings import changes, update_settings, used_rates
from trainclient.training.optimizer_config import OptimizerConfig
from trainclient.training.schedule import module_rates

MODULES = [ModuleSpec(**module(kind)) for kind in ("encoder", "backbone", "generator")]


def settings(**optimizer: Any) -> dict[str, Any]:
    config = OptimizerConfig.model_validate(optimizer)
    return update_settings(config, module_rates(config, MODULES))


def saved(frozen: tuple[str, ...] = (), **optimizer: Any) -> TrainerState:
    """As it is read back."""
    return TrainerState({"step": 7}, {}, frozen=[*frozen], optimizer=json.loads(json.dumps(settings(**optimizer))))


@pytest.mark.parametrize(
    ("before", "now", "lines"),
    [
        ({}, {}, []),
        ({"lr": 0.1 + 0.2}, {"lr": 0.1 + 0.2}, []),
        ({}, {"lr": 1e-4}, ["optimizer.lr of vit, llm, dit: 0.0003 -> 0.0001"]),
        ({"encoder": {"lr": 1e-5}}, {"encoder": {"lr_factor": 0.1}}, ["optimizer.lr of vit: 1e-05 -> 3e-05"]),
        ({"encoder": {"lr": 3e-5}}, {"modules": {"vit": {"lr": 3e-5}}}, []),
        ({"clip": 1.0, "beta2": 0.95}, {"clip": 0.0, "beta2": 0.9},
         ["optimizer.beta2: 0.95 -> 0.9", "optimizer.clip: 1 -> 0"]),
        ({"warmup_steps": 4}, {"generator": {"warmup_steps": 6}},
         ["optimizer.warmup_steps of vit, llm: 4 -> 0", "optimizer.warmup_steps of dit: 4 -> 6"]),
        ({"weight_decay": 0.1}, {"backbone": {"weight_decay": 0}}, ["optimizer.weight_decay of llm: 0.1 -> 0"]),
        ({}, {"schedule": "cosine", "decay_steps": 50, "min_ratio": 0.1},
         ["optimizer.schedule of vit, llm, dit: constant -> cosine, falls from step 0 in 50 steps to 0.1"]),
        ({"schedule": "wsd", "stable_steps": 10, "decay_steps": 5},
         {"schedule": "wsd", "stable_steps": 20, "decay_steps": 5},
         ["optimizer.schedule of vit, llm, dit: wsd, falls from step 10 in 5 steps to 0 -> "
          "wsd, falls from step 20 in 5 steps to 0"]),
    ],
)  # fmt: skip
def test_rates_that_change(before: dict[str, Any], now: dict[str, Any], lines: list[str]) -> None:
    assert changes(saved(**before), settings(**now), ()) == lines


def test_modules_that_are_frozen_or_thawed() -> None:
    """Of a module that is frozen before or now, rates that nothing uses are not told."""
    assert changes(saved(("vit",)), settings(lr=1e-4), ("dit",)) == [
        "vit: frozen -> trained with lr 0.0001; its moments begin at zero",
        "dit: trained -> frozen; its moments end with this checkpoint",
        "optimizer.lr of llm: 0.0003 -> 0.0001",
    ]
    assert changes(saved(("vit",)), settings(), ("vit",)) == []


TOWER = ("vit.patch_embed", "vit.layers")
PROJECTOR = {"projector": {"lr": 1e-3}}


@pytest.mark.parametrize(
    ("before", "then", "frozen", "now", "lines"),
    [
        (TOWER, {}, (), {"lr": 1e-4}, [
            "vit: tower frozen -> trained with lr 0.0001; its moments begin at zero",
            "optimizer.lr of vit, llm, dit: 0.0003 -> 0.0001"]),
        (("vit",), PROJECTOR, TOWER, PROJECTOR,
         ["vit: frozen -> tower frozen with lr 0.001; its moments begin at zero"]),
        ((), {}, TOWER, {}, ["vit: trained -> tower frozen; its moments end with this checkpoint"]),
        (TOWER, PROJECTOR, TOWER, {**PROJECTOR, "encoder": {"lr": 1e-5}}, []),
        ((), {}, (), PROJECTOR, ["optimizer.lr of vit.projector: 0.0003 -> 0.001"]),
        ((), PROJECTOR, (), {"lr": 1e-4},
         ["optimizer.lr of vit, llm, dit: 0.0003 -> 0.0001", "optimizer.lr of vit.projector: 0.001 -> 0.0001"]),
    ],
)  # fmt: skip
def test_projectors_that_are_trained_alone_or_at_rates_of_their_own(
    before: tuple[str, ...], then: dict[str, Any], frozen: tuple[str, ...], now: dict[str, Any], lines: list[str]
) -> None:
    """Rates of a projector that are new, or are given up, are told as changes of what it had."""
    assert changes(saved(before, **then), settings(**now), frozen) == lines


def test_rates_that_nothing_is_updated_with() -> None:
    names = ["vit", "llm", "vit.projector"]
    assert used_rates(names, TOWER) == ["llm", "vit.projector"]
    assert used_rates(names[:2], TOWER) == ["vit", "llm"]
    assert used_rates(names, ("vit",)) == ["llm"]
    assert used_rates(names, ()) == names


def test_a_checkpoint_that_says_nothing_of_updates() -> None:
    assert changes(replace(saved(("vit",)), optimizer={}), settings(lr=1e-4), ("vit",)) == []
