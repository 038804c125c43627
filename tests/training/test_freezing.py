"""Encoders whose projector is trained alone: what is trained, what a checkpoint holds of it, and what cannot be."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from builders.contrastive import contrastive_job, two_towers
from builders.jobs import TOKENIZER, make_job
from models.microbatches import encoder as run_encoder
from program.runtime_cases import Degrees, job_data
from torch import nn
from torch.distributed import HashStore

from dataserver.planning.job.identity import Job, parse_job
from dataserver.planning.job.spec import JobSpec
from trainclient.checkpoint.state import TrainerState
from trainclient.models.encoder import EncoderConfig, ImageEncoder
from trainclient.models.parameters import initialise
from trainclient.modules import TrainedModule
from trainclient.topology.process_grid import Topology
from trainclient.topology.process_groups import Groups, process_groups
from trainclient.training.config import ConfigError, validate_config
from trainclient.training.freezing import freeze_tower, frozen_parts
from trainclient.training.loop import Trainer
from trainclient.training.memory_need import needs, states
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


def trainer_of(folder: Path, config: dict[str, Any], groups: Groups, job: Job) -> tuple[Trainer, Any]:
    """A trainer that resumes from a folder, where there is a checkpoint; and streams that stand at step 1."""
    data = {"progress": False, "checkpoint": {"directory": str(folder), "asynchronous": False}, **config}
    made = Trainer(validate_config(data), job, Topology.of(job.spec), groups)
    cursor = {"version": 1, "stream_id": job.stream_id, "step": 1, "stream": "{}"}
    found = SimpleNamespace(state_dict=lambda: cursor, load_state_dict=lambda _: None, step=1, job=job)
    made.resume(found)  # type: ignore[arg-type]
    return made, found


def test_a_checkpoint_of_a_projector_is_thawed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In one process, whose gradients are all one: the tower changes no bit, and its moments begin with zero later."""
    data = job_data(Degrees(1, 1, 1, 0, colocated=True), generation={"ratio": "0"})
    data["stream"]["datasets"][0]["fingerprint"] = "0" * 64
    data["stream"]["tokenizer"] = TOKENIZER
    job = parse_job(data)
    topology, cpu, counts = Topology.of(job.spec), torch.device("cpu"), list[dict[str, int]]()
    with process_groups(topology, cpu, 60, HashStore(), 0) as groups:
        for config in (ALONE, {}):
            trainer, streams = trainer_of(tmp_path, config, groups, job)
            before = {name: p.detach().clone() for name, p in trainer._parameters.local.items()}
            ones = {name: torch.ones_like(p) for name, p in trainer._parameters.local.items() if p.requires_grad}
            trainer._optimizer.step(0, ones)
            changed = {name for name, p in trainer._parameters.local.items() if not torch.equal(p, before[name])}
            assert changed == ones.keys()
            trainer._save(streams, SimpleNamespace(sync=lambda: None))  # type: ignore[arg-type]
            state = {name: int(t) for name, t in trainer._optimizer.tensors().items() if name.endswith("/step")}
            counts.append({name.partition("/")[0]: count for name, count in state.items()})
    towers = [{name for name in found if name.startswith("vit.")} for found in counts]
    assert {name.partition(".merger.")[0] for name in towers[0]} == {"vit"}
    assert towers[0] < towers[1]
    assert {counts[1][name] for name in towers[0]} == {2}
    assert {counts[1][name] for name in towers[1] - towers[0]} == {1}
    told = "changed on resume: vit: tower frozen -> trained with lr 0.0003; its moments begin at zero"
    assert told in capsys.readouterr().err.splitlines()
