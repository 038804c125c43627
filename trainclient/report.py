"""What a command says of an error, and its exit code."""

import logging
import os
import sys
from typing import Final

USER_ERROR: Final = 2
FAILURE: Final = 1
INTERRUPTED: Final = 130

_log = logging.getLogger(__name__)


def report(name: str, error: Exception, code: int) -> int:
    """Say what is wrong, in one line on stderr; returns the code."""
    _log.debug("failed", exc_info=error)
    sys.stderr.write(f"{name}: {' '.join(str(error).split())}\n")
    return code


def seen_enough() -> int:
    """Drop what is left of stdout, whose reader, such as `head`, is gone; returns the exit code."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return FAILURE
