"""Costs of named models: by hand, against the trainer's models, and as a job names them."""

import json
from collections.abc import Iterator
from dataclasses import astuple
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from builders.jobs import job_data
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from dataserver.planning import I64
from dataserver.planning.balancing import bin_totals
from dataserver.planning.costs.model import backward_ns, forward_ns
from dataserver.planning.job.fields import (
    DEFAULT_COSTS,
    Cost,
    Modality,
    ModelCost,
    ModuleKind,
    ModuleSpec,
    default_cost,
)
from dataserver.planning.job.fields.hardware import (
    MODELS,
    PEAK_GIGAFLOPS,
    ModelSize,
    backward_percent,
    coefficients,
    fixed_ns,
    linear_flops,
    pair_flops,
)
from dataserver.planning.job.identity import JobSpecError, canonical_json, parse_job
from trainclient.models import presets
from trainclient.models.audio_encoder import AudioEncoder
from trainclient.models.backbone import BackboneStage
from trainclient.models.encoder import ImageEncoder
from trainclient.models.generator import ImageGenerator

VIT = {"model": "vit-h", "device": "h100", "efficiency": "0.4"}
NAMES = [(kind, name) for kind, models in MODELS.items() for name in models]
TRAINED = [(kind, name) for kind, name in NAMES if kind != "tower"]
"""The trainer has no towers."""
MODULE_0 = ("execution", "modules", 0)


def test_vit_h_by_hand() -> None:
    # 32 layers of 4 x 1280^2 weights of attention and 2 x 1280 x 5120 of the MLP, two operations each.
    assert linear_flops("encoder", MODELS["encoder"]["vit-h"]) == 2 * 32 * (6_553_600 + 13_107_200) == 1_258_291_200
    assert pair_flops("encoder", MODELS["encoder"]["vit-h"]) == 4 * 32 * 1280 == 163_840
    # 0.4 x 989,400 operations a nanosecond: 1,258,291,200 / 395,760 = 3179.4299... ns, and 163,840 / it = 0.41398...
    found = coefficients("encoder", "vit-h", "h100", Fraction("0.4"))
    assert (found.linear_ps, found.quadratic_fs) == (3_179_430, 413_989)
    # 10 us a layer, and as many bytes of weights as operations of a row: 1,258,291,200 / 3,350 = 375,609.3 ns.
    assert found.microbatch_ns == 320_000 + 375_610


def test_short_microbatches_reach_less() -> None:
    """Reading the weights of Llama 7B takes an H100 as long as computing 118 tokens at 40 % of its peak."""
    found = coefficients("backbone", "llama3-7b", "h100", Fraction("0.4"))
    reading = found.microbatch_ns - 32 * 10_000
    assert reading == fixed_ns("backbone", MODELS["backbone"]["llama3-7b"], "h100") - 320_000
    assert reading * 1_000 // found.linear_ps == 989_400 * 4 // (3_350 * 10) == 118


