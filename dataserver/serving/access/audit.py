"""A line of the log for each refused call."""

import logging
import threading
from time import monotonic
from typing import Final

from dataserver.dataset import printable

LINES_PER_S: Final = 50
"""Most lines a second; beyond them the next line says how many are missing, so that no stranger can fill a disk."""
MAX_CHARS: Final = 256

_log = logging.getLogger("dataserver.audit")


class Audit:
    """Writes the lines. Thread-safe. No token and no key is ever among what they say."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._second = 0
        self._lines = 0
        self._unsaid = 0
        self.refused = 0
        """Calls refused since the server began."""

    def write(self, what: str, who: str, why: str) -> None:
        """Say that something was refused.

        Args:
            what: the method that was called.
            who: the identity and the address of the caller, as far as they are known.
            why: the reason.
        """
        with self._lock:
            self.refused += 1
            second = int(monotonic())
            if second != self._second:
                self._second, self._lines = second, 0
            self._lines += 1
            if self._lines > LINES_PER_S:
                self._unsaid += 1
                return
            unsaid, self._unsaid = self._unsaid, 0
        more = f" ({unsaid} refusals before it were not logged)" if unsaid else ""
        _log.warning("refused %s of %s: %s%s", *(printable(text, MAX_CHARS) for text in (what, who, why)), more)
