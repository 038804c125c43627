"""Measured costs: from the device to a file, and from the file to a choice."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from orchestration.instances import paper_problem
from torch import nn

from dataserver.job_files import read_job
from dataserver.planning.costs.profile import Profile, ProfiledCost, ProfiledModule, ProfileError, with_sums
from dataserver.planning.job.fields import Cost, ModelSize
from dataserver.planning.job.spec import Execution
from trainclient.cli import main
from trainclient.models.generator import GeneratorConfig, ImageGenerator
from trainclient.models.towers import TextTower, TextTowerConfig
from trainclient.orchestrate import profiling
from trainclient.orchestrate.cluster import cluster
from trainclient.orchestrate.command import Orchestrate, networks, problem
from trainclient.orchestrate.costs import analytic_cost, computed_cost
from trainclient.orchestrate.networks import Network, read_network
from trainclient.orchestrate.profile_command import doubts
from trainclient.orchestrate.profiled_costs import costs_of, read_profile, write_profile
from trainclient.orchestrate.profiling import LAYERS, Plan, alike, share, subject
from trainclient.stream.jobs import load_job_data

H100 = cluster("h100", 16)
NETWORKS = paper_problem("llama3-7b", 8, 8, 512).networks


def orchestrate(arguments: Sequence[str]) -> int:
    return main(["orchestrate", *arguments])


def profile_command(arguments: Sequence[str]) -> int:
    return main(["profile", *arguments])


def measured(degrees: tuple[int, ...] = (1,), gpu: str = "h100", networks: Sequence[Network] = NETWORKS) -> Profile:
    """What would be measured if devices were twice as fast as they are computed to be."""
    modules = [
        ProfiledModule(
            name=n.name,
            size=n.size,
            degrees=tuple(
                ProfiledCost(tp=tp, cost=computed_cost(n, tp, 2 * H100.peak_flops_ns, H100.gpu), error_percent=1.0)
                for tp in degrees
            ),
        )
        for n in networks
    ]
    name = "NVIDIA H100 80GB HBM3"
    return Profile(gpu=gpu, device=name, dtype="bfloat16", within_gb_s="450", modules=tuple(modules))


def test_costs_far_from_their_times_are_named() -> None:
    profile = measured((1, 2))
    assert not list(doubts(profile))
    first, *others = profile.modules
    poor = first.degrees[1].model_copy(update={"error_percent": 659.0})
    odd = profile.model_copy(
        update={"modules": (first.model_copy(update={"degrees": (first.degrees[0], poor)}), *others)}
    )
    (doubt,) = doubts(odd)
    assert f"the cost of {first.name}, tp 2, is 659 % off its own times" in doubt


def test_what_is_written_is_read(tmp_path: Path) -> None:
    file = tmp_path / "profile.yaml"
    write_profile(measured((1, 4)), file)
    assert read_profile(file) == measured((1, 4))


def test_a_place_that_cannot_be_written_is_known_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--encoder", "tiny", "--device", "cpu", "--output", str(tmp_path / "nowhere" / "profile.yaml")]
    assert profile_command(given) == 2
    said = capsys.readouterr().err
    assert said.startswith(
        f"trainclient: --output {given[-1]} cannot be written (No such file or directory); name a file"
    )
    assert said.count("\n") == 1


@pytest.mark.parametrize("degrees", [(1,), (1, 2, 4, 8), (1, 8)])
def test_degrees_that_were_not_measured_follow_from_those_that_were(degrees: tuple[int, ...]) -> None:
    twice = replace(H100, peak_flops_ns=2 * H100.peak_flops_ns)
    for (name, tp), cost in costs_of(measured(degrees), NETWORKS, H100).items():
        network = next(n for n in NETWORKS if n.name == name)
        wanted = analytic_cost(network, tp, twice)
        assert cost.microbatch_ns == pytest.approx(wanted.microbatch_ns, rel=1e-3)
        assert cost.linear_ps == pytest.approx(wanted.linear_ps, rel=1e-3)
        assert cost.quadratic_fs == pytest.approx(wanted.quadratic_fs, rel=1e-3)
        assert cost.backward_percent == wanted.backward_percent


def test_a_window_of_attention_stays_where_sums_over_peers_are_added() -> None:
    cost = Cost(linear_ps=1000, quadratic_fs=10, window=729)
    summed = with_sums(cost, "encoder", NETWORKS[0].size, 2, Fraction(450))
    assert summed.window == 729
    assert summed.linear_ps > 1000


def test_a_frozen_module_runs_its_part_of_the_measured_backward() -> None:
    encoder = replace(NETWORKS[0], frozen=True)
    backbone = replace(NETWORKS[1], frozen=True, input_gradient=True)
    table = costs_of(measured(), (encoder, backbone), H100)
    assert table["encoder", 1].backward_percent == 0
    assert table["backbone", 1].backward_percent == 100


def test_another_kind_of_gpu_or_another_model_is_refused() -> None:
    with pytest.raises(
        ProfileError, match=r"the profile is of h200 .*, and the cluster has h100; profile the model there"
    ):
        costs_of(measured(gpu="h200"), NETWORKS, H100)
    with pytest.raises(ProfileError, match=r"with `trainclient profile`, set --gpu h200, or leave"):
        costs_of(measured(gpu="h200"), NETWORKS, H100)
    with pytest.raises(ProfileError, match=r"with `trainclient profile`, or leave"):  # no cluster can be of that kind
        costs_of(measured(gpu="cpu"), NETWORKS, H100)
    with pytest.raises(ProfileError, match=r"module backbone of the profile is another model .layers 32, not 40"):
        costs_of(measured(), (read_network("backbone", "llama3-13b"),), H100)
    with pytest.raises(ProfileError, match="the profile has no module vit"):
        costs_of(measured(), (read_network("encoder", "vit-h", "vit"),), H100)


MODEL = {"encoder": "vit-h", "backbone": "llama3-7b", "generator": "dit-1b"}
TOWERS = {"image_tower": "vit-h", "text_tower": "clip-text-h"}
SENSES = {"encoder": "vit-h", "audio_encoder": "whisper-large", "video_encoder": "tiny", "backbone": "llama3-7b"}
OF_SENSES = [
    {"name": "vit", "kind": "encoder", "modality": "image"},
    {"name": "ears", "kind": "encoder", "modality": "audio", "tp": 2},
    {"name": "films", "kind": "encoder", "modality": "video"},
    {"name": "llm", "kind": "backbone", "dp": 2, "tp": 2},
]
MODULES = [
    {"name": "vit", "kind": "encoder", "dp": 4},
    {"name": "llm", "kind": "backbone", "dp": 2, "tp": 2, "recompute": True},
    {"name": "dit", "kind": "generator", "dp": 4},
]
PAIR = [
    {"name": "pictures", "kind": "tower", "modality": "image", "tp": 2},
    {"name": "words", "kind": "tower", "modality": "text"},
]


def job_file(folder: Path, modules: Sequence[dict[str, Any]], **cost: Any) -> Path:
    """A job whose modules cost what a profile beside it says."""
    file = folder / "job.yaml"
    entries = [{**m, "cost": {"profile": "profile.yaml", **cost}} for m in modules]
    file.write_text(yaml.safe_dump({"stream": {}, "execution": {"modules": entries}}))
    return file


@pytest.mark.parametrize(
    ("model", "modules", "frozen"),
    [
        (MODEL, MODULES, ()),
        (MODEL, MODULES, (0,)),
        (MODEL, MODULES, (1,)),
        (TOWERS, PAIR, (0,)),
        (SENSES, OF_SENSES, (1,)),
    ],
)
def test_planner_and_solver_take_the_same_costs_from_one_file(
    tmp_path: Path, model: dict[str, str], modules: Sequence[dict[str, Any]], frozen: tuple[int, ...]
) -> None:
    read = networks(Orchestrate.model_validate(model))
    read = networks(Orchestrate.model_validate({**model, "frozen": [read[n].name for n in frozen]}))
    write_profile(measured((1, 2), networks=read), tmp_path / "profile.yaml")
    ours = [{**m, "frozen": True} if n in frozen else m for n, m in enumerate(modules)]
    file = job_file(tmp_path, ours)
    job = read_job(file)
    assert job == load_job_data(file)
    end, layout = {"epochs": 1}, {"kind": "contrastive" if model is TOWERS else "pipelined"}
    execution = Execution.model_validate({**job["execution"], "end": end, "layout": layout})
    solved = costs_of(read_profile(tmp_path / "profile.yaml"), read, H100)
    for module, network in zip(execution.modules, read, strict=True):
        wanted = solved[network.name, module.tp].model_dump()
        wanted["backward_percent"] += 100 if module.recompute else 0
        assert module.cost.model_dump() == wanted


@pytest.mark.parametrize(
    ("module", "cost", "within", "said"),
    [
        ({"tp": 4}, {}, "450", "modules.0.cost: profile.yaml: the profile has encoder at tp [1, 2], and module vit"),
        ({"sp": 2}, {}, "450", "module vit has sp 2, and profiles none; give its cost in numbers"),
        ({"modality": "audio"}, {}, "450", "the profile has no module audio-encoder, only ['encoder', "),
        (PAIR[0], {}, "450", "the profile has no module image, only ['encoder', 'backbone', 'generator']; measure it"),
        ({}, {"linear_ps": 3}, "450", "cost has ['linear_ps', 'profile'], and profile is 'profile.yaml'; the name"),
        ({}, {"profile": 3}, "450", "cost has ['profile'], and profile is 3; the name of a file alone is required"),
        ({}, {"profile": "other.yaml"}, "450", "other.yaml cannot be read: No such file"),
        ({}, {"profile": "job.yaml"}, "450", "cost: job.yaml is no profile (gpu: Field required; "),
        ({"tp": 2}, {}, None, "the profile has no within_gb_s, on which the sums over the 2 peers of encoder depend"),
        ({"tp": 2}, {}, "0.001", "check the bandwidth within a node"),
        ({}, {}, "0", "within_gb_s: Value error, it is 0; at least 0.001 is required"),
    ],
)  # fmt: skip
def test_a_job_whose_profile_does_not_have_it_is_refused(
    tmp_path: Path, module: dict[str, Any], cost: dict[str, Any], within: str | None, said: str
) -> None:
    profile = yaml.safe_load(yaml.safe_dump(measured((1, 2)).model_dump(mode="json")))
    (tmp_path / "profile.yaml").write_text(yaml.safe_dump({**profile, "within_gb_s": within}))
    file = job_file(tmp_path, [{**MODULES[0], **module}], **cost)
    for read in (read_job, load_job_data):
        with pytest.raises(ValueError, match=re.escape(said)):
            read(file)


def test_what_else_is_wrong_with_a_module_is_named_in_place_of_its_profile(tmp_path: Path) -> None:
    file = job_file(tmp_path, [{**MODULES[0], "tp": "two"}])
    assert read_job(file)["execution"]["modules"] == [{**MODULES[0], "tp": "two"}]
    file.write_text("execution: {modules: [1, {cost: 2}, {cost: {linear_ps: 3}}]}")
    assert load_job_data(file) == yaml.safe_load(file.read_text())


def test_the_solver_reads_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, sizes = tmp_path / "profile.yaml", tmp_path / "sizes.json"
    write_profile(measured(), file)
    sizes.write_text(json.dumps({"samples": [{"text_tokens": 100, "patches": [1024]}]}))
    given = ["--encoder", "vit-h", "--backbone", "llama3-7b", "--generator", "dit-1b", "--generation", "0.5", "--gpu",
             "h100", "--gpus", "32", "--steps", "0", "--sizes", str(sizes), "--as-json"]  # fmt: skip
    assert orchestrate(given) == 0
    computed = json.loads(capsys.readouterr().out)["choices"][0]["step_ns"]
    assert orchestrate([*given, "--profile", str(file)]) == 0
    assert 1.5 < computed / json.loads(capsys.readouterr().out)["choices"][0]["step_ns"] <= 2.05
    write_profile(measured().model_copy(update={"within_gb_s": "7"}), file)
    options = Orchestrate.model_validate({**MODEL, "generation": 0.5, "sizes": sizes, "profile": file})
    assert problem(options).cluster.within_bytes_ns == 7
    assert problem(options.model_copy(update={"within_gb_s": 9})).cluster.within_bytes_ns == 9
    file.write_text("gpu: h100\n")
    assert orchestrate([*given, "--profile", str(file)]) == 2
    assert "is no profile" in capsys.readouterr().err


def test_modules_and_towers_are_measured_and_solved_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On a CPU, and small: what is measured there is a time of something, in a file of its own kind."""
    file, sizes = tmp_path / "profile.yaml", tmp_path / "sizes.json"
    modules = ("--encoder", "--audio-encoder", "--video-encoder", "--backbone", "--generator")
    model = [word for module in modules for word in (module, "tiny")]
    towers = ["--image-tower", "tiny", "--text-tower", "tiny"]
    given = [*model, *towers, "--output", str(file), "--device", "cpu", "--dtype", "float32", "--sizes", "16", "64",
             "256", "--tp", "1", "4", "--repeats", "1"]  # fmt: skip
    assert profile_command(given) == 0, capsys.readouterr().err
    assert "backbone is not measured at tp 4: backbone has 4 heads, 2 of keys" in capsys.readouterr().err
    found = read_profile(file)
    assert found.gpu == "cpu"
    assert {m.name: [d.tp for d in m.degrees] for m in found.modules} == {
        "encoder": [1, 4], "audio-encoder": [1, 4], "video-encoder": [1, 4], "backbone": [1], "generator": [1, 4],
        "image": [1, 4], "text": [1, 4],
    }  # fmt: skip
    for module in found.modules:
        for degree in module.degrees:
            assert isinstance(degree.cost, Cost)
            assert degree.cost.microbatch_ns + degree.cost.linear_ps + degree.cost.quadratic_fs > 0
    assert yaml.safe_load(file.read_text())["modules"][3]["size"]["layers"] == 4
    media = {"patches": [64, 750, 96], "modality": ["image", "audio", "video"], "groups": [1, 1, 6]}
    pair = {"text_tokens": 100, "patches": [64]}
    sizes.write_text(json.dumps({"samples": [pair]}))
    solved = ["--sizes", str(sizes), "--steps", "0", "--as-json", "--profile", str(file)]
    assert orchestrate([*towers, *solved]) == 2
    assert "the profile is of cpu (cpu), and the cluster has h100" in capsys.readouterr().err
    file.write_text(file.read_text().replace("gpu: cpu", "gpu: h100"))
    for solving, samples in ((towers, [pair]), ([*model, "--generation", "0.5"], [pair, {"text_tokens": 10, **media}])):
        sizes.write_text(json.dumps({"samples": samples}))
        assert orchestrate([*solving, *solved]) == 0, capsys.readouterr().err
        assert json.loads(capsys.readouterr().out)["execution"]["modules"]


