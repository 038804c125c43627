"""How the parameters of our models and the tensors of a family's checkpoints correspond."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Generic, TypeVar

import torch
from torch import Tensor

from trainclient.models.audio_encoder import AudioEncoderConfig
from trainclient.models.backbone_block import BackboneConfig
from trainclient.models.encoder import EncoderConfig
from trainclient.models.hf.fields import Fields
from trainclient.models.hf.files import PretrainedError

Sizes = BackboneConfig | EncoderConfig | AudioEncoderConfig
Names = Mapping[str, str]
"""How a kind of file spells the names of tensors: by the beginning of our spelling, that of theirs."""
PLAIN: Final[Names] = {"": ""}
Config = TypeVar("Config", BackboneConfig, EncoderConfig, AudioEncoderConfig)


def _same(tensor: Tensor) -> Tensor:
    return tensor


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of theirs, and the parameters of ours that hold its rows one after the other."""

    ours: Mapping[str, int]
    """Our tensors that it becomes, with the rows of each."""
    theirs: str
    """Its name, in the spelling of its family."""
    shape: tuple[int, ...]
    read: Callable[[Tensor], Tensor] = field(default=_same)
    """Turns their rows into ours."""
    write: Callable[[Tensor], Tensor] = field(default=_same)
    """Turns our tensor back into theirs."""

    def divided(self, tensor: Tensor) -> dict[str, Tensor]:
        """Our parameters from their tensor."""
        parts = torch.split(self.read(tensor), list(self.ours.values()))
        return {name: part.contiguous() for name, part in zip(self.ours, parts, strict=True)}

    def require(self, parameters: Mapping[str, Tensor]) -> None:
        """Raise PretrainedError where parameters of ours that it is made of are missing or of other shapes."""
        for name, like in self.divided(torch.empty(self.shape, device="meta")).items():
            found = parameters.get(name)
            if found is None or found.shape != like.shape:
                said = "nothing" if found is None else f"{list(found.shape)}"
                raise PretrainedError(f"there is {said} for {name}; a tensor of shape {list(like.shape)} is required")

    def joined(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """Their tensor from our parameters, in memory of its own."""
        rows = torch.cat([parameters[name] for name in self.ours])
        return self.write(rows).clone(memory_format=torch.contiguous_format)


@dataclass(frozen=True, slots=True)
class Alone:
    """How a model is exported that is no part of another one."""

    architecture: str
    """The class of transformers that loads it."""
    write: Callable[[Any], dict[str, Any]]
    """Fields of its config.json from our sizes; refuses what it cannot be."""
    suits: Callable[[Any], bool]
    """Whether sizes of its kind are exported as this architecture."""
    processor: Callable[[Any, int | None], dict[str, Any]] | None = None
    """What transformers calls its processor of images, and how large these are: given the sizes, and the most patches
    of an image, if that is known."""


@dataclass(frozen=True, slots=True)
class Family(Generic[Config]):
    """An architecture that our models can be."""

    name: str
    """`model_type` of what is exported."""
    kind: type[Config]
    read: Callable[[Fields, Fields], Config]
    """Our sizes from its fields, and from those of the whole model; refuses what our models cannot be."""
    entries: Callable[[Config], list[Entry]]
    ignored: str
    """Regular expression of names, in the spelling of `entries`, that are no weights of our models.
    With a group `layer`: where that number is none of our layers."""
    spellings: tuple[Names, ...] = (PLAIN,)
    """How files spell names of tensors, of its own and of models that contain it; the first one is written."""
    section: str = ""
    """Field of config.json with its fields, where it is given; else, and in such a file of its own, all are its."""
    alone: Alone | None = None
    """How it is exported by itself; None for parts that only whole models have."""

    @property
    def speaks(self) -> bool:
        """Whether it is a language model, whose config.json names special tokens and the longest sequence."""
        return self.kind is BackboneConfig

    @property
    def sees(self) -> bool:
        """Whether it takes pixels, whose normalisation its folders say (`pixels` of our sizes)."""
        return self.kind is EncoderConfig


def spelled(names: Names, ours: str) -> str:
    """How files spell a name; the name itself where they have another one for none of it."""
    prefix = next((p for p in names if ours.startswith(p)), None)
    return ours if prefix is None else names[prefix] + ours.removeprefix(prefix)


def unspelled(names: Names, theirs: str) -> str | None:
    """The reverse of `spelled`; None for a name of another part."""
    ours = next((p for p, begins in names.items() if theirs.startswith(begins)), None)
    return None if ours is None else ours + theirs.removeprefix(names[ours])


def linear(ours: str, theirs: str, rows: int, columns: int, *, bias: bool) -> list[Entry]:
    """The entries of a linear layer."""
    return stacked({ours: rows}, theirs, columns, bias=bias)


def stacked(ours: Mapping[str, int], theirs: str, columns: int, *, bias: bool) -> list[Entry]:
    """The entries of a linear layer of theirs that holds several of ours, by the rows of each."""
    rows, shapes = sum(ours.values()), {"weight": (columns,), **({"bias": ()} if bias else {})}
    return [
        Entry({f"{name}.{kind}": n for name, n in ours.items()}, f"{theirs}.{kind}", (rows, *shape))
        for kind, shape in shapes.items()
    ]


def vector(ours: str, theirs: str, width: int) -> Entry:
    """The entry of a vector."""
    return Entry({ours: width}, theirs, (width,))


def transposed(ours: str, theirs: str, rows: int, columns: int) -> Entry:
    """The entry of a linear layer without bias that they multiply from the other side, [columns, rows]."""
    return Entry({ours: rows}, theirs, (columns, rows), Tensor.t, Tensor.t)


def table(ours: str, theirs: str, rows: int, width: int) -> Entry:
    """The entry of an embedding."""
    return Entry({ours: rows}, theirs, (rows, width))


def reshaped(ours: str, theirs: str, shape: tuple[int, ...], their_shape: tuple[int, ...]) -> Entry:
    """The entry of a tensor that has further dimensions of theirs, of one."""
    return Entry({ours: shape[0]}, theirs, their_shape, lambda t: t.reshape(shape), lambda t: t.view(their_shape))


def norm(ours: str, theirs: str, width: int) -> list[Entry]:
    """The entries of a LayerNorm."""
    return [vector(f"{ours}.{name}", f"{theirs}.{name}", width) for name in ("weight", "bias")]


def within(prefix: str, entries: list[Entry]) -> list[Entry]:
    """Entries whose names begin with the name of a part."""
    return [replace(entry, theirs=prefix + entry.theirs) for entry in entries]
