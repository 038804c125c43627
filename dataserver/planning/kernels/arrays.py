"""What numpy offers for arrays, as plain loops: its versions take many times as long to compile."""

from dataserver.planning import I64
from dataserver.planning.kernels.compiler import part


@part
def first_largest(values: I64) -> int:
    """Position of the largest of one value or more, the first of several."""
    best = 0
    for position in range(1, len(values)):
        if values[position] > values[best]:
            best = position
    return best


@part
def largest(values: I64) -> int:
    """The largest of one value or more."""
    found: int = values[first_largest(values)]
    return found


@part
def copy_to(target: I64, source: I64) -> None:
    """Copy as many values as the source has to the front of the target."""
    for position in range(len(source)):
        target[position] = source[position]
