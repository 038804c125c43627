"""Runs the tests under coverage, each test file once for a state of what it depends on, and keeps what they ran."""

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from difflib import SequenceMatcher
from functools import cached_property
from pathlib import Path

from coverage import CoverageData
from coverage.exceptions import DataError

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

    def contexts(self, path: str) -> dict[int, list[str]]:
        """The tests, or files of tests, that ran each line of a file as it is now."""
        # Of a process that tests of several files share, the file that started it stands before the one it ran for.
        recorded = self.lines.contexts_by_lineno(path).items()
        found = {line: [context.rpartition("|")[2] for context in contexts] for line, contexts in recorded}
        then = self.folder / "sources" / path
        if not then.is_file():
            return found
        return moved(found, then.read_text().splitlines(), (ROOT / path).read_text().splitlines())


def moved(contexts: dict[int, list[str]], then: list[str], now: list[str]) -> dict[int, list[str]]:
    """The contexts of lines, which count from 1, where they are now; changed and new lines have those of the lines in
    whose place they are, or of the line before them.
    """
    found: dict[int, list[str]] = {}
    for kind, first, last, start, end in SequenceMatcher(None, then, now, autojunk=False).get_opcodes():
        if kind == "equal":
            found |= {start + n + 1: contexts.get(first + n + 1, []) for n in range(last - first)}
        else:
            before = range(first, last) if first < last else range(first - 1, first)
            merged = sorted({context for line in before for context in contexts.get(line + 1, ())})
            found |= {line + 1: merged for line in range(start, end)}
    return found


def records(tests: Sequence[str], workers: int, earlier: bool) -> list[tuple[Record, set[str]]]:
    """Records, and the test files for which each of them is true: of the tree as it is, or also, if these test files
    are the same, of an `earlier` state of what they test.

    Runs the tests in the given folders or files that have none.
    """
    missing = left = _digests()
    found: list[tuple[Record, set[str]]] = []
    useless = newest = sorted(STORE.glob("record-*"), key=lambda folder: folder.stat().st_mtime, reverse=True)
    for exact in (True, False):
        for record in map(Record, newest):
            known, wanted = (record.digests, left) if exact else (_own(record.digests), _own(left))
            current = {file for file, digest in known.items() if wanted.get(file) == digest}
            left = {file: digest for file, digest in left.items() if file not in current}
            useless = [folder for folder in useless if not current or folder != record.folder]
            if current and (exact or earlier):
                found.append((record, current))
        missing = left if exact or earlier else missing
    for folder in useless:
        shutil.rmtree(folder)
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


def _own(digests: dict[str, str]) -> dict[str, str]:
    """Without that of the code that they may depend on."""
    return {file: digest.partition(" ")[2] for file, digest in digests.items()}


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
    for name in tracked_files():
        if name.startswith(MEASURED) and name.endswith(".py"):
            copy = folder / "sources" / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(tree.folder / name, copy)
    (folder / "digests.json").write_text(json.dumps(digests))
    return Record(folder.rename(folder.with_name(folder.name.replace("running", "record"))))


def _combine(folder: Path, tree: Path) -> None:
    """Make one file of those of all processes, with paths relative to the repository.

    A process that was killed while it wrote its own leaves a part of one, which is left out.
    """
    data = CoverageData(str(folder / "lines"))
    for path in folder.glob("data.*"):
        part = CoverageData(str(path))
        try:
            part.read()
            data.update(part, map_path=lambda file: str(Path(file).relative_to(tree)))
        except DataError as error:
            print(f"A process of the tests was killed as it wrote its lines: {error}", flush=True)
        path.unlink()
    data.write()
