"""`dataserver`, and `python -m dataserver`.

Ctrl-C ends a process from here on, in one line and with exit status 130, also while it imports.
"""

import os
import signal
import sys
from types import FrameType


def _end(_number: int, _frame: FrameType | None) -> None:
    os.write(2, b"dataserver: interrupted\n")
    os._exit(130)


def main() -> int:
    """Run the command line."""
    heeds = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # else it was started to ignore it
    if heeds:
        signal.signal(signal.SIGINT, _end)
    try:
        from dataserver.cli import main as run

        return run()
    finally:
        if heeds:
            signal.signal(signal.SIGINT, _end)


if __name__ == "__main__":
    sys.exit(main())
