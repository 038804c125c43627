"""Saving beside training: what is saved, when the next one begins, and what is left when it cannot be finished."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from faults.disk import fill, missing, small_disk

from trainclient.checkpoint.folder import Checkpoints
from trainclient.checkpoint.saver import Saver, share
from trainclient.checkpoint.selection import survey
from trainclient.checkpoint.state import SaveError, TrainerState

NAMES = tuple("abcde")
WAIT_S = 120


def state(step: int) -> TrainerState:
    return TrainerState({"version": 1, "stream_id": "", "step": step, "stream": "{}"}, {})


@contextmanager
def world(folder: Path) -> Iterator[dist.ProcessGroup]:
    """Of this process alone."""
    folder.mkdir(exist_ok=True)
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 1), rank=0, world_size=1)
    try:
        assert dist.group.WORLD is not None
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def complete(folder: Path) -> list[Path]:
    """The checkpoints of a folder, oldest first."""
    return [stored.path for stored in reversed(survey(folder).stored)]


def values(checkpoints: Checkpoints, path: Path, names: tuple[str, ...], size: int) -> set[float]:
    """All that is in these tensors of a checkpoint."""
    tensors = {name: torch.full((size,), -1.0) for name in names}
    checkpoints.load(path, tensors)
    return {value for tensor in tensors.values() for value in tensor.unique().tolist()}


def test_replicas_save_each_tensor_once_and_about_the_same_bytes() -> None:
    tensors = {name: torch.zeros(size) for name, size in zip(NAMES, (100, 90, 50, 40, 1), strict=True)}
    shares = [share(tensors, rank, 2) for rank in range(2)]
    assert sorted(name for found in shares for name in found) == sorted(tensors)
    assert [sum(t.numel() for t in found.values()) for found in shares] == [141, 140]
    assert share(tensors, 0, 1).keys() == tensors.keys()


TWO = """
import os, sys
from pathlib import Path
import torch, torch.distributed as dist
from trainclient.checkpoint.folder import Checkpoints
from trainclient.checkpoint.saver import Saver
from trainclient.checkpoint.state import TrainerState
root, rank = Path(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("gloo", store=dist.FileStore(str(root / "store"), 2), rank=rank, world_size=2)
checkpoints = Checkpoints(root / "checkpoints", 3, dist.group.WORLD)
saver = Saver(checkpoints, dist.group.WORLD, torch.device("cpu"), beside=True)
tensors = {name: torch.ones(1000) for name in "abcde"}
for step in (1, 2):
    if rank == 1:
        sys.stdin.readline()
    cursor = {"version": 1, "stream_id": "", "step": step, "stream": "{}"}
    saver.save(tensors, TrainerState(cursor, {}))
    for tensor in tensors.values():  # as the next step does
        tensor += 1
    print("goes on", flush=True)
saver.wait()
dist.barrier()  # no process ends while another one still answers it
os._exit(0)  # as the trainer does: a thread of gloo may outlive the interpreter, and abort the process
"""


def test_steps_go_on_and_the_next_one_waits(tmp_path: Path) -> None:
    """The second process holds up the first checkpoint until the first process has changed what is saved."""
    command = [sys.executable, "-c", TWO, str(tmp_path)]
    processes = [
        subprocess.Popen([*command, str(rank)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    folder = tmp_path / "checkpoints"
    try:
        first, second = processes
        assert first.stdout is not None
        assert second.stdin is not None
        assert next(line for line in first.stdout if "[Gloo]" not in line) == "goes on\n"  # torch 2.9 prints such
        assert complete(folder) == []
        second.stdin.write("\n\n")
        second.stdin.flush()
        assert [process.wait(WAIT_S) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    found = complete(folder)
    assert [path.name for path in found] == ["step-00000001", "step-00000002"]
    with world(tmp_path / "reader") as group:
        checkpoints = Checkpoints(folder, 3, group)
        assert [values(checkpoints, path, NAMES, 1000) for path in found] == [{1.0}, {2.0}]


FOREVER = """
import itertools, sys
from pathlib import Path
import torch, torch.distributed as dist
from trainclient.checkpoint.folder import Checkpoints
from trainclient.checkpoint.saver import Saver
from trainclient.checkpoint.state import TrainerState
root = Path(sys.argv[1])
dist.init_process_group("gloo", store=dist.FileStore(str(root / "store"), 1), rank=0, world_size=1)
checkpoints = Checkpoints(root / "checkpoints", 3, dist.group.WORLD)
saver = Saver(checkpoints, dist.group.WORLD, torch.device("cpu"), beside=True)
tensors = {"w": torch.zeros(1 << 22)}
for step in itertools.count(1):
    tensors["w"].fill_(step)
    cursor = {"version": 1, "stream_id": "", "step": step, "stream": "{}"}
    saver.save(tensors, TrainerState(cursor, {}))
"""


def test_killed_in_the_middle_of_a_save(tmp_path: Path) -> None:
    """The process is held still while a part of a checkpoint is written, and killed then; those before it are whole."""
    process = subprocess.Popen([sys.executable, "-c", FOREVER, str(tmp_path)])
    folder = tmp_path / "checkpoints"
    try:
        while not (partial := _held_in_a_save(process, folder)):
            assert process.poll() is None
    finally:
        process.kill()
        process.wait()
    found = complete(folder)
    assert found[-1].name != partial.name[-len(found[-1].name) :]
    with world(tmp_path / "reader") as group:
        checkpoints = Checkpoints(folder, 3, group)
        steps = [int(path.name.removeprefix("step-")) for path in found]
        assert int(partial.name.rpartition("-")[2]) == steps[-1] + 1
        assert [values(checkpoints, path, ("w",), 1 << 22) for path in found] == [{float(step)} for step in steps]
        checkpoints.save({"w": torch.zeros(1)}, state(steps[-1] + 1))
    assert not partial.exists()


def _held_in_a_save(process: "subprocess.Popen[bytes]", folder: Path) -> Path | None:
    """Hold a process still; what it is writing after its second checkpoint, or None if it is just not writing."""
    if len(complete(folder)) < 2 or not list(folder.glob(".partial-*-step-*/*.distcp")):
        time.sleep(0.001)
        return None
    process.send_signal(signal.SIGSTOP)
    found = [path.parent for path in folder.glob(".partial-*-step-*/*.distcp")]
    if found and not (found[0] / ".metadata").exists():
        return found[0]
    process.send_signal(signal.SIGCONT)
    return None


@pytest.mark.skipif(bool(missing()), reason=missing())
@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("state_bytes", [0, 2 << 20])
def test_a_full_disk_is_said_and_costs_no_checkpoint(tmp_path: Path, beside: bool, state_bytes: int) -> None:
    """The disk is full when tensors are written, or after them."""
    with small_disk(tmp_path / "disk", kibibytes=1024) as disk, world(tmp_path / "group") as group:
        checkpoints = Checkpoints(disk / "checkpoints", 3, group)
        saver = Saver(checkpoints, group, torch.device("cpu"), beside=beside)
        saver.save({"w": torch.ones(1000)}, state(1))
        saver.wait()
        if not state_bytes:
            fill(disk)
        more = TrainerState(state(2).cursor, {"vit": {"name": "x" * state_bytes}})
        with pytest.raises(SaveError, match=r"step-00000002 cannot be written \(rank 0: .*No space left on device"):
            _save(saver, more)
        assert not saver.failed
        assert [path.name for path in (disk / "checkpoints").iterdir()] == ["step-00000001"]
        assert values(checkpoints, disk / "checkpoints" / "step-00000001", ("w",), 1000) == {1.0}


def _save(saver: Saver, more: TrainerState) -> None:
    saver.save({"w": torch.ones(1000)}, more)
    saver.wait()


def test_a_failure_is_known_before_it_is_waited_for(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with world(tmp_path / "group") as group:
        saver = Saver(Checkpoints(tmp_path / "file", 3, group), group, torch.device("cpu"), beside=True)
        saver.save({"w": torch.ones(1000)}, state(1))
        while not saver.failed:
            time.sleep(0.001)
        with pytest.raises(SaveError, match=r"cannot be written \(rank 0: File exists: .*file"):
            saver.save({"w": torch.ones(1000)}, state(2))
