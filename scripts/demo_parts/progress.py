"""What the demo is doing: one table that keeps up on a terminal, a line every few seconds elsewhere."""

import re
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table

EVERY_S = 3.0
"""Where there is no terminal, what is being waited for is said again after so long."""
_COUNTED = re.compile(r"(\d+)(?:/| of )(\d+)")
_BAR_WIDTH = 20


class Display(Protocol):
    """Shows stages, one after the other."""

    def begin(self, stage: str, text: str) -> None:
        """A stage begins, and this is what it does."""

    def say(self, text: str) -> None:
        """What the stage does now; "3 of 20" or "3/20" in it says how far it is."""

    def done(self, text: str) -> None:
        """The stage has ended, and this is what it made."""

    def tick(self) -> None:
        """Take notice that time has passed."""


class LineDisplay:
    """Lines on stderr: when a stage begins and ends, and every few seconds in between."""

    def begin(self, stage: str, text: str) -> None:
        """Name the stage in all lines that follow."""
        self._stage, self._text, self._began = stage, text, time.monotonic()
        self._print(text)

    def say(self, text: str) -> None:
        """Keep the text for the next line."""
        self._text = text

    def done(self, text: str) -> None:
        """Print what a stage has made."""
        self._print(text)

    def tick(self) -> None:
        """Print a line if the last one is a while ago."""
        now = time.monotonic()
        if now - self._printed >= EVERY_S:
            self._print(f"{self._text} ({now - self._began:.0f} s)")

    def _print(self, text: str) -> None:
        self._printed = time.monotonic()
        print(f"{self._stage}: {text}", file=sys.stderr, flush=True)


@dataclass(slots=True)
class _Row:
    text: str = ""
    began: float = 0.0
    ended: float = 0.0


class LiveDisplay:
    """A table on stderr with a row for each stage, drawn again several times a second."""

    def __init__(self, stages: Sequence[str]) -> None:
        """Show these stages, all of them ahead."""
        self._rows = {stage: _Row() for stage in stages}
        self._current = _Row()
        self._spinner = Spinner("line")

    def begin(self, stage: str, text: str) -> None:
        """Go to the row of another stage."""
        self._current = self._rows[stage]
        self._current.began = time.monotonic()
        self._current.text = text

    def say(self, text: str) -> None:
        """Change the text of the current row."""
        self._current.text = text

    def done(self, text: str) -> None:
        """Stop the clock of the current row."""
        self._current.text = text
        self._current.ended = time.monotonic()

    def tick(self) -> None:
        """Nothing: a thread draws the table."""

    def __rich__(self) -> Table:
        table = Table.grid(padding=(0, 1))
        table.add_column(width=1)
        table.add_column(no_wrap=True)
        table.add_column(ratio=1, overflow="fold")
        table.add_column(justify="right", no_wrap=True)
        for stage, row in self._rows.items():
            if not row.began:
                table.add_row("", f"[dim]{stage}[/]")
                continue
            seconds = f"[dim]{(row.ended or time.monotonic()) - row.began:.0f} s[/]"
            mark = "[green]+[/]" if row.ended else self._spinner
            table.add_row(mark, f"[bold]{stage}[/]", _with_bar(row), seconds)
        return table


def _with_bar(row: _Row) -> Table:
    """The text of a row, with a bar before it while it counts."""
    counted = None if row.ended else _COUNTED.search(row.text)
    parts = Table.grid(padding=(0, 1))
    bar = [ProgressBar(float(counted[2]), float(counted[1]), width=_BAR_WIDTH)] if counted else []
    parts.add_row(*bar, row.text.replace("[", "\\["))
    return parts


@contextmanager
def display(stages: Sequence[str]) -> Iterator[Display]:
    """Show these stages in the way that fits stderr."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield LineDisplay()
        return
    table = LiveDisplay(stages)
    live: AbstractContextManager[object] = Live(table, console=console, refresh_per_second=8)
    with live:
        yield table
