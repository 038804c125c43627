"""What cannot be sharded is refused before training starts, by name."""

from typing import Any

import pytest
import torch
from builders.grouped import grouped_data
from builders.jobs import make_job
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from dataserver.planning.job.identity import parse_job
from trainclient.exchange.wait_times import Waits
from trainclient.models.layers import SplitLayer
from trainclient.sharding.fsdp import ShardedNetwork
from trainclient.sharding.tensor_parallel import split
from trainclient.training.config import ConfigError, TrainConfig
from trainclient.training.model_config import Sharding
from trainclient.training.models import Models


class Scaled(nn.Module):
    """With a parameter that has no rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2)])
        self.scale = nn.Parameter(torch.ones(()))


@pytest.mark.parametrize(
    ("network", "message"),
    [
        (Scaled(), r"module vit has parameters without dimensions \(scale\).*give them the shape \[1\]"),
        (nn.ModuleList([nn.Linear(2, 2)]), "the network of module vit is a ModuleList, which cannot be called"),
        (nn.ModuleDict({"a": nn.Linear(2, 2)}), "is a ModuleDict"),
    ],
)
@pytest.mark.parametrize("by_hand", [True, False])
def test_networks_without_shares(network: nn.Module, message: str, by_hand: bool) -> None:
    mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=("dp",), _init_backend=False, _rank=0)
    with pytest.raises(ValueError, match=message):
        ShardedNetwork(network, "vit", mesh, torch.float32, Waits(torch.device("cpu")), by_hand=by_hand)


def test_a_module_of_ones_own_cannot_be_gathered_block_by_block() -> None:
    own = {"use": "modules.own_encoder:BlockEncoder", "options": {"hidden": 8}}
    spec = make_job(encoder=2, backbone=(1, 1), generator=1).spec
    for sharding in ("none", "zero2"):
        models = Models.of(TrainConfig.model_validate({"modules": {"vit": {**own, "sharding": sharding}}}), spec)
        assert models.sharding(spec.execution.module("vit")) == sharding
    with pytest.raises(
        ConfigError, match=r"modules\.vit\.sharding is zero3, in which ranks wait .*; zero2 is possible"
    ):
        Models.of(TrainConfig.model_validate({"modules": {"vit": {**own, "sharding": "zero3"}}}), spec)


def test_one_rank_alone_holds_everything_and_checkpoints_do_not_say_who_holds_what() -> None:
    spec = make_job(encoder=2, backbone=(1, 1), generator=1).spec
    own = {"vit": {"use": "modules.own_encoder:BlockEncoder", "options": {"hidden": 8}}}
    shares = {"backbone": {"sharding": "zero3"}, "generator": {"sharding": "zero2"}}
    models = Models.of(
        TrainConfig.model_validate({**shares, "modules": {"vit": {**own["vit"], "sharding": "zero2"}}}), spec
    )
    assert [models.sharding(m) for m in spec.execution.modules] == [Sharding.ZERO2, Sharding.NONE, Sharding.NONE]
    assert models.describe() == Models.of(TrainConfig.model_validate({"modules": own}), spec).describe()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"backbone": {"heads": 6, "groups": 3, "width": 96}, "tp": 2}, "module llm has tp 2 and groups 3"),
        ({"backbone": {}, "tp": 3}, "module llm has tp 3 and heads 4"),
        ({"backbone": {"mlp_width": 190}, "tp": 4}, "module llm has tp 4 and groups 2"),
        (
            {"backbone": {"mlp_width": 191}, "tp": 2},
            "module llm has tp 2 and mlp_width 191, which ranks cannot .* set tp to a divisor of 191",
        ),
        ({"backbone": {}, "sp": 3}, "module llm has sp 3 and heads 4, which .* set sp to a divisor of 4"),
        (
            {"backbone": {"mlp_width": 190}, "tp": 2, "sp": 2},
            "module llm has tp 2 x sp 2 and groups 2, which ranks cannot .* set tp x sp to a divisor of 2",
        ),
    ],
)
def test_layers_without_equal_parts(changed: dict[str, Any], message: str) -> None:
    data = make_job(encoder=1, backbone=(1, 1), generator=1).spec.model_dump(mode="json")
    data["execution"]["modules"][1] |= {key: changed[key] for key in ("tp", "sp") if key in changed}
    config = TrainConfig.model_validate({"backbone": changed["backbone"]})
    with pytest.raises(ConfigError, match=message):
        Models.of(config, parse_job(data).spec)


@pytest.mark.parametrize(
    ("sizes", "degree", "message"),
    [
        ({}, 4, "module llm has groups 2, which 4 ranks that share sequences .*max_degree to at most 2, or groups"),
        (
            {"heads": 6, "groups": 3, "width": 48},
            2,
            "module llm has groups 3, which 2 ranks .*to at most 1",
        ),
        ({"heads": 1, "groups": 1}, 2, "module llm has heads 1, which 2 ranks .*or heads to a multiple of 2"),
    ],
)
def test_heads_without_equal_parts(sizes: dict[str, int], degree: int, message: str) -> None:
    groups = {"max_degree": degree}
    job = parse_job(grouped_data(4, 512, groups))
    Models.of(TrainConfig.model_validate({"backbone": {"heads": 8, "groups": 4}}), job.spec)
    with pytest.raises(ConfigError, match=message):
        Models.of(TrainConfig.model_validate({"backbone": sizes}), job.spec)


class Odd(SplitLayer):
    """Networks that cannot be split evenly, or not at all."""

    columns, rows = ("up",), ("down",)

    def __init__(self, up: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.up, self.down = up, down


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (nn.Linear(2, 2), "module vit has tp 2, but no layer of its network is a SplitLayer"),
        (Odd(nn.Linear(4, 3), nn.Linear(4, 4)), r"vit\.0\.up has 3 outputs to split, .* no multiple of tp 2"),
        (Odd(nn.Linear(4, 4), nn.Linear(5, 4)), r"vit\.0\.down has 5 inputs to split"),
        (Odd(nn.Identity(), nn.Linear(4, 4)), r"vit\.0\.up is a Identity; a Linear is required"),
    ],
)
def test_networks_without_equal_parts(layer: nn.Module, message: str) -> None:
    mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=("tp",), _init_backend=False, _rank=0)
    with pytest.raises(ValueError, match=message):
        split(nn.Sequential(layer), "vit", mesh)
