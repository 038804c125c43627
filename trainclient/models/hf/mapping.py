"""How the parameters of our models and the tensors of a family's checkpoints correspond."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from trainclient.models.backbone import BackboneConfig
from trainclient.models.encoder import EncoderConfig
from trainclient.models.hf.fields import Fields

Sizes = BackboneConfig | EncoderConfig
Config = TypeVar("Config", BackboneConfig, EncoderConfig)


def _same(tensor: Tensor) -> Tensor:
    return tensor


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of theirs, and the parameters of ours that hold its rows one after the other."""

    ours: Mapping[str, int]
    """Our tensors that it becomes, with the rows of each."""
    theirs: str
    """Its name without the prefix."""
    shape: tuple[int, ...]
    read: Callable[[Tensor], Tensor] = field(default=_same)
    """From their rows to ours."""
    write: Callable[[Tensor], Tensor] = field(default=_same)
    """Turns our tensor back into theirs."""

    def divided(self, tensor: Tensor) -> dict[str, Tensor]:
        """Our parameters from their tensor."""
        parts = torch.split(self.read(tensor), list(self.ours.values()))
        return {name: part.contiguous() for name, part in zip(self.ours, parts, strict=True)}

    def joined(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """Their tensor from our parameters, in memory of its own."""
        rows = torch.cat([parameters[name] for name in self.ours])
        return self.write(rows).clone(memory_format=torch.contiguous_format)


@dataclass(frozen=True, slots=True)
class Family(Generic[Config]):
    """An architecture that our models can be."""

    name: str
    """`model_type` of what is exported."""
    architecture: str
    """The class of transformers that loads what is exported."""
    kind: type[Config]
    read: Callable[[Fields], Config]
    """Our sizes from its fields; refuses what our models cannot be."""
    write: Callable[[Config], dict[str, Any]]
    """Its fields from our sizes; refuses what it cannot be."""
    entries: Callable[[Config], list[Entry]]
    prefixes: tuple[str, ...]
    """Prefixes of the names of its tensors, in checkpoints of its own and of models that contain it; the first is
    written."""
    ignored: str
    """Regular expression of names, without the prefix, that are no weights of our models."""
    suits: Callable[[Config], bool]
    """Whether sizes of its kind are exported as this architecture."""
    speaks: bool = False
    """Whether it is a language model, whose config.json names special tokens and the longest sequence."""
    tied: Mapping[str, str] = field(default_factory=dict)
    """What stands for a tensor that is not there where `tie_word_embeddings` is true."""
    pixels: Callable[[Config], str] | None = None
    """How pixels are normalised, where its folders say so."""
    processor: Callable[[Config, int | None], dict[str, Any]] | None = None
    """What transformers calls its processor of images, and how large these are: given the sizes, and the most patches
    of an image, if that is known."""


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


def table(ours: str, theirs: str, rows: int, width: int) -> Entry:
    """The entry of an embedding."""
    return Entry({ours: rows}, theirs, (rows, width))


def norm(ours: str, theirs: str, width: int) -> list[Entry]:
    """The entries of a LayerNorm."""
    return [vector(f"{ours}.{name}", f"{theirs}.{name}", width) for name in ("weight", "bias")]
