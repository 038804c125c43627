"""Whole checkpoints: a folder in, sizes and parameters out."""

import re
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor, nn

from trainclient.models.hf.backbones import LLAMA, QWEN2
from trainclient.models.hf.fields import Fields
from trainclient.models.hf.files import MAX_CONFIG_BYTES, PretrainedError, TensorFiles, read_json
from trainclient.models.hf.mapping import Family, Sizes
from trainclient.models.hf.towers import CLIP, QWEN2_VL, SIGLIP
from trainclient.models.patches import PIXELS

CONFIG: Final = "config.json"
PREPROCESSOR: Final = "preprocessor_config.json"
VISION: Final = "vision_config"
FAMILIES: Final[Mapping[str, Family[Any]]] = MappingProxyType(
    {
        "llama": LLAMA,
        "qwen2": QWEN2,
        "clip": CLIP,
        "clip_vision_model": CLIP,
        "siglip": SIGLIP,
        "siglip_vision_model": SIGLIP,
        "qwen2_vl": QWEN2_VL,
        "qwen2_vl_vision": QWEN2_VL,
    }
)
"""By `model_type`; of a model with a vision tower, its tower."""


@dataclass(frozen=True, slots=True, eq=False)
class Pretrained:
    """A checkpoint in our terms."""

    config: Sizes
    """The sizes of the module. A tower without a merger has merge 1 and its own width as output: replace them."""
    state: dict[str, Tensor]
    """Parameters by the names of the whole model, in the types that they are stored in. What such checkpoints do not
    have (query tokens; the merger of SigLIP and CLIP) is not there."""


def load_pretrained(folder: Path, names: Container[str] | None = None) -> Pretrained:
    """Read a checkpoint.

    Args:
        folder: holds config.json, and model.safetensors or several files with an index.
        names: read only these parameters, such as those of a pipeline stage; by default all.

    Raises:
        PretrainedError: a file cannot be read, the architecture is none that our models can be (with the field and its
            value), or tensors are missing, unknown, or of other shapes than config.json says.
    """
    family, fields, whole = described(folder)
    config = family.read(fields)
    if family.pixels is not None:
        config = replace(config, pixels=_pixels(folder, family.pixels(config)))
    with TensorFiles(folder) as files:
        tied = family.tied if whole.flag("tie_word_embeddings", False) else {}
        return Pretrained(config, dict(_parameters(folder, files, family, config, names, tied)))


def load_into(module: nn.Module, state: Mapping[str, Tensor]) -> list[str]:
    """Copy parameters into a module, or the part of it that a pipeline stage holds, in the module's types.

    Returns:
        The names of the module's parameters that were not there, and keep their values.

    Raises:
        PretrainedError: a parameter has another shape.
    """
    missing = []
    for name, parameter in module.named_parameters():
        found = state.get(name)
        if found is None:
            missing.append(name)
            continue
        if found.shape != parameter.shape:
            raise PretrainedError(
                f"{name} has shape {list(found.shape)}, and {list(parameter.shape)} in the model; give the model the "
                "checkpoint's sizes"
            )
        with torch.no_grad():
            parameter.copy_(found)
    return missing


def described(folder: Path) -> tuple[Family[Any], Fields, Fields]:
    """The family of a checkpoint, the fields of the model, and those of all that it is part of."""
    path = folder / CONFIG
    whole = Fields(read_json(path, MAX_CONFIG_BYTES), str(path))
    name = whole.data.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        raise whole.refusal("model_type", f"one of {', '.join(FAMILIES)} is required")
    if whole.has("quantization_config"):
        raise whole.refusal("quantization_config", "quantized weights cannot be trained; take the original checkpoint")
    return FAMILIES[name], whole.within(VISION) if whole.has(VISION) else whole, whole


def _parameters(
    folder: Path,
    files: TensorFiles,
    family: Family[Any],
    config: Sizes,
    names: Container[str] | None,
    tied: Mapping[str, str],
) -> Iterator[tuple[str, Tensor]]:
    """Our parameters, after all shapes were compared."""
    entries = family.entries(config)
    first = entries[0].theirs
    prefix = next((p for p in family.prefixes if p + first in files), None)
    if prefix is None:
        raise PretrainedError(
            f"{folder} holds no tensor {family.prefixes[-1]}{first}; the weights of a {family.name} do"
        )
    stored_names: dict[str, str] = {}
    for entry in entries:
        name, shape = entry.theirs, entry.shape
        stored_name = prefix + (tied.get(name, name) if prefix + name not in files else name)
        there = files.shape(stored_name) if stored_name in files else None
        if there != shape:
            found = "does not hold" if there is None else f"holds shape {list(there)} for"
            raise PretrainedError(f"{folder} {found} {stored_name}; shape {list(shape)} is required by its config.json")
        files.require_floating(stored_name)
        stored_names[name] = stored_name
    known = set(stored_names.values())
    unknown = [n for n in files if n.startswith(prefix) and n not in known]
    unknown = [n for n in unknown if not re.fullmatch(family.ignored, n.removeprefix(prefix)) and n not in tied]
    if unknown:
        raise PretrainedError(
            f"{folder} holds {len(unknown)} tensors that no {family.name} has, such as {sorted(unknown)[0]}: its "
            "architecture is another one than its config.json says"
        )
    for entry in entries:
        wanted = [name for name in entry.ours if names is None or name in names]
        if wanted:
            parameters = entry.divided(files.read(stored_names[entry.theirs]))
            yield from ((name, parameters[name]) for name in wanted)


def _pixels(folder: Path, default: str) -> str:
    """How the processor of a checkpoint normalises pixels."""
    path = folder / PREPROCESSOR
    if not path.is_file():
        return default
    data = read_json(path, MAX_CONFIG_BYTES)
    mean, std = data.get("image_mean"), data.get("image_std")
    if mean is None and std is None:
        return default
    for name, known in PIXELS.items():
        if ([*known[0]], [*known[1]]) == (mean, std):
            return name
    raise PretrainedError(
        f"{path}: image_mean is {mean!r:.100} and image_std {std!r:.100}; one of {PIXELS} is required"
    )


def family_of(config: Sizes) -> Family[Any]:
    """The architecture as which a model of these sizes is exported."""
    return next(f for f in FAMILIES.values() if f.kind is type(config) and f.suits(config))
