"""Modules that begin as a Hugging Face checkpoint."""

from dataclasses import replace
from pathlib import Path

from torch import nn

from dataserver.planning.job import JobSpec
from dataserver.planning.jobspec import Modality, ModuleKind, ModuleSpec
from trainclient.models.backbone import BackboneConfig
from trainclient.models.encoder import EncoderConfig
from trainclient.models.hf import load_into, load_pretrained
from trainclient.models.towers import IN_ENCODER, ImageTower, ImageTowerConfig, TextTowerConfig
from trainclient.modules import Sizes, query_tokens, sizes_of
from trainclient.training.config import ConfigError


def pretrained_sizes(folder: Path, job: JobSpec, module: ModuleSpec, width: int) -> Sizes:
    """The sizes of a checkpoint as a module of a job; no weights are read.

    Args:
        folder: the checkpoint.
        job: the module's.
        module: an encoder, a backbone or a tower.
        width: of the backbone, which nobody reads for the backbone itself; of towers, of their features.

    Raises:
        ValueError: the checkpoint cannot be read, is of another kind, or does not fit the job.
    """
    found = load_pretrained(folder, names=()).config
    stream, name = job.stream, module.name
    texts = module.kind is ModuleKind.BACKBONE or module.modality is Modality.TEXT
    if isinstance(found, BackboneConfig) and texts:
        if found.vocab_size < stream.tokenizer.vocab_size:
            raise ConfigError(
                f"the weights {folder} of module {name} know {found.vocab_size} tokens, and the job's tokenizer "
                f"{stream.tokenizer.name} has {stream.tokenizer.vocab_size}; give the job the tokenizer of the weights"
            )
        if module.modality is not None:
            return TextTowerConfig(**sizes_of(found), output_dim=width)
        return replace(found, query_tokens=query_tokens(job))
    images = module.kind is ModuleKind.ENCODER or module.modality is Modality.IMAGE
    if not isinstance(found, EncoderConfig) or not images:
        what = "a backbone" if isinstance(found, BackboneConfig) else "an encoder"
        kind = module.kind if module.modality is None else f"{module.kind} of {module.modality}s"
        raise ConfigError(f"the weights {folder} are those of {what}; module {name} is of kind {kind}")
    if module.modality is not None:
        if found.class_token:
            raise ConfigError(
                f"the weights {folder} of module {name} have a class token, as CLIP has, and image towers none; give "
                "it those of SigLIP or Qwen2-VL"
            )
        found = ImageTowerConfig(**{**sizes_of(found), "merge": stream.sizing.merge, "output_dim": width})
    elif found.position_grid:  # of a tower without a merger: ours begins untrained
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

    What the checkpoint does not have (query tokens, the merger of SigLIP and CLIP, the projection of towers) keeps its
    initial values.
    """
    ours = {
        IN_ENCODER.get(name, name) if isinstance(network, ImageTower) else name: name
        for name, _ in network.named_parameters()
    }
    state = load_pretrained(folder, ours.keys()).state
    load_into(network, {ours[name]: tensor for name, tensor in state.items()})
