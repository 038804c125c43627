"""Which tests run a mutant's line, the best first."""

import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from mutation.mutants import Mutant
from mutation.recording import MEASURED, Record
from mutation.source import Source
from mutation.trees import ROOT, tracked_files

KERNELS = "dataserver/planning/kernels/"
MIRRORED = {"stream": "client"}
"""Folders whose tests lie in a folder of another name."""


class Covering:
    """The tests of each line, from the records and the test files for which each is true."""

    def __init__(self, records: list[tuple[Record, set[str]]]) -> None:
        self._records = records
        self._seconds: dict[str, float] = {}
        self._tests_of: dict[str, set[str]] = {}
        for record, files in records:
            for test, seconds in record.seconds.items():
                if (file := test.partition("::")[0]) in files:
                    self._seconds[test] = seconds
                    self._tests_of.setdefault(file, set()).add(test)

    def tests(self, mutant: Mutant) -> list[str]:
        """All tests that run the mutant's line: first those whose place mirrors the mutant's, of these the fastest."""
        found = self._of_kernel(mutant.path) if mutant.path.startswith(KERNELS) else self._of_line(mutant)
        return sorted(found, key=lambda test: (-_likeness(mutant.path, test), self._seconds[test], test))

    def seconds(self, test: str) -> float:
        """How long the test took when it was recorded."""
        return self._seconds[test]

    def _of_line(self, mutant: Mutant) -> set[str]:
        source = Source(mutant.source)
        if found := self._running(mutant.path, source.statement(mutant.line)):
            return found
        # The line runs when its module is imported, which is no test's doing: ask for what it defines.
        if (body := source.function(mutant.line)) is not None:
            return self._running(mutant.path, body)
        if names := source.assigned(mutant.line):
            return self._mentioning(rf"\b({'|'.join(names)})\b")
        return self._running(mutant.path, range(1, mutant.source.count("\n") + 2))

    def _of_kernel(self, path: str) -> set[str]:
        """Coverage cannot see compiled lines. But who calls a kernel imports it in that very function: the tests that
        ran such a line, and all tests of files with one.
        """
        names = "|".join(Path(module).stem for module in dependents(path))
        pattern = rf"\bkernels(\.({names})\b| import .*\b({names})\b)"
        files = [file for file in self._tests_of if re.search(pattern, (ROOT / file).read_text())]
        return self._mentioning(pattern).union(*(self._tests_of[file] for file in files))

    def _mentioning(self, pattern: str) -> set[str]:
        """The tests that ran a line which matches."""
        found: set[str] = set()
        for path in tracked_files():
            if path.startswith(MEASURED) and path.endswith(".py"):
                lines = enumerate((ROOT / path).read_text().splitlines(), start=1)
                found |= self._running(path, [number for number, line in lines if re.search(pattern, line)])
        return found

    def _running(self, path: str, lines: Iterable[int]) -> set[str]:
        """The tests that ran one of the lines; of lines in another process, all tests of the file that started it."""
        contexts = self._contexts(path)
        found = set[str]().union(*(contexts.get(line, ()) for line in lines))
        return (found & self._seconds.keys()).union(*(self._tests_of.get(context, ()) for context in found))

    @cache  # noqa: B019
    def _contexts(self, path: str) -> dict[int, set[str]]:
        """The tests and test files that ran each line of a file."""
        merged: dict[int, set[str]] = {}
        for record, files in self._records:
            for line, contexts in record.lines.contexts_by_lineno(path).items():
                merged.setdefault(line, set()).update(c for c in contexts if c.partition("::")[0] in files)
        return merged


def dependents(path: str) -> set[str]:
    """The modules of kernels that a change of one of them reaches, itself included."""
    modules = {f"{KERNELS}{file.name}": file.read_text() for file in (ROOT / KERNELS).glob("*.py")}
    if path == f"{KERNELS}__init__.py":
        return set(modules)
    found, before = {path}, set[str]()
    while found != before:
        before, names = found, "|".join(Path(module).stem for module in found)
        found = found | {module for module, text in modules.items() if re.search(rf"\bkernels\.({names})\b", text)}
    return found


def _likeness(path: str, test: str) -> int:
    """How many folders, and at last the file's name, a test shares with a module."""
    ours = [MIRRORED.get(part, part) for part in Path(path).with_suffix("").parts[1:]]
    theirs = Path(test.partition("::")[0]).with_suffix("").parts[1:]
    return sum(part in other for part, other in zip(ours, theirs, strict=False))
