"""What a command says: tables, and of an error one line with its exit code."""

import logging
import sys
from collections.abc import Sequence
from typing import Final

from dataserver.process import in_one_line

USER_ERROR: Final = 2
FAILURE: Final = 1

_log = logging.getLogger(__name__)


def report(name: str, error: Exception, code: int) -> int:
    """Say what is wrong, in one line on stderr; returns the code."""
    _log.debug("failed", exc_info=error)
    sys.stderr.write(f"{name}: {in_one_line(error)}\n")
    return code


def aligned(rows: Sequence[Sequence[str]], *, right: bool = False) -> list[str]:
    """Lines of a table; all columns but the first one are aligned to the left, or to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if right and number else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
