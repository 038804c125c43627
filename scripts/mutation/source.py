"""What a source file's syntax says about a place in it: noise, scope, statement, names."""

import ast
from collections.abc import Iterator
from functools import cached_property

_Span = tuple[tuple[int, int], tuple[int, int]]


class Source:
    """A source file; lines count from 1, columns from 0."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tree = ast.parse(text)

    @cached_property
    def dump(self) -> str:
        """Return the syntax tree as text, without positions."""
        return ast.dump(self.tree)

    @cached_property
    def _noise(self) -> list[_Span]:
        return [_span(node) for node in _noise(self.tree)]

    def is_noise(self, position: tuple[int, int]) -> bool:
        """Whether a change there is none that tests should notice: see `_noise`."""
        return any(first <= position < end for first, end in self._noise)

    def scope(self, line: int) -> str:
        """The qualified name of the function or class around a line."""
        return ".".join(node.name for node in self._around(line))

    def function(self, line: int) -> range | None:
        """The lines of the body of the innermost function around a line."""
        found = [node for node in self._around(line) if not isinstance(node, ast.ClassDef)]
        return range(found[-1].body[0].lineno, (found[-1].end_lineno or 0) + 1) if found else None

    def statement(self, line: int) -> range:
        """The lines of the innermost statement around a line; of one with a body, those before the body."""
        found = [node for node in ast.walk(self.tree) if isinstance(node, ast.stmt) and line in _lines(node)]
        return min(map(_lines, found), key=len, default=range(line, line + 1))

    def assigned(self, line: int) -> set[str]:
        """The names that the statements around a line give a value to, in a module or a class."""
        targets: list[ast.expr] = []
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Assign | ast.AnnAssign) and line in _lines(node):
                targets += node.targets if isinstance(node, ast.Assign) else [node.target]
        return {node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)}

    def constant(self, line: int) -> bool:
        """Whether a line gives a module's constant its value, and computes it from nothing but numbers and other names:
        a decision of ours. Lines in functions and classes, calls and texts are none.
        """
        return any(_is_constant(node) for node in self.tree.body if line in _lines(node))

    def _around(self, line: int) -> list[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
        """The functions and classes around a line, outermost first."""
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        found = [node for node in ast.walk(self.tree) if isinstance(node, kinds)]
        return sorted((n for n in found if n.lineno <= line <= (n.end_lineno or 0)), key=lambda node: node.lineno)


def _lines(node: ast.stmt) -> range:
    body = getattr(node, "body", None)
    end = body[0].lineno if isinstance(body, list) and body else (node.end_lineno or node.lineno) + 1
    return range(node.lineno, max(end, node.lineno + 1))


_OF_CONSTANTS = (
    *(ast.Constant, ast.Name, ast.expr_context, ast.Tuple, ast.List, ast.Dict, ast.Set, ast.Starred),
    *(ast.UnaryOp, ast.unaryop, ast.BinOp, ast.operator),
)
"""What the value of a constant consists of."""


def _is_constant(node: ast.stmt) -> bool:
    if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
        return False
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    named = all(isinstance(target, ast.Name) and target.id.isupper() for target in targets)
    return named and all(isinstance(part, _OF_CONSTANTS) for part in ast.walk(node.value))


def _span(node: ast.AST) -> _Span:
    return (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]


def _noise(tree: ast.Module) -> Iterator[ast.AST]:
    """Annotations, decorators, bases; assertions and `strict` of zip, which only check; calls of a logger."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from node.decorator_list
            yield from filter(None, [node.returns])
        elif isinstance(node, ast.ClassDef):
            yield from [*node.decorator_list, *node.bases]
        elif isinstance(node, ast.arg | ast.AnnAssign):
            yield from filter(None, [node.annotation])
        elif isinstance(node, ast.keyword) and node.arg == "strict":
            yield node.value
        elif isinstance(node, ast.Assert) or _logs(node) or _is_for_types(node):
            yield node


def _logs(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func).startswith(("_log.", "logging."))


def _is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
