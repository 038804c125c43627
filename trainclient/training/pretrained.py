"""Modules that begin as a Hugging Face checkpoint."""

from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any

from torch import nn

from dataserver.planning.job.fields import ModuleSpec
from dataserver.planning.job.spec import JobSpec
from trainclient.models import hf
from trainclient.models.encoder import EncoderConfig
from trainclient.models.hf import load_into, load_pretrained
from trainclient.modules import WHAT, Sizes, family_of
from trainclient.training.config import ConfigError


def pretrained_sizes(folder: Path, job: JobSpec, module: ModuleSpec, width: int, positions: int | None = None) -> Sizes:
    """The sizes of a checkpoint as a module of a job; no weights are read.

    Args:
        folder: the checkpoint.
        job: the module's.
        module: an encoder, a backbone or a tower.
        width: of the backbone, which nobody reads for the backbone itself; of towers, of their features.
        positions: tokens of the longest sequence that it is to learn, where that is more than the weights know.

    Raises:
        ValueError: the checkpoint cannot be read, is of another kind, or does not fit the job.
    """
    start = family_of(module).begins_as
    found: Any = load_pretrained(folder, names=(), kind=None if start is None else start.source).config
    if start is None or start.source is not type(found):
        what, of = WHAT[type(found)], "" if module.modality is None else f" of {module.modality}s"
        raise ConfigError(
            f"the weights {folder} are those of {what}; module {module.name} is of kind {module.kind}{of}"
        )
    if _begins_as_encoder(module):
        hf.require_same_rule(folder, job.stream.sizing)
    if positions is not None:
        found = _lengthened(found, positions, folder, module)
    try:
        return start.sizes(found, job, width)
    except ValueError as error:
        raise ConfigError(f"the weights {folder} of module {module.name} {error}") from None


def sizing_note(folder: Path, job: JobSpec, module: ModuleSpec) -> str | None:
    """What would give a module the images that its checkpoint was trained on, in words; None where it has them, and
    for modules that read no images.
    """
    return hf.sizing_note(folder, job.stream.sizing) if _begins_as_encoder(module) else None


def _begins_as_encoder(module: ModuleSpec) -> bool:
    """Whether the checkpoint of a module may have an image processor."""
    start = family_of(module).begins_as
    return start is not None and start.source is EncoderConfig


def _lengthened(found: Any, positions: int, folder: Path, module: ModuleSpec) -> Any:
    """Sizes of weights that learn further positions."""
    known = getattr(found, "longest", None)
    if known is None:
        raise ConfigError(f"module {module.name} has weights and ['positions']; weights bring their own sizes")
    if positions < known:
        raise ConfigError(
            f"module {module.name} has positions {positions}, and the weights {folder} know {known}; leave it out"
        )
    return replace(found, positions=ceil(positions * found.positions / known))


def load_pretrained_into(network: nn.Module, folder: Path, module: ModuleSpec) -> None:
    """Give a module, or the share of it that a process holds, the weights of a checkpoint.

    What the checkpoint does not have (query tokens, the merger of SigLIP and CLIP, the projection of towers) keeps its
    initial values.
    """
    start = family_of(module).begins_as
    names, kind = ({}, None) if start is None else (start.names, start.source)
    ours = {names.get(name, name): name for name, _ in network.named_parameters()}
    state = load_pretrained(folder, ours.keys(), kind).state
    load_into(network, {ours[name]: tensor for name, tensor in state.items()})
