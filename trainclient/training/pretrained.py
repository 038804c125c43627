"""Modules that begin as a Hugging Face checkpoint."""

from collections.abc import Mapping
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from dataserver.planning.job.fields import ModuleSpec
from dataserver.planning.job.spec import JobSpec
from trainclient.models import hf
from trainclient.models.backbone_block import BackboneConfig
from trainclient.models.encoder import EncoderConfig
from trainclient.models.hf import load_into, load_pretrained
from trainclient.modules import WHAT, Sizes, family_of
from trainclient.training.config import ConfigError

GROWING: Final[tuple[str, ...]] = ("positions", "vocabulary")
"""Options that make weights larger: tokens of the longest sequence, and tokens that are known."""
_ROWS_OF_TOKENS: Final = ("embed.weight", "head.weight")
"""Parameters with a row for each token."""
_LINE_BYTES: Final = 4096
"""Longest first line of a file of ranks."""


def pretrained_sizes(folder: Path, job: JobSpec, module: ModuleSpec, width: int, grown: Mapping[str, int]) -> Sizes:
    """The sizes of a checkpoint as a module of a job; no weights are read.

    Args:
        folder: the checkpoint.
        job: the module's.
        module: an encoder, a backbone or a tower.
        width: of the backbone, which nobody reads for the backbone itself; of towers, of their features.
        grown: by `GROWING`, what it is to learn beyond what the weights know.

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
    if "positions" in grown:
        found = _lengthened(found, grown["positions"], folder, module)
    if "vocabulary" in grown:
        found = _with_tokens(found, grown["vocabulary"], folder, module)
    try:
        return start.sizes(found, job, width)
    except ValueError as error:
        raise ConfigError(f"the weights {folder} of module {module.name} {error}") from None


def sizing_note(folder: Path, job: JobSpec, module: ModuleSpec) -> str | None:
    """What would give a module the images that its checkpoint was trained on, in words; None where it has them, and
    for modules that read no images.
    """
    return hf.sizing_note(folder, job.stream.sizing) if _begins_as_encoder(module) else None


def require_its_tokenizer(folder: Path, job: JobSpec, module: ModuleSpec) -> None:
    """Raise ConfigError where a checkpoint has a tokenizer, a module reads tokens, and those of the job are others.

    Of a folder with nothing but ranks of tiktoken nothing is known: servers may have them with another pattern.
    """
    start, tokenizer = family_of(module).begins_as, job.stream.tokenizer
    if start is None or start.source is not BackboneConfig:
        return
    there = hf.tokenizer_files(folder)
    if not all(map(_has_ranks, there)) and tokenizer.digest not in map(_digest, there):
        raise ConfigError(
            f"the job's tokenizer {tokenizer.name} is not that of the weights of module {module.name}, {there[0]}, so "
            f"that its ids may be other tokens than they know: start data servers with --tokenizer NAME={folder} and "
            "give the job that NAME; where one was made from the other, set backbone.other_tokenizer (or that of "
            f"modules.{module.name}), or vocabulary for new tokens"
        )


def _has_ranks(path: Path) -> bool:
    """Whether a tokenizer is a file of ranks, which its content says to servers as well, and not its name."""
    from dataserver.assembly import is_ranks

    with path.open("rb") as file:
        return is_ranks(file.readline(_LINE_BYTES))


def _digest(path: Path) -> str | None:
    """The digest that a tokenizer has on servers; None for a file that they cannot have been started with."""
    from dataserver.assembly import TokenizerError, tokenizer_digest

    try:
        return tokenizer_digest(path.name, path)
    except TokenizerError:
        return None


def _begins_as_encoder(module: ModuleSpec) -> bool:
    """Whether the checkpoint of a module may have an image processor."""
    start = family_of(module).begins_as
    return start is not None and start.source is EncoderConfig


def _lengthened(found: Any, positions: int, folder: Path, module: ModuleSpec) -> Any:
    """Sizes of weights that learn further positions."""
    known = _known(found, "longest", "positions", positions, folder, module)
    return replace(found, positions=ceil(positions * found.positions / known))


def _with_tokens(found: Any, tokens: int, folder: Path, module: ModuleSpec) -> Any:
    """Sizes of weights that learn further tokens."""
    _known(found, "vocab_size", "vocabulary", tokens, folder, module)
    return replace(found, vocab_size=tokens)


def _known(found: Any, size: str, option: str, wanted: int, folder: Path, module: ModuleSpec) -> int:
    """How many of something weights know. Raises ConfigError where they know none, or more than are wanted."""
    known: int | None = getattr(found, size, None)
    if known is None:
        raise ConfigError(f"module {module.name} has weights and [{option!r}]; weights bring their own sizes")
    if wanted < known:
        raise ConfigError(
            f"module {module.name} has {option} {wanted}, and the weights {folder} know {known}; leave it out"
        )
    return known


def _with_rows(weight: Tensor, like: Tensor) -> Tensor:
    """A weight with as many rows as another one, the further ones the mean of its own."""
    mean = weight.to(torch.float64).mean(0, keepdim=True).to(weight.dtype)
    return torch.cat([weight, mean.expand(len(like) - len(weight), -1)])


def load_pretrained_into(network: nn.Module, folder: Path, module: ModuleSpec) -> None:
    """Give a module, or the share of it that a process holds, the weights of a checkpoint.

    What the checkpoint does not have (query tokens, the merger of SigLIP and CLIP, the projection of towers) keeps its
    initial values; tokens that it does not know begin as the mean of those that it knows.
    """
    start = family_of(module).begins_as
    names, kind = ({}, None) if start is None else (start.names, start.source)
    ours = {names.get(name, name): name for name, _ in network.named_parameters()}
    state = load_pretrained(folder, ours.keys(), kind).state
    parameters = dict(network.named_parameters())
    for name in [name for name in _ROWS_OF_TOKENS if name in state and name in parameters]:
        if len(parameters[name]) > len(state[name]):
            state[name] = _with_rows(state[name], parameters[name])
    load_into(network, {ours[name]: tensor for name, tensor in state.items()})
