"""What a module is, as far as time and memory depend on it: a preset, a `config.json`, or sizes in a YAML file."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

from dataserver.planning.job.fields import (
    MAX_TEXT_BYTES,
    MODELS,
    ModelSize,
    TextError,
    linear_flops,
    pair_flops,
    parse_yaml,
)
from trainclient.orchestrate.memory import ENCODER_BLOCK, GATED_BLOCK, GENERATOR_BLOCK, Block

MAX_SIZE: Final = 1 << 20
"""Largest width, vocabulary or number of layers."""
FEATURES: Final = 1024
"""Numbers of a tower's feature."""
_LLAMA: Final = {
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "mlp_width": "intermediate_size",
    "heads": "num_attention_heads",
    "groups": "num_key_value_heads",
    "vocab_size": "vocab_size",
}
_SQUARE: Final = {name: _LLAMA[name] for name in ("layers", "width", "mlp_width", "heads")}
_DEEP: Final = {"layers": "depth", "width": "hidden_size", "mlp_width": "intermediate_size", "heads": "num_heads"}
_QWEN2_VL: Final = {"layers": "depth", "width": "embed_dim", "heads": "num_heads"}
_LLAMAS: Final = ("llama", "mistral", "qwen2", "qwen3", "qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text",
                  "qwen3_vl_text")  # fmt: skip
_SQUARES: Final = ("clip_vision_model", "idefics3_vision", "siglip_vision_model", "siglip2_vision_model")
_TEXTS: Final = ("clip_text_model", "siglip_text_model", "siglip2_text_model")
_FAMILIES: Final[Mapping[str, Mapping[str, Mapping[str, str]]]] = {
    "backbone": dict.fromkeys(_LLAMAS, _LLAMA),
    "encoder": {**dict.fromkeys(_SQUARES, _SQUARE), "qwen2_vl": _QWEN2_VL, "qwen2_vl_vision": _QWEN2_VL,
                "qwen3_vl_vision": _DEEP},
    "text tower": dict.fromkeys(_TEXTS, _SQUARE),
}  # fmt: skip
"""By what a module is, each `model_type` whose blocks cost as ours do, and what it calls the fields of `ModelSize`."""
_PARTS: Final = {"encoder": "vision_config", "backbone": "text_config", "text tower": "text_config"}
"""Where the `config.json` of a model of several modules has that of one; without a `model_type` it is the whole's."""
_WHOLE: Final = {
    "clip": {"encoder": "clip_vision_model", "text tower": "clip_text_model"},
    "siglip": {"encoder": "siglip_vision_model", "text tower": "siglip_text_model"},
    "siglip2": {"encoder": "siglip2_vision_model", "text tower": "siglip2_text_model"},
}


@dataclass(frozen=True, slots=True)
class Role:
    """What a kind of module is among the others."""

    block: Block
    """What its blocks keep of a row."""
    spine: bool = False
    """Whether rows of all others have its width; then it knows tokens, and may be cut into stages."""
    feeds: bool = False
    """Whether its rows, of images, go to the spine."""
    generates: bool = False
    """Whether it attends to rows of the spine in every block, to make images."""


_ROLES: Final[Mapping[str, Role]] = {
    "encoder": Role(ENCODER_BLOCK, feeds=True),
    "backbone": Role(GATED_BLOCK, spine=True),
    "generator": Role(GENERATOR_BLOCK, generates=True),
    "tower": Role(ENCODER_BLOCK),
}
"""By kind: the one place that knows which there are. (The trainer's, `modules.registry`, brings torch.)"""


class NetworkError(ValueError):
    """A model that cannot be read, or that is none of the kind."""


@dataclass(frozen=True, slots=True)
class Network:
    """A module of a job before it has degrees."""

    name: str
    """Name of the module in the job."""
    kind: str
    """encoder, backbone, generator or tower."""
    size: ModelSize
    condition_width: int = 0
    """Generator: width of the backbone, whose rows it attends to."""
    modality: str | None = None
    """Tower: whether it reads images or text."""
    frozen: bool = False
    input_gradient: bool = False
    """Whether a module before it is trained, so that it hands gradients on."""

    @property
    def role(self) -> Role:
        """What it is among the others."""
        return _ROLES[self.kind]

    @property
    def reads_images(self) -> bool:
        """Whether its rows are patches; else they are tokens."""
        return self.role.feeds or self.role.generates or self.modality == "image"

    @property
    def row_flops(self) -> int:
        """Forward operations of a patch or token, as the planner counts them."""
        return linear_flops(self.kind, self.size)

    @property
    def pair_flops(self) -> int:
        """Forward operations of a pair of rows of one item."""
        return pair_flops(self.kind, self.size)

    @property
    def block_parameters(self) -> int:
        """Parameters of all blocks."""
        size = self.size
        conditions = 2 * size.layers * size.width**2 + size.width * self.condition_width
        return self.row_flops // 2 - self.end_parameters + (conditions if self.role.generates else 0)

    @property
    def end_parameters(self) -> int:
        """Parameters of each end of a backbone: the embedding of tokens, and the output head."""
        return self.size.width * self.size.vocab_size if self.role.spine else 0

    @property
    def parameters(self) -> int:
        """All of them; norms, biases and the embedding of patches are left out."""
        return self.block_parameters + 2 * self.end_parameters

    @property
    def gradient_passes(self) -> int:
        """Forwards that a backward takes: one for the gradients of inputs, one for those of weights."""
        if self.frozen:
            return 1 if self.input_gradient else 0
        return 2

    def divides_heads(self, degree: int) -> bool:
        """Whether heads, and heads of keys, can be divided between so many devices."""
        return self.size.heads % degree == 0 and self.size.groups % degree == 0

    def divides(self, degree: int) -> bool:
        """Whether its layers can be: heads, and what is inside the MLP."""
        return self.divides_heads(degree) and self.size.mlp_width % degree == 0

    @property
    def divided(self) -> str:
        """What a degree of tensor parallelism must divide, for people."""
        size = self.size
        return f"{self.name} has {size.heads} heads, {size.groups} of keys, and an MLP of {size.mlp_width}"


