"""All mutants of a source file, and a sample of those of many files."""

import ast
import random
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cached_property
from pathlib import Path
from typing import Any

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code

from mutation.operators import Position, operators
from mutation.source import Source


@dataclass(frozen=True)
class Mutant:
    """One change of one file."""

    path: str
    """Path of the file, relative to the repository."""
    line: int
    scope: str
    """The function or class around it, empty at the top of a module."""
    source: str
    mutated: str

    @cached_property
    def change(self) -> tuple[str, str]:
        """The changed lines before and after, each with its spaces collapsed: together with file and scope they name
        the mutant, wherever its lines move.
        """
        before, after = self.source.splitlines(), self.mutated.splitlines()
        changed = [
            step for step in SequenceMatcher(None, before, after, autojunk=False).get_opcodes() if step[0] != "equal"
        ]
        (_, first, _, start, _), (_, _, last, _, end) = changed[0], changed[-1]
        return " ".join(" ".join(before[first:last]).split()), " ".join(" ".join(after[start:end]).split())

    @cached_property
    def of_constant(self) -> bool:
        """Whether it only changes a constant of a module."""
        return Source(self.source).constant(self.line)

    @property
    def location(self) -> str:
        """Where it is, for people."""
        return f"{self.path}:{self.line}" + (f" in {self.scope}" if self.scope else "")


def sample(root: Path, paths: Sequence[str], number: int, seed: int) -> list[Mutant]:
    """Mutants drawn with equal chance for each place that can change, and there for each way to change it.

    The same tree and seed give the same mutants, and a smaller number the first of a larger one.
    """
    draw = random.Random(seed)
    sources = {path: Source((root / path).read_text()) for path in paths}
    places = [(path, place) for path in paths for place in _ways(sources[path]).items()]
    draw.shuffle(places)
    found: list[Mutant] = []
    for path, (position, ways) in places:
        draw.shuffle(ways)
        mutant = next(filter(None, (_mutant(path, sources[path], position, way) for way in ways)), None)
        if mutant is not None:
            found.append(mutant)
        if len(found) == number:
            break
    return found


def source_files(root: Path, folders: Sequence[str]) -> list[str]:
    """The Python files in the folders, or these files themselves, relative to the repository, sorted.

    Raises:
        ValueError: if one of them is not there.

    """
    found: set[Path] = set()
    for folder in folders:
        path = root / folder
        if not path.exists():
            raise ValueError(f"{folder} is neither a folder nor a file of {root}")
        found.update(path.rglob("*.py") if path.is_dir() else [path])
    return sorted(str(path.relative_to(root)) for path in found)


_Way = tuple[Any, int]
"""An operator, and which of its occurrences in the file."""


def _ways(source: Source) -> dict[Position, list[_Way]]:
    """The ways to change each place of a file that is worth it."""
    found: dict[Position, list[_Way]] = {}
    every = operators()
    counts = [0] * len(every)
    for node in ast_nodes(get_ast(source.text)):
        for index, operator in enumerate(every):
            for position in operator.mutation_positions(node):
                if not source.is_noise(position[0]):
                    found.setdefault(position, []).append((operator, counts[index]))
                counts[index] += 1
    return found


def _mutant(path: str, source: Source, position: Position, way: _Way) -> Mutant | None:
    """The mutant, unless it is no Python or the same program."""
    try:
        mutated = mutate_code(source.text, *way)
    except AttributeError:  # Cosmic Ray cannot replace an exception whose name has a dot
        return None
    try:
        same = mutated is None or ast.dump(ast.parse(mutated)) == source.dump
    except SyntaxError:
        return None
    line = position[0][0]
    return None if same else Mutant(path, line, source.scope(line), source.text, mutated)
