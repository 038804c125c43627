"""Encoders whose projector is trained alone: what is trained, what a checkpoint holds of it, and what cannot be."""

from typing import Any

import pytest
import torch
from builders.contrastive import contrastive_job, two_towers
from builders.jobs import make_job
from models.test_compiling import encoder as run_encoder
from torch import nn

from dataserver.planning.job.spec import JobSpec
from trainclient.checkpoint.state import TrainerState
from trainclient.models.encoder import EncoderConfig, ImageEncoder
from trainclient.models.parameters import initialise
from trainclient.modules import TrainedModule
from trainclient.topology.process_grid import Topology
from trainclient.training.config import ConfigError, validate_config
from trainclient.training.freezing import freeze_tower, frozen_parts
from trainclient.training.memory import needs, states
from trainclient.training.models import Models

ALONE = {"encoder": {"freeze_tower": True}}
TOWER = ["vit.patch_embed", "vit.layers", "vit.merger_norm"]


class Bare(TrainedModule):
    """A network as a module."""

    def forward(self, view: Any, rows: Any) -> Any:
        raise NotImplementedError


def models(config: dict[str, Any] = ALONE, **encoder: Any) -> Models:
    spec: JobSpec = make_job(encoder=1, backbone=(1, 1), generator=1).spec
    modules = tuple(m.model_copy(update=encoder if m.name == "vit" else {}) for m in spec.execution.modules)
    execution = spec.execution.model_copy(update={"modules": modules})
    return Models.of(validate_config(config), spec.model_copy(update={"execution": execution}))


def test_gradients_of_a_projector_are_those_of_a_whole_training_and_the_tower_has_none() -> None:
    """Bit for bit."""
    found = []
    for alone in (False, True):
        network = ImageEncoder(EncoderConfig(2, 32, 4, 64, 2, 2, 32, deepstack=(0,)))
        initialise(network, 3, "vit")
        if alone:
            freeze_tower(Bare(network), "vit")
        run_encoder(network, (16, 16), torch.Generator().manual_seed(1)).backward()
        found.append({name: p.grad for name, p in network.named_parameters() if p.grad is not None})
    whole, projector = found
    assert {name.partition(".")[0] for name in projector} == {"merger", "deepstack"}
    assert all(torch.equal(gradient, whole[name]) for name, gradient in projector.items())
    assert len(whole) > len(projector)


def test_a_run_knows_what_is_trained_and_needs_less_memory() -> None:
    found, whole = models(), models({})
    assert found.frozen() == TOWER
    assert whole.frozen() == []
    assert found.describe() == whole.describe(), "checkpoints of one are resumed by the other"
    topology = Topology.of(found.job)
    ours, theirs = (states(m, topology)[0] for m in (found, whole))
    _, made = found.shaped(topology.processes[0].chunks[0])
    merger = sum(p.numel() for name, p in made.network.named_parameters() if name.startswith("merger."))
    assert (ours.trained, ours.parameters) == (merger, theirs.parameters)
    assert not made.passes_gradients
    assert not made.trains_weights
    room, whole_room = (needs(m, topology, 1 << 30)[0] for m in (found, whole))
    assert room.unit_bytes is not None
    assert whole_room.unit_bytes is not None
    assert room.unit_bytes < whole_room.unit_bytes
    assert room.state_bytes < whole_room.state_bytes


def test_state_of_an_optimizer_that_a_checkpoint_lacks_begins_anew() -> None:
    state = TrainerState({}, {}, frozen=[*TOWER, "dit"])
    names = ["vit.layers.0.x", "vit.merger.up.weight", "vit.merger_norm.weight", "dit.x", "llm.layers.0.x"]
    tensors = {f"{name}{end}": torch.zeros(1) for name in names for end in ("", "/step", "/exp_avg")}
    begins_anew = tensors.keys() - state.readable(tensors).keys()
    assert {name.partition("/")[0] for name in begins_anew} == {"vit.layers.0.x", "vit.merger_norm.weight", "dit.x"}
    assert all("/" in name for name in begins_anew)


def test_parts_of_a_network_are_named_by_as_few_names_as_say_it() -> None:
    network = nn.ModuleDict({"one": nn.Linear(2, 2), "two": nn.Linear(2, 2)})
    assert frozen_parts(network, "own") == []
    network["one"].requires_grad_(requires_grad=False)
    network["two"].bias.requires_grad_(requires_grad=False)
    assert frozen_parts(network, "own") == ["own.one", "own.two.bias"]


@pytest.mark.parametrize(
    ("config", "encoder", "message"),
    [
        (ALONE, {"frozen": True}, "vit has freeze_tower, but is frozen whole by the job; leave one of them out"),
        (
            {"modules": {"llm": {"freeze_tower": True}}},
            {},
            "llm has freeze_tower, but is of kind backbone, which has no",
        ),
        ({"encoder": {"freeze_tower": True, "lora": {"rank": 2}}}, {}, "vit has freeze_tower, but has lora adapters"),
        (
            {"modules": {"vit": {"freeze_tower": True, "use": "modules.own_encoder:BlockEncoder"}}},
            {},
            "vit has freeze_tower, and nothing says which of its parameters project: give Sequential an attribute",
        ),
    ],
)
def test_what_has_no_tower_to_freeze_is_named(config: dict[str, Any], encoder: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        models(config, **encoder)


def test_towers_of_contrastive_jobs_have_no_projector() -> None:
    with pytest.raises(ConfigError, match="which has no projector; freeze it whole"):
        Models.of(validate_config(ALONE), contrastive_job(two_towers()).spec)
