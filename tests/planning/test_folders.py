"""Planning has few folders, each imports only those before it, and all meet in the planner."""

import ast
from pathlib import Path

import dataserver.planning

FOLDER = Path(dataserver.planning.__file__).parent
ORDER = ("kernels", "job", "balancing", "simulation", "stream", "costs", "plan", "fitting", "layouts", "planner")
"""A folder imports itself and those before it."""
SEPARATE = {("fitting", "layouts"), ("layouts", "fitting")}
"""Folders that do not know of each other, whichever stands first."""
REGISTRY = "job/spec.py"
"""Names the options of every layout, and is the only file that imports upwards."""


def imported(file: Path) -> set[str]:
    """What a file imports of planning, by folder; of the registry all but options of layouts."""
    tree = ast.parse(file.read_text())
    taken = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    taken += [
        f"dataserver.planning.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "dataserver.planning"
        for alias in node.names
    ]
    registers = file.relative_to(FOLDER).as_posix() == REGISTRY
    names = (name.removeprefix("dataserver.planning.") for name in taken if name.startswith("dataserver.planning."))
    return {name.split(".")[0] for name in names if not (registers and name.endswith(".options"))} & set(ORDER)


def test_planning_has_at_most_eleven_entries() -> None:
    entries = {path.stem for path in FOLDER.iterdir() if path.name != "__pycache__"}
    assert entries == {"__init__", *ORDER}


def test_folders_import_those_before_them() -> None:
    upwards = {
        (file.relative_to(FOLDER).as_posix(), name)
        for file in FOLDER.rglob("*.py")
        for own in [file.relative_to(FOLDER).with_suffix("").parts[0]]
        if own != "__init__"
        for name in imported(file)
        if ORDER.index(name) > ORDER.index(own) or (own, name) in SEPARATE
    }
    assert not upwards
