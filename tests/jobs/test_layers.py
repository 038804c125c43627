"""Data flows one way: a folder of the server imports only what stands before it in the line."""

import ast
from pathlib import Path

import pytest

import dataserver

FOLDER = Path(dataserver.__file__).parent
BELOW_COMMANDS = {
    *("planning", "transforms", "images", "audio", "video", "dataset", "assembly", "jobs"),
    *("security", "fleet", "serving"),
}
BEFORE = {
    "planning": set(),
    "transforms": {"planning"},
    "images": {"planning", "transforms"},
    "audio": {"planning"},
    "video": {"planning", "images", "audio"},
    "tracing": {"security"},
    "dataset": {"transforms", "images", "audio", "video", "planning", "tracing"},
    "assembly": {"transforms", "images", "audio", "video", "dataset", "planning"},
    "jobs": {"transforms", "images", "audio", "video", "dataset", "planning", "assembly", "tracing"},
    "security": set(),
    "fleet": {"dataset", "planning", "jobs", "security", "tracing"},
    "serving": {
        *("transforms", "images", "dataset", "planning", "assembly", "jobs", "security", "fleet", "tracing"),
        "job_files",
    },
    # what commands print and pages show, worked out once for both
    "reporting": {"transforms", "images", "audio", "dataset", "planning", "assembly", "jobs", "security", "fleet"},
    "web": BELOW_COMMANDS | {"reporting"},
    # a command starts the pages, which know of no command
    "cli": BELOW_COMMANDS | {"reporting", "web", "job_files"},
}
BELOW_ALL = {
    *("addresses", "allocator", "chrome_trace", "drawing", "extras", "flags", "header_error", "outputs", "process"),
    "varints",
}
"""Modules beside the folders, which import nothing of ours."""
OVER_PLANNING = {"job_files"}
"""Modules beside the folders, which import planning alone. Commands and servers use them, and so does the trainer."""
NO_PROTOS = {"transforms", "images", "audio", "video", "dataset", "planning", "assembly", "jobs"}


def imports(file: Path) -> set[str]:
    """Names of the modules that a file imports, anywhere in it."""
    nodes = list(ast.walk(ast.parse(file.read_text())))
    found = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    taken = [
        (node.module or "", alias.name) for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names
    ]
    return found | {f"dataserver.{name}" if module == "dataserver" else module for module, name in taken}


def test_every_folder_has_its_place() -> None:
    assert {path.parent.name for path in FOLDER.glob("*/__init__.py")} == BEFORE.keys()


@pytest.mark.parametrize("folder", BEFORE)
def test_a_folder_imports_what_stands_before_it(folder: str) -> None:
    allowed = BEFORE[folder] | {folder} | BELOW_ALL
    for file in (FOLDER / folder).rglob("*.py"):
        for name in imports(file):
            top, _, rest = name.partition(".")
            if top == "dataserver":
                assert rest.split(".")[0] in allowed, f"{file} imports {name}"
            assert top not in ("torch", "trainclient"), f"{file} imports {name}"
            assert folder not in NO_PROTOS or top not in ("grpc", "disttrain", "google"), f"{file} imports {name}"


@pytest.mark.parametrize("module", sorted(BELOW_ALL))
def test_what_all_folders_use_imports_nothing_of_ours(module: str) -> None:
    assert not [
        name for name in imports(FOLDER / f"{module}.py") if name.split(".")[0] in ("dataserver", "trainclient")
    ]


@pytest.mark.parametrize("module", sorted(OVER_PLANNING))
def test_what_both_sides_use_imports_planning_alone(module: str) -> None:
    ours = [n for n in imports(FOLDER / f"{module}.py") if n.split(".")[0] in ("dataserver", "trainclient")]
    assert ours
    assert all(name.startswith("dataserver.planning.") for name in ours)


@pytest.mark.parametrize("folder", ["images", "dataset", "assembly", "fleet", "serving", "reporting", "web", "cli"])
def test_jobs_are_entered_by_their_face(folder: str) -> None:
    for file in (FOLDER / folder).rglob("*.py"):
        assert not [name for name in imports(file) if name.startswith("dataserver.jobs.")], file
