"""`trainclient train` in one process, which notes what each step did: `python -m on_gpu.watched train ...`.

What is watched comes as JSON in the variable `DISTTRAIN_WATCH`: {"output": FILE, "syncs": STEP}. For every step the
file gets the allocator's counters, the pauses of Python's garbage collector and the CPU time of the process. In one
step, what waits for the device is counted, by where in the code it was asked for (`torch.cuda.set_sync_debug_mode`).
"""

import gc
import json
import os
import resource
import socket
import sys
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import torch

from trainclient.checkpoint.lease import FollowedLease, Lease
from trainclient.cli import main
from trainclient.topology.process_groups import Groups
from trainclient.training import loop
from trainclient.training.config import ProfileConfig
from trainclient.training.profiling import StepProfiler
from trainclient.training.traceback_frames import is_ours

WATCH: Final = "DISTTRAIN_WATCH"
COUNTERS: Final = (
    "num_alloc_retries", "num_ooms", "num_device_alloc", "num_device_free", "num_sync_all_streams",
    "allocated_bytes.all.current", "allocated_bytes.all.peak", "reserved_bytes.all.current", "reserved_bytes.all.peak",
    "inactive_split_bytes.all.current", "active.all.current", "allocation.all.allocated",
)  # fmt: skip
"""Counters of `torch.cuda.memory_stats` that are noted after each step."""
FRAMES: Final = 3
"""Innermost frames of our code that are shown for what waits."""


class Pauses:
    """What Python's garbage collector takes."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._began = 0.0
        gc.callbacks.append(self._called)

    def _called(self, phase: str, info: dict[str, int]) -> None:
        del info
        if phase == "start":
            self._began = time.perf_counter()
        else:
            self.seconds.append(time.perf_counter() - self._began)


class Syncs:
    """What makes the host wait for the device, by the code that asks for it, while it is entered."""

    def __init__(self) -> None:
        self.found: Counter[str] = Counter()
        self._caught = warnings.catch_warnings()

    def __enter__(self) -> "Syncs":
        self._caught.__enter__()
        warnings.simplefilter("always")
        warnings.showwarning = self._note  # type: ignore[assignment]
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("warn")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("default")
        self._caught.__exit__(kind, error, trace)

    def _note(self, message: Any, *rest: Any) -> None:
        del rest
        if "synchroniz" in str(message):
            frames = [f for f in traceback.extract_stack() if is_ours(f.filename)][-FRAMES:]
            self.found[" < ".join(_frame(f) for f in reversed(frames)) or "no code of ours (another thread)"] += 1


class StepWatch(StepProfiler):
    """Notes what lies between two calls of `begin_step`, besides what a profiler does."""

    def __init__(self, config: ProfileConfig, groups: Groups, lease: Lease | FollowedLease | None = None) -> None:
        super().__init__(config, groups, lease)
        wanted = json.loads(os.environ[WATCH])
        self._output, self._step_of_syncs = Path(wanted["output"]), wanted.get("syncs")
        self._cuda = groups.device.type == "cuda"
        self._pauses = Pauses()
        self._syncs: Syncs | None = None
        self._found: dict[str, Any] = {"steps": [], "syncs": None, "frozen_garbage": gc.get_freeze_count()}

    def begin_step(self, step: int) -> None:
        """Begin a step as `StepProfiler` does; after it, all that belongs to the step before is written down."""
        super().begin_step(step)
        if self._syncs is not None:
            self._syncs.__exit__(None, None, None)
            self._found["syncs"], self._syncs = dict(self._syncs.found.most_common()), None
        usage = resource.getrusage(resource.RUSAGE_SELF)
        noted: dict[str, Any] = {
            "before_step": step,
            "at_s": time.perf_counter(),
            "cpu_s": usage.ru_utime + usage.ru_stime,
            "switched_out": usage.ru_nivcsw,
            "pauses": len(self._pauses.seconds),
            "longest_pause_ms": 1000 * max(self._pauses.seconds, default=0.0),
            "pauses_ms": 1000 * sum(self._pauses.seconds),
        }
        self._pauses.seconds.clear()
        if self._cuda:
            counters = torch.cuda.memory_stats()
            noted |= {name: counters.get(name, 0) for name in COUNTERS}
        self._found["steps"].append(noted)
        self._output.write_text(json.dumps(self._found))
        if step == self._step_of_syncs:
            self._syncs = Syncs()
            self._syncs.__enter__()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        super().__exit__(kind, error, trace)
        self._output.write_text(json.dumps(self._found))


def alone() -> dict[str, str]:
    """What torchrun would say to the only process of a run."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ones = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "1")
    return {"RANK": "0", "LOCAL_RANK": "0", **ones, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def _frame(frame: traceback.FrameSummary) -> str:
    return f"{Path(frame.filename).name}:{frame.lineno} {frame.name}"


if __name__ == "__main__":
    vars(loop)["StepProfiler"] = StepWatch
    os.environ.update(alone())
    sys.exit(main(sys.argv[1:]))
