"""One process of a tiny run: real leases and checkpoints around tensors whose values are known at each step."""

import json
import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trainclient.checkpoint import lease as lease_module
from trainclient.checkpoint.folder import Checkpoints
from trainclient.checkpoint.lease import Lease, renewed, take
from trainclient.checkpoint.lease_file import LeaseError, Output
from trainclient.checkpoint.owner import Owner
from trainclient.checkpoint.resume_from import ResumeFrom
from trainclient.checkpoint.saver import Saver, share
from trainclient.checkpoint.selection import last_owner
from trainclient.checkpoint.state import CheckpointError, SaveError, TrainerState

END = 8
KEEP = 3
NAMES = tuple("abcde")


class Code(IntEnum):
    """How a process ends."""

    DONE = 0
    REFUSED = 20
    """Another run owns the folder."""
    LOST = 21
    """Another run has taken it over."""
    NO_STEP = 22
    ALONE = 23
    """Its peer is gone."""
    LOCKED = 24
    """It has asked for a file lock."""
    WRONG = 25
    """What it published is not what it trained."""
    FAILED = 26


EXPECTED = {Code.DONE, Code.REFUSED, Code.LOST, Code.NO_STEP, Code.ALONE, -9}


@dataclass(frozen=True)
class Start:
    """How a run is started."""

    folder: Path
    run: str
    world: int
    store: Path
    log: Path
    seed: int
    take_over: bool = False
    resume_from: int | ResumeFrom = ResumeFrom.NEWEST
    beside: bool = False


def begin(run: str) -> dict[str, torch.Tensor]:
    """The tensors of a run before its first step."""
    return {name: torch.full((300,), float(number + len(run))) for number, name in enumerate(NAMES)}


def update(tensors: dict[str, torch.Tensor], run: str, step: int) -> None:
    """A step of a run, which depends on all before it."""
    for tensor in tensors.values():
        torch.sin(tensor * 1.5 + float(sum(run.encode()) + step), out=tensor)


def undisturbed(run: str, step: int) -> dict[str, torch.Tensor]:
    """What a run has after so many steps."""
    tensors = begin(run)
    for number in range(step):
        update(tensors, run, number)
    return tensors


def state(run: str, step: int) -> TrainerState:
    return TrainerState({"version": 1, "stream_id": "", "step": step, "stream": "{}"}, {}, run=run)


def contend(start: Start, rank: int) -> None:
    """Train, as a process; ends it with a `Code`."""
    sys.addaudithook(_no_locks)
    sys.stderr = start.log.open("a")
    moments = random.Random(start.seed + rank)
    lease_module.RENEW_S = moments.choice((0.05, 60))  # type: ignore[misc]
    _dawdle(moments)
    try:
        code = _own(start, rank)
    except LeaseError as error:
        code = _said(Code.REFUSED, error)
    except SaveError as error:
        lost = "taken over from this run" in str(error) or "is gone, so another run" in str(error)
        code = _said(Code.LOST if lost else Code.FAILED, error)
    except CheckpointError as error:
        code = _said(Code.NO_STEP if "no checkpoint of step" in str(error) else Code.FAILED, error)
    except RuntimeError as error:  # of gloo
        code = _said(Code.ALONE, error)
    except BaseException as error:
        code = _said(Code.FAILED, error)
    sys.stderr.flush()
    os._exit(code)


def _own(start: Start, rank: int) -> Code:
    if rank:
        return _train(start, rank, None)
    output, after = Output("the folder", start.folder), last_owner(start.folder)
    lease = take(output, Owner.here(start.run), take_over=start.take_over, after=after)
    try:
        with renewed([lease], lambda said: os._exit(_said(Code.LOST, RuntimeError(said)))):
            return _train(start, rank, lease)
    finally:
        lease.release()


def _train(start: Start, rank: int, lease: Lease | None) -> Code:
    store = dist.FileStore(str(start.store), start.world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=start.world)
    group = dist.group.WORLD
    assert group is not None
    checkpoints = Checkpoints(start.folder, KEEP, group, lease)
    saver = Saver(checkpoints, group, torch.device("cpu"), beside=start.beside)
    newest, run, step = checkpoints.resume_point(start.resume_from, start.run), start.run, 0
    tensors = begin(run)
    if newest is not None:
        run, step = newest.manifest.state.run, newest.step
        checkpoints.load(newest.path, tensors)
    if lease is not None:
        seen = {p.name: p.stat().st_ino for p in start.folder.iterdir() if p.is_dir()}
        _log(start, {"attempt": lease.owner.attempt, "seen": seen})
        lease.require()
        _log(start, {"owned": lease.owner.attempt})  # so it was the owner when it wrote the line before
    for number in range(step, END):
        update(tensors, run, number)
        saver.save(tensors, state(run, number + 1))
    saver.wait()
    if step < END:
        published = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        own = share(published, rank, start.world)
        checkpoints.load(start.folder / f"step-{END:08d}", own)
        if not all(torch.equal(tensors[name], tensor) for name, tensor in own.items()):
            return Code.WRONG
    dist.barrier()
    return Code.DONE


def _log(start: Start, line: dict[str, Any]) -> None:
    with start.log.with_suffix(".jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def _said(code: Code, error: BaseException) -> Code:
    sys.stderr.write(f"{os.getpid()} {code.name} {type(error).__name__}: {error}\n")
    sys.stderr.flush()
    return code


def _no_locks(event: str, arguments: tuple[object, ...]) -> None:
    """Leases and checkpoints hold where locks do nothing, since they ask for none."""
    import fcntl

    locks = (fcntl.F_SETLK, fcntl.F_SETLKW)
    if event in ("fcntl.flock", "fcntl.lockf") or (event == "fcntl.fcntl" and arguments[1] in locks):
        os._exit(Code.LOCKED)


def _dawdle(moments: random.Random) -> None:
    """Wait a moment behind each look at the lease: whoever is stopped there goes on with what it saw."""

    def slowly(require: Callable[[Lease], None]) -> Callable[[Lease], None]:
        def look(lease: Lease) -> None:
            require(lease)
            time.sleep(moments.choice((0, 0, 0.002, 0.02)))

        return look

    Lease.require = slowly(Lease.require)  # type: ignore[method-assign]
