"""The checkpoints of a folder: model, optimizer and cursor, readable by any layout of the same stream.

A checkpoint is a folder `step-N`: the tensors as torch.distributed.checkpoint writes them, each once, under their names
in the whole model, and `trainer.json`. It is written under a name that holds the attempt's, and renamed when it is
complete, so a folder named `step-N` is always whole, whenever the processes are killed.

Who takes over a folder first renames what attempts before it have not published. So a process that was stopped on its
way to publish, and goes on, finds nothing to rename, whatever it had checked before.
"""

import errno
import itertools
import json
import os
import shutil
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from dataserver.outputs import sync_folder
from trainclient.checkpoint.lease import Lease
from trainclient.checkpoint.lease_file import LeaseLostError
from trainclient.checkpoint.resume_from import ResumeFrom
from trainclient.checkpoint.selection import PARTIAL, Resumption, Stored, resumption, survey
from trainclient.checkpoint.state import (
    OTHERWISE,
    REMEDY,
    STATE_FILE,
    CheckpointError,
    FileSum,
    Line,
    Manifest,
    SaveError,
    TrainerState,
    Writer,
    read_manifest,
    write_manifest,
)
from trainclient.checkpoint.sums import SummingFiles, damages, dealt, extras
from trainclient.checkpoint.writer import PlainWriter
from trainclient.exchange.gathering import broadcast_text, gather_texts


