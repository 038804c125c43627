"""Tables that fit a terminal: too many columns are left out whole, so that no figure is ever cut or broken."""

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import cached_property
from typing import Final, Literal

from rich import box
from rich.table import Table
from rich.text import Text

GAP: Final = 2
"""Number of spaces between two columns."""
HEAD_LINES: Final = 2
MIN_NAME: Final = 12
"""Characters to which a column of names may shrink, if they still differ by then."""
MIN_WORDS: Final = 15
"""Characters to which a column of words may shrink, whose cells go on in the next line."""
CUT: Final = "*"
"""What stands for the middle of a name."""


class Kind(Enum):
    """What may be done to the cells of a column where it is narrow."""

    FIGURES = auto()
    NAMES = auto()
    WORDS = auto()


@dataclass(frozen=True)
class Column:
    """A column whose cells hold characters of one place each."""

    title: str
    cells: Sequence[str]
    kind: Kind = Kind.FIGURES
    about: str = ""
    """What the title does not say."""

    @property
    def justify(self) -> Literal["left", "right"]:
        """Side on which the column's cells are aligned."""
        return "right" if self.kind is Kind.FIGURES else "left"

    @property
    def width(self) -> int:
        """That at which nothing is shortened."""
        return max(map(len, [self.title, *self.cells]))

    @property
    def least_width(self) -> int:
        """The smallest at which it says what it must."""
        if self.kind is Kind.NAMES:
            return max(len(self.title), _least_width_of_names(self.cells))
        if self.kind is Kind.WORDS:
            return max(len(self.title), min(self.width, MIN_WORDS))
        return self.width

    def at(self, width: int) -> "Column":
        """The column with cells of at most that width."""
        cells = self.cells
        if self.kind is Kind.NAMES:
            cells = shortened(cells, width) or [_without_middle(cell, width, width // 2) for cell in cells]
        elif self.kind is Kind.WORDS:
            cells = ["\n".join(textwrap.wrap(cell, width)) for cell in cells]
        return replace(self, cells=cells)


@dataclass(frozen=True)
class FittedTable:
    """The columns for which a width has room, and the titles of those that are left out."""

    columns: Sequence[Column]
    widths: Sequence[int]
    left_out: Sequence[str]

    @cached_property
    def row_lines(self) -> list[int]:
        """Return how many lines each row takes."""
        rows = zip(*(column.cells for column in self.columns), strict=True)
        return [1 + max(cell.count("\n") for cell in row) for row in rows]

    @property
    def legend(self) -> str:
        """What the titles do not say."""
        return " ".join(f"{column.title}: {column.about}." for column in self.columns if column.about)

    def table(self, rows: Iterable[int], red: frozenset[int] = frozenset()) -> Table:
        """The table of these rows; some of them red."""
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, GAP - 1, 0, 0))
        for column, width in zip(self.columns, self.widths, strict=True):
            table.add_column(column.title, justify=column.justify, width=width, no_wrap=True)
        for row in rows:
            table.add_row(*(Text(column.cells[row]) for column in self.columns), style="red" if row in red else "")
        return table


def fit(columns: Sequence[Column], keep: Sequence[str], width: int) -> FittedTable:
    """The columns for which there is room, in their order.

    Args:
        columns: with cells for the same rows.
        keep: titles of all of them, the one that is left out last first.
        width: characters of a line.
    """
    by_title = {column.title: column for column in columns}
    widths: dict[str, int] = {}
    spare = width + GAP
    for title in keep:
        least = by_title[title].least_width
        if widths and least + GAP > spare:
            break
        widths[title] = min(least, width)
        spare -= least + GAP
    for title in widths:  # those that are shortened get what is left
        more = max(0, min(spare, by_title[title].width - widths[title]))
        widths[title] += more
        spare -= more
    kept = [column for column in columns if column.title in widths]
    return FittedTable(
        columns=[column.at(widths[column.title]) for column in kept],
        widths=[widths[column.title] for column in kept],
        left_out=[column.title for column in columns if column.title not in widths],
    )


def shortened(names: Sequence[str], width: int) -> list[str] | None:
    """Names of at most that many characters, the middles of longer ones cut so that names that differ still do.

    None if there is no such place.
    """
    apart = len(set(names))
    for tail in sorted(range(width), key=lambda tail: abs(2 * tail + 1 - width)):
        found = {name: _without_middle(name, width, tail) for name in names}
        if len(set(found.values())) == apart:
            return [found[name] for name in names]
    return None


def _least_width_of_names(names: Sequence[str]) -> int:
    longest = max(map(len, names), default=0)
    few = list(dict.fromkeys(names))
    return next((width for width in range(MIN_NAME, longest) if shortened(few, width) is not None), longest)


def _without_middle(name: str, width: int, tail: int) -> str:
    return name if len(name) <= width else name[: max(0, width - tail - 1)] + CUT + name[len(name) - tail :]
