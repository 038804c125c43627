"""What a module is, as far as time and memory depend on it: a preset, a `config.json`, or sizes in a YAML file."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dataserver.planning.job.fields import (
    MAX_TEXT_BYTES,
    MODELS,
    Modality,
    ModelSize,
    TextError,
    linear_flops,
    pair_flops,
    parse_yaml,
    seen_rows,
)
from trainclient.orchestrate.config_sizes import NetworkError, checked_size, size_of_config
from trainclient.orchestrate.memory import ENCODER_BLOCK, GATED_BLOCK, GENERATOR_BLOCK, Block

FEATURES: Final = 1024
"""Numbers of a tower's feature."""


@dataclass(frozen=True, slots=True)
class Role:
    """What a kind of module is among the others."""

    block: Block
    """What its blocks keep of a row."""
    spine: bool = False
    """Whether rows of all others have its width; then it knows tokens, and may be cut into stages."""
    feeds: bool = False
    """Whether its rows, of images, clips or videos, go to the spine."""
    generates: bool = False
    """Whether it attends to rows of the spine in every block, to make images."""


_ROLES: Final[Mapping[str, Role]] = {
    "encoder": Role(ENCODER_BLOCK, feeds=True),
    "backbone": Role(GATED_BLOCK, spine=True),
    "generator": Role(GENERATOR_BLOCK, generates=True),
    "tower": Role(ENCODER_BLOCK),
}
"""By kind: the one place that knows which there are. (The trainer's, `modules.registry`, brings torch.)"""
_PARTS: Final[Mapping[tuple[str, str | None], str]] = {
    ("encoder", Modality.AUDIO): "audio encoder",
    ("tower", Modality.IMAGE): "encoder",
    ("tower", Modality.TEXT): "text tower",
}
"""What a module is in a `config.json`, where it is not its kind."""


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
    """Tower: whether it reads images or text. Encoder: audio or video, where it reads no images."""
    frozen: bool = False
    input_gradient: bool = False
    """Whether a module before it is trained, so that it hands gradients on."""

    @property
    def role(self) -> Role:
        """What it is among the others."""
        return _ROLES[self.kind]

    @property
    def reads(self) -> str:
        """What it reads, beside the rows of other modules."""
        return self.modality or (Modality.TEXT if self.role.spine else Modality.IMAGE)

    @property
    def reads_images(self) -> bool:
        """Whether its rows are those of images, clips or videos; else they are tokens."""
        return self.reads != Modality.TEXT

    @property
    def row_flops(self) -> int:
        """Forward operations of a patch or token, as the planner counts them."""
        return linear_flops(self.kind, self.size)

    @property
    def pair_flops(self) -> int:
        """Forward operations of a pair of rows of one item, as far as rows attend to one another (`window`)."""
        size = self.size
        whole = size.global_layers if size.window and size.global_layers else size.layers
        return pair_flops(self.kind, size) * whole // size.layers

    @property
    def window(self) -> int | None:
        """How many rows of an item a row's pairs count, at most, where all layers have windows."""
        size = self.size
        return seen_rows(self.kind, size) if size.window and not size.global_layers else None

    @property
    def windowed_flops(self) -> int:
        """Forward operations of a row in the windows of some layers, where others see whole items; as if all items were
        longer than a window."""
        size = self.size
        if not size.window or not size.global_layers:
            return 0
        return (pair_flops(self.kind, size) - self.pair_flops) * seen_rows(self.kind, size)

    @property
    def block_parameters(self) -> int:
        """Number of parameters of all blocks."""
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
        what = _PARTS.get((kind, modality), kind)
        path = path / "config.json" if path.is_dir() else path
        size = size_of_config(what, _read(path), path)
    elif path.suffix in (".yaml", ".yml"):
        size = checked_size(path, _read(path))
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
