"""`trainclient profile`: times the modules of a model on a device."""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field

from dataserver.outputs import require_writable, tells_on
from dataserver.planning.costs.profile import Profile
from trainclient.models.compiling import require_compiler
from trainclient.orchestrate.command import MaybePath, MaybeText, Orchestrate, networks
from trainclient.orchestrate.costs import DEGREES
from trainclient.orchestrate.networks import Network
from trainclient.orchestrate.profiled_costs import write_profile
from trainclient.orchestrate.profiling import MERGE, Plan, profile_modules
from trainclient.training.config_base import Options, options_of

ABOUT = """Measure what the modules of a model cost on this machine's device, for `trainclient orchestrate --profile`.
For each module it builds a few layers, and runs them forward and backward at each size; the times of the whole module
follow from these. For each degree of tensor parallelism that divides a module, it measures the share of one device.
"""
POOR_PERCENT = 20.0
"""Median error of a cost on the times that it was fitted to, above which it is no ground for a choice."""
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


_OF_MODEL = ("encoder", "audio_encoder", "video_encoder", "backbone", "generator")
"""Modules of a model with a backbone."""


class ProfileOptions(Options):
    """Options of `trainclient profile`: models, device and sizes."""

    encoder: MaybeText = None
    """Model of the encoder of images, as for `trainclient orchestrate`."""
    audio_encoder: MaybeText = None
    """Model of the encoder of clips."""
    video_encoder: MaybeText = None
    """Model of the encoder of videos, whose rows are patches of two frames."""
    backbone: MaybeText = None
    """Model of the backbone, as for `trainclient orchestrate`."""
    generator: MaybeText = None
    """Model of the generator, as for `trainclient orchestrate`."""
    image_tower: MaybeText = None
    """Contrastive training: model of the tower of images. May be given together with the models above, for the same
    file."""
    text_tower: MaybeText = None
    """Contrastive training: model of the tower of texts."""
    output: MaybePath = None
    """YAML file to write the profile to."""
    sizes: tuple[int, ...] = (256, 512, 1024, 2048, 4096, 8192)
    """Sizes of the timed microbatches in patches, positions of clips, or tokens: at least three multiples of 4. Each is
    timed as one item and, if 32 divides it, as eight."""
    tp: tuple[int, ...] = (1, 2, 4, 8)
    """Degrees of tensor parallelism; 1 must be one of them."""
    device: str = "cuda"
    """Device to measure: cuda, or cpu to try the command."""
    dtype: str = "bfloat16"
    """Type of weights: bfloat16 or float32."""
    repeats: Annotated[int, Field(ge=1)] = 10
    """How often each size is run, after one run to warm up."""
    compile: bool = False
    """Compile blocks with torch.compile. Give it if you train with --compile."""


def main(arguments: Sequence[str]) -> int:
    """Run the command.

    Raises:
        ValueError: what was given cannot be measured.
    """
    options = options_of(ProfileOptions, "profile", ABOUT, arguments)
    output, plan = _checked(options)
    require_writable("--output", output)
    says = tells_on(output)
    profile = profile_modules(_models(options), plan, _say)
    write_profile(profile, output)
    for module in profile.modules:
        for found in module.degrees:
            says.write(
                f"{module.name} tp {found.tp}: {found.cost.microbatch_ns / 1e6:.3f} ms + "
                f"{found.cost.linear_ps / 1e6:.3f} us a row, backward {found.cost.backward_percent} %, median error "
                f"{found.error_percent:.1f} %\n"
            )
    says.write(f"the profile of {profile.gpu} ({profile.device}) is in {output}\n")
    for doubt in doubts(profile):
        _say(doubt)
    return 0


def doubts(profile: Profile) -> Iterator[str]:
    """Yield what is wrong with costs that are far from the times that they were fitted to."""
    for module in profile.modules:
        for found in module.degrees:
            if found.error_percent > POOR_PERCENT:
                yield (
                    f"the cost of {module.name}, tp {found.tp}, is {found.error_percent:.0f} % off its own times: "
                    "leave the device to this alone, and raise --repeats or give other --sizes, before you choose by it"
                )


def _say(what: str) -> None:
    sys.stderr.write(f"profile: {what}\n")
    sys.stderr.flush()


def _models(options: ProfileOptions) -> list[Network]:
    """The modules of one model, of towers, or of both, which have other names."""
    towers = Orchestrate(image_tower=options.image_tower, text_tower=options.text_tower)
    model = Orchestrate(**{name: getattr(options, name) for name in _OF_MODEL})
    given = [found for found in (model, towers) if found != Orchestrate()]
    return [network for found in given or [model] for network in networks(found)]


def _checked(options: ProfileOptions) -> tuple[Path, Plan]:
    if options.output is None:
        raise ValueError("--output is missing: a YAML file to write")
    if len(set(options.sizes)) < 3 or any(size < 4 or size % MERGE**2 for size in options.sizes):
        raise ValueError(f"--sizes are {list(options.sizes)}; three or more multiples of {MERGE**2} are required")
    if 1 not in options.tp or not set(options.tp) <= set(DEGREES):
        raise ValueError(f"--tp is {list(options.tp)}; 1, and more of 2, 4 and 8, are required")
    if options.dtype not in DTYPES:
        raise ValueError(f"--dtype is {options.dtype}; one of {', '.join(DTYPES)} is required")
    if options.device not in ("cuda", "cpu") or (options.device == "cuda" and not torch.cuda.is_available()):
        raise ValueError(
            f"--device is {options.device}, and torch finds no such device; run it where the GPUs are, or set --device "
            "cpu to try the command"
        )
    device = torch.device(options.device)
    if options.compile:
        require_compiler(device)
    return options.output, Plan(
        device, DTYPES[options.dtype], options.sizes, options.tp, options.repeats, options.compile
    )
