"""Filters over sidecar columns, such as `width >= 256 and (punsafe < 0.1 or not nsfw in ("NSFW", "UNSURE"))`.

A comparison with a missing value is false (so `not (x < 1)` keeps samples without x); only `is null` holds for it.
`filter_grammar.py` makes filters of text.
"""

import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from dataserver.dataset.errors import FilterError
from dataserver.dataset.media_columns import flag_of

if TYPE_CHECKING:
    import pyarrow as pa

Literal = bool | int | float | str
Mask = npt.NDArray[np.bool_]

NUMERIC: Final = frozenset({"int64", "double"})
IN: Final = "in"
NOT_IN: Final = "not_in"
IS_NULL: Final = "is_null"
IS_NOT_NULL: Final = "is_not_null"


class ColumnSource(Protocol):
    """What a filter needs of a shard."""

    @property
    def name(self) -> str: ...  # noqa: D102

    @property
    def num_samples(self) -> int: ...  # noqa: D102

    @property
    def columns(self) -> Mapping[str, str]: ...  # noqa: D102

    @property
    def known_columns(self) -> frozenset[str]: ...  # noqa: D102

    def column(self, name: str) -> "pa.Array": ...  # noqa: D102


@dataclass(frozen=True, slots=True)
class Comparison:
    """`column` compared with a literal by a function of Arrow, or by one of the words above."""

    column: str
    operator: str
    literal: Literal | tuple[Literal, ...] | None
    """Several with `IN` and `NOT_IN`, none with `IS_NULL` and `IS_NOT_NULL`."""

    @property
    def literals(self) -> tuple[Literal, ...]:
        """All literals of the condition."""
        if self.literal is None:
            return ()
        return self.literal if isinstance(self.literal, tuple) else (self.literal,)


@dataclass(frozen=True, slots=True)
class Group:
    """`and` or `or` of at least two nodes, or `not` of one."""

    operator: str
    nodes: tuple["Node", ...]


Node = Comparison | Group


@dataclass(frozen=True, slots=True)
class Filter:
    """A filter expression: its text, and the syntax tree that is evaluated."""

    text: str
    node: Node

    def check(self, shards: Iterable[ColumnSource]) -> None:
        """Check columns and types against the schemas of all shards, without reading a column.

        Raises:
            FilterError: a column is unknown or of another type than its literal; lists the columns there are.
        """
        for shard in shards:
            for comparison in _comparisons(self.node):
                _check(comparison, shard)

    def mask(self, shard: ColumnSource) -> Mask:
        """Return bool[num samples]: True where the sample stays.

        Raises:
            FilterError: as `check`.
        """
        self.check([shard])
        return _mask(self.node, shard)

    def nulls(self, shard: ColumnSource) -> Mask:
        """Return bool[num samples]: True where a column that the filter compares is null, or the shard has none."""
        found = np.zeros(shard.num_samples, np.bool_)
        for name in dict.fromkeys(c.column for c in _comparisons(self.node) if c.operator != IS_NULL):
            found |= _nulls(name, shard)
        return found


def _comparisons(node: Node) -> Iterable[Comparison]:
    if isinstance(node, Comparison):
        yield node
    else:
        for child in node.nodes:
            yield from _comparisons(child)


def _check(comparison: Comparison, shard: ColumnSource) -> None:
    name = comparison.column
    kind = shard.columns.get(name)
    if kind is None:
        if name in shard.known_columns:
            return
        listed = ", ".join(sorted(shard.known_columns | shard.columns.keys()))
        flag = flag_of(name)
        remedy = f"index with {flag} to have it; " if flag else ""
        raise FilterError(
            f"the filter names the column {name!r}, which no shard has; {remedy}the columns are: {listed}"
        )
    for literal in comparison.literals:
        if not _fits(literal, kind, comparison.operator):
            listed = ", ".join(f"{column} ({shard.columns[column]})" for column in sorted(shard.columns))
            raise FilterError(
                f"the filter compares ({comparison.operator}) the column {name!r} of type {kind} in shard {shard.name}"
                f" with {literal!r}; use a literal of its type; the columns are: {listed}"
            )


def _fits(literal: Literal, kind: str, by: str) -> bool:
    if isinstance(literal, bool):
        return kind == "bool" and by in {"equal", "not_equal", IN, NOT_IN}
    return kind == "string" if isinstance(literal, str) else kind in NUMERIC


def _mask(node: Node, shard: ColumnSource) -> Mask:
    if isinstance(node, Comparison):
        return _compare(node, shard)
    masks = [_mask(child, shard) for child in node.nodes]
    if node.operator == "not":
        return ~masks[0]
    joined = masks[0]
    combine: Callable[[Mask, Mask], Mask] = operator.and_ if node.operator == "and" else operator.or_
    for mask in masks[1:]:
        joined = combine(joined, mask)
    return joined


def _compare(comparison: Comparison, shard: ColumnSource) -> Mask:
    import pyarrow as pa
    import pyarrow.compute as pc

    if comparison.operator in (IS_NULL, IS_NOT_NULL):
        nulls = _nulls(comparison.column, shard)
        return nulls if comparison.operator == IS_NULL else ~nulls
    kind = shard.columns.get(comparison.column)
    if kind is None:
        return np.zeros(shard.num_samples, np.bool_)
    values = shard.column(comparison.column)
    literals: list[Any] = [*comparison.literals]
    if kind == "int64" and any(isinstance(literal, float) for literal in literals):
        values = values.cast(pa.float64(), safe=False)
        kind = "double"
    if kind == "double":
        literals = [float(literal) for literal in literals]
    if comparison.operator in (IN, NOT_IN):
        found = pc.is_in(values, value_set=pa.array(literals, values.type))
        if comparison.operator == NOT_IN:
            found = pc.and_(pc.invert(found), values.is_valid())
    else:
        found = pc.call_function(comparison.operator, [values, pa.scalar(literals[0], values.type)])
    mask: Mask = found.fill_null(False).to_numpy(zero_copy_only=False)
    return mask


def _nulls(name: str, shard: ColumnSource) -> Mask:
    """bool[num samples]: where a column is null, as all of one that the shard does not have."""
    if name not in shard.columns:
        return np.ones(shard.num_samples, np.bool_)
    found: Mask = shard.column(name).is_null().to_numpy(zero_copy_only=False)
    return found
