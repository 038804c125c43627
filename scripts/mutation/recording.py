"""Runs the tests under coverage, each test file once for a state of what it depends on, and keeps what they ran."""

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from coverage import CoverageData

from mutation.recorder import FILE_VARIABLE, TIMES_VARIABLE
from mutation.trees import ROOT, STORE, Tree, tracked_files

MEASURED = ("dataserver", "trainclient")
SELECTION = "not slow and not long"
"""The tests that are recorded: the fast ones."""
NOT_RECORDED = ("tests/foreign/", "tests/cli/test_first_second.py")
"""Tests of clients in other languages, which meet our code only through a server; and those that interrupt processes at
once, which hang where coverage itself is interrupted."""
SETTINGS = """[run]
source = {source}
data_file = {folder}/data
parallel = true
sigterm = true
patch = _exit
core = ctrace
context = ${{{variable}-}}
disable_warnings = no-data-collected,module-not-imported,module-not-measured
"""


class Record:
    """What the tests of some files ran, and for how long."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.digests: dict[str, str] = json.loads((folder / "digests.json").read_text())
        """Of each test file when it ran."""
        self.seconds: dict[str, float] = json.loads((folder / "times.json").read_text())
        """Of each test that passed."""

    @cached_property
    def lines(self) -> CoverageData:
        """Which tests, or files of tests, ran which lines."""
        data = CoverageData(str(self.folder / "lines"))
        data.read()
        return data


def records(tests: Sequence[str], workers: int) -> list[tuple[Record, set[str]]]:
    """Records, and the test files for which each of them is true of the tree as it is.

    Runs the tests in the given folders or files that have none.
    """
    missing = _digests()
    found: list[tuple[Record, set[str]]] = []
    for record in map(Record, sorted(STORE.glob("record-*"))):
        current = {file for file, digest in record.digests.items() if missing.get(file) == digest}
        missing = {file: digest for file, digest in missing.items() if file not in current}
        if current:
            found.append((record, current))
        else:
            shutil.rmtree(record.folder)
    missing = {file: digest for file, digest in missing.items() if file.startswith(tuple(tests))}
    if missing:
        print(f"Recording which lines the tests of {len(missing)} files run ...", flush=True)
        found.append((_run(missing, workers), set(missing)))
    return found


def _digests() -> dict[str, str]:
    """The digest of each test file, with all code that it may depend on."""
    shared, tests = hashlib.sha256(), dict[str, str]()
    for name in tracked_files():
        digest = hashlib.sha256((ROOT / name).read_bytes()).hexdigest()
        if name.startswith("tests/") and Path(name).match("test_*.py"):
            tests[name] = digest
        elif name.startswith((*(f"{folder}/" for folder in MEASURED), "tests/", "protos/")):
            shared.update(f"{name} {digest}\n".encode())
    return {name: f"{shared.hexdigest()} {own}" for name, own in tests.items() if not name.startswith(NOT_RECORDED)}


def _run(digests: dict[str, str], workers: int) -> Record:
    """Run the test files, in a copy of the tree."""
    tree = Tree("recorded")
    folder = Path(tempfile.mkdtemp(dir=STORE, prefix="running-"))
    source = ",".join(str(tree.folder / name) for name in MEASURED)
    (folder / "settings").write_text(SETTINGS.format(source=source, folder=folder, variable=FILE_VARIABLE))
    variables = {"COVERAGE_PROCESS_START": str(folder / "settings"), TIMES_VARIABLE: str(folder / "times.json")}
    options = [
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "mutation.recorder",
        "-n",
        str(workers),
        "--dist",
        "loadgroup",
        "-m",
        SELECTION,
    ]
    command = [sys.executable, "-m", "pytest", *options, *digests]
    subprocess.run(command, cwd=tree.folder, env=tree.environment(**variables), check=False)
    _combine(folder, tree.folder)
    (folder / "digests.json").write_text(json.dumps(digests))
    return Record(folder.rename(folder.with_name(folder.name.replace("running", "record"))))


def _combine(folder: Path, tree: Path) -> None:
    """Make one file of those of all processes, with paths relative to the repository."""
    data = CoverageData(str(folder / "lines"))
    for path in folder.glob("data.*"):
        part = CoverageData(str(path))
        part.read()
        data.update(part, map_path=lambda file: str(Path(file).relative_to(tree)))
        path.unlink()
    data.write()
