"""Checkpoints: model, optimizer and cursor, readable by any layout of the same stream.

A checkpoint is a folder `step-N`: the tensors as torch.distributed.checkpoint writes them, each once, under their names
in the whole model, and `trainer.json`. It is written under another name and renamed when it is complete, so a folder
named `step-N` is always whole, whenever the processes are killed.
"""

import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from trainclient.checkpoint.writer import PlainWriter
from trainclient.models.noise import NOISE_VERSION

STATE_VERSION = 4
"""Of the fields of `TrainerState`, and of the metrics within: another field takes another version."""
_READ_VERSIONS = 2, 3, STATE_VERSION
"""Version 2 is without metrics that lack an evaluation, version 3 without what updates were made with."""
_STATE_FILE = "trainer.json"
_NAME = re.compile(r"step-(\d{8,})")
_TOLD_BYTES = 1024
_REMEDY = "check the storage and its space"


def is_state(name: str) -> bool:
    """Whether a tensor of that name is state of an optimizer; the parameter's name stands before it."""
    return "/" in name


def module_of(name: str) -> str:
    """The module that a tensor belongs to; names of modules have no dot."""
    return name.partition(".")[0]


class CheckpointError(ValueError):
    """A checkpoint that cannot be resumed, or not by this job."""


class SaveError(CheckpointError):
    """A checkpoint that cannot be written. All processes raise it with the same message."""

    known_to_all = True


