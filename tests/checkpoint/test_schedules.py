"""Random schedules of runs over one folder: started, killed, stopped, continued, started again, with copies in between.

What is published is always of one run, whole, and bit by bit what that run has when nothing disturbs it. No process
asks for a file lock (`contender._no_locks`), so all of it holds on storage whose locks do nothing.
"""

import contextlib
import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
from checkpoint.contender import END, EXPECTED, NAMES, Code, Start, contend, undisturbed
from cli.forked import forks
from torch.distributed.checkpoint.state_dict_loader import load

from trainclient.checkpoint.resume_from import ResumeFrom
from trainclient.checkpoint.selection import survey
from trainclient.checkpoint.state import read_manifest
from trainclient.checkpoint.sums import damages, extras

DEADLINE_S = 120
SCHEDULES = 10
LONG = 200


@dataclass
class Run:
    """The processes of one attempt."""

    processes: list[BaseProcess]
    stopped: bool = False

    @property
    def is_over(self) -> bool:
        """Whether its first process has ended; the others have nobody left then."""
        return self.processes[0].exitcode is not None

    def send(self, number: signal.Signals) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid or 0, number)

    def end(self, deadline: float) -> int:
        """Wait for it; the exit code of its first process."""
        self.send(signal.SIGCONT)
        self.processes[0].join(max(0, deadline - time.monotonic()))
        code = self.processes[0].exitcode
        for process in self.processes:
            process.kill()
            process.join()
        assert code is not None, "it hangs"
        return code


