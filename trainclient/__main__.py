"""`trainclient`, and `python -m trainclient`.

A signal ends a process from here on, in one line, also while it imports.
"""

import os
import sys

from dataserver import process

SAYS = {
    "train": "asking the servers for the job, then loading torch",
    "export": "loading torch",
    "checkpoints": "loading torch",
    "orchestrate": "solving each layout, then planning and simulating the best choices",
    "profile": "loading torch",
    "memory": "asking the servers for the job, then loading torch",
}
"""What a command does first."""


def main() -> int:
    """Run the command line of `trainclient`, and return its exit code."""
    return process.run("trainclient", _command)


def _command() -> int:
    given = sys.argv[1:]
    if given and given[0] in SAYS and "RANK" not in os.environ and not {"-h", "--help"} & set(given):
        sys.stderr.write(f"{given[0]}: {SAYS[given[0]]}\n")
        sys.stderr.flush()
    from trainclient.cli import main as command

    return command()


if __name__ == "__main__":
    sys.exit(main())
