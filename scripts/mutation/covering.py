"""Which tests run a mutant's line, the best first."""

import re
from collections import Counter
from functools import cache
from pathlib import Path

from mutation.mutants import Mutant
from mutation.recording import MEASURED, Record
from mutation.source import Source
from mutation.trees import ROOT, tracked_files

KERNELS = "/kernels/"
"""Part of the path of every file of kernels."""

Lines = dict[str, set[int]]
"""Numbers of lines by file."""


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
        """All tests that run the mutant's line, the most likely to notice first.

        First are those of files that name it, then those of the folder that mirrors the mutant's. Their paths share
        most words with that of the mutant's file; of equals those come first that run its line themselves, then those
        that run most of it, and then the fastest. The others start processes in which the line runs, or stand beside
        such a test: of these only the file is known. Further cases of a test come after all other tests that stand
        with it.
        """
        lines = self._kernel(mutant.path) if KERNELS in mutant.path else self._lines(mutant)
        found = self._running(lines)
        # Where others mention what the line defines, its own file still counts: its tests know best what it should be.
        files = lines if KERNELS in mutant.path else [mutant.path]
        extent = self._running({path: set(self._contexts(path)) for path in files})
        words, mirror = _words(mutant.path), f"tests/{Path(*Path(mutant.path).parts[1:-1])}/"
        naming = self._naming(mutant)
        own = found & self._seconds.keys() | naming
        others = {test for file in found for test in self._tests_of.get(file, ())} - own

        def urgency(test: str) -> tuple[bool, int, bool, int, float, str]:
            shared = words & _words(test.partition("::")[0])
            return test not in naming, -len(shared), test in others, -extent[test], self._seconds[test], test

        cases = Counter[str]()
        order: dict[str, tuple[bool, bool, int]] = {}
        for test in sorted(own | others, key=urgency):
            function = test.partition("[")[0]
            order[test] = test not in naming, not test.startswith(mirror), cases[function]
            cases[function] += 1
        return sorted(order, key=order.__getitem__)

    def seconds(self, test: str) -> float:
        """How long the test took when it was recorded."""
        return self._seconds[test]

    def _lines(self, mutant: Mutant) -> Lines:
        """The lines whose tests judge the mutant: those of its statement, if tests run it.

        A line that runs when its module is imported, which is no test's doing, has those of what it defines;
        so have the defaults of a function.
        """
        source = Source(mutant.source)
        body = source.function(mutant.line)
        if names := _defined(mutant):
            # Tests that seem to run it, in processes of their own, only import it: those of its file may check it.
            return {**_mentioning(rf"\b({'|'.join(names)})\b", MEASURED), mutant.path: set(self._contexts(mutant.path))}
        statement = {mutant.path: set(source.statement(mutant.line))}
        if (body is None or mutant.line in body) and self._running(statement):
            return statement
        if body is not None:
            return {mutant.path: set(body)}
        return {mutant.path: set(self._contexts(mutant.path))}

    def _kernel(self, path: str) -> Lines:
        """Coverage cannot see compiled lines. But who calls a kernel imports it in that very function."""
        return _mentioning(_import_of(path), MEASURED)

    def _naming(self, mutant: Mutant) -> set[str]:
        """The tests of files that import the mutant's kernel themselves, or name what its line defines."""
        if KERNELS in mutant.path:
            pattern = _import_of(mutant.path)
        elif names := _defined(mutant):
            pattern = rf"\b({'|'.join(names)})\b"
        else:
            return set()
        return {test for file in _mentioning(pattern, ("tests",)) for test in self._tests_of.get(file, ())}

    def _running(self, lines: Lines) -> Counter[str]:
        """How many of the lines each test ran, and the processes of each test file."""
        found = Counter[str]()
        for path, numbers in lines.items():
            contexts = self._contexts(path)
            found.update(context for number in numbers for context in contexts.get(number, ()))
        return found

    @cache  # noqa: B019
    def _contexts(self, path: str) -> dict[int, set[str]]:
        """The tests, and test files, that ran each line of a file."""
        merged: dict[int, set[str]] = {}
        for record, files in self._records:
            for line, contexts in record.contexts(path).items():
                merged.setdefault(line, set()).update(c for c in contexts if c.partition("::")[0] in files)
        return merged


def _words(path: str) -> set[str]:
    return set(re.findall("[a-z]+", path))


def _defined(mutant: Mutant) -> set[str]:
    """What the mutant's line gives a value to when its module is imported."""
    source = Source(mutant.source)
    return source.assigned(mutant.line) if source.function(mutant.line) is None else set()


def _import_of(path: str) -> str:
    """A pattern for the import of a kernel, or of one that it is a part of."""
    names = "|".join(Path(module).stem for module in dependents(path))
    return rf"\bkernels(\.({names})\b| import .*\b({names})\b)"


def _mentioning(pattern: str, folders: tuple[str, ...]) -> Lines:
    """The lines of code in the folders that match."""
    found: Lines = {}
    for path in tracked_files():
        if path.startswith(folders) and path.endswith(".py"):
            for number, line in enumerate((ROOT / path).read_text().splitlines(), start=1):
                if re.search(pattern, line):
                    found.setdefault(path, set()).add(number)
    return found


def dependents(path: str) -> set[str]:
    """The modules of kernels that a change of one of them reaches, itself included."""
    folder = Path(path).parent
    modules = {str(folder / file.name): file.read_text() for file in (ROOT / folder).glob("*.py")}
    if Path(path).name == "__init__.py":
        return set(modules)
    found, before = {path}, set[str]()
    while found != before:
        before, names = found, "|".join(Path(module).stem for module in found)
        found = found | {module for module, text in modules.items() if re.search(rf"\bkernels\.({names})\b", text)}
    return found