@dataclass
class Schedule:
    """One of them."""

    root: Path
    seed: int
    runs: list[Run] = field(default_factory=list)
    copies: dict[str, int] = field(default_factory=dict)
    """Their inodes."""
    codes: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.moments = random.Random(self.seed)
        self.folder = self.root / "ckpt"
        self.folder.mkdir(parents=True)

    def play(self) -> None:
        """Let it happen, then let all end, and start once more what was started last."""
        events: list[Callable[[], None]] = [self.start, self.start, self.kill, self.stop, self.go_on, self.copy]
        self.start()
        for _ in range(self.moments.randint(8, 12)):
            time.sleep(self.moments.choice((0, 0.02, 0.1)))
            self.moments.choice(events)()
        deadline = time.monotonic() + DEADLINE_S
        self.codes += [run.end(deadline) for run in self.runs]
        assert set(self.codes) <= EXPECTED, self.said()
        self.begin(Start(self.folder, "requeued", 1, self.root / "last", self.root / "log", self.seed))
        assert self.runs[-1].end(deadline) == Code.DONE, self.said()

    def begin(self, start: Start) -> None:
        processes = [forks().Process(target=contend, args=(start, rank)) for rank in range(start.world)]
        for process in processes:
            process.start()
        self.runs.append(Run(processes))

    def start(self) -> None:
        if len(self.alive()) == 3:
            return
        moments, number = self.moments, len(self.runs)
        wanted = moments.choice(
            (ResumeFrom.NEWEST, ResumeFrom.NEWEST, ResumeFrom.NEWEST_WHOLE, moments.randint(1, END))
        )
        self.begin(
            Start(
                self.folder,
                moments.choice(("one", "other", "third one")),
                moments.choice((1, 1, 2)),
                self.root / f"store-{number}",
                self.root / "log",
                self.seed + number,
                take_over=moments.random() < 0.4,
                resume_from=wanted,
                beside=moments.random() < 0.3,
            )
        )

    def alive(self) -> list[Run]:
        return [run for run in self.runs if not run.is_over]

    def some(self) -> Iterator[Run]:
        """One that lives, if any does."""
        alive = self.alive()
        return iter(self.moments.sample(alive, 1) if alive else [])

    def kill(self) -> None:
        for run in self.some():
            run.send(signal.SIGKILL)

    def stop(self) -> None:
        for run in self.some():
            run.send(signal.SIGSTOP)

    def go_on(self) -> None:
        for run in self.some():
            run.send(signal.SIGCONT)

    def copy(self) -> None:
        """Copy a checkpoint to a name that says another step; it may be removed meanwhile."""
        found = sorted(p for p in self.folder.glob("step-*") if p.name not in self.copies)
        if not found:
            return
        name = f"step-{self.moments.randint(END + 1, 9_999):08d}"
        source, beside = self.moments.choice(found), self.root / "copy"
        shutil.rmtree(beside, ignore_errors=True)
        with contextlib.suppress(OSError, shutil.Error):
            shutil.copytree(source, beside)
            if (beside / "trainer.json").exists() and not (self.folder / name).exists():
                beside.rename(self.folder / name)
                self.copies[name] = (self.folder / name).stat().st_ino

    def check(self) -> None:
        """What holds for whatever was published."""
        folders = {path.name: path for path in self.folder.iterdir()}
        for name, inode in self.copies.items():
            assert folders.pop(name).stat().st_ino == inode, name
        assert not [name for name in folders if name.startswith(".")], "leases or parts are left"
        owners = self.owners()
        for name, path in folders.items():
            manifest = read_manifest(path)
            files, writer = manifest.files, manifest.writer
            assert files is not None
            assert writer is not None
            assert damages(path, files) == [], name
            assert extras(path, manifest) == [], name
            state = manifest.state
            tensors = {tensor: torch.zeros(300) for tensor in NAMES}
            load(tensors, checkpoint_id=path, no_dist=True)
            for tensor, value in undisturbed(state.run, state.step).items():
                assert torch.equal(tensors[tensor], value), (name, tensor, state.run)
            attempts = list(owners)
            for later in attempts[attempts.index(writer.attempt) + 1 :]:  # who lost the folder published nothing since
                assert path.stat().st_ino in owners[later], (name, writer, later)
        assert survey(self.folder).stored[0].step == END

    def owners(self) -> dict[str, set[int]]:
        """The inodes that each attempt saw before its first step, in the order in which they owned the folder."""
        lines = [json.loads(line) for line in (self.root / "log.jsonl").read_text().splitlines()]
        owned = {line["owned"] for line in lines if "owned" in line}
        return {line["attempt"]: set(line["seen"].values()) for line in lines if line.get("attempt") in owned}

    def said(self) -> str:
        """For whoever reads a failure."""
        codes = [Code(code).name if code >= 0 else str(code) for code in self.codes]
        log = self.root / "log"
        return f"seed {self.seed}: {codes}\n{log.read_text() if log.exists() else ''}"


def play(root: Path, seed: int) -> list[int]:
    schedule = Schedule(root, seed)
    try:
        schedule.play()
        schedule.check()
    except AssertionError as error:
        raise AssertionError(f"{error}\n{schedule.said()}") from error
    finally:
        for run in schedule.runs:
            run.send(signal.SIGKILL)
    return schedule.codes


def seeds(number: int) -> list[int]:
    """Of so many schedules; `DISTTRAIN_FAULT_SEED` replays those that begin with it."""
    given = os.environ.get("DISTTRAIN_FAULT_SEED")
    first = int(given) if given else random.SystemRandom().randrange(1 << 31)
    return list(range(first, first + (1 if given else number)))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize(
    "number",
    [pytest.param(SCHEDULES, marks=pytest.mark.timeout(600)),
     pytest.param(LONG, marks=[pytest.mark.long, pytest.mark.timeout(3600)])],
)  # fmt: skip
def test_runs_do_not_hurt_each_other(tmp_path: Path, number: int) -> None:
    found = seeds(number)
    sys.stdout.write(f"DISTTRAIN_FAULT_SEED={found[0]}\n")
    codes = [code for seed in found for code in play(tmp_path / str(seed), seed)]
    assert number == SCHEDULES or {Code.DONE, Code.REFUSED, Code.LOST, -9} <= set(codes)
