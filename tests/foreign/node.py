"""The client in JavaScript, run as its users run it: a process that prints a JSON line for each microbatch."""

import json
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cli.server_process import TIMEOUT_S

CLIENT = Path(__file__).resolve().parents[2] / "trainclient" / "clients" / "node"
Line = dict[str, Any]


def is_installed() -> bool:
    """Whether the client can run."""
    return all(map(shutil.which, ("node", "npm"))) and (CLIENT / "node_modules" / ".installed").is_file()


def require_node() -> None:
    """Skip where JavaScript cannot run."""
    for tool in ("node", "npm"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is missing: Node.js 20 or newer with npm is required")
    if not (CLIENT / "node_modules" / ".installed").is_file():
        pytest.skip("the packages of the client in JavaScript are not installed: run scripts/setup")


def command(addresses: Sequence[str], job: Path, *flags: str) -> list[str]:
    """The command line of the client."""
    return ["node", str(CLIENT / "cli.js"), "--servers", ",".join(addresses), "--job", str(job), *flags]


@dataclass
class Read:
    """What a client printed to its end: the job, and a line for each microbatch."""

    job: Line
    lines: list[Line]

    def view(self, module: str, rank: int) -> list[Line]:
        """The microbatches of one rank in the order in which they came."""
        return [line for line in self.lines if (line["module"], line["rank"]) == (module, rank)]

    def contents(self) -> list[tuple[Any, ...]]:
        """What must be the same from every server, whichever codec it used; in order of view and place."""
        return sorted(map(content, self.lines))

    def servers(self) -> set[str]:
        """Whom the microbatches came from."""
        return {line["server"] for line in self.lines}


def content(line: Line) -> tuple[Any, ...]:
    """Everything of a microbatch that its codecs do not change."""
    header = {k: v for k, v in line["header"].items() if k not in {"tensors", "total_bytes", "crc32c"}}
    place = (line["module"], line["rank"], int(header["step"]), header["microbatch"])
    return (*place, json.dumps([header, line["sha256"]], sort_keys=True))


def read(addresses: Sequence[str], job: Path, *flags: str, odd: Mapping[str, str] | None = None) -> Read:
    """Run a client to its end.

    Args:
        addresses: of its servers.
        job: its job.
        flags: others.
        odd: what the client has to say of servers that it passes over, by address.
    """
    done = subprocess.run(
        command(addresses, job, *flags), capture_output=True, text=True, timeout=2 * TIMEOUT_S, check=False
    )
    warnings = done.stderr.splitlines()
    assert (done.returncode, len(warnings)) == (0, len(odd or {})), done.stderr
    for warning, (address, text) in zip(warnings, (odd or {}).items(), strict=True):
        assert warning.startswith("passed over: ")
        assert address in warning
        assert text in warning
    first, *lines = map(json.loads, done.stdout.splitlines())
    return Read(first["job"], lines)


def refused(addresses: Sequence[str], job: Path, *flags: str) -> str:
    """The message with which a client gives up."""
    done = subprocess.run(
        command(addresses, job, *flags), capture_output=True, text=True, timeout=2 * TIMEOUT_S, check=False
    )
    assert done.returncode == 2, done
    assert "    at " not in done.stderr, "a stack trace"
    return done.stderr.strip()


@contextmanager
def reading(addresses: Sequence[str], job: Path, *flags: str) -> Iterator[Iterator[Line]]:
    """Lines of a client while it runs; it must end well. The pipe holds back a client whose lines nobody takes."""
    with subprocess.Popen(
        command(addresses, job, *flags), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            yield map(json.loads, process.stdout)
            assert (process.wait(TIMEOUT_S), process.stderr.read()) == (0, "")
        finally:
            process.kill()


def evaluate(script: str, value: Any) -> Any:
    """Run a function body of JavaScript on a JSON value, and wait for what it promises; `client` is the library."""
    text = f"const client = require({json.dumps(str(CLIENT))});"
    text += f"const run = (client, value) => {{ {script} }};"
    text += "Promise.resolve(run(client, JSON.parse(require('fs').readFileSync(0))))"
    text += ".then((found) => console.log(JSON.stringify(found)));"
    done = subprocess.run(
        ["node", "-e", text], input=json.dumps(value), capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
