"""No function and no class is too long to be read at once."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LONGEST_FUNCTION, LONGEST_CLASS = 80, 250
"""Lines, from the first to the last."""


def too_long(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > (LONGEST_CLASS if isinstance(node, ast.ClassDef) else LONGEST_FUNCTION):
                yield f"{node.name} has {lines} lines"


@pytest.mark.parametrize("top", ["dataserver", "trainclient"])
def test_functions_and_classes_are_short(top: str) -> None:
    files = sorted((ROOT / top).rglob("*.py"))
    assert len(files) > 150
    assert [f"{file}: {found}" for file in files for found in too_long(ast.parse(file.read_text()))] == []


def test_a_line_too_many_is_found() -> None:
    body = "\n    x = 1" * (LONGEST_FUNCTION - 1)
    assert list(too_long(ast.parse(f"def f():{body}"))) == []
    assert list(too_long(ast.parse(f"def f():{body}\n    y = 2"))) == ["f has 81 lines"]
