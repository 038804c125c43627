"""`dataserver`, and `python -m dataserver`.

A signal ends a process from here on, in one line, also while it imports.
"""

import os
import sys

from dataserver import process

# Read as gRPC is loaded. By default it writes a line for each handshake that fails: strangers could fill a disk.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")


def main() -> int:
    """Run the command line of `dataserver`, and return its exit code."""
    return process.run("dataserver", _command)


def _command() -> int:
    from dataserver.cli import main as command

    return command()


if __name__ == "__main__":
    sys.exit(main())
