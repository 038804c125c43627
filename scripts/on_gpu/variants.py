"""What is tried, by name: each differs from `base` in one thing that a GPU must judge.

`docs/internal/benchmarks/README.md` is the queue: which to try next, and what each gave. Names may be joined with "+".
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
    """Further flags of `trainclient train`."""
    environment: Mapping[str, str] = field(default_factory=lambda: _NONE)
    recomputed: tuple[str, ...] = ()
    """Modules that compute their blocks again."""
    whole: bool = False
    """Whether the encoder keeps the images of a whole step until its backward phase, and not of a round."""
    microbatch: int | None = None
    """Sequences of a microbatch; None as the preset has it."""

    def plus(self, other: "Variant") -> "Variant":
        """Both changes at once; of sizes of microbatches, the other one's."""
        return Variant(
            f"{self.why}; {other.why}",
            self.flags + other.flags,
            {**self.environment, **other.environment},
            tuple(dict.fromkeys(self.recomputed + other.recomputed)),
            self.whole or other.whole,
            other.microbatch or self.microbatch,
        )


VARIANTS: Final[Mapping[str, Variant]] = MappingProxyType(
    {
        "base": Variant("the preset as it is"),
        "recomputed": Variant(
            "the encoder computes its blocks again, of a whole step", recomputed=("vision",), whole=True
        ),
        "singles": Variant("microbatches of one sequence", microbatch=1),
        "quads": Variant("microbatches of four sequences", microbatch=4),
        "cpp": Variant("what launches the kernels of blocks is C++", environment={"TORCHINDUCTOR_CPP_WRAPPER": "1"}),
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
