"""The record of a check, written again after every stage."""

import gzip
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any, Final

from on_gpu.processes import Ended
from on_gpu.telling import Told

LOG_LINES: Final = 40
"""Lines of the log of a stage that failed, in the record itself."""
LOG_BYTES: Final = 400_000
"""Bytes of each log, from its end, beside the record."""
TRACE: Final = "trace.json.gz"
FACTS: Final = """
import json, os, sys, torch
cuda = torch.cuda.is_available()
memory = torch.cuda.get_device_properties(0).total_memory / 2**30 if cuda else 0
print(json.dumps({"device": torch.cuda.get_device_name(0) if cuda else "CPU", "devices": torch.cuda.device_count(),
    "torch": torch.__version__, "cuda": torch.version.cuda, "python": sys.version.split()[0], "cores": os.cpu_count(),
    "memory_gib": round(memory, 1)}))
"""
FACTS_S: Final = 120


class Record:
    """A Markdown file and a JSON file of one name, all logs, and a trace if there is a small one."""

    def __init__(self, folder: Path, work: Path, facts: Mapping[str, Any], *, small: bool) -> None:
        """Begin the record of a machine with its `facts_of_machine`; its device is part of the name."""
        self._work, self._parts, self._facts = work, list[str](), dict(facts)
        self._data: dict[str, Any] = {"facts": self._facts, "stages": {}}
        device = "small" if small else f"{facts.get('devices', 0)}x {facts.get('device', 'unknown')}"
        self._title = f"Check of {device}, {date.today().isoformat()}"
        name = "-".join("".join(c if c.isalnum() else " " for c in device.lower()).split())
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"check-{name}-{date.today().isoformat()}.md"

    def add(self, name: str, about: str, ended: Ended, told: Told) -> None:
        """Add what a stage found to the record."""
        lines = [f"## {about}", f"`{name}`: {ended.how}, {ended.seconds:.0f} s."]
        lines += [table.markdown() for table in told.tables if table.rows]
        if ended.code != 0:
            lines.append(f"The end of its log:\n\n```\n{ended.tail(LOG_LINES)}\n```")
        self._parts.append("\n\n".join(lines))
        self._data["stages"][name] = {"ended": ended.how, "seconds": ended.seconds, **told.data}
        self._write()

    def skipped(self, name: str, about: str, why: str) -> None:
        """A stage that was not run."""
        self._parts.append(f"## {about}\n\n`{name}`: not run, {why}.")
        self._data["stages"][name] = {"ended": "not run"}
        self._write()

    def _write(self) -> None:
        facts = ", ".join(f"{key} {value}" for key, value in self._facts.items())
        self.path.write_text(
            "\n\n".join([f"# {self._title}", f"By `scripts/gpu_check`: {facts}.", *self._parts]) + "\n"
        )
        self.path.with_suffix(".json").write_text(json.dumps(self._data, indent=1) + "\n")
        logs = sorted(self._work.rglob("*.log"))
        shown = [f"==== {log.relative_to(self._work)}\n{_end(log)}\n" for log in logs]
        self.path.with_suffix(".logs.gz").write_bytes(gzip.compress("".join(shown).encode()))
        if (self._work / TRACE).exists():
            shutil.copy(self._work / TRACE, self.path.with_suffix(".trace.json.gz"))


def _end(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - LOG_BYTES))
        return file.read().decode(errors="replace")


def facts_of_machine(environment: Mapping[str, str]) -> dict[str, Any]:
    """Ask for facts of the machine, and the commit that is checked, in processes with these variables besides."""
    found: dict[str, Any] = {}
    try:
        command = [sys.executable, "-c", FACTS]
        said = subprocess.run(
            command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=FACTS_S, check=True
        )
        found |= json.loads(said.stdout)
    except (subprocess.SubprocessError, ValueError) as error:
        found["torch"] = f"does not load: {error}"
    try:
        here = Path(__file__).parent
        command = ["git", "describe", "--always", "--dirty"]
        said = subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=20, check=True)
        found["commit"] = said.stdout.strip()
    except (subprocess.SubprocessError, OSError):
        found["commit"] = "unknown"
    return found
