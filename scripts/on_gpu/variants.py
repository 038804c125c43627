"""What is tried, by name: each differs from `base` in one thing that a GPU must judge.

`docs/benchmarks/README.md` is the queue: which to try next, and what each gave. Names may be joined with "+".
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

_NONE: Final[Mapping[str, str]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Variant:
    """How a run differs from the preset; of flags that are given twice the last one counts."""

    why: str
    flags: tuple[str, ...] = ()
    """More of `trainclient train`."""
    environment: Mapping[str, str] = field(default_factory=lambda: _NONE)
    recomputed: tuple[str, ...] = ("vision",)
    """Modules that compute their blocks again."""
    kept_gb: float | None = None
    """Memory for what the encoder keeps of images until its backward phase, for which a step is cut into rounds."""
    microbatch: int = 1
    """Sequences of a microbatch."""

    def plus(self, other: "Variant") -> "Variant":
        """Both changes at once; of modules, those that both compute again."""
        return Variant(
            f"{self.why}; {other.why}",
            self.flags + other.flags,
            {**self.environment, **other.environment},
            tuple(name for name in self.recomputed if name in other.recomputed),
            self.kept_gb or other.kept_gb,
            max(self.microbatch, other.microbatch),
        )


VARIANTS: Final[Mapping[str, Variant]] = MappingProxyType(
    {
        "base": Variant("the preset as it is"),
        "norecompute": Variant("the encoder keeps its activations", recomputed=()),
        "rounds": Variant("the encoder keeps its activations, a round at a time", recomputed=(), kept_gb=40.0),
        "pairs": Variant("microbatches of two sequences", microbatch=2),
        "fixed": Variant(
            "segments of the allocator do not grow", environment={"PYTORCH_ALLOC_CONF": "expandable_segments:False"}
        ),
        "eager": Variant("blocks are not compiled", ("--no-compile",)),
    }
)


def variant(name: str) -> Variant:
    """One of the table, or several joined with "+".

    Raises:
        ValueError: there is none of that name.
    """
    parts = name.split("+")
    unknown = [part for part in parts if part not in VARIANTS]
    if unknown:
        raise ValueError(f"there is no variant {unknown[0]!r}; use {', '.join(VARIANTS)}, several joined with +")
    found = VARIANTS[parts[0]]
    for part in parts[1:]:
        found = found.plus(VARIANTS[part])
    return found
