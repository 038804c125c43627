"""Which checkpoints a folder has, and which of them a run continues.

The name of a folder decides nothing: what stands in it does, and one whose name and content disagree is passed over.
Checkpoints form lines (`Line`). The newest is the one with the highest step of the newest line, so that a run which
went back to an older step goes on with what it wrote since, and not with what it left behind.
"""

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from trainclient.checkpoint.resume_from import ResumeFrom
from trainclient.checkpoint.state import OTHERWISE, STATE_FILE, CheckpointError, Line, Manifest, read_manifest

NAME: Final = re.compile(r"step-(\d{8,18})")
PARTIAL: Final = re.compile(r"\.partial-(\d{8,})-[0-9a-f]{32}-.+")
"""What an attempt writes until it is complete; the number is that of its lease, which grows with each owner."""
MAX_NAMED: Final = 20
"""How many steps a message names."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A checkpoint that can be read."""

    path: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        """The first step that is not in it."""
        return self.manifest.state.step

    @property
    def order(self) -> tuple[int, int]:
        """The newest has the highest."""
        return self.manifest.line.number, self.step


@dataclass(frozen=True, slots=True)
class Unusable:
    """A folder with the name of a checkpoint that is not counted as one."""

    path: Path
    step: int
    """Step that the folder's name gives."""
    reason: str
    line: int = -1
    """The line that its content names; -1 if none can be read."""
    is_copy: bool = False
    """Whether it holds a checkpoint of another step than its name says."""
    is_empty: bool = False
    """Whether it does not even say what it is."""

    @property
    def problem(self) -> str:
        """The reason, where it is no advice to pass it over."""
        return self.reason.removesuffix(f"; {OTHERWISE}")


@dataclass(frozen=True, slots=True)
class Survey:
    """The checkpoints of a folder."""

    directory: Path
    stored: tuple[Stored, ...]
    """The checkpoints, newest first."""
    unusable: tuple[Unusable, ...]

    @property
    def warnings(self) -> list[str]:
        """What a user should know of folders that are passed over."""
        return [f"{found.path} is passed over: {found.problem}" for found in self.unusable]

    @property
    def next_line(self) -> int:
        """The number of a line that is newer than all that are there."""
        return max([s.manifest.line.number for s in self.stored] + [u.line for u in self.unusable], default=-1) + 1

    def broken(self, step: int) -> list[Unusable]:
        """Checkpoints that cannot be read, of a step or later ones."""
        return [u for u in self.unusable if not u.is_copy and not u.is_empty and u.step >= step]


@dataclass(frozen=True, slots=True)
class Resumption:
    """What a run may continue from."""

    survey: Survey
    candidates: tuple[Stored, ...]
    """Checkpoints in the order in which they are to be tried."""
    asked: tuple[tuple[int, str], ...] = ()
    """What this run adds to the line, as in `Line`."""
    notes: tuple[str, ...] = ()
    """What a user should know."""

    def line(self, chosen: Stored | None) -> Line:
        """The line of a run that continues from one of the candidates, or from none."""
        if chosen is None:
            return Line(self.survey.next_line)
        line, newest = chosen.manifest.line, self.survey.stored[0]
        if chosen is newest and not self.asked and not self.survey.broken(chosen.step):
            return line
        before = (*line.before, (line.number, chosen.step))
        return Line(self.survey.next_line, before, (*line.asked, *self.asked))


def survey(directory: Path) -> Survey:
    """Look at all checkpoints of a folder; OSError if it cannot be read."""
    stored, unusable = [], []
    for path in sorted(directory.iterdir()) if directory.is_dir() else []:
        name = NAME.fullmatch(path.name)
        if name is None or not path.is_dir():
            continue
        step = int(name[1])
        if not has_state(path):
            unusable.append(Unusable(path, step, f"it has no {STATE_FILE}", is_empty=True))
            continue
        try:
            found = Stored(path, read_manifest(path))
        except CheckpointError as error:
            unusable.append(Unusable(path, step, str(error)))
            continue
        if found.step == step:
            stored.append(found)
            continue
        run = found.manifest.state.run or "unknown"
        reason = (
            f"its name says step {step}, and it holds step {found.step} of run {run}; to go back to a step, leave "
            f"names as they are and give --resume-from {found.step}"
        )
        unusable.append(Unusable(path, step, reason, found.manifest.line.number, is_copy=True))
    return Survey(directory, tuple(sorted(stored, key=lambda s: s.order, reverse=True)), tuple(unusable))