def test_each_size_is_one_item_and_several() -> None:
    plan = Plan(torch.device("cpu"), torch.float32, sizes=(16, 64, 256), degrees=(1,), repeats=1)
    assert list(plan.microbatches()) == [(16,), (64,), (8,) * 8, (256,), (32,) * 8]


MEDIA = ("audio", "video")
SIZE = ModelSize(6, 64, 192, 4, 4)


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        ("encoder", SIZE),
        ("encoder", replace(SIZE, gated=True, window=64, global_layers=2, deepstack=3)),
        ("audio", SIZE),
        ("video", replace(SIZE, gated=True, window=64, global_layers=2)),
        ("backbone", replace(SIZE, groups=2, vocab_size=100)),
        ("backbone", replace(SIZE, groups=2, vocab_size=100, head_dim=32, window=8, global_layers=1, deepstack=3)),
    ],
)
def test_what_is_measured_has_the_weights_that_are_computed(kind: str, size: ModelSize) -> None:
    network = Network("encoder", "encoder", size, modality=kind) if kind in MEDIA else Network(kind, kind, size)
    plan = Plan(torch.device("cpu"), torch.float32, sizes=(16,), degrees=(1,), repeats=1)
    for _, each in alike(size):
        module, run = subject(network, replace(each, layers=1), plan)
        assert getattr(module.config, "window", 0) == {0: 0, 8: 8, 64: 4}[each.window]
        weights = sum(parameter.numel() for parameter in module.layers.parameters() if parameter.dim() == 2)
        assert weights == network.block_parameters / size.layers
        run((16,))().backward()
        assert all(parameter.grad is not None for parameter in module.parameters() if parameter.requires_grad)


