"""Modules by name: ours, and those of the user's own."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from builders.jobs import make_job
from builders.jobs import module as job_module

from trainclient.modules import Rows, Site, own
from trainclient.topology.process_grid import Topology
from trainclient.training.config import ConfigError, TrainConfig, validate_config
from trainclient.training.model_config import NamedModel
from trainclient.training.models import Models

CPU = torch.device("cpu")
DOCS = Path(__file__).parents[2] / "docs" / "training.md"


def models(**modules: dict[str, Any]) -> Models:
    config = TrainConfig(modules={name: NamedModel(**fields) for name, fields in modules.items()})
    return Models.of(config, make_job(encoder=1, generator=1).spec)


def test_the_example_in_the_documentation_is_the_one_that_is_tested() -> None:
    code = (Path(__file__).parent / "own_encoder.py").read_text()
    assert f"```python\n{code}```" in DOCS.read_text()
    assert len(code.splitlines()) <= 50


def test_modules_differ_by_name() -> None:
    found = models(vit={"layers": 3})
    assert (found.sizes["vit"].layers, found.sizes["dit"].layers) == (3, 2)
    assert found.describe()["vit"]["kind"] == "encoder"
    assert found.describe()["vit"]["layers"] == 3


def test_blocks_are_computed_again_where_the_job_says_so() -> None:
    modules = [job_module("encoder", recompute=True), job_module("backbone"), job_module("generator", recompute=True)]
    job = make_job(execution={"modules": modules}).spec
    found = Models.of(TrainConfig(), job)
    made = [
        network.network.checkpoint for place in Topology.of(job).processes for _, network in found.build(place, CPU)
    ]
    assert made == [True, False, True]


def test_a_module_of_ones_own_says_that_it_computes_again() -> None:
    modules = [job_module("encoder", recompute=True), job_module("backbone")]
    job = make_job(execution={"modules": modules}).spec
    config = TrainConfig(modules={"vit": NamedModel(use="modules.own_encoder:BlockEncoder")})
    place = Topology.of(job).processes[0]
    with pytest.raises(ConfigError, match=r"vit compute its blocks again \(recompute\), which .*BlockEncoder cannot"):
        Models.of(config, job).build(place, CPU)
    own_encoder = importlib.import_module("modules.own_encoder").BlockEncoder
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(own_encoder, "recomputes", True)
        ((site, _),) = Models.of(config, job).build(place, CPU)
    assert site.module.recompute


def test_a_module_of_ones_own_is_made_alike_everywhere() -> None:
    found = models(vit={"use": "modules.own_encoder:BlockEncoder", "options": {"hidden": 5}})
    place = Topology.of(found.job).processes[0]
    ((site, first),), ((_, second),) = (found.build(place, CPU) for _ in range(2))
    assert site.row_width == found.row_width == first.network[2].out_features
    for (name, a), (_, b) in zip(first.network.named_parameters(), second.network.named_parameters(), strict=True):
        assert torch.equal(a, b), name
        assert float(a.detach().abs().sum()) > 0 or name.endswith("bias")
    described = found.describe()["vit"]
    assert (described["use"], described["options"]) == ("modules.own_encoder:BlockEncoder", {"hidden": 5})


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        ({"other": {}}, r"modules names \['other'\], which are not in the job; it has \['vit', 'llm', 'dit'\]"),
        ({"vit": {"groups": 2}}, r"modules.vit gives \['groups'\], which modules of kind encoder lack"),
        ({"vit": {"preset": "huge"}}, "there is no encoder named 'huge'"),
        ({"llm": {"use": "a:B"}}, "modules.llm.use is given, but a backbone of one's own cannot be used yet"),
    ],
)
def test_what_cannot_be_is_refused(modules: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        models(**modules)


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("nowhere:Encoder", "'nowhere:Encoder', which cannot be imported .No module named 'nowhere'"),
        ("math:Encoder", "cannot be imported .module 'math' has no attribute 'Encoder'"),
        ("math", "cannot be imported"),
        ("math:pi", "cannot be made of .*3.14\\d+ is not a callable"),
        ("operator:add", "cannot be made of .*missing a required argument"),
        ("builtins:repr", "makes a str; a trainclient.modules.TrainedModule is required"),
    ],
)
def test_a_class_that_is_none_is_refused(reference: str, message: str) -> None:
    job = make_job(encoder=1).spec
    site = Site(job, job.execution.module("vit"), 4)
    with pytest.raises(ValueError, match=f"module vit is to be .*{message}"):
        own(reference, site, {})


def test_an_unknown_field_of_a_module_is_named() -> None:
    with pytest.raises(ConfigError, match=r"modules\.vit\.size: this option is unknown"):
        validate_config({"modules": {"vit": {"size": 3}}})


def test_invalid_items_leave_as_zeros_and_learn_nothing() -> None:
    values = torch.ones(5, 2, requires_grad=True)
    rows = Rows.of_items(values, torch.tensor([True, False, True]), torch.tensor([0, 1, 3, 5], dtype=torch.int32))
    assert rows.values[:, 0].tolist() == [1, 0, 0, 1, 1]
    rows.values.sum().backward()
    assert values.grad is not None
    assert values.grad[:, 0].tolist() == [1, 0, 0, 1, 1]
