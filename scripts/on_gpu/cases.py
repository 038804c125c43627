"""Tests in a process of their own, with a time for all of them, and what became of each."""

import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from on_gpu.case_log import FILE
from on_gpu.processes import Ended, run_bounded

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Cases:
    """What became of some tests."""

    found: tuple[Mapping[str, Any], ...]
    """Outcomes of the tests, as `case_log` notes them."""
    ended: Ended

    @property
    def counts(self) -> str:
        """Number of tests with each outcome, in words."""
        counted = Counter(case["outcome"] for case in self.found)
        return ", ".join(f"{number} {outcome}" for outcome, number in counted.items()) or "none was run"


def run_cases(
    tests: Sequence[str], limit_s: float, log: Path, environment: Mapping[str, str], at_once: int = 1
) -> Cases:
    """Run tests in the order in which they are given, so many at once."""
    notes = log.with_suffix(".jsonl")
    notes.unlink(missing_ok=True)
    command: list[object] = [sys.executable, "-m", "pytest", "-p", "on_gpu.case_log", "-q", "--color=no", "-rN"]
    command += ["--rootdir", ROOT, *(["-n", at_once, "--maxschedchunk", 1] if at_once > 1 else [])]
    paths = [ROOT / "tests" / test for test in tests]
    ended = run_bounded([*command, *paths], limit_s, log, {**environment, FILE: str(notes)})
    lines = notes.read_text().splitlines() if notes.exists() else []
    return Cases(tuple(json.loads(line) for line in lines), ended)
