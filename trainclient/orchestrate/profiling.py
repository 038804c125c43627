"""Times modules on the device at hand. The only part of this folder that loads torch."""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from types import MappingProxyType
from typing import Any, Final, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dataserver.planning.costs.profile import Profile, ProfiledCost, ProfiledModule
from dataserver.planning.fitting import FitError, TimingSamples, fit
from dataserver.planning.job.fields import Modality, ModelSize
from trainclient.models.audio_encoder import AudioEncoder, AudioEncoderConfig
from trainclient.models.backbone import BackboneBatch, BackboneStage
from trainclient.models.backbone_block import BackboneConfig
from trainclient.models.compiling import compile_blocks
from trainclient.models.encoder import EncoderConfig, ImageEncoder
from trainclient.models.generator import GeneratorConfig, ImageGenerator
from trainclient.models.layers import SplitLayer
from trainclient.models.parameters import initialise
from trainclient.models.projectors import NormedMerger
from trainclient.models.towers import ImageTower, ImageTowerConfig, TextTower, TextTowerConfig
from trainclient.models.video_encoder import VideoEncoder
from trainclient.orchestrate.cluster import BOARDS
from trainclient.orchestrate.networks import FEATURES, Network

LAYERS: Final = (1, 3)
"""Layers of the modules that are measured: the difference gives the time of a layer, the rest that of the ends."""
PATCH: Final = 16
MERGE: Final = 2
QUERIES: Final = 64
"""Rows of the conditions of a picture."""
PIECES: Final = 8
"""Images or texts that a microbatch is cut into, to tell what rows cost from what attention among them does."""
RUNS: Final = 3
"""Passes between two waits for the device: as in a step, the next one is prepared while one is computed."""
BINS: Final = 128
"""Mel bins of the clips that are timed."""
ROTARY_BASE: Final = 500_000.0
TOWER_VOCABULARY: Final = 49_408
"""Rows of a text tower's embedding, which sizes do not tell: CLIP's (arXiv 2103.00020, section 2.4)."""
_MEASURED: Final = ("head_dim", "gated", "window")
"""Sizes that a module has, or does not have, beside those of all."""
_KINDS: Final = {"A100": "a800", "A800": "a800", "H100": "h100", "H800": "h100", "H200": "h200"}
"""Kinds of clusters by a part of the name that CUDA tells."""

