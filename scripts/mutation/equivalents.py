"""The mutants that equivalents.md lists: no test can notice them, or none should."""

import re
from pathlib import Path

from mutation.mutants import Mutant
from mutation.trees import ROOT

PAGE = ROOT / "scripts" / "mutation" / "equivalents.md"
_ROW = re.compile(
    r"^\| `(?P<file>\S+\.py)` (?P<scope>\S*) ?\| `(?P<before>.*)` \| `(?P<after>.*)` \| (?P<reason>.+) \|$"
)

Key = tuple[str, str, str, str]
"""File, scope, and the changed lines before and after."""


def key(mutant: Mutant) -> Key:
    """What names a mutant, wherever its lines move."""
    before, after = mutant.change
    return mutant.path, mutant.scope, before, after


def row(mutant: Mutant) -> str:
    """The line of the table for a mutant, without the reason."""
    before, after = (text.replace("|", r"\|") for text in mutant.change)
    return f"| `{mutant.path}` {mutant.scope} | `{before}` | `{after}` | "


def equivalents(page: Path = PAGE) -> dict[Key, str]:
    """The reason of each mutant in the page's tables.

    Raises:
        ValueError: if a row of such a table cannot be read.

    """
    found: dict[Key, str] = {}
    for number, line in enumerate(page.read_text().splitlines(), start=1):
        if not re.match(r"\| `\S+\.py`", line):
            continue
        parts = _ROW.match(line)
        if parts is None:
            raise ValueError(f"{page}:{number} is no row of file, scope, line before, line after, reason: {line}")
        before, after = (parts[name].replace(r"\|", "|") for name in ("before", "after"))
        found[parts["file"], parts["scope"], before, after] = parts["reason"]
    return found
