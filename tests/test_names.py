"""Words that stand in no file of ours, and names that no file, class, function, field, flag, metric or proto has."""

import ast
import re
import subprocess
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WORDS = (
    *("stair", "island", "lend", "lent", "borrow", "parcel", "shipment", "inlet", "outlet", "sister", "oddity"),
    *("in place of", "of which"),
)
"""They say nothing to people of the field, or are translated."""
NAMES = frozenset(
    {"place", "measure", "stamp", "joint", "lane", "desk", "standing", "holding", "kept", "lacking", "apart", "meeting"}
    | {"beginning", "narrow"}
)
"""They have had several meanings."""
EXEMPT = (
    *("tests/test_names.py", "docs/internal/renames.md", "docs/internal/benchmarks/", "LICENSE"),
    *("protos/golden/", "protos/google/"),
)
"""They list old names, are recorded, or come from others."""
TEXTS = {".py", ".pyi", ".md", ".proto", ".js", ".mjs", ".ts", ".toml", ".yaml", ".yml", ".json", ".sh", ".c", ""}


@cache
def files() -> tuple[str, ...]:
    """Tracked files with text, by their paths from the root."""
    command = ["git", "ls-files"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    return tuple(f for f in listed if Path(f).suffix in TEXTS and not f.startswith(EXEMPT) and (ROOT / f).is_file())


def words(name: str) -> set[str]:
    """Words of a name, in lower case: of snake_case, CamelCase, kebab-case and paths."""
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)}


def names_of(tree: ast.AST) -> Iterator[str]:
    """Classes, functions, fields and module constants. Tests are named by sentences."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if not node.name.startswith("test_"):
                yield node.name
        elif isinstance(node, ast.AnnAssign):
            yield node.target.id if isinstance(node.target, ast.Name) else ast.unparse(node.target).rpartition(".")[2]
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.Constant) and re.fullmatch(r"--[a-z][a-z-]*|disttrain_[a-z_]+", str(node.value)):
            yield str(node.value)  # a flag, or a metric


def proto_names(text: str) -> Iterator[str]:
    """Packages, messages, enums and their values, services, methods and fields."""
    code = re.sub(r"//[^\n]*", "", text)
    yield from re.findall(r"\b(?:message|enum|service|rpc|oneof)\s+(\w+)", code)
    yield from re.findall(r"\b(\w+)\s*=\s*\d+", code)


def test_words_that_stand_in_no_file() -> None:
    either = "|".join(WORDS)
    pattern = re.compile(rf"\b(?:{either})s?\b", re.IGNORECASE)
    found = [
        f"{file}:{number}: {line.strip()[:120]}"
        for file in files()
        for number, line in enumerate((ROOT / file).read_text(errors="replace").splitlines(), start=1)
        if pattern.search(line)
    ]
    assert not found, "\n".join(found)


def test_names_that_nothing_has() -> None:
    found = []
    for file in files():
        found += [f"{file} is named so" for _ in words(file) & NAMES]
        text = (ROOT / file).read_text(errors="replace")
        named: Iterable[str] = ()
        if file.endswith(".py") and not file.endswith("_pb2.py"):
            named = names_of(ast.parse(text))
        elif file.endswith(".proto"):
            named = proto_names(text)
        found += [f"{file}: {name}" for name in dict.fromkeys(named) if words(name) & NAMES]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("name", ["_placeHolder", "kept", "KEPT_BYTES", "to_place", "MeetingPoint", "--narrow"])
def test_whole_words_of_a_name(name: str) -> None:
    assert words(name) & NAMES


@pytest.mark.parametrize("name", ["placement", "replace", "measured", "apartment", "standings"])
def test_other_words(name: str) -> None:
    assert not words(name) & NAMES
