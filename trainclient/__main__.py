"""`trainclient`, and `python -m trainclient`.

Ctrl-C ends a process from here on, in one line and with exit status 130, also while it imports.
"""

import os
import signal
import sys
from types import FrameType


def _end(_number: int, _frame: FrameType | None) -> None:
    os.write(2, b"trainclient: interrupted\n")
    os._exit(130)


def main() -> int:
    """Run the command line."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it was started to ignore it
        signal.signal(signal.SIGINT, _end)
    given = sys.argv[1:]
    if given[:1] == ["train"] and "RANK" not in os.environ and not {"-h", "--help"} & set(given):
        sys.stderr.write("train: loading torch, then asking the servers for the job\n")
        sys.stderr.flush()
    from trainclient.cli import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
