"""Where numbers stop being finite: the first module, rank and microbatch that made them of finite ones.

Noting costs a small reduction on the device and waits for nothing; the notes are read only after a step whose gradients
are not finite.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from trainclient.stream.microbatch import Items

MAX_NAMED = 8
"""Samples that a message names."""


@dataclass(slots=True)
class _Passes:
    """One microbatch; flags are bool scalars on the device, absent where nothing passed."""

    items: Items
    flags: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Origin:
    """A pass of a microbatch that made numbers that are not finite of finite ones."""

    microbatch: int
    direction: str
    """Whether the pass was a forward or a backward."""
    samples: tuple[tuple[int, int], ...]
    """Some of the items, each by the position of its dataset in the job and the number of its sample."""


class FiniteNotes:
    """What one chunk saw in a step."""

    def __init__(self) -> None:
        self._passes: dict[int, _Passes] = {}

    def begin_step(self) -> None:
        """Forget the passes of the step before."""
        self._passes.clear()

    def forward(self, microbatch: int, items: Items, rows_in: Tensor | None, made: list[Tensor | None]) -> None:
        """Note the inputs and outputs of a forward pass."""
        self._passes[microbatch] = _Passes(items)
        self._note(microbatch, "in", [rows_in])
        self._note(microbatch, "out", made)

    def backward(self, microbatch: int, gradients: list[Tensor | None], returned: Tensor | None) -> None:
        """Note the gradients that came, and the one that goes back."""
        self._note(microbatch, "came", gradients)
        self._note(microbatch, "returned", [returned])

    def origin(self) -> Origin | None:
        """The first microbatch in which something not finite was made here; waits for the device."""
        for microbatch, passes in sorted(self._passes.items()):
            finite = {name: bool(flag) for name, flag in passes.flags.items()}
            forward = finite.get("in", True) and not finite.get("out", True)
            clean = finite.get("in", True) and finite.get("out", True) and finite.get("came", True)
            if forward or (clean and not finite.get("returned", True)):
                items = passes.items
                named = zip(items.dataset.tolist(), items.sample.tolist(), strict=True)
                samples = tuple(dict.fromkeys(named))[:MAX_NAMED]
                return Origin(microbatch, "forward" if forward else "backward", samples)
        return None

    def _note(self, microbatch: int, name: str, tensors: list[Tensor | None]) -> None:
        flags = [torch.isfinite(t.detach()).all() for t in tensors if t is not None]
        if flags:
            self._passes[microbatch].flags[name] = torch.stack(flags).all()
