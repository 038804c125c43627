"""Shards and data servers of a benchmark, on its own machine."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from demo_parts.processes import Processes

SCRIPTS: Final = Path(__file__).parents[1]
SHARDS: Final = 8


def dataserver(*arguments: Any) -> list[Any]:
    """The command line of `dataserver`, which need not be installed."""
    return [sys.executable, "-m", "dataserver", *arguments]


def make_shards(folder: Path, samples: int, workers: int = 1, say: Callable[[str], None] = print) -> Path:
    """Shards of so many image-text pairs with their index, below `folder`."""
    shards = folder / "shards"
    make = [sys.executable, SCRIPTS / "fixtures" / "make_demo_shards.py", shards]
    make += ["--samples", samples, "--shards", max(SHARDS, workers), "--workers", workers]
    with Processes(folder) as processes:
        processes.run([processes.start("making shards", make)], say)
        processes.run([processes.start("indexing", dataserver("index", shards))], say)
    return shards


@contextmanager
def servers(folder: Path, shards: Path, number: int = 2) -> Iterator[str]:
    """The addresses of data servers of these shards, with commas between; their logs go to `folder`."""
    serve = dataserver("serve", "--listen", "127.0.0.1:0", "--dataset", f"pairs={shards}")
    with Processes(folder) as processes:
        started = [processes.start(f"server {n + 1}", serve) for n in range(number)]
        yield ",".join(processes.address(server) for server in started)
