"""Data flows one way: a folder of the server imports only what stands before it in the line."""

import ast
from pathlib import Path

import pytest

import dataserver

FOLDER = Path(dataserver.__file__).parent
BEFORE = {
    "dataset": set(),
    "planning": set(),
    "preprocessing": {"dataset", "planning"},
    "jobs": {"dataset", "planning", "preprocessing"},
    "serving": {"dataset", "planning", "preprocessing", "jobs"},
    "cli": {"dataset", "planning", "preprocessing", "jobs", "serving"},
}
NO_PROTOS = {"dataset", "planning", "preprocessing", "jobs"}


def imports(file: Path) -> set[str]:
    """Names of the modules that a file imports, anywhere in it."""
    nodes = list(ast.walk(ast.parse(file.read_text())))
    found = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return found | {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}


def test_every_folder_has_its_place() -> None:
    assert {path.parent.name for path in FOLDER.glob("*/__init__.py")} == BEFORE.keys()


@pytest.mark.parametrize("folder", BEFORE)
def test_a_folder_imports_what_stands_before_it(folder: str) -> None:
    allowed = BEFORE[folder] | {folder}
    for file in (FOLDER / folder).rglob("*.py"):
        for name in imports(file):
            top, _, rest = name.partition(".")
            if top == "dataserver":
                assert rest.split(".")[0] in allowed, f"{file} imports {name}"
            assert top not in ("torch", "trainclient"), f"{file} imports {name}"
            assert folder not in NO_PROTOS or top not in ("grpc", "disttrain", "google"), f"{file} imports {name}"


@pytest.mark.parametrize("folder", ["dataset", "preprocessing", "serving", "cli"])
def test_jobs_are_entered_by_their_face(folder: str) -> None:
    for file in (FOLDER / folder).rglob("*.py"):
        assert not [name for name in imports(file) if name.startswith("dataserver.jobs.")], file
