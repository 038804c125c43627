"""Times of modules on the device at hand. The only part of this folder that loads torch."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn

from dataserver.planning.fitting import FitError, Measurements, fit
from dataserver.planning.jobspec import ModelSize
from trainclient.models.backbone import BackboneBatch, BackboneConfig, BackboneStage
from trainclient.models.encoder import EncoderConfig, ImageEncoder
from trainclient.models.generator import GeneratorConfig, ImageGenerator
from trainclient.models.parameters import initialise
from trainclient.orchestrate.networks import Network
from trainclient.orchestrate.profile import MeasuredCost, MeasuredModule, Profile, size_of

LAYERS: Final = (1, 3)
"""Layers of the modules that are measured: the difference gives the time of a layer, the rest that of the ends."""
PATCH: Final = 16
MERGE: Final = 2
QUERIES: Final = 64
_KINDS: Final = {"A100": "a800", "A800": "a800", "H100": "h100", "H800": "h100", "H200": "h200"}
"""Kinds of clusters by a part of the name that CUDA tells."""

Step = Callable[[], tuple[int, int]]
"""One forward and backward, and the nanoseconds that each took."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How to measure."""

    device: torch.device
    dtype: torch.dtype
    sizes: tuple[int, ...]
    """Rows of an item."""
    degrees: tuple[int, ...]
    repeats: int


def gpu_kind(device: torch.device) -> tuple[str, str]:
    """The kind of a device, as clusters name it, and what it is called."""
    if device.type != "cuda":
        return device.type, device.type
    name = torch.cuda.get_device_name(device)
    return next((kind for part, kind in _KINDS.items() if part in name), name), name


def measure(networks: Sequence[Network], plan: Plan, progress: Callable[[str], None]) -> Profile:
    """Measure every module at every size; backbones at every degree, others at degree 1.

    Raises:
        FitError: the sizes do not tell the terms of a cost apart.
    """
    modules = []
    for network in networks:
        degrees = [d for d in plan.degrees if network.role.spine or d == 1]
        found = []
        for tp in degrees:
            if not network.divides(tp):
                raise ValueError(
                    f"--tp {tp} does not divide the {network.size.heads} heads and {network.size.groups} heads of keys "
                    f"of {network.name}; leave it out"
                )
            progress(f"{network.name}, tp {tp}")
            found.append(_measured(network, tp, plan))
        modules.append(MeasuredModule(name=network.name, size=size_of(network.size), degrees=tuple(found)))
    kind, name = gpu_kind(plan.device)
    return Profile(gpu=kind, device=name, dtype=str(plan.dtype).removeprefix("torch."), modules=tuple(modules))


def _measured(network: Network, tp: int, plan: Plan) -> MeasuredCost:
    times = np.array([_whole_ns(network, tp, size, plan) for size in plan.sizes], np.int64)
    sizes = np.array(plan.sizes, np.int64)
    try:
        found = fit(Measurements(np.ones_like(sizes), sizes, sizes * sizes, times[:, 0], times[:, 1]))
    except FitError as error:
        raise FitError(
            f"{network.name}, tp {tp}: {error}. Here steps are --repeats, and items --sizes: raise the first, or give "
            "larger or other sizes"
        ) from None
    return MeasuredCost(tp=tp, cost=found.cost, error_percent=found.residual_p50_ppm / 10_000)


def _whole_ns(network: Network, tp: int, size: int, plan: Plan) -> tuple[int, int]:
    """Forward and backward of an item of so many rows in the whole module, from modules of few layers."""
    few, more = (_layers_ns(network, tp, layers, size, plan) for layers in LAYERS)
    each = [max(0, m - f) / (LAYERS[1] - LAYERS[0]) for f, m in zip(few, more, strict=True)]
    whole = [f + (network.size.layers - LAYERS[0]) * e for f, e in zip(few, each, strict=True)]
    return round(whole[0]), round(whole[1])


def _layers_ns(network: Network, tp: int, layers: int, size: int, plan: Plan) -> tuple[int, int]:
    shared = replace(
        network.size, layers=layers, heads=network.size.heads // tp, groups=network.size.groups // tp,
        mlp_width=network.size.mlp_width // tp, vocab_size=-(-network.size.vocab_size // tp),
    )  # fmt: skip
    step = _STEPS[network.kind](network, shared, size, plan)
    step()
    times = [step() for _ in range(plan.repeats)]
    forward, backward = (statistics.median(t[i] for t in times) for i in (0, 1))
    return round(forward), round(backward)


def _timed(plan: Plan, network: nn.Module, run: Callable[[], Tensor]) -> Step:
    def now() -> int:
        if plan.device.type == "cuda":
            torch.cuda.synchronize(plan.device)
        return time.perf_counter_ns()

    def step() -> tuple[int, int]:
        network.zero_grad(set_to_none=True)
        began = now()
        loss = run()
        between = now()
        loss.backward()  # type: ignore[no-untyped-call]
        return between - began, now() - between

    return step


def _ready(network: nn.Module, plan: Plan) -> nn.Module:
    initialise(network, 0, "profile")
    return network.to(plan.device, plan.dtype)


def _image(size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Pixels, grid and offsets of a picture of so many patches, as wide as it must be."""
    patches = torch.zeros(size, PATCH**2 * 3, dtype=torch.uint8)
    return patches, torch.tensor([[MERGE, size // MERGE]]), torch.tensor([0, size])


def _encoder(network: Network, shared: ModelSize, size: int, plan: Plan) -> Step:
    del network
    config = EncoderConfig(shared.layers, shared.width, shared.heads, shared.mlp_width, PATCH, MERGE, shared.width)
    module = _ready(ImageEncoder(config), plan)
    image = _image(size)
    return _timed(plan, module, lambda: module(*image).float().sum())


def _backbone(network: Network, shared: ModelSize, size: int, plan: Plan) -> Step:
    config = BackboneConfig(
        shared.layers, shared.width, shared.mlp_width, shared.heads, shared.groups, 500_000.0, shared.vocab_size, 0,
        head_dim=network.size.width // network.size.heads,
    )  # fmt: skip
    module = _ready(BackboneStage(config), plan)
    tokens, empty = torch.arange(size) % shared.vocab_size, torch.zeros(0, dtype=torch.int64)
    batch = BackboneBatch(torch.tensor([0, size]), torch.arange(size), tokens, empty, empty, tokens)
    return _timed(plan, module, lambda: module(batch).loss_sum)


def _generator(network: Network, shared: ModelSize, size: int, plan: Plan) -> Step:
    width = network.condition_width or shared.width
    config = GeneratorConfig(shared.layers, shared.width, shared.heads, shared.mlp_width, PATCH, MERGE, width)
    module = _ready(ImageGenerator(config), plan)
    patches, grid, offsets = _image(size)
    conditions = torch.zeros(QUERIES, width, device=plan.device, dtype=plan.dtype)
    noise, moment = torch.zeros(size, PATCH**2 * 3, device=plan.device), torch.full((1,), 0.5, device=plan.device)
    arguments = (patches, grid, offsets, conditions, torch.tensor([0, QUERIES]), noise, moment, torch.tensor([True]))
    return _timed(plan, module, lambda: module(*arguments))


_STEPS: Final = {"encoder": _encoder, "backbone": _backbone, "generator": _generator}