def has_state(path: Path) -> bool:
    """Whether a folder says what it is, or cannot be looked into: reading it then says why."""
    try:
        (path / STATE_FILE).stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        pass
    return True


def last_owner(directory: Path) -> int:
    """The highest number of a lease under which anything in a folder was written; OSError if it cannot be read."""
    found = [0]
    for path in directory.iterdir() if directory.is_dir() else []:
        if partial := PARTIAL.fullmatch(path.name):
            found.append(int(partial[1]))
        with suppress(CheckpointError):
            writer = read_manifest(path).writer
            found.append(writer.number if writer is not None else 0)
    return max(found)


def resumption(found: Survey, wanted: int | ResumeFrom, settings: str = "") -> Resumption:
    """What a run may continue from.

    Args:
        found: the folder.
        wanted: a step, or which checkpoint.
        settings: digest of all that the run's losses depend on. A run that was asked to go back to a step, and is
            started again with the same settings, goes on with what it wrote since.

    Raises:
        CheckpointError: there is no such checkpoint, it cannot be read, or there are some where none may be.
    """
    if wanted == ResumeFrom.NONE:
        return _none(found)
    if wanted == ResumeFrom.NEWEST_WHOLE:
        _require_some(found)
        return Resumption(found, found.stored)
    if wanted == ResumeFrom.NEWEST:
        newest = found.stored[:1]
        if broken := found.broken(newest[0].step if newest else 0):
            raise CheckpointError(broken[-1].reason)
        _require_some(found)
        return Resumption(found, newest)
    return _step(found, int(wanted), settings)


def _require_some(found: Survey) -> None:
    """Raise CheckpointError where all folders of checkpoints are passed over: a run would begin anew without a word."""
    if found.unusable and not found.stored:
        last = found.unusable[-1]
        raise CheckpointError(
            f"no folder in {found.directory} can be resumed: {last.path.name}: {last.problem}; put back what is "
            "missing, or give another --checkpoint.directory to begin anew in"
        )


def _none(found: Survey) -> Resumption:
    there = sorted([*(x.path.name for x in found.stored), *(x.path.name for x in found.unusable)])
    if there:
        raise CheckpointError(
            f"--resume-from none begins anew, and {found.directory} has checkpoints ({_some(there)}); give an empty "
            "folder by --checkpoint.directory to begin anew in, or leave --resume-from out to go on with these"
        )
    return Resumption(found, ())


def _step(found: Survey, step: int, settings: str) -> Resumption:
    since = next((s for s in found.stored if (step, settings) in s.manifest.line.asked), None)
    if since is not None:
        note = (
            f"this run went back to step {step} before, and has checkpoints up to step {since.step} since: it goes on "
            f"there. To repeat the steps from {step} on, give another --checkpoint.directory and copy step-{step:08d} "
            "into it"
        )
        return Resumption(found, (since,), notes=(note,))
    for stored in found.stored:
        if stored.step == step:
            return Resumption(found, (stored,), ((step, settings),))
    for unusable in found.unusable:
        if unusable.step == step:
            raise CheckpointError(f"{unusable.path} cannot be resumed: {unusable.reason}")
    if not found.stored:
        raise CheckpointError(
            f"there is no checkpoint of step {step} in {found.directory}, nor any other that can be read; give the "
            "folder that has it by --checkpoint.directory, or leave --resume-from out to begin anew"
        )
    there = _some([str(s.step) for s in sorted(found.stored, key=lambda s: s.step)])
    raise CheckpointError(
        f"there is no checkpoint of step {step} in {found.directory}; there are those of steps {there}: give "
        "--resume-from one of these, newest or newest-whole"
    )


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(names[-MAX_NAMED:]) + more


def newest(path: Path) -> Path:
    """The checkpoint `path`, or the newest in that folder.

    Raises:
        CheckpointError: it is neither, or what is newest cannot be read.
    """
    if (path / STATE_FILE).is_file():
        return path
    found = resumption(survey(path), ResumeFrom.NEWEST).candidates
    if not found:
        raise CheckpointError(f"there is no complete checkpoint {path}, nor one in it; give a folder step-N, or theirs")
    return found[0].path
