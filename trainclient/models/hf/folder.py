"""Whole checkpoints: a folder in, sizes and parameters out, and back."""

import json
import re
import shutil
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from trainclient.models.hf.backbones import LLAMA, QWEN2
from trainclient.models.hf.fields import Fields
from trainclient.models.hf.files import INDEX, MAX_CONFIG_BYTES, WEIGHTS, PretrainedError, TensorFiles, read_json
from trainclient.models.hf.mapping import Family, Sizes
from trainclient.models.hf.towers import CLIP, QWEN2_VL, SIGLIP
from trainclient.models.patches import PIXELS

CONFIG: Final = "config.json"
PREPROCESSOR: Final = "preprocessor_config.json"
COMPANIONS: Final = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)
"""What comes along from the checkpoint that a model began as."""
MAX_COMPANION_BYTES: Final = 256 << 20
SHARD_BYTES: Final = 5 * 10**9
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
    family, fields, whole = _described(folder)
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


def export_pretrained(
    folder: Path,
    config: Sizes,
    state: Mapping[str, Tensor],
    base: Path | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> list[str]:
    """Write a checkpoint that transformers loads.

    Args:
        folder: is made, when it is complete; must not be there.
        config: the sizes of the module.
        state: its parameters, of the whole model.
        base: a checkpoint of the same architecture, whose tokenizer files and further fields of config.json come along.
        shard_bytes: largest file, as far as single tensors allow.

    Returns:
        The names of the parameters that such checkpoints have no place for (query tokens; CLIP's and SigLIP's merger).

    Raises:
        PretrainedError: no architecture that is exported has these sizes, or parameters are missing or of other shapes.
    """
    family = family_of(config)
    described = _exported_config(family, config, state, base)
    if folder.exists():
        raise PretrainedError(f"{folder} is there already; give a folder that is not")
    tensors: dict[str, Tensor] = {}
    used = set()
    for entry in family.entries(config):
        for name, like in entry.divided(torch.empty(entry.shape, device="meta")).items():
            parameter = state.get(name)
            if parameter is None or parameter.shape != like.shape:
                there = "nothing" if parameter is None else f"{list(parameter.shape)}"
                raise PretrainedError(f"there is {there} for {name}; a tensor of shape {list(like.shape)} is required")
            used.add(name)
        ours = {name: state[name].cpu() for name in entry.ours}
        tensors[family.prefixes[0] + entry.theirs] = entry.joined(ours)
    partial = folder.with_name(f".partial-{folder.name}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    _write_tensors(partial, tensors, shard_bytes)
    (partial / CONFIG).write_text(_text(described))
    if family.pixels is not None:
        (partial / PREPROCESSOR).write_text(_text(_exported_preprocessor(family.pixels(config), base)))
    for name in COMPANIONS:
        _copy(base, partial, name)
    partial.rename(folder)
    return sorted(set(state) - used)


def _described(folder: Path) -> tuple[Family[Any], Fields, Fields]:
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
    places = {}
    for entry in entries:
        name, shape = entry.theirs, entry.shape
        place = prefix + (tied.get(name, name) if prefix + name not in files else name)
        there = files.shape(place) if place in files else None
        if there != shape:
            found = "does not hold" if there is None else f"holds shape {list(there)} for"
            raise PretrainedError(f"{folder} {found} {place}; shape {list(shape)} is required by its config.json")
        files.require_floating(place)
        places[name] = place
    known = set(places.values())
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
            parameters = entry.divided(files.read(places[entry.theirs]))
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


def _exported_config(
    family: Family[Any], config: Sizes, state: Mapping[str, Tensor], base: Path | None
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if base is not None:
        like, fields, _ = _described(base)
        if like is not family:
            raise PretrainedError(f"{base} is a {like.name}, and the model a {family.name}; give the one it began as")
        found = {**fields.data}
    dtype = str(next(iter(state.values())).dtype).removeprefix("torch.") if state else "float32"
    written = {"architectures": [family.architecture], "model_type": family.name, "dtype": dtype, "torch_dtype": dtype}
    return {**found, **family.write(config), **written}


def _exported_preprocessor(pixels: str, base: Path | None) -> dict[str, Any]:
    found: dict[str, Any] = {"do_normalize": True, "do_rescale": True, "rescale_factor": 1 / 255}
    if base is not None and (base / PREPROCESSOR).is_file():
        found = read_json(base / PREPROCESSOR, MAX_CONFIG_BYTES)
    mean, std = PIXELS[pixels]
    return {**found, "image_mean": [*mean], "image_std": [*std]}


def _write_tensors(folder: Path, tensors: dict[str, Tensor], shard_bytes: int) -> None:
    shards: list[dict[str, Tensor]] = [{}]
    room = shard_bytes
    for name, tensor in tensors.items():
        if tensor.nbytes > room and shards[-1]:
            shards.append({})
            room = shard_bytes
        shards[-1][name] = tensor
        room -= tensor.nbytes
    if len(shards) == 1:
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
        return
    placed: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        placed |= dict.fromkeys(shard, file)
    size = sum(tensor.nbytes for tensor in tensors.values())
    (folder / INDEX).write_text(_text({"metadata": {"total_size": size}, "weight_map": placed}))


def _copy(base: Path | None, folder: Path, name: str) -> None:
    if base is None or not (base / name).is_file():
        return
    if (base / name).stat().st_size > MAX_COMPANION_BYTES:
        raise PretrainedError(f"{base / name} is larger than {MAX_COMPANION_BYTES} bytes; no tokenizer is")
    shutil.copyfile(base / name, folder / name)


def _text(data: Mapping[str, Any]) -> str:
    return json.dumps(data, indent=2, sort_keys=True) + "\n"
