"""What a stage has found so far, in a file that says it even if the stage is ended in the middle."""

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dataserver.outputs import write_whole


@dataclass(slots=True)
class Table:
    """A table of the record."""

    title: str
    columns: list[str]
    rows: list[list[str]] = field(default_factory=list)

    def markdown(self) -> str:
        """Return the table as a record shows it."""
        lines = [self.columns, ["---"] * len(self.columns), *self.rows]
        shown = "\n".join(f"| {' | '.join(_cell(cell) for cell in line)} |" for line in lines)
        return f"{self.title}:\n\n{shown}\n"


@dataclass(slots=True)
class Told:
    """Tables for people, and data for programs."""

    path: Path
    tables: list[Table] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> "Told":
        """What a stage wrote; nothing if it wrote nothing."""
        if not path.exists():
            return cls(path)
        found = json.loads(path.read_text())
        return cls(path, [Table(**table) for table in found["tables"]], found["data"])

    def table(self, title: str, *columns: str) -> Table:
        """A new table, to which rows are added before `save`."""
        self.tables.append(Table(title, list(columns)))
        return self.tables[-1]

    def save(self) -> None:
        """Write all of it down, whole or not at all."""
        write_whole(self.path, json.dumps({"tables": [asdict(t) for t in self.tables], "data": self.data}))


@dataclass(frozen=True, slots=True)
class Given:
    """What every stage is told."""

    work: Path
    """Folder that all stages share."""
    small: bool
    """Whether stand-ins run on a CPU."""
    limit_s: float
    """Seconds until the stage is ended."""
    words: tuple[str, ...]
    """Further arguments that the stage was given."""

    @property
    def shards(self) -> Path:
        """Indexed shards of image-text pairs, once they are prepared."""
        return self.work / "shards"

    def told(self, stage: str) -> Told:
        """What a stage has found."""
        return Told.read(self.work / f"{stage}.json")


def given(about: str | None) -> Given:
    """The command line of a stage."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("work", type=Path)
    parser.add_argument("limit_s", type=float)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--small", action="store_true")
    found = parser.parse_args()
    return Given(found.work, found.small, found.limit_s, tuple(found.words))


def _cell(text: str) -> str:
    return text.replace("|", "/").replace("\n", "<br>")


def spread(values: Sequence[float], form: str) -> str:
    """Least, median and largest of some values, each in a format of Python's."""
    if not values:
        return "none"
    return " / ".join(format(value, form) for value in (min(values), statistics.median(values), max(values)))
