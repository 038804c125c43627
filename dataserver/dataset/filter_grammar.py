"""The grammar of filters: from the text of a job to the tree that `filters.py` evaluates.

`and`, `or`, `not`, parentheses, and comparisons (chained ones too) of a column with a literal: integer, float, string,
`true`, `false`. Besides `==`, `!=`, `<`, `<=`, `>` and `>=` there are `in (...)`, `not in (...)`, `is null` and
`is not null`. A column is named by ASCII letters, digits and underscores, or by anything in quotes:
`"clip-b32 score" > 0.3`. Where both sides of a comparison are quoted, the left one is the column.

Python's parser builds the tree, a list of permitted nodes checks it, nothing is evaluated as code.
"""

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from dataserver.dataset.errors import FilterError
from dataserver.dataset.filters import IN, IS_NOT_NULL, IS_NULL, NOT_IN, Comparison, Filter, Group, Literal, Node

MAX_FILTER_CHARS: Final = 4096
MAX_FILTER_DEPTH: Final = 32

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
INT64_RANGE: Final = range(-(1 << 63), 1 << 63)
GRAMMAR: Final = (
    "use comparisons of a column with a number, string, true or false, in (...), is null, is not null, joined by and,"
    " or, not, ( )"
)


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


def filter_parts(text: str) -> tuple[Filter, ...]:
    """Return the conditions that a filter joins by `and`, each as a filter of its own; one of them alone is the whole.

    Raises:
        FilterError: as `compile_filter`.
    """
    whole = compile_filter(text)
    source = text.strip()
    body = ast.parse(source, mode="eval").body
    if not (isinstance(body, ast.BoolOp) and isinstance(body.op, ast.And)):
        return (whole,)
    return tuple(compile_filter(f"({ast.get_source_segment(source, part)})") for part in body.values)


def _check_names(tree: ast.AST, source: str) -> None:
    """Refuse names that Python's parser reads as other ones: it takes U+217E, a Roman numeral, for the letter d."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            written = ast.get_source_segment(source, node)
            if written != node.id or not written.isascii():
                raise FilterError(
                    f"the filter names {written!a} at byte {node.col_offset}, which is not ASCII; put such names in"
                    " quotes, as they are spelled in the sidecar"
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
    if isinstance(op, ast.In | ast.NotIn):
        return Comparison(_column(whole, left), IN if isinstance(op, ast.In) else NOT_IN, _values(whole, right))
    if isinstance(op, ast.Is | ast.IsNot):
        if not (isinstance(right, ast.Name) and right.id == "null"):
            raise _RefusedError(whole, "where `is` stands before something else than null or not null")
        return Comparison(_column(whole, left), IS_NULL if isinstance(op, ast.Is) else IS_NOT_NULL, None)
    name = OPERATORS[type(op)]
    first, second = _operand(left), _operand(right)
    if not isinstance(first, _Column) and not isinstance(second, _Column):  # a column in quotes
        if isinstance(first, str) and not (isinstance(second, str) and len(whole.ops) > 1):
            first = _Column(first)
        elif isinstance(second, str) and not isinstance(first, str):
            second = _Column(second)
    if not isinstance(first, _Column):
        first, second, name = second, first, MIRRORED[name]
    if isinstance(first, _Column) and not isinstance(second, _Column):
        return Comparison(first.name, name, second)
    raise _RefusedError(whole, "which does not compare a column with a value")


@dataclass(frozen=True, slots=True)
class _Column:
    name: str


def _column(whole: ast.Compare, node: ast.expr) -> str:
    """The column that stands alone on a side, in quotes or not."""
    found = _operand(node)
    if isinstance(found, _Column):
        return found.name
    if isinstance(found, str):
        return found
    raise _RefusedError(whole, "which does not begin with the name of a column")


def _values(whole: ast.Compare, node: ast.expr) -> tuple[Literal, ...]:
    """The values in the parentheses behind `in`; Python sees none around a single one."""
    nodes = node.elts if isinstance(node, ast.Tuple) else [node]
    found = tuple(value for value in map(_operand, nodes) if not isinstance(value, _Column))
    if not found or len(found) < len(nodes):
        raise _RefusedError(whole, "where `in` needs one or more values in parentheses")
    return found


def _operand(node: ast.expr) -> _Column | Literal:
    if isinstance(node, ast.Name) and node.id != "null":
        return {"true": True, "false": False}.get(node.id, _Column(node.id))
    value: object = None
    if isinstance(node, ast.Constant):
        value = node.value
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant):
        number = node.operand.value
        value = -number if isinstance(number, int | float) and not isinstance(number, bool) else None
    if isinstance(value, Literal) and _is_storable(value):
        return value
    null = isinstance(node, ast.Name)
    raise _RefusedError(
        node,
        "which no comparison holds for: write `is null` or `is not null`"
        if null
        else "which is neither the name of a column nor a value that a column can hold",
    )


def _is_storable(value: Literal) -> bool:
    """Say whether a column can hold the literal: text as UTF-8, integers in 64 bits."""
    if isinstance(value, str):
        return not any("\ud800" <= character <= "\udfff" for character in value)
    return not isinstance(value, int) or value in INT64_RANGE
