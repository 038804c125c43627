"""`trainclient`, and `python -m trainclient`.

Ctrl-C ends a process from here on, in one line and with exit status 130, also while it imports.
"""

import os
import signal
import sys
from types import FrameType

SAYS = {
    "train": "asking the servers for the job, then loading torch",
    "export": "loading torch",
    "orchestrate": "solving each layout, then planning and simulating the best choices",
    "profile": "loading torch",
    "memory": "asking the servers for the job, then loading torch",
}
"""What a command does first."""


def _end(_number: int, _frame: FrameType | None) -> None:
    os.write(2, b"trainclient: interrupted\n")
    os._exit(130)


def main() -> int:
    """Run the command line."""
    heeds = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # else it was started to ignore it
    if heeds:
        signal.signal(signal.SIGINT, _end)
    given = sys.argv[1:]
    if given and given[0] in SAYS and "RANK" not in os.environ and not {"-h", "--help"} & set(given):
        sys.stderr.write(f"{given[0]}: {SAYS[given[0]]}\n")
        sys.stderr.flush()
    try:
        from trainclient.cli import main as run

        return run()
    finally:
        if heeds:
            signal.signal(signal.SIGINT, _end)


if __name__ == "__main__":
    sys.exit(main())