def read_network(kind: str, given: str, name: str | None = None, modality: str | None = None) -> Network:
    """A module from the name of a preset, a Hugging Face `config.json` or its folder, or a YAML file of sizes.

    Raises:
        NetworkError: there is no such preset or file, or what it holds is no module of that kind.
    """
    path = Path(given)
    if given in MODELS[kind]:
        size = MODELS[kind][given]
    elif path.is_dir() or path.suffix == ".json":
        what = {"image": "encoder", "text": "text tower"}.get(modality or "", kind)
        size = _from_config(what, path / "config.json" if path.is_dir() else path)
    elif path.suffix in (".yaml", ".yml"):
        size = _from_sizes(path, _read(path))
    else:
        raise NetworkError(
            f"there is no {kind} named {given!r}; give one of {', '.join(sorted(MODELS[kind]))}, a config.json of "
            "Hugging Face, or a .yaml file with layers, width, mlp_width, heads and groups"
        )
    return Network(name or kind, kind, size, modality=modality)


def _read(path: Path) -> Mapping[str, Any]:
    try:
        with path.open("rb") as file:
            text = file.read(MAX_TEXT_BYTES + 1)
        found = json.loads(text) if path.suffix == ".json" else parse_yaml(text)
    except OSError as error:
        raise NetworkError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError, TextError) as error:
        raise NetworkError(f"{path} cannot be used: {error}") from None
    if not isinstance(found, dict):
        raise NetworkError(f"{path} holds a {type(found).__name__}; an object with the sizes of a model is required")
    return found


def _from_config(what: str, path: Path) -> ModelSize:
    whole = _read(path)
    part = whole.get(_PARTS.get(what, ""))
    data = part if isinstance(part, dict) else whole
    given = str(data.get("model_type", whole.get("model_type")))
    known = _FAMILIES.get(what, {})
    keys = known.get(_WHOLE.get(given, {}).get(what, given))
    if keys is None:
        raise NetworkError(
            f"{path}: model_type is {given[:80]!r}; of {what}s {', '.join(sorted(known)) or 'none'} are understood: "
            "give the sizes in a .yaml file instead (layers, width, mlp_width, heads, groups, vocab_size)"
        )
    sizes = {ours: data[theirs] for ours, theirs in keys.items() if data.get(theirs) is not None}
    missing = [keys[name] for name in ("layers", "width", "heads") if name not in sizes]
    if missing:
        raise NetworkError(
            f"{path}: {', '.join(missing)} of {what} {given[:80]!r} are missing; give a whole config.json"
        )
    wrong = [
        f"{keys[name]} is {value!r:.40}"
        for name, value in sizes.items()
        if type(value) is not int or abs(value) > MAX_SIZE
    ]
    if wrong:
        raise NetworkError(f"{path}: {', '.join(wrong)}; integers up to {MAX_SIZE} are required")
    if "mlp_width" not in keys:
        ratio = data.get("mlp_ratio", 4)
        if type(ratio) not in (int, float) or not 0 < ratio <= MAX_SIZE:
            raise NetworkError(f"{path}: mlp_ratio is {ratio!r:.40}; a number above 0 is required")
        sizes["mlp_width"] = int(sizes["width"] * ratio)
    size = _from_sizes(path, sizes)
    head = data.get("head_dim")
    if head not in (None, size.width // size.heads):
        raise NetworkError(
            f"{path}: head_dim is {head!r:.40}; hidden_size / num_attention_heads = {size.width // size.heads} is "
            "needed, since times are those of heads that make up the width"
        )
    return size


def _from_sizes(path: Path, data: Mapping[str, Any]) -> ModelSize:
    known = {f.name for f in fields(ModelSize)} - {"causal"}
    values = {"groups": data.get("heads"), "vocab_size": 0, **data}
    unknown, missing = sorted(values.keys() - known), sorted(known - values.keys())
    if unknown or missing:
        raise NetworkError(f"{path}: lacks {missing}, has the unknown {unknown}; {sorted(known)} are required")
    for name, value in values.items():
        if type(value) is not int or not (0 if name == "vocab_size" else 1) <= value <= MAX_SIZE:
            raise NetworkError(f"{path}: {name} is {value!r:.40}; an integer from 1 to {MAX_SIZE} is required")
    size = ModelSize(**values)
    if size.width % size.heads or size.heads % size.groups:
        raise NetworkError(
            f"{path}: width is {size.width}, heads {size.heads}, groups {size.groups}; heads must divide the width, "
            "and groups the heads"
        )
    return size