class Checkpoints:
    """The checkpoints of one folder, used by all processes together."""

    def __init__(self, directory: Path, keep: int, group: ProcessGroup, lease: Lease | None = None) -> None:
        """Use a folder; all processes do so together.

        Args:
            directory: the same on all processes.
            keep: how many of the newest to keep, of those that this run wrote.
            group: all processes, over gloo.
            lease: of the folder; only the first process has it. Without one nothing else may use the folder.
        """
        self._directory = directory
        self._keep = keep
        self._group = group
        self._leads = group.rank() == 0
        self._lease = lease
        self._number = lease.number if lease is not None else 0
        attempt = lease.owner.attempt if lease is not None else uuid.uuid4().hex
        self._attempt = broadcast_text(f"{self._number:08d}-{attempt}", group)
        self._line = Line()

    def save(self, tensors: dict[str, Tensor], state: TrainerState) -> None:
        """Write a checkpoint; all processes call it with the same state, each with its own tensors.

        Raises:
            SaveError: it cannot be written, or another run owns the folder by now; the same one on all processes. What
                was written of it is removed.
            RuntimeError: another process is gone.
        """
        target = self._directory / f"step-{state.step:08d}"
        partial = self._directory / f".partial-{self._attempt}-{target.name}"
        failure = f"the checkpoint {target} cannot be written"
        self._led(failure, self._make_room)
        files = SummingFiles()
        try:
            save(tensors, storage_writer=PlainWriter(partial, files), process_group=self._group)
        except CheckpointException as error:  # on all processes, when none of them writes any more
            self._led(failure, lambda: self._give_up(partial))
            raise SaveError(f"{failure} ({_reasons(error)}); {REMEDY}") from error
        sums = gather_texts(json.dumps({name: (s.bytes, s.crc32c) for name, s in files.sums.items()}), self._group)
        self._led(failure, lambda: self._complete(partial, target, state, sums))

    def amend(self, state: TrainerState) -> None:
        """Replace what the trainer says of itself in the checkpoint of a state's step; errors as in `save`."""
        target = self._directory / f"step-{state.step:08d}"
        self._led(f"the checkpoint {target} cannot be written", lambda: self._amend(target, state))

    def resume_point(self, wanted: int | ResumeFrom = ResumeFrom.NEWEST, settings: str = "") -> Stored | None:
        """The checkpoint to continue from, whose files are as they were written; the same on all processes.

        Args:
            wanted: a step, or which one.
            settings: see `resumption`.

        Raises:
            CheckpointError: there is no such checkpoint, it is damaged, or a process does not see it.
            SaveError: the folder cannot be written to, better known now than at the first checkpoint; or another run
                owns it by now.
        """
        found: list[Resumption] = []
        failure = f"no checkpoint can be written to {self._directory}"
        names = json.loads(self._led(failure, lambda: self._look(found, wanted, settings)))
        for number, name in enumerate(names):
            path = self._directory / str(name)
            manifest, damage = self._read(path)
            if manifest is not None and not damage:
                if found:
                    self._line = found[0].line(found[0].candidates[number])
                return Stored(path, manifest)
            self._require_own_on_all()  # whoever owns the folder by now may have removed it
            if wanted != ResumeFrom.NEWEST_WHOLE:
                raise CheckpointError(f"the checkpoint {path} cannot be read ({damage}); {OTHERWISE}")
            self._warn(f"{path} is passed over ({damage})")
        if names:
            raise CheckpointError(f"no checkpoint in {self._directory} is whole; begin anew in another folder")
        if found:
            self._line = found[0].line(None)
        return None

    def load(self, path: Path, tensors: dict[str, Tensor]) -> None:
        """Read a checkpoint into existing tensors; all processes call it, each with its own tensors.

        Raises:
            CheckpointError: it cannot be read, a tensor is not there, or has another shape; on all processes.
            SaveError: another run owns the folder by now, and may have removed it.
        """
        said = gather_texts(_unlike(path, tensors), self._group)
        if any(said):
            self._require_own_on_all()
            raise CheckpointError(next(text for text in said if text))
        try:
            load(tensors, checkpoint_id=path, process_group=self._group)
        except CheckpointException as error:  # on all processes, as in `save`
            self._require_own_on_all()
            raise CheckpointError(f"the checkpoint {path} cannot be read ({_reasons(error)}); {REMEDY}") from error

    def _look(self, found: list[Resumption], wanted: int | ResumeFrom, settings: str) -> str:
        """Names of the checkpoints to try, as JSON. From here on no attempt before this one publishes anything."""
        make_folder(self._directory)
        self._make_room()
        try:
            seen = survey(self._directory)
            found.append(resumption(seen, wanted, settings))
        finally:
            self._require_lease()  # whoever owns the folder by now may have removed some meanwhile
        for line in (*seen.warnings, *found[0].notes):
            self._warn(line)
        return json.dumps([stored.path.name for stored in found[0].candidates])

    def _read(self, path: Path) -> tuple[Manifest | None, str]:
        """What a checkpoint says of itself, and what is wrong with it; the same on all, which each read their share."""
        rank, manifest, more = self._group.rank(), None, []
        try:
            manifest = read_manifest(path)
            files = manifest.files or {}
            readers = dealt({name: file.bytes for name, file in files.items()}, self._group.size())
            found = damages(path, {name: files[name] for name, reader in readers.items() if reader == rank})
            more = extras(path, manifest) if self._leads else []
        except (CheckpointError, OSError) as error:
            seen = os.path.exists(path / STATE_FILE)  # noqa: PTH110 - it raises nothing
            found = [str(error) if seen else _NOT_SEEN]
        said = gather_texts(json.dumps(found), self._group)
        problems = [f"rank {r}: {problem}" for r, text in enumerate(said) for problem in json.loads(text)]
        if self._leads and manifest is not None:
            if manifest.files is None:
                self._warn(f"{path} was written without checksums, so that damage to it would not be noticed")
            if more:
                self._warn(f"{path} has files that it was not written with, which are not read: {', '.join(more)}")
        return manifest, broadcast_text("; ".join(problems[:4]), self._group)

    def _make_room(self) -> None:
        """Make the folder, without what attempts before this one were writing when they ended, or still write."""
        self._require_lease()
        self._directory.mkdir(parents=True, exist_ok=True)
        for number, path in enumerate(sorted(self._directory.iterdir())):
            named = PARTIAL.fullmatch(path.name)
            if named is None or not path.is_dir() or self._is_of_a_later_owner(int(named[1])):
                continue
            own = path.name.startswith(f".partial-{self._attempt}-")
            doomed = path if own else self._own(f"dropped-{number}-{uuid.uuid4().hex[:8]}")
            with suppress(FileNotFoundError):  # who was writing it has found out, too
                shutil.rmtree(path.rename(doomed), ignore_errors=True)

    def _is_of_a_later_owner(self, number: int) -> bool:
        """Whether this process was stopped behind its look at the lease, and somebody else writes by now."""
        return self._lease is not None and number > self._number

    def _complete(self, partial: Path, target: Path, state: TrainerState, sums: list[str]) -> None:
        """Give what all have written its name, and remove what is older than the ones to keep."""
        files = {name: FileSum(*s) for text in sums for name, s in json.loads(text).items()}
        try:
            write_manifest(partial, Manifest(state, files, self._writer(), self._line))
            self._publish(partial, target)
        except OSError:
            self._give_up(partial)
            raise
        own = [s for s in survey(self._directory).stored if s.manifest.state.run == state.run]
        own = sorted((s for s in own if self._line.holds(s.manifest.line.number, s.step)), key=lambda s: s.step)
        for old in own[: -self._keep]:
            self._require_lease()
            try:
                shutil.rmtree(old.path.rename(self._own(f"old-{old.path.name}")))
            except OSError as error:  # the new one is there all the same
                self._warn(f"{old.path}, which is older than the ones to keep, is not removed: {error}")

    def _publish(self, partial: Path, target: Path) -> None:
        """Rename a complete checkpoint into place; what has its name already is set aside, and not removed."""
        before = target.stat() if target.exists() else None
        self._require_lease()
        if before is not None:
            names = (
                target.with_name(f"aside-{target.name}-{self._attempt.rpartition('-')[2][:8]}-{n}")
                for n in itertools.count(1)
            )
            aside = target.rename(next(name for name in names if not name.exists()))
            if not os.path.samestat(before, aside.stat()):  # this process was stopped, and is no longer the owner
                aside.rename(target)
            self._require_lease()
            self._warn(f"{target} was there before this run came to that step; what was there is now {aside}")
        partial.rename(target)  # fails where there is one
        sync_folder(target.parent)

    def _amend(self, target: Path, state: TrainerState) -> None:
        """Rename another manifest into a checkpoint, from a folder that the next owner sweeps, as in `_publish`."""
        self._make_room()
        partial = self._own(f"amended-{target.name}")
        try:
            partial.mkdir()
            write_manifest(partial, replace(read_manifest(target), state=state))
            self._require_lease()
            (partial / STATE_FILE).replace(target / STATE_FILE)
            sync_folder(target)
        finally:
            self._give_up(partial)

    def _give_up(self, partial: Path) -> None:
        """Remove what could not be published; raises LeaseLostError if that is why."""
        shutil.rmtree(partial, ignore_errors=True)
        self._require_lease()

    def _require_lease(self) -> None:
        if self._lease is not None:
            self._lease.require()

    def _require_own_on_all(self) -> None:
        """Raise SaveError on all processes if another run owns the folder."""
        self._led(f"the lease of {self._directory} cannot be looked at", self._require_lease)

    def _own(self, name: str) -> Path:
        """A folder that is removed, if this process does not come to it, by the next owner."""
        return self._directory / f".partial-{self._attempt}-{name}"

    def _writer(self) -> Writer | None:
        if self._lease is None:
            return None
        owner, now = self._lease.owner, datetime.now(UTC).isoformat(timespec="seconds")
        return Writer(owner.host, owner.pid, owner.attempt, self._lease.number, owner.release, now)

    def _warn(self, text: str) -> None:
        if self._leads:
            sys.stderr.write(f"warning: {text}\n")

    def _led(self, failure: str, action: Callable[[], str | None]) -> str:
        """Have the first process do something while the others wait; what it returns.

        Raises:
            SaveError: storage refuses it, or another run owns the folder.
            CheckpointError: it refuses a checkpoint.
        """
        said: dict[str, Any] = {}
        if self._leads:
            try:
                said = {"done": action() or ""}
            except LeaseLostError as error:
                said = {"lost": str(error)}
            except CheckpointError as error:
                said = {"refused": str(error)}
            except OSError as error:
                reason = f"{error.strerror or type(error).__name__}: {error.filename or self._directory}"
                said = {"lost": f"{failure} (rank 0: {reason}); {REMEDY}"}
        said = json.loads(broadcast_text(json.dumps(said), self._group))
        if "lost" in said:
            raise SaveError(said["lost"])
        if "refused" in said:
            raise CheckpointError(said["refused"])
        return str(said["done"])