def test_llama_by_hand() -> None:
    # Per layer: queries and output 2 x 8192^2, keys and values 2 x 8192 x 1024 (8 of 64 heads), MLP 3 x 8192 x 28672.
    weights = 80 * (134_217_728 + 16_777_216 + 704_643_072) + 8192 * 128_256
    assert linear_flops("backbone", MODELS["backbone"]["llama3-70b"]) == 2 * weights
    assert pair_flops("backbone", MODELS["backbone"]["llama3-70b"]) == 4 * 80 * 8192 // 2
    found = coefficients("backbone", "llama3-70b", "a800", Fraction(1), degree=8)
    assert found.linear_ps == -(-2 * weights * 1000 // (312_000 * 8))


def test_towers_by_hand() -> None:
    """OpenCLIP's ViT-H/14: its image tower is the encoder of that name, its text tower has a causal mask."""
    assert MODELS["tower"]["vit-h"] == MODELS["encoder"]["vit-h"]
    for flops in (linear_flops, pair_flops):
        assert flops("tower", MODELS["tower"]["vit-h"]) == flops("encoder", MODELS["encoder"]["vit-h"])
    text = MODELS["tower"]["clip-text-h"]
    assert (text.width, text.heads, text.layers) == (1024, 16, 24)
    # 24 layers of 4 x 1024^2 weights of attention and 2 x 1024 x 4096 of the MLP: 302 million.
    assert linear_flops("tower", text) == 2 * 24 * (4_194_304 + 8_388_608) == 603_979_776
    assert pair_flops("tower", text) == 4 * 24 * 1024 // 2


def test_every_kind_has_sizes_and_the_trainer_makes_all_encoders() -> None:
    assert set(MODELS) == set(ModuleKind)
    assert MODELS["encoder"].keys() == presets.ENCODERS.keys() | presets.AUDIO_ENCODERS.keys()
    assert all(MODELS[kind][name].groups == MODELS[kind][name].heads for kind, name in NAMES if kind != "backbone")


def weights_of_rows(kind: str, name: str, size: ModelSize) -> Iterator[torch.Tensor]:
    """The matrices of the trainer's own module that every row meets."""
    with torch.device("meta"):
        if name in presets.AUDIO_ENCODERS and name not in presets.ENCODERS:
            module: torch.nn.Module = AudioEncoder(presets.audio_encoder_config(name, 128, 2, 4096))
        elif kind == "encoder":
            module = ImageEncoder(presets.encoder_config(name, 14, 2, 4096))
        elif kind == "backbone":
            module = BackboneStage(presets.backbone_config(name, size.vocab_size, 0))
        else:
            module = ImageGenerator(presets.generator_config(name, 14, 2, 4096))
    for path, part in module.named_modules():
        if isinstance(part, torch.nn.Linear) and path.startswith(("layers.", "head")):
            yield part.weight


@pytest.mark.parametrize(("kind", "name"), TRAINED)
def test_operations_are_those_of_the_trainer(kind: str, name: str) -> None:
    size = MODELS[kind][name]
    weights = sum(w.numel() for w in weights_of_rows(kind, name, size))
    conditions = 2 * size.layers * size.width**2 if kind == "generator" else 0  # keys and values of the conditions
    assert linear_flops(kind, size) == 2 * (weights - conditions)


def test_peaks() -> None:
    assert dict(PEAK_GIGAFLOPS) == {"a800": 312_000, "h100": 989_400, "h200": 989_400}


@given(
    st.sampled_from(NAMES),
    st.sampled_from(sorted(PEAK_GIGAFLOPS)),
    st.fractions(Fraction(1, 100), 1, max_denominator=1000),
    st.sampled_from([1, 2, 4, 8, 64]),
)
def test_costs_fall_with_faster_devices(name: tuple[str, str], device: str, efficiency: Fraction, degree: int) -> None:
    found = coefficients(*name, device, efficiency, degree)
    for better in (
        coefficients(*name, device, min(Fraction(1), efficiency * 2), degree),
        coefficients(*name, device, efficiency, 2 * degree),
        coefficients(*name, "h200", efficiency, degree),
    ):
        assert 0 < better.linear_ps <= found.linear_ps
        assert 0 < better.quadratic_fs <= found.quadratic_fs
        assert 0 < better.microbatch_ns <= found.microbatch_ns
    exact = Fraction(linear_flops(name[0], MODELS[name[0]][name[1]]) * 1000, 1)
    exact /= PEAK_GIGAFLOPS[device] * efficiency * degree
    assert 0 <= found.linear_ps - exact < 1


def test_larger_models_cost_more() -> None:
    sizes = [coefficients("backbone", f"llama3-{n}b", "h100", Fraction("0.4")) for n in (7, 13, 70)]
    assert sizes == sorted(sizes, key=lambda c: (c.linear_ps, c.quadratic_fs))
    assert [c.linear_ps // sizes[0].linear_ps for c in sizes] == [1, 1, 9]


@pytest.mark.parametrize(
    ("frozen", "gradient", "checkpoint", "percent"),
    [
        (False, True, False, 200), (False, False, False, 200), (False, True, True, 300),
        (True, True, False, 100), (True, True, True, 200), (True, False, False, 0), (True, False, True, 0),
    ],
)  # fmt: skip
def test_backward(frozen: bool, gradient: bool, checkpoint: bool, percent: int) -> None:
    assert backward_percent(frozen=frozen, input_gradient=gradient, checkpoint=checkpoint) == percent


# --- in a job -------------------------------------------------------------------------------------------------------


def with_cost(cost: Any, **module: Any) -> dict[str, Any]:
    data = job_data()
    data["execution"]["modules"][0].update(cost=cost, **module)
    return data


def first_cost(data: dict[str, Any]) -> Cost:
    return parse_job(data).spec.execution.modules[0].cost


def test_names_become_integers_before_the_job_gets_its_identity() -> None:
    named, plain = parse_job(with_cost(VIT)), first_cost(with_cost(VIT))
    assert plain == Cost(microbatch_ns=695_610, linear_ps=3_179_430, quadratic_fs=413_989, backward_percent=200)
    assert parse_job(with_cost(plain.model_dump())).job_id == named.job_id
    assert parse_job(json.loads(canonical_json(named.spec))) == named
    assert b"vit-h" not in canonical_json(named.spec)


def test_defaults_are_named_models() -> None:
    data = job_data(encoder=1, generator=1)
    for written in data["execution"]["modules"]:
        del written["cost"]
    for module in parse_job(data).spec.execution.modules:
        named = DEFAULT_COSTS[module.kind]
        assert (named.device, named.efficiency) == ("h100", "0.4")
        assert module.cost == Cost(**named.fields_of(module.kind, 1))
    assert [DEFAULT_COSTS[kind].model for kind in ModuleKind] == ["vit-h", "llama3-7b", "dit-1b", "vit-h"]


def test_the_default_of_a_tower_depends_on_what_it_reads() -> None:
    def cost(**fields: Any) -> Cost:
        return ModuleSpec(name="t", kind="tower", **fields).cost

    assert default_cost(ModuleKind.TOWER, Modality.TEXT).model == "clip-text-h"
    vit, text = (coefficients("tower", name, "h100", Fraction("0.4")) for name in ("vit-h", "clip-text-h"))
    for modality, found in (("image", vit), ("text", text)):
        default = cost(modality=modality)
        assert (default.microbatch_ns, default.linear_ps, default.quadratic_fs) == astuple(found)
        assert default.backward_percent == 200
    assert cost(modality="text", tp=2).linear_ps == -(-text.linear_ps // 2)
    assert cost(modality="text", cost={**VIT, "model": "clip-text-h"}) == cost(modality="text")
    assert cost(modality="image", cost={**VIT, "frozen": True}).backward_percent == 0, "nothing stands before a tower"
    with pytest.raises(ValidationError, match="tower t has no modality"):
        cost()


def test_degrees_divide_the_work_and_tensor_parallel_peers_the_weights() -> None:
    eight = first_cost(with_cost(VIT, tp=4, sp=2))
    assert eight.linear_ps == -(-1_258_291_200 * 1000 * 10 // (989_400 * 4 * 8))
    assert eight.microbatch_ns == 320_000 + -(-1_258_291_200 // (3_350 * 4))
    assert first_cost(with_cost(None, tp=4)).linear_ps == -(-1_258_291_200 * 1000 * 10 // (989_400 * 4 * 4))


def test_frozen_modules() -> None:
    assert first_cost(with_cost({**VIT, "frozen": True})).backward_percent == 0, "nothing stands before an encoder"
    assert first_cost(with_cost({**VIT, "checkpoint": True})).backward_percent == 300
    data = job_data()
    llm = {"model": "llama3-7b", "device": "h200", "efficiency": "0.4", "frozen": True}
    for gradient, percent in ((True, 100), (False, 0)):
        data["execution"]["modules"][1]["cost"] = {**llm, "input_gradient": gradient}
        assert parse_job(data).spec.execution.backbone.cost.backward_percent == percent


@pytest.mark.parametrize(
    ("cost", "message"),
    [
        ({**VIT, "model": "llama3-7b"}, r"modules\.0\.cost: there is no encoder named 'llama3-7b'; .* tiny, vit-h"),
        ({**VIT, "device": "b200"}, "there is no device named 'b200'; choose one of a800, h100, h200"),
        ({**VIT, "efficiency": "0"}, r"efficiency is 0; a value in \(0, 1\] is required"),
        ({**VIT, "efficiency": "1.1"}, r"efficiency is 1.1; a value in \(0, 1\] is required"),
        ({**VIT, "efficiency": "much"}, r"modules\.0\.cost: efficiency: found 'much'; a decimal string"),
        (
            {**VIT, "efficiency": "0.000000000000001"},
            r"modules\.0\.cost: found \d+; it should be less than",
        ),
        ({**VIT, "linear_ps": 3}, r"modules\.0\.cost: linear_ps: Extra inputs"),
        ({"model": "vit-h"}, r"modules\.0\.cost: device: Field required; efficiency: Field required"),
        ({"model": []}, r"modules\.0\.cost: model: "),
        (7, r"modules\.0\.cost: "),
    ],
)
def test_costs_that_cannot_be_are_refused(cost: Any, message: str) -> None:
    with pytest.raises(JobSpecError, match=message) as refusal:
        parse_job(with_cost(cost))
    assert "\n" not in str(refusal.value)


def test_a_wrong_degree_is_reported_once() -> None:
    with pytest.raises(JobSpecError, match=r"modules\.0\.tp: ") as refusal:
        parse_job(with_cost(VIT, tp=0))
    assert "no encoder" not in str(refusal.value)


def test_a_named_cost_may_be_given_as_an_object() -> None:
    fields = parse_job(with_cost(VIT)).spec.execution.modules[0].model_dump()
    named = ModuleSpec.model_validate({**fields, "cost": ModelCost(**VIT)})
    assert named.cost == first_cost(with_cost(VIT))
    with pytest.raises(ValidationError, match="efficiency"):
        ModelCost(**{**VIT, "efficiency": "2"})


# --- times ----------------------------------------------------------------------------------------------------------


def padded_ns(cost: Cost, sizes: I64, microbatch: I64, count: int) -> I64:
    return bin_totals(forward_ns(cost, sizes), microbatch, count, padded=True)


def test_padded_microbatches_cost_their_count_times_the_longest() -> None:
    cost = Cost(microbatch_ns=7, linear_ps=2_000, quadratic_fs=1_000_000)
    sizes, microbatch = np.array([3, 5, 4, 2]), np.array([0, 0, 2, 2])
    assert padded_ns(cost, sizes, microbatch, 4).tolist() == [2 * (10 + 25), 0, 2 * (8 + 16), 0]
    assert padded_ns(cost, np.empty(0, np.int64), np.empty(0, np.int64), 2).tolist() == [0, 0]


@given(st.lists(st.integers(1, 2**22), min_size=1, max_size=6), st.integers(0, 10**11), st.integers(0, 10**8))
def test_padding_never_saves_time_and_nothing_overflows(sizes: list[int], linear: int, quadratic: int) -> None:
    cost = Cost(linear_ps=linear, quadratic_fs=quadratic)
    packed = int(forward_ns(cost, np.array(sizes)).sum())
    padded = int(padded_ns(cost, np.array(sizes), np.zeros(len(sizes), np.int64), 1)[0])
    longest = max(sizes)
    exact = Fraction(longest * linear, 1000) + Fraction(longest**2 * quadratic, 10**6)
    assert packed <= padded <= len(sizes) * exact
    assert len(sizes) * (exact - 3) < padded


@given(st.integers(0, 2**22 - 1), st.sampled_from(NAMES))
def test_times_grow_with_sizes(size: int, name: tuple[str, str]) -> None:
    fields = ModelCost(model=name[1], device="h100", efficiency="0.4").fields_of(ModuleKind(name[0]), 1)
    cost = Cost(**fields)
    small, large = forward_ns(cost, np.array([size, size + 1])).tolist()
    assert 0 <= small <= large
    assert backward_ns(cost, np.array([large])).tolist() == [2 * large]
