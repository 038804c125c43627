"""What modules take of a device, as `trainclient memory` derives it, beside what networks and processes really hold."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from builders.jobs import make_job
from models.microbatches import backbone, encoder, generator_
from program.conftest import Fleet
from program.runtime_cases import Degrees, job_data
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from dataserver.planning.job.identity import parse_job
from trainclient.cli import main
from trainclient.models import backbone as backbones
from trainclient.models.backbone import BackboneStage
from trainclient.models.backbone_block import BackboneConfig
from trainclient.models.encoder import EncoderConfig, ImageEncoder
from trainclient.models.generator import GeneratorConfig, ImageGenerator
from trainclient.orchestrate.memory import (
    ENCODER_BLOCK,
    GATED_BLOCK,
    GENERATOR_BLOCK,
    MAX_LOGITS,
    PRECISIONS,
    Parameters,
    block_bytes,
    saved_bytes,
)
from trainclient.topology.process_grid import Topology
from trainclient.training.config import ConfigError, TrainConfig
from trainclient.training.memory_need import Need, as_yaml, needs
from trainclient.training.models import Models

WIDTH, LENGTHS = 32, (16, 16)
BLOCKS = {"encoder": ENCODER_BLOCK, "backbone": GATED_BLOCK, "generator": GENERATOR_BLOCK}
Make = Callable[[int, bool], nn.Module]
Run = Callable[[nn.Module, tuple[int, ...], torch.Generator], Tensor]
NETWORKS: dict[str, tuple[Make, Run, int]] = {
    "backbone": (
        lambda n, c: BackboneStage(BackboneConfig(n, WIDTH, 176, 4, 2, 1e4, 50, 0), checkpoint=c),
        backbone,
        1,
    ),
    "encoder": (lambda n, c: ImageEncoder(EncoderConfig(n, WIDTH, 4, 128, 2, 2, WIDTH), checkpoint=c), encoder, 8),
    "generator": (
        lambda n, c: ImageGenerator(GeneratorConfig(n, WIDTH, 4, 128, 2, 2, WIDTH), checkpoint=c),
        generator_,
        8,
    ),
}
"""How each kind is made of a number of layers, with or without recomputing; how it is run; rows of a unit of length."""


def bytes_for_backward(network: nn.Module, run: Run) -> int:
    """What a forward keeps for its backward beside parameters."""
    parameters = {p.untyped_storage().data_ptr() for p in network.parameters()}
    retained: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        retained[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        run(network, LENGTHS, torch.Generator().manual_seed(1))
    return sum(t.untyped_storage().nbytes() for address, t in retained.items() if address not in parameters)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("kind", NETWORKS)
def test_blocks_keep_of_a_row_what_is_derived(kind: str, recompute: bool) -> None:
    """On CPUs RMSNorm also keeps what it has normalised, and attention a number for each head."""
    make, run, scale = NETWORKS[kind]
    one, three = (make(layers, recompute) for layers in (1, 3))
    found = (bytes_for_backward(three, run) - bytes_for_backward(one, run)) / 2 / (sum(LENGTHS) * scale)
    beside = 4 * 2 * WIDTH if kind == "backbone" and not recompute else 0
    size = one.config.size
    expected = saved_bytes(BLOCKS[kind], size, 1, recompute, PRECISIONS["float32"])
    assert found - beside == pytest.approx(expected, rel=0.03)


def derived(changes: dict[str, Any], config: dict[str, Any], gigabytes: float = 1.0, **execution: Any) -> list[Need]:
    data = make_job(encoder=2, backbone=(2, 2), generator=1).spec.model_dump(mode="json")
    for module in data["execution"]["modules"]:
        module |= changes.get(module["name"], {})
        del module["cost"]["backward_percent"]  # is the job's to find out
    data["execution"] |= execution
    spec = parse_job(data).spec
    models = Models.of(TrainConfig.model_validate(config), spec)
    return needs(models, Topology.of(spec), int(gigabytes * 1e9))


def test_states_are_those_of_the_largest_stage_and_of_what_ranks_share() -> None:
    plain = {need.module: need for need in derived({}, {"dtype": "bfloat16"})}
    spec = make_job(encoder=2, backbone=(2, 2), generator=1).spec
    models = Models.of(TrainConfig(), spec)
    places = {
        p.modules[0].name: p for p in Topology.of(spec).processes
    }  # of the backbone the last stage, with its head
    for name, place in places.items():
        numbers = [p.numel() for _, m in models.build(place, torch.device("cpu")) for p in m.network.parameters()]
        assert plain[name].state_bytes >= 18 * sum(numbers)
    assert plain["vit"].state_bytes == 18 * plain["vit"].parameters
    shared = {n.module: n for n in derived({}, {"dtype": "bfloat16", "encoder": {"sharding": "zero2"}})}
    assert shared["vit"].state_bytes == (6 + 12 / 2) * plain["vit"].parameters
    assert shared["vit"].budget_bytes > plain["vit"].budget_bytes
    assert shared["llm"] == plain["llm"]
    dealt = derived({}, {"dtype": "bfloat16", "encoder": {"sharding": "zero3"}})[0]
    assert 18 / 2 * dealt.parameters < dealt.state_bytes < 18 * dealt.parameters


def test_frozen_parts_adapters_and_peers() -> None:
    vit, llm, _ = derived({}, {})
    assert vit.state_bytes == 16 * vit.parameters
    assert derived({"vit": {"frozen": True}}, {})[0].state_bytes == 4 * vit.parameters
    split = derived({"llm": {"tp": 2}}, {})[1]
    assert split.parameters == llm.parameters
    assert llm.state_bytes / 2 < split.state_bytes < llm.state_bytes  # the head is whole
    adapted = derived({"llm": {"tp": 2}}, {"backbone": {"lora": {"rank": 2}}})[1]
    assert adapted.parameters > llm.parameters
    assert adapted.state_bytes < split.state_bytes / 2
    whole, shared = (derived({"llm": {"sp": sp}}, {"backbone": {"sharding": "zero2"}})[1] for sp in (1, 2))
    assert shared.state_bytes < whole.state_bytes
    assert shared.unit_bytes is not None
    assert llm.unit_bytes is not None
    assert shared.unit_bytes == llm.unit_bytes / 2
    again = derived({"llm": {"recompute": True}}, {})[1]
    assert again.unit_bytes is not None
    assert 10 * again.unit_bytes < llm.unit_bytes


def test_what_is_printed_goes_into_a_job_and_what_does_not_fit_is_refused() -> None:
    found = yaml.safe_load(as_yaml(derived({}, {})))["modules"]
    assert [m["name"] for m in found] == ["vit", "llm", "dit"]
    derived({m["name"]: {"memory": m["memory"]} for m in found}, {})
    with pytest.raises(ConfigError, match=r"module vit takes 0\.00.. GB .* raise its tp, its pp, or its dp with shard"):
        derived({}, {}, gigabytes=0.0001)
    own = {"vit": {"use": "modules.own_encoder:BlockEncoder", "options": {"hidden": 8}}}
    assert "only its author knows" in as_yaml(derived({}, {"modules": own}))


def test_states_and_a_block_that_are_counted_by_hand() -> None:
    assert MAX_LOGITS == backbones.MAX_LOGITS
    held = Parameters(trained=100, frozen=10)
    assert held.state_bytes(4) == 110 * 2 + 100 * 4 + 100 * 12 / 4
    assert held.dealt_bytes(4, Parameters(trained=5)) == (110 * 2 + 100 * 16) / 4 + 5 * 6
    assert block_bytes(ENCODER_BLOCK, EncoderConfig(1, 1280, 16, 5120, 14, 2, 1).size, 1) == 34 * 1280


def test_the_command_prints_what_servers_take(fleet: Fleet, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, job = job_data(Degrees(1, 2, 2, 1, recompute=("llm",))), tmp_path / "job.yaml"
    job.write_text(yaml.safe_dump(data))
    command = ["memory", "--job", str(job), "--servers", fleet.address, "--backbone.sharding", "zero2"]
    assert main(command) == 2
    assert "--memory-gb is missing; the memory of a device" in capsys.readouterr().err
    assert main([*command, "--memory-gb", "0.1"]) == 0
    found = yaml.safe_load(capsys.readouterr().out)["modules"]
    for module, needed in zip(data["execution"]["modules"], found, strict=True):
        module |= {"memory": needed["memory"]}
    fleet.completed(data)
    assert main([*command, "--memory-gb", "0.001"]) == 2
    assert "trainclient: module vit takes 0.00" in capsys.readouterr().err
