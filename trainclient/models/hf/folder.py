"""Whole checkpoints: a folder in, sizes and parameters out."""

import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isclose
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from trainclient.models.hf.fields import Fields
from trainclient.models.hf.files import MAX_CONFIG_BYTES, PretrainedError, TensorFiles, read_json
from trainclient.models.hf.mapping import Family, Sizes, spelled, unspelled
from trainclient.models.hf.processors import processor_fields
from trainclient.models.hf.registry import families_of
from trainclient.models.patches import pixel_statistics, pixels_named

CONFIG: Final = "config.json"


@dataclass(frozen=True, slots=True, eq=False)
class Pretrained:
    """A checkpoint in our terms."""

    config: Sizes
    """The sizes of the module. A tower without a merger has merge 1 and its own width as output: replace them."""
    state: dict[str, Tensor]
    """Parameters by the names of the whole model, in the types that they are stored in. What such checkpoints do not
    have (query tokens; the merger of SigLIP and CLIP) is not there."""


def load_pretrained(
    folder: Path | str, names: Container[str] | None = None, kind: type[Sizes] | None = None
) -> Pretrained:
    """Read a checkpoint.

    Args:
        folder: holds config.json, and model.safetensors or several files with an index.
        names: read only these parameters, such as those of a pipeline stage; by default all.
        kind: EncoderConfig or BackboneConfig, which part of a whole model is read; by default its encoder.

    Raises:
        PretrainedError: a file cannot be read, the architecture is none that our models can be (with the field and its
            value), or tensors are missing, unknown, or of other shapes than config.json says.
    """
    folder = Path(folder)
    family, fields, whole = described(folder, kind)
    config = family.read(fields, whole)
    if family.sees:
        config = replace(config, pixels=_pixels(folder, config.pixels))
    with TensorFiles(folder) as files:
        _require_claimed(folder, files, families_of(whole))
        return Pretrained(config, dict(_parameters(folder, files, family, config, names)))


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


def described(folder: Path, kind: type[Sizes] | None) -> tuple[Family[Any], Fields, Fields]:
    """The family of a checkpoint, or of its part of a kind, the fields of that, and those of the whole model."""
    path = folder / CONFIG
    whole = Fields(read_json(path, MAX_CONFIG_BYTES), str(path))
    families = families_of(whole)
    family = next((f for f in families if f.kind is kind), families[0])
    return family, part_of(whole, family), whole


def part_of(whole: Fields, family: Family[Any]) -> Fields:
    """The fields of a part of a model."""
    return whole.within(family.section) if family.section and whole.has(family.section) else whole


def stored_names(folder: Path, files: TensorFiles, family: Family[Any], config: Sizes) -> dict[str, str]:
    """How files spell the tensors of a part, by the names of its entries, after all shapes were compared.

    A tied head that files hold as well as the embedding is among them.

    Raises:
        PretrainedError: tensors are missing, misshapen, or such a part has none like them.
    """
    entries = family.entries(config)
    first = entries[0].theirs
    names = next((n for n in family.spellings if spelled(n, first) in files), None)
    if names is None:
        raise PretrainedError(
            f"{folder} holds no tensor {spelled(family.spellings[-1], first)}; the weights of a {family.name} do"
        )
    found: dict[str, str] = {}
    for entry in entries:
        stored_name, shape = spelled(names, entry.theirs), entry.shape
        there = files.shape(stored_name) if stored_name in files else None
        if there != shape:
            said = "does not hold" if there is None else f"holds shape {list(there)} for"
            raise PretrainedError(f"{folder} {said} {stored_name}; shape {list(shape)} is required by its config.json")
        files.require_floating(stored_name)
        found[entry.theirs] = stored_name
    known = set(found.values())
    others = {name: unspelled(names, name) for name in files if name not in known}
    unknown = [n for n, ours in others.items() if ours is not None and not _is_ignored(family, config, ours)]
    if getattr(config, "tied", False):
        copies = [name for name in unknown if others[name] == HEAD and _is_copy(files, name, found)]
        for name in copies:
            found[HEAD] = name
        unknown = [name for name in unknown if name not in copies]
    if unknown:
        raise PretrainedError(
            f"{folder} holds {len(unknown)} tensors that no {family.name} has, such as {sorted(unknown)[0]}: its "
            "architecture is another one than its config.json says"
        )
    return found


def _is_ignored(family: Family[Any], config: Sizes, name: str) -> bool:
    """Whether a tensor is no weight of ours; of a numbered layer, where our model ends before it."""
    found = re.fullmatch(family.ignored, name)
    number = None if found is None else found.groupdict().get("layer")
    return found is not None and (number is None or int(number) >= config.layers)


def _require_claimed(folder: Path, files: TensorFiles, families: Sequence[Family[Any]]) -> None:
    """Refuse tensors that belong to no part of a whole model; beside a tower alone there may be a text model."""
    spellings = [names for family in families for names in family.spellings]
    unknown = sorted(name for name in files if all(unspelled(names, name) is None for names in spellings))
    if unknown and len(families) > 1:
        raise PretrainedError(
            f"{folder} holds {len(unknown)} tensors that no part of a {families[0].name} has, such as {unknown[0]}: "
            "its architecture is another one than its config.json says"
        )


HEAD: Final = "lm_head.weight"
EMBEDDING: Final = "model.embed_tokens.weight"


def _is_copy(files: TensorFiles, head: str, stored: Mapping[str, str]) -> bool:
    """Whether a head that is said to be the embedding is that."""
    embedding = stored[EMBEDDING]
    return files.shape(head) == files.shape(embedding) and torch.equal(files.read(head), files.read(embedding))


def _parameters(
    folder: Path, files: TensorFiles, family: Family[Any], config: Sizes, names: Container[str] | None
) -> Iterator[tuple[str, Tensor]]:
    """Yield our parameters by name."""
    stored = stored_names(folder, files, family, config)
    for entry in family.entries(config):
        wanted = [name for name in entry.ours if names is None or name in names]
        if wanted:
            parameters = entry.divided(files.read(stored[entry.theirs]))
            yield from ((name, parameters[name]) for name in wanted)


def _pixels(folder: Path, default: str) -> str:
    """How the processor of a checkpoint normalises pixels."""
    fields = processor_fields(folder)
    if fields is None:
        return default
    for name in ("do_rescale", "do_normalize"):
        fields.require(name, value=True, reason="pixels in [0, 1] are normalised by image_mean and image_std")
    if not isclose(fields.number("rescale_factor", 1 / 255), 1 / 255, rel_tol=1e-6):
        raise fields.refusal("rescale_factor", "1 / 255 is required: pixels are normalised in [0, 1]")
    if not fields.has("image_mean") and not fields.has("image_std"):
        return default
    found = pixels_named(_numbers(fields, "image_mean"), _numbers(fields, "image_std"))
    try:
        pixel_statistics(found)
    except ValueError as error:
        raise fields.refusal("image_std", str(error)) from None
    return found


def _numbers(fields: Fields, name: str) -> list[float]:
    """The number of each channel."""
    values = fields.data.get(name)
    numbers = values if isinstance(values, list) and len(values) == 3 else []
    if not numbers or any(isinstance(value, bool) or not isinstance(value, int | float) for value in numbers):
        raise fields.refusal(name, "a list of three numbers is required, beside the other of image_mean, image_std")
    return numbers