def test_windowed_layers_and_others_are_measured_as_many_as_there_are() -> None:
    mixed = replace(SIZE, window=8, global_layers=2)
    windowed, plain = replace(SIZE, window=8), SIZE
    assert alike(mixed) == [(4, windowed), (2, plain)]
    assert alike(replace(mixed, global_layers=6)) == [(6, plain)]
    assert (alike(windowed), alike(plain)) == ([(6, windowed)], [(6, plain)])


def test_a_module_that_nothing_is_built_of_is_not_measured() -> None:
    plan = Plan(torch.device("cpu"), torch.float32, sizes=(16,), degrees=(1,), repeats=1)
    for change, said in (({"head_dim": 32}, "head_dim 32"), ({"window": 81}, "window 81")):
        network = Network("vit", "encoder", replace(SIZE, **change))
        with pytest.raises(ValueError, match=rf"vit has {said}, with which no encoder is measured; leave it out"):
            subject(network, network.size, plan)


def test_blocks_are_compiled_where_they_are_in_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What compiles them is noted alone: compiling takes a minute, and has tests of its own."""
    compiled: list[nn.Module] = []
    monkeypatch.setattr(profiling, "compile_blocks", lambda network, *_: compiled.append(network))
    given = ["--backbone", "tiny", "--output", str(tmp_path / "profile.yaml"), "--device", "cpu", "--dtype", "float32",
             "--sizes", "16", "64", "256", "--tp", "1", "--repeats", "1"]  # fmt: skip
    for options, number in (([], 0), (["--compile"], len(LAYERS))):
        assert profile_command([*given, *options]) == 0, capsys.readouterr().err
        assert len(compiled) == number


def test_a_share_is_that_of_one_peer() -> None:
    """Projections of attention and MLPs have equal parts, everything else is whole, and rows go through it."""
    sizes = TextTowerConfig(1, 64, 192, 4, 2, 1e4, 100, 0, output_dim=32)
    whole, part = dict(TextTower(sizes).named_parameters()), dict(share(TextTower(sizes), 2).named_parameters())
    assert part.keys() == whole.keys()
    ratios = {name: whole[name].numel() / part[name].numel() for name in whole}
    split = {name for name in whole if ".attention." in name or ".mlp." in name}
    assert {name for name, ratio in ratios.items() if ratio == 2} == split
    assert set(ratios.values()) == {1, 2}
    generator = share(ImageGenerator(GeneratorConfig(1, 64, 4, 256, 16, 2, 64)), 4)
    assert {tuple(b.shape) for n, b in generator.named_parameters() if n.endswith("attention.query.bias")} == {(16,)}


def test_towers_are_solved_with_their_own_costs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, sizes = tmp_path / "profile.yaml", tmp_path / "sizes.json"
    towers = [read_network("tower", "vit-h", "image", "image"), read_network("tower", "clip-text-h", "text", "text")]
    write_profile(measured((1, 2), networks=towers), file)
    sizes.write_text(json.dumps({"samples": [{"text_tokens": 60, "patches": [256]}]}))
    given = ["--image-tower", "vit-h", "--text-tower", "clip-text-h", "--gpus", "8", "--global-batch", "4096",
             "--steps", "0", "--sizes", str(sizes), "--as-json"]  # fmt: skip
    assert orchestrate(given) == 0
    computed = json.loads(capsys.readouterr().out)["choices"][0]["step_ns"]
    assert orchestrate([*given, "--profile", str(file)]) == 0
    assert 1.5 < computed / json.loads(capsys.readouterr().out)["choices"][0]["step_ns"] <= 2.05


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((), "--output is missing"),
        (("--output", "x", "--sizes", "16", "64"), "three or more multiples of 4"),
        (("--output", "x", "--sizes", "16", "64", "65"), "three or more multiples of 4"),
        (("--output", "x", "--tp", "2"), "--tp is [2]; 1, and more of 2, 4 and 8"),
        (("--output", "x", "--dtype", "int8"), "--dtype is int8"),
        (("--output", "x", "--device", "tpu"), "--device is tpu"),
        (("--output", "x", "--device", "cpu"), "--backbone is missing"),
        (
            ("--output", "x", "--device", "cpu", "--text-tower", "tiny"),
            "two towers, --image-tower and --text-tower",
        ),
        (
            ("--output", "x", "--device", "cpu", "--backbone", "tiny", "--tp", "1", "8"),
            "--tp 8 divides no module (backbone has 4 heads, 2 of keys, and an MLP of 192); leave it out",
        ),
    ],
)
def test_what_cannot_be_measured_is_one_line(
    capsys: pytest.CaptureFixture[str], given: tuple[str, ...], said: str
) -> None:
    assert profile_command(given) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
