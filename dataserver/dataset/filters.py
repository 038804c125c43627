"""Filters over sidecar columns, such as `width >= 256 and (punsafe < 0.1 or not nsfw == "NSFW")`.

Grammar: `and`, `or`, `not`, parentheses, and comparisons (chained ones too) of a column, named in ASCII, with a
literal: integer, float, string, `true`, `false`. Python's parser builds the tree, a list of permitted nodes checks it,
nothing is evaluated as code. A comparison with a missing value is false (so `not (x < 1)` keeps samples without x).
"""

import ast
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from dataserver.dataset.errors import FilterError

if TYPE_CHECKING:
    import pyarrow as pa

MAX_FILTER_CHARS: Final = 4096
MAX_FILTER_DEPTH: Final = 32

Literal = bool | int | float | str
Mask = npt.NDArray[np.bool_]

OPERATORS: Final[Mapping[type[ast.cmpop], str]] = {
    ast.Eq: "equal",
    ast.NotEq: "not_equal",
    ast.Lt: "less",
    ast.LtE: "less_equal",
    ast.Gt: "greater",
    ast.GtE: "greater_equal",
}
MIRRORED: Final[Mapping[str, str]] = {
    "equal": "equal",
    "not_equal": "not_equal",
    "less": "greater",
    "less_equal": "greater_equal",
    "greater": "less",
    "greater_equal": "less_equal",
}
NUMERIC: Final = frozenset({"int64", "double"})
INT64_RANGE: Final = range(-(1 << 63), 1 << 63)
GRAMMAR: Final = "use comparisons of a column with a number, string, true or false, joined by and, or, not, ( )"


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
    """`column` compared with a literal by one of the values of `OPERATORS`."""

    column: str
    operator: str
    literal: Literal


@dataclass(frozen=True, slots=True)
class Group:
    """`and` or `or` of at least two nodes, or `not` of one."""

    operator: str
    nodes: tuple["Node", ...]


Node = Comparison | Group


@dataclass(frozen=True, slots=True)
class Filter:
    """A compiled filter expression."""

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
        """Return bool[num samples]: True where a column that the filter names is null, or the shard has none."""
        found = np.zeros(shard.num_samples, np.bool_)
        for name in dict.fromkeys(comparison.column for comparison in _comparisons(self.node)):
            found |= shard.column(name).is_null().to_numpy(zero_copy_only=False) if name in shard.columns else True
        return found


