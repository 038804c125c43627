"""What a rank is handed, what that costs its device, and what the rank's processes spend on it.

The device is a sleep: as long as what was handed costs, padding included.
"""

import ast
import inspect
import json
import os
import textwrap
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

RANKS, ROWS = 2, 8
"""Processes that train, and microbatches of a step on each (of ours, one more where the samples ask for it)."""
SEQ_LEN = 2048
WORKERS = 2
"""Processes or threads that load for a rank, where its loader takes any."""
BATCH = 6
"""Samples of a microbatch where samples are not packed: about as many as `SEQ_LEN` tokens hold."""
WARM, MEASURED = 2, 8
STEPS = WARM + MEASURED + 1
"""Measured between the first microbatches of steps `WARM` and `WARM + MEASURED`."""
TOKEN_COST, PATCH_COST = 11, 1
"""A backbone of 7 billion parameters beside an encoder of 0.63 billion, forward and backward alike."""
UNIT_S = 2e-6
"""Device time for a unit of cost; an image with its caption then takes 9 ms."""


@dataclass(frozen=True, slots=True)
class Load:
    """A microbatch of a rank."""

    images: int
    tokens: int
    """Tokens of the samples, image tokens among them."""
    patches: int
    token_slots: int
    """Tokens that the model is handed, with padding."""
    patch_slots: int

    @property
    def cost(self) -> int:
        """Cost of the samples without padding."""
        return self.tokens * TOKEN_COST + self.patches * PATCH_COST

    @property
    def handed(self) -> int:
        """Cost of what the model is handed, with padding."""
        return self.token_slots * TOKEN_COST + self.patch_slots * PATCH_COST


@dataclass(slots=True)
class RankReport:
    """What a rank measured between warm-up and end."""

    lines: int
    """Lines of the user's code."""
    images: int = 0
    cost: list[int] = field(default_factory=lambda: [0] * MEASURED)
    """Cost of each step, without padding."""
    handed: int = 0
    """Cost of all steps, with padding."""
    cpu_s: float = 0.0
    """CPU time of this process and those that it started."""
    wait_s: float = 0.0


class Meter:
    """Is told each microbatch that the model gets, sleeps for it, and writes a report when the last step begins."""

    def __init__(self, out: Path, waited: Callable[[], float], *user_code: Any) -> None:
        """Write `RANK.json` in a folder.

        Args:
            out: the folder.
            waited: seconds that this rank waited for data so far.
            user_code: functions and classes that a user writes.
        """
        self._file = out / f"{os.environ['RANK']}.json"
        self._waited = waited
        self._report = RankReport(code_lines(*user_code))
        self._count, self._started, self._written = 0, False, False

    def microbatch(self, load: Load, step: int | None = None) -> None:
        """Called for each; without a step, `ROWS` of them are one."""
        step = self._count // ROWS if step is None else step
        self._count += 1
        if step >= WARM and not self._started:
            self._started = True
            self._spend(-1)
        if step >= WARM + MEASURED and not self._written:
            self._written = True
            self._spend(1)
            self._file.write_text(json.dumps(asdict(self._report)))
        if WARM <= step < WARM + MEASURED:
            self._report.images += load.images
            self._report.cost[step - WARM] += load.cost
            self._report.handed += load.handed
        time.sleep(load.handed * UNIT_S)

    def _spend(self, sign: int) -> None:
        self._report.cpu_s += sign * _cpu_s()
        self._report.wait_s += sign * self._waited()


def code_lines(*user_code: Any) -> int:
    """Lines of functions and classes without comments, docstrings and blank lines."""
    found = 0
    for item in user_code:
        source = textwrap.dedent(inspect.getsource(item))
        lines = [line.strip() for line in source.splitlines()]
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node) is not None:
                first, last = node.body[0].lineno - 1, node.body[0].end_lineno or 0
                lines[first:last] = [""] * (last - first)
        found += sum(bool(line) and not line.startswith("#") for line in lines)
    return found


def _cpu_s() -> float:
    process, found = psutil.Process(), 0.0
    for one in (process, *process.children(recursive=True)):
        times = one.cpu_times()
        found += times.user + times.system + times.children_user + times.children_system
    return found
