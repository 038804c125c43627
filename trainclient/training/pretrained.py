"""Modules that begin as a Hugging Face checkpoint."""

from dataclasses import replace
from pathlib import Path

from torch import nn

from dataserver.planning.job import JobSpec
from dataserver.planning.jobspec import ModuleKind, ModuleSpec
from trainclient.models.backbone import BackboneConfig
from trainclient.models.encoder import EncoderConfig
from trainclient.models.hf import load_into, load_pretrained
from trainclient.modules import Sizes, query_tokens
from trainclient.training.config import ConfigError


def pretrained_sizes(folder: Path, job: JobSpec, module: ModuleSpec, width: int) -> Sizes:
    """The sizes of a checkpoint as a module of a job; no weights are read.

    Args:
        folder: the checkpoint.
        job: the module's.
        module: an encoder or a backbone.
        width: of the backbone; nobody reads it for the backbone itself.

    Raises:
        ValueError: the checkpoint cannot be read, is of another kind, or does not fit the job.
    """
    found = load_pretrained(folder, names=()).config
    stream, name = job.stream, module.name
    if isinstance(found, BackboneConfig) and module.kind is ModuleKind.BACKBONE:
        if found.vocab_size < stream.tokenizer.vocab_size:
            raise ConfigError(
                f"the weights {folder} of module {name} know {found.vocab_size} tokens, and the job's tokenizer "
                f"{stream.tokenizer.name} has {stream.tokenizer.vocab_size}; give the job the tokenizer of the weights"
            )
        return replace(found, query_tokens=query_tokens(job))
    if not isinstance(found, EncoderConfig) or module.kind is not ModuleKind.ENCODER:
        what = "a backbone" if isinstance(found, BackboneConfig) else "an encoder"
        raise ConfigError(f"the weights {folder} are those of {what}; module {name} is of kind {module.kind}")
    if found.position_grid:  # of a tower without a merger: ours begins untrained
        found = replace(found, merge=stream.sizing.merge, output_dim=width)
    wanted = {"patch": stream.sizing.patch, "merge": stream.sizing.merge, "output_dim": width}
    has = {key: getattr(found, key) for key in wanted}
    different = [f"{key} {has[key]}, not {value}" for key, value in wanted.items() if has[key] != value]
    if different:
        raise ConfigError(
            f"the weights {folder} of module {name} have {', '.join(different)}; patch and merge are those of the "
            "job's sizing, output_dim is the width of the backbone"
        )
    return found


def load_pretrained_into(network: nn.Module, folder: Path) -> None:
    """Give a module, or the share of it that a process holds, the weights of a checkpoint.

    What the checkpoint does not have (query tokens, the merger of SigLIP and CLIP) keeps its initial values.
    """
    names = {name for name, _ in network.named_parameters()}
    load_into(network, load_pretrained(folder, names).state)