def compile_filter(text: str) -> Filter:
    """Parse a filter expression.

    Raises:
        FilterError: it is too long, too deep, or has anything in it that the grammar does not have.
    """
    if len(text) > MAX_FILTER_CHARS:
        raise FilterError(f"the filter has {len(text)} characters, the limit is {MAX_FILTER_CHARS}; shorten it")
    source = text.strip()
    try:
        tree = ast.parse(source, mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        problem = error.msg if isinstance(error, SyntaxError) else error
        raise FilterError(f"the filter {text[:80]!r} cannot be parsed ({problem}); {GRAMMAR}") from error
    _check_names(tree, source)
    try:
        return Filter(text, _compile(tree.body, 0))
    except _RefusedError as error:
        part = (ast.get_source_segment(source, error.node) or "")[:80]
        place = f"the filter holds {part!r} at byte {error.node.col_offset}"
        raise FilterError(f"{place}, {error.problem}; {GRAMMAR}") from None


def _check_names(tree: ast.AST, source: str) -> None:
    """Refuse names that Python's parser reads as other ones: it takes U+217E, a Roman numeral, for the letter d."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            written = ast.get_source_segment(source, node)
            if written != node.id or not written.isascii():
                raise FilterError(
                    f"the filter names {written!a} at byte {node.col_offset}, which is not ASCII; columns are named by"
                    " ASCII letters, digits and underscores, as they are spelled in the sidecar"
                )


class _RefusedError(Exception):
    """A part of a filter that the grammar does not have."""

    def __init__(self, node: ast.expr, problem: str) -> None:
        super().__init__(problem)
        self.node, self.problem = node, problem


def _compile(node: ast.expr, depth: int) -> Node:
    if depth > MAX_FILTER_DEPTH:
        raise FilterError(f"the filter is nested deeper than {MAX_FILTER_DEPTH}; flatten it")
    if isinstance(node, ast.BoolOp):
        name = "and" if isinstance(node.op, ast.And) else "or"
        return Group(name, tuple(_compile(value, depth + 1) for value in node.values))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return Group("not", (_compile(node.operand, depth + 1),))
    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        links = [_compile_link(node, *link) for link in zip(sides, node.ops, sides[1:], strict=False)]
        return links[0] if len(links) == 1 else Group("and", tuple(links))
    raise _RefusedError(node, "which is no comparison")


def _compile_link(whole: ast.Compare, left: ast.expr, op: ast.cmpop, right: ast.expr) -> Comparison:
    name = OPERATORS.get(type(op))
    if name is None:
        raise _RefusedError(whole, "which compares by something else than ==, !=, <, <=, > or >=")
    column, literal = _operand(left), _operand(right)
    if not isinstance(column, _Column):
        column, literal, name = literal, column, MIRRORED[name]
    if isinstance(column, _Column) and not isinstance(literal, _Column):
        return Comparison(column.name, name, literal)
    raise _RefusedError(whole, "which does not compare a column with a value")


@dataclass(frozen=True, slots=True)
class _Column:
    name: str


def _operand(node: ast.expr) -> _Column | Literal:
    if isinstance(node, ast.Name):
        return {"true": True, "false": False}.get(node.id, _Column(node.id))
    value: object = None
    if isinstance(node, ast.Constant):
        value = node.value
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant):
        number = node.operand.value
        value = -number if isinstance(number, int | float) and not isinstance(number, bool) else None
    if isinstance(value, Literal) and _is_storable(value):
        return value
    raise _RefusedError(node, "which is neither the name of a column nor a value that a column can hold")


def _is_storable(value: Literal) -> bool:
    """Say whether a column can hold the literal: text as UTF-8, integers in 64 bits."""
    if isinstance(value, str):
        return not any("\ud800" <= character <= "\udfff" for character in value)
    return not isinstance(value, int) or value in INT64_RANGE


def _comparisons(node: Node) -> Iterable[Comparison]:
    if isinstance(node, Comparison):
        yield node
    else:
        for child in node.nodes:
            yield from _comparisons(child)


def _check(comparison: Comparison, shard: ColumnSource) -> None:
    name, literal = comparison.column, comparison.literal
    kind = shard.columns.get(name)
    if kind is None:
        if name in shard.known_columns:
            return
        listed = ", ".join(sorted(shard.known_columns))
        raise FilterError(f"the filter names the column {name!r}, which no shard has; the columns are: {listed}")
    if isinstance(literal, bool):
        fits = kind == "bool" and comparison.operator in {"equal", "not_equal"}
    elif isinstance(literal, str):
        fits = kind == "string"
    else:
        fits = kind in NUMERIC
    if not fits:
        listed = ", ".join(f"{column} ({shard.columns[column]})" for column in sorted(shard.columns))
        raise FilterError(
            f"the filter compares ({comparison.operator}) the column {name!r} of type {kind} in shard {shard.name}"
            f" with {literal!r}; use a literal of its type; the columns are: {listed}"
        )


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

    kind = shard.columns.get(comparison.column)
    if kind is None:
        return np.zeros(shard.num_samples, np.bool_)
    values = shard.column(comparison.column)
    literal: Any = comparison.literal
    if isinstance(literal, float) and kind == "int64":
        values = values.cast(pa.float64(), safe=False)
        kind = "double"
    scalar = pa.scalar(float(literal) if kind == "double" else literal, values.type)
    found = pc.call_function(comparison.operator, [values, scalar])
    mask: Mask = found.fill_null(False).to_numpy(zero_copy_only=False)
    return mask