Step = Callable[[], tuple[int, int]]
"""One forward and backward, and the nanoseconds that each took."""
Run = Callable[[], Tensor]
"""A forward that ends in a scalar."""
Lengths = tuple[int, ...]
"""Rows of each image, clip, group of frames or text of a microbatch."""
Subject = tuple[nn.Module, Callable[[Lengths], Run]]
"""A module, and a forward of it for a microbatch."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to profile, and how often."""

    device: torch.device
    dtype: torch.dtype
    sizes: tuple[int, ...]
    """Rows of a microbatch, one entry for each size that is measured."""
    degrees: tuple[int, ...]
    repeats: int
    compile: bool = False
    """Whether blocks are compiled, as `trainclient train --compile` does."""

    def microbatches(self) -> Iterator[Lengths]:
        """Each size as one image or text, and as several where it can be divided."""
        for size in self.sizes:
            yield (size,)
            if size % (PIECES * MERGE**2) == 0:
                yield (size // PIECES,) * PIECES


def gpu_kind(device: torch.device) -> tuple[str, str]:
    """The kind of a device, as clusters name it, and what it is called."""
    if device.type != "cuda":
        return device.type, device.type
    name = torch.cuda.get_device_name(device)
    return next((kind for part, kind in _KINDS.items() if part in name), name), name


def profile_modules(networks: Sequence[Network], plan: Plan, progress: Callable[[str], None]) -> Profile:
    """Time every module at every size, at each of the degrees that divides it.

    Raises:
        ValueError: a degree divides none of the modules, or one has a size that is not measured.
        FitError: the sizes do not tell the terms of a cost apart.
    """
    for tp in plan.degrees:
        if not any(n.divides(tp) for n in networks):
            raise ValueError(f"--tp {tp} divides no module ({'; '.join(n.divided for n in networks)}); leave it out")
    modules = []
    for network in networks:
        found = []
        for tp in plan.degrees:
            if network.divides(tp):
                progress(f"{network.name}, tp {tp}")
                found.append(_profiled(network, tp, plan))
            else:
                progress(f"{network.name} is not measured at tp {tp}: {network.divided}")
        modules.append(ProfiledModule(name=network.name, size=network.size, degrees=tuple(found)))
    kind, name = gpu_kind(plan.device)
    within = f"{BOARDS[kind].within_gb_s:g}" if kind in BOARDS else None
    dtype = str(plan.dtype).removeprefix("torch.")
    return Profile(gpu=kind, device=name, dtype=dtype, within_gb_s=within, modules=tuple(modules))


def share(network: nn.Module, tp: int) -> nn.Module:
    """Shrink each layer to the part of one tensor-parallel rank (`sharding.tensor_parallel`), without values."""
    for layer in [m for m in network.modules() if isinstance(m, SplitLayer)]:
        for names, inputs, outputs in ((layer.columns, 1, tp), (layer.rows, tp, 1)):
            for name in names:
                whole = cast(nn.Linear, layer.get_submodule(name))
                part = whole.in_features // inputs, whole.out_features // outputs
                setattr(layer, name, nn.Linear(*part, bias=whole.bias is not None))
    return network


def _profiled(network: Network, tp: int, plan: Plan) -> ProfiledCost:
    microbatches = list(plan.microbatches())
    times = _times(network, tp, plan, microbatches)
    counts, rows, squares = (
        np.array([f(each) for each in microbatches], np.int64)
        for f in (len, sum, lambda each: sum(n * min(n, network.window or n) for n in each))
    )
    try:
        found = fit(TimingSamples(counts, rows, squares, times[:, 0], times[:, 1]))
    except FitError as error:
        raise FitError(
            f"{network.name}, tp {tp}: {error}. Here steps are --repeats, and items --sizes: raise the first, or give "
            "larger or other sizes"
        ) from None
    cost = found.cost.model_copy(update={"window": network.window})
    return ProfiledCost(tp=tp, cost=cost, error_percent=found.residual_p50_ppm / 10_000)


def alike(size: ModelSize) -> list[tuple[int, ModelSize]]:
    """The same model with layers that are all alike, windowed or not, and how many layers of it are such."""
    if not size.window or not size.global_layers:
        return [(size.layers, replace(size, global_layers=0))]
    found = [(size.layers - size.global_layers, size.window), (size.global_layers, 0)]
    return [(count, replace(size, window=window, global_layers=0)) for count, window in found if count]


def _times(network: Network, tp: int, plan: Plan, microbatches: Sequence[Lengths]) -> NDArray[np.int64]:
    """[microbatches, 2]: forward and backward of each, in nanoseconds."""
    times = np.zeros((len(microbatches), 2), np.int64)
    for count, size in alike(network.size):
        few, more = (_steps(replace(network, size=size), tp, layers, plan) for layers in LAYERS)
        times += count * np.array([_whole_ns(size.layers, few(each), more(each), plan) for each in microbatches])
    return times // network.size.layers


def _whole_ns(layers: int, few: Step, more: Step, plan: Plan) -> tuple[int, int]:
    """Forward and backward of a microbatch in a module of so many layers, from steps of modules of `LAYERS`."""
    ends, long = (_median_ns(step, plan.repeats) for step in (few, more))
    each = [max(0, m - f) / (LAYERS[1] - LAYERS[0]) for f, m in zip(ends, long, strict=True)]
    whole = [f + (layers - LAYERS[0]) * e for f, e in zip(ends, each, strict=True)]
    return round(whole[0]), round(whole[1])


def _steps(network: Network, tp: int, layers: int, plan: Plan) -> Callable[[Lengths], Step]:
    """Steps of a module of so many layers, for any microbatch."""
    few = replace(network.size, layers=layers, vocab_size=-(-network.size.vocab_size // tp))
    with torch.device("meta"):
        module, run = subject(network, few, plan)
        share(module, tp)
    module.to(plan.dtype).to_empty(device=plan.device)
    initialise(module, 0, "profile")
    if plan.compile:
        compile_blocks(module, plan.device, plan.dtype)
    return lambda lengths: _timed(plan, module, run(lengths))


def subject(network: Network, few: ModelSize, plan: Plan) -> Subject:
    """What is measured for a module, with some of its layers; ValueError where that is another one."""
    module, run = _SUBJECTS[network.modality or network.kind](network, few, plan)
    made = cast(Any, module).config.size
    other = [f"{name} {getattr(few, name)}" for name in _MEASURED if getattr(made, name) != getattr(few, name)]
    if other:
        raise ValueError(
            f"{network.name} has {', '.join(other)}, with which no {network.modality or network.kind} is measured; "
            "leave it out, and give its cost in numbers"
        )
    return module, run


def _median_ns(step: Step, repeats: int) -> tuple[int, int]:
    step()
    times = [step() for _ in range(repeats)]
    forward_ns, backward_ns = (statistics.median(t[i] for t in times) for i in (0, 1))
    return round(forward_ns), round(backward_ns)


def _timed(plan: Plan, network: nn.Module, run: Run) -> Step:
    def now() -> int:
        if plan.device.type == "cuda":
            torch.cuda.synchronize(plan.device)
        return time.perf_counter_ns()

    def step() -> tuple[int, int]:
        network.zero_grad(set_to_none=True)
        began = now()
        for _ in range(RUNS):
            run()
        between = now()
        for _ in range(RUNS):
            run().backward()  # type: ignore[no-untyped-call]
        forward_ns = (between - began) // RUNS
        return forward_ns, max(0, (now() - between) // RUNS - forward_ns)

    return step


def _image(lengths: Lengths) -> tuple[Tensor, Tensor, Tensor]:
    """Pixels, grids and offsets of pictures of so many patches, as wide as they must be."""
    patches = torch.zeros(sum(lengths), PATCH**2 * 3, dtype=torch.uint8)
    return patches, torch.tensor([[MERGE, n // MERGE] for n in lengths]), _offsets(lengths)


def _text(lengths: Lengths, vocab_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids, positions and offsets of texts."""
    positions = torch.cat([torch.arange(n) for n in lengths])
    return positions % vocab_size, positions, _offsets(lengths)


def _offsets(lengths: Lengths) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)])


def _video(lengths: Lengths) -> tuple[Tensor, Tensor, Tensor]:
    """As `_image`, of videos with one group of two frames each: groups do not see each other."""
    patches, grid, offsets = _image(lengths)
    return patches.repeat(1, 2), torch.cat([torch.ones_like(grid[:, :1]), grid], dim=1), offsets


def _encoder(network: Network, few: ModelSize, plan: Plan) -> Subject:
    sizes = few.layers, few.width, few.heads, few.mlp_width
    window, is_video = math.isqrt(few.window) // MERGE, network.reads == Modality.VIDEO
    config = EncoderConfig(*sizes, PATCH, MERGE, few.width, gated=few.gated, window=window, second_frame=is_video)
    module, items = (VideoEncoder(config), _video) if is_video else (ImageEncoder(config), _image)
    further = nn.ModuleList(NormedMerger(few.width, MERGE, few.width, config.norm_eps) for _ in range(few.deepstack))
    module.deepstack = further  # of layers that a module of few layers does not have: they run beside it

    def run(lengths: Lengths) -> Run:
        given = items(lengths)
        rows = torch.zeros(sum(lengths), few.width, device=plan.device, dtype=plan.dtype, requires_grad=True)
        return lambda: sum((merger(rows).float().sum() for merger in further), module(*given).float().sum())

    return module, run


def _audio_encoder(network: Network, few: ModelSize, plan: Plan) -> Subject:
    del network
    sizes = few.layers, few.width, few.heads, few.mlp_width
    module = AudioEncoder(AudioEncoderConfig(*sizes, BINS, MERGE, few.width, positions=max(plan.sizes)))

    def run(lengths: Lengths) -> Run:
        positions = _offsets(lengths)
        frames = 2 * positions  # which the second convolution halves
        mel = torch.zeros(int(frames[-1]), BINS)
        return lambda: module(mel, frames, positions).float().sum()

    return module, run


def _backbone(network: Network, few: ModelSize, plan: Plan) -> Subject:
    del network, plan
    sizes = few.layers, few.width, few.mlp_width, few.heads, few.groups
    head_dim, window = few.head_dim or None, few.window  # rows of deepstack are only added
    module = BackboneStage(BackboneConfig(*sizes, ROTARY_BASE, few.vocab_size, 0, head_dim=head_dim, window=window))

    def run(lengths: Lengths) -> Run:
        (tokens, positions, offsets), empty = _text(lengths, few.vocab_size), torch.zeros(0, dtype=torch.int64)
        batch = BackboneBatch(offsets, positions, tokens, empty, empty, tokens)
        return lambda: module(batch).loss_sum

    return module, run


def _generator(network: Network, few: ModelSize, plan: Plan) -> Subject:
    width = network.condition_width or few.width
    module = ImageGenerator(GeneratorConfig(few.layers, few.width, few.heads, few.mlp_width, PATCH, MERGE, width))

    def run(lengths: Lengths) -> Run:
        patches, grid, offsets = _image(lengths)
        count = len(lengths)
        conditions = torch.zeros(count * QUERIES, width, device=plan.device, dtype=plan.dtype)
        noise = torch.zeros(sum(lengths), PATCH**2 * 3, device=plan.device)
        moment = torch.full((count,), 0.5, device=plan.device)
        queries, generated = torch.arange(count + 1) * QUERIES, torch.ones(count, dtype=torch.bool)
        return lambda: module(patches, grid, offsets, conditions, queries, noise, moment, generated)

    return module, run


def _image_tower(network: Network, few: ModelSize, plan: Plan) -> Subject:
    del network, plan
    sizes = few.layers, few.width, few.heads, few.mlp_width
    module = ImageTower(ImageTowerConfig(*sizes, PATCH, MERGE, FEATURES, gated=few.gated))

    def run(lengths: Lengths) -> Run:
        image = _image(lengths)
        return lambda: module(*image, None).features.float().sum()

    return module, run


def _text_tower(network: Network, few: ModelSize, plan: Plan) -> Subject:
    del network, plan
    sizes = few.layers, few.width, few.mlp_width, few.heads, few.groups
    module = TextTower(TextTowerConfig(*sizes, ROTARY_BASE, TOWER_VOCABULARY, 0, output_dim=FEATURES))

    def run(lengths: Lengths) -> Run:
        text = _text(lengths, TOWER_VOCABULARY)
        return lambda: module(*text, None).features.float().sum()

    return module, run


_SUBJECTS: Final[Mapping[str, Callable[[Network, ModelSize, Plan], Subject]]] = MappingProxyType(
    {
        "encoder": _encoder,
        "audio": _audio_encoder,
        "video": _encoder,
        "backbone": _backbone,
        "generator": _generator,
        "image": _image_tower,
        "text": _text_tower,
    }
)
"""By kind; of towers, and of encoders that read no images, by what they read."""
