"""What a program asks of those who hold the parameters of its chunks."""

from typing import Final, Protocol


class Parameters(Protocol):
    """The parameters of a process's chunks, all or shares of them. All ranks of a chunk call the same together."""

    def unshard(self, chunk: int) -> None:
        """Have a chunk ready to run, at the position among the process's; RankLostError if a rank is gone."""

    def reduce(self, chunk: int) -> None:
        """Sum a chunk's gradients of the step over its ranks; RankLostError if one is gone."""


class _NothingHeld:
    """Whole parameters that nobody trains."""

    def unshard(self, chunk: int) -> None:
        """Return at once: the parameters are always whole."""

    def reduce(self, chunk: int) -> None:
        """Return at once: no other rank has a part of the gradients."""


WHOLE_PARAMETERS: Final[Parameters] = _NothingHeld()
