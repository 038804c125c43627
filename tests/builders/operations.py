"""Operations of a stage that are written down one by one."""

from collections.abc import Iterable

import numpy as np

from dataserver.planning.simulation import Operation, OperationKind, Operations

KINDS = tuple(OperationKind)


def operations_of(listed: Iterable[Operation]) -> Operations:
    """The same operations as arrays."""
    rows = [(KINDS.index(o.kind), o.microbatch, o.chunk) for o in listed]
    return Operations(*np.array(rows, np.int64).reshape(-1, 3).T.copy())
