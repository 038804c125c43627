"""Shell blocks of the pages: their commands, as bash reads them, with paths and addresses of this machine."""

import re
import shlex
import shutil
import socket
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

from ports import free_ports
from test_docs import BLOCK, ROOT

PAGES = ("README.md", "docs/training.md", "docs/adapters.md", "docs/operations.md")
"""Pages whose blocks are run."""
PROGRAMS = ("dataserver", "trainclient", "torchrun", "pip")
FIRST_PORT, PORTS = 50051, 4
"""Ports that the pages name."""
LIMITS = {"max_patches": 64, "max_pixels": 12544}
"""Sizes of images in small jobs."""
_PRELUDE = """set -eu
note() { local line; line=$(printf '%q ' "$@"); printf '%s\\n' "$line" >> "$NOTED"; }
"""
_PORTS = re.compile(rf"(?<=[:-])({'|'.join(str(FIRST_PORT + i) for i in range(PORTS))})\b")
_PATH = re.compile(r"(?:^|(?<==))/[\w./-]+$")


class ShellBlock(NamedTuple):
    """A block of a page without a language: commands and nothing else."""

    page: str
    text: str

    @property
    def first(self) -> str:
        """The first line, by which a block is known."""
        return self.text.strip().partition("\n")[0]

    def commands(self, folder: Path) -> list[list[str]]:
        """The words of each command that bash runs. Any program but those of the pages is an error."""
        noted = folder / "noted"
        functions = "".join(f'{name}() {{ note {name} "$@"; }}\n' for name in PROGRAMS)
        script = f"{_PRELUDE}{functions}{self.text}\nwait\n"
        shell, environment = shutil.which("bash"), {"NOTED": str(noted), "PATH": "/nowhere"}
        assert shell is not None
        subprocess.run([shell], input=script, env=environment, text=True, check=True)
        return [shlex.split(line) for line in noted.read_text().splitlines()]


def shell_blocks(page: str) -> list[ShellBlock]:
    """The shell blocks of a page."""
    return [ShellBlock(page, text) for _, language, text in BLOCK.findall((ROOT / page).read_text()) if not language]


def python_blocks(page: str) -> list[str]:
    """The Python blocks of a page."""
    return [text for _, language, text in BLOCK.findall((ROOT / page).read_text()) if language == "python"]


class Machine(NamedTuple):
    """What paths, hosts and ports of the pages are here: hosts are addresses of the loopback device."""

    port: int
    """The one that `FIRST_PORT` is; the others follow. One more is free for anything else."""
    paths: Mapping[str, Path]

    @classmethod
    def of(cls, paths: Mapping[str, Path]) -> "Machine":
        """A machine with ports of its own."""
        return cls(_ports_in_a_row(PORTS + 1), paths)

    def address(self, host: int) -> str:
        """HOST:PORT of a host that the pages call `cpuN`."""
        return f"127.0.0.{host}:{self.port}"

    def word(self, word: str) -> str:
        """A word of a command, for this machine."""
        word = _PATH.sub(lambda found: str(self.paths[found[0]]), word)
        word = _PORTS.sub(lambda found: str(self.port + int(found[0]) - FIRST_PORT), word)
        word = re.sub(r"\bcpu(\d)\b", r"127.0.0.\1", word).replace("0.0.0.0", "127.0.0.1")
        word = word.replace("dataservers.cluster.local", "localhost")
        return re.sub(r"\bhead:\d+|(?<=//)127.0.0.1:4317", f"127.0.0.1:{self.port + PORTS}", word)


def _ports_in_a_row(count: int) -> int:
    """The first of some free ports that follow each other."""
    for _ in range(100):
        (first,) = free_ports(1)
        with suppress(OSError), ExitStack() as stack:
            for port in range(first, first + count):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            return first
    raise OSError(f"no {count} free ports follow each other")


def small(job: Any, steps: int = 2, *, in_one_process: bool = False) -> Any:
    """A job of a page with a rank of one stage for each module, and short steps."""
    stream, execution = job["stream"], job["execution"]
    sizing = {key: LIMITS.get(key, value) for key, value in stream["sizing"].items()}
    modules = [{"name": module["name"], "kind": module["kind"]} for module in execution["modules"]]
    layout = {"layout": {"kind": "colocated"}} if in_one_process else {}
    return {
        "stream": {**stream, "sizing": sizing, "seq_len": 512, "global_batch": 2},
        "execution": {**execution, **layout, "modules": modules, "end": {"steps": steps}},
    }


def option(words: Sequence[str], name: str) -> str | None:
    """What a command gives for an option, if it does."""
    return words[words.index(name) + 1] if name in words else None
