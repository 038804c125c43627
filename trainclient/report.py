"""What a command says of an error, and its exit code."""

import logging
import sys
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