@dataclass(frozen=True, slots=True)
class TrainerState:
    """What a checkpoint holds besides tensors."""

    cursor: dict[str, Any]
    """`DataClient.state_dict()`: version, stream_id, step, and the stream to tell what differs from another one."""
    modules: dict[str, Any]
    """Sizes of every module by its name."""
    images: int = 0
    """Images of all steps so far."""
    invalid_images: int = 0
    """Images of these that could not be decoded."""
    version: int = STATE_VERSION
    noise_version: int = NOISE_VERSION
    """Of the diffusion noise; states that do not say so are of version 1."""
    run: str = ""
    """Name of the run, which its metrics carry."""
    frozen: list[str] = field(default_factory=list)
    """Modules that were not trained in the last step: the tensors hold no state of an optimizer for them."""
    unevaluated: dict[str, Any] | None = None
    """Metrics of the last step, if the run was asked to stop before its evaluation had a result."""
    optimizer: dict[str, Any] = field(default_factory=dict)
    """What updates were made with (`training/changes.py`), to tell what differs when a run resumes."""

    def readable(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Those tensors that the checkpoint holds: where a module was frozen, its optimizer begins anew."""
        return {name: t for name, t in tensors.items() if module_of(name) not in self.frozen or not is_state(name)}

    @property
    def step(self) -> int:
        """The first step that is not in the parameters."""
        return int(self.cursor["step"])

    def require_modules(self, modules: dict[str, Any], where: Path) -> None:
        """Raise CheckpointError, with what differs, unless all of these models are in the checkpoint."""
        different = [
            f"{name}.{key}: {value!r} here, {self.modules[name].get(key)!r} there"
            for name, sizes in modules.items()
            for key, value in sizes.items()
            if name in self.modules and value != self.modules[name].get(key)
        ]
        different += [f"no module {name} there, only {list(self.modules)}" for name in modules.keys() - self.modules]
        if different:
            raise CheckpointError(
                f"the checkpoint {where} has other models ({'; '.join(different)}); give the sizes and module names it "
                "was made with"
            )


class Checkpoints:
    """The checkpoints of one folder, used by all processes together."""

    def __init__(self, directory: Path, keep: int, group: ProcessGroup) -> None:
        """Use a folder.

        Args:
            directory: the same on all processes.
            keep: how many of the newest to keep.
            group: all processes, over gloo.
        """
        self._directory = directory
        self._keep = keep
        self._group = group
        self._leads = group.rank() == 0

    def save(self, tensors: dict[str, Tensor], state: TrainerState) -> None:
        """Write a checkpoint; all processes call it with the same state, each with its own tensors.

        Raises:
            SaveError: it cannot be written; the same one on all processes. What was written of it is removed.
            RuntimeError: another process is gone.
        """
        target = self._directory / f"step-{state.step:08d}"
        partial = self._directory / f".partial-{target.name}"
        failure = f"the checkpoint {target} cannot be written"
        self._led(failure, lambda: _make_room(self._directory))
        try:
            save(tensors, storage_writer=PlainWriter(partial), process_group=self._group)
        except CheckpointException as error:  # on all processes, when none of them writes any more
            if self._leads:
                shutil.rmtree(partial, ignore_errors=True)
            raise SaveError(f"{failure} ({_reasons(error)}); {_REMEDY}") from error
        self._led(failure, lambda: self._complete(partial, target, state))

    def amend(self, state: TrainerState) -> None:
        """Replace what the checkpoint of a state's step holds besides tensors; errors as in `save`."""
        target = self._directory / f"step-{state.step:08d}"
        self._led(f"the checkpoint {target} cannot be written", lambda: _write_state(target, state))

    def _complete(self, partial: Path, target: Path, state: TrainerState) -> None:
        """Give what all have written its name."""
        try:
            _write_state(partial, state)
            _publish(partial, target)
        except OSError:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        for old in complete_checkpoints(self._directory)[: -self._keep]:
            _discard(old)

    def _led(self, failure: str, action: Callable[[], None]) -> None:
        """Have the first process do something while the others wait; SaveError on all if it cannot."""
        reason = ""
        if self._leads:
            try:
                action()
            except OSError as error:
                reason = f"{error.strerror or type(error).__name__}: {error.filename or self._directory}"
        told = torch.frombuffer(bytearray(reason.encode()[:_TOLD_BYTES].ljust(_TOLD_BYTES, b"\0")), dtype=torch.uint8)
        dist.broadcast(told, group_src=0, group=self._group)
        reason = bytes(told.numpy()).rstrip(b"\0").decode(errors="replace")
        if reason:
            raise SaveError(f"{failure} (rank 0: {reason}); {_REMEDY}")

    def latest(self) -> Path | None:
        """The newest complete checkpoint, the same on all processes.

        Raises:
            CheckpointError: this process does not see the folder that the first one sees.
            SaveError: it cannot be written to; better known now than at the first checkpoint.
        """
        self._led(f"no checkpoint can be written to {self._directory}", lambda: make_folder(self._directory))
        found = complete_checkpoints(self._directory) if self._leads else []
        step = torch.tensor([_step_of(found[-1]) if found else -1])
        dist.broadcast(step, group_src=0, group=self._group)
        if int(step) < 0:
            return None
        path = self._directory / f"step-{int(step):08d}"
        if not (path / _STATE_FILE).is_file():
            raise CheckpointError(
                f"this process does not see the checkpoint {path} that global rank 0 sees; the checkpoint directory "
                "must be on storage that all processes share"
            )
        return path

    def load(self, path: Path, tensors: dict[str, Tensor]) -> None:
        """Read a checkpoint into existing tensors; all processes call it, each with its own tensors.

        Raises:
            CheckpointError: it cannot be read, a tensor is not there, or has another shape.
        """
        stored = stored_tensors(path)
        for name, tensor in tensors.items():
            entry = stored.get(name)
            if entry is None or entry.size != tensor.shape:
                there = "nothing" if entry is None else f"{list(entry.size)}"
                raise CheckpointError(
                    f"the checkpoint {path} holds {there} for {name}, and {list(tensor.shape)} is needed; give the "
                    "sizes and module names it was made with"
                )
        with explained(f"the checkpoint {path} cannot be read"):
            load(tensors, checkpoint_id=path, process_group=self._group)


def make_folder(directory: Path) -> None:
    """Make the folder of checkpoints, if it is not there; OSError if it can be neither made nor written to."""
    directory.mkdir(parents=True, exist_ok=True)
    if not os.access(directory, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(directory))


def complete_checkpoints(directory: Path) -> list[Path]:
    """The complete checkpoints of a folder, oldest first."""
    if not directory.is_dir():
        return []
    found = [p for p in directory.iterdir() if _NAME.fullmatch(p.name) and (p / _STATE_FILE).is_file()]
    return sorted(found, key=_step_of)


def stored_tensors(path: Path) -> dict[str, TensorStorageMetadata]:
    """The tensors that a checkpoint holds, by name.

    Raises:
        CheckpointError: what says so cannot be read.
    """
    try:
        stored = FileSystemReader(path).read_metadata().state_dict_metadata
    except Exception as error:  # torch keeps it as a pickle, which raises anything if it is damaged
        raise CheckpointError(
            f"the checkpoint {path} cannot be read ({type(error).__name__}: {error}); {_REMEDY}"
        ) from None
    return {name: entry for name, entry in stored.items() if isinstance(entry, TensorStorageMetadata)}


def read_state(path: Path) -> TrainerState:
    """What a checkpoint holds besides tensors.

    Raises:
        CheckpointError: it cannot be read, or was written by another release.
    """
    try:
        data = {"noise_version": 1, **json.loads((path / _STATE_FILE).read_bytes())}
        version = data["version"]
        state = TrainerState(**data) if version in _READ_VERSIONS else None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(
            f"the checkpoint {path} cannot be read ({type(error).__name__}: {error}); remove it to resume from an "
            "older one"
        ) from None
    if state is None:
        raise CheckpointError(
            f"the checkpoint {path} has state version {version}; this release reads "
            f"{', '.join(map(str, _READ_VERSIONS[:-1]))} and {STATE_VERSION}: resume it with the release that made it"
        )
    if state.noise_version != NOISE_VERSION:
        raise CheckpointError(
            f"the checkpoint {path} was trained with noise version {state.noise_version}; this release makes "
            f"{NOISE_VERSION}, and the same steps would give another model: resume it with the release that made it"
        )
    return state


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Turn what torch collects from all processes into a CheckpointError."""
    try:
        yield
    except CheckpointException as error:
        raise CheckpointError(f"{what} ({_reasons(error)}); {_REMEDY}") from error


def _reasons(error: CheckpointException) -> str:
    """Of what torch collects from all processes, a BaseException with a page of text, a line."""
    return "; ".join(sorted({f"rank {rank}: {failure[0]}" for rank, failure in error.failures.items()})[:4])


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _publish(partial: Path, target: Path) -> None:
    """Rename a complete checkpoint into place; it replaces one of the same step that an earlier run left."""
    if target.exists():
        _discard(target)
    partial.rename(target)
    _sync_folder(target.parent)


def _discard(path: Path) -> None:
    """Remove a checkpoint so that no part of it ever looks complete."""
    doomed = path.with_name(f".partial-old-{path.name}")
    path.rename(doomed)
    shutil.rmtree(doomed)


def _make_room(directory: Path) -> None:
    """Make the folder, without what killed processes left."""
    directory.mkdir(parents=True, exist_ok=True)
    for leftover in directory.glob(".partial-*"):
        shutil.rmtree(leftover)


def _write_state(folder: Path, state: TrainerState) -> None:
    """Write what a checkpoint holds besides tensors, durably and at once."""
    new = folder / f".{_STATE_FILE}"
    with new.open("wb") as file:
        file.write(json.dumps(asdict(state), sort_keys=True, indent=1).encode())
        file.flush()
        os.fsync(file.fileno())
    new.rename(folder / _STATE_FILE)
    _sync_folder(folder)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