_NOT_SEEN: Final = (
    "this process does not see the checkpoint that global rank 0 sees; the checkpoint directory must be on storage "
    "that all processes share"
)


def make_folder(directory: Path) -> None:
    """Make the folder of checkpoints, if it is not there; OSError if it can be neither made nor written to."""
    directory.mkdir(parents=True, exist_ok=True)
    if not os.access(directory, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(directory))


def stored_tensors(path: Path) -> dict[str, TensorStorageMetadata]:
    """The tensors that a checkpoint holds, by name.

    Raises:
        CheckpointError: what says so cannot be read.
    """
    try:
        stored = FileSystemReader(path).read_metadata().state_dict_metadata
    except Exception as error:  # torch keeps it as a pickle, which raises anything if it is damaged
        raise CheckpointError(
            f"the checkpoint {path} cannot be read ({type(error).__name__}: {error}); {REMEDY}"
        ) from None
    return {name: entry for name, entry in stored.items() if isinstance(entry, TensorStorageMetadata)}


def _unlike(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Why tensors cannot be read from a checkpoint, by what it says of itself; empty if they can."""
    try:
        stored = stored_tensors(path)
    except CheckpointError as error:
        return str(error)
    for name, tensor in tensors.items():
        entry = stored.get(name)
        if entry is None or entry.size != tensor.shape:
            there = "nothing" if entry is None else f"{list(entry.size)}"
            return (
                f"the checkpoint {path} holds {there} for {name}, and {list(tensor.shape)} is needed; give the sizes "
                "and module names it was made with"
            )
    return ""


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Turn what torch collects from all processes into a CheckpointError."""
    try:
        yield
    except CheckpointException as error:
        raise CheckpointError(f"{what} ({_reasons(error)}); {REMEDY}") from error


def _reasons(error: CheckpointException) -> str:
    """One line for what torch collects from all processes: a BaseException with a page of text."""
    return "; ".join(sorted({f"rank {rank}: {failure[0]}" for rank, failure in error.failures.items()})[:4])
