"""Leases as files: their names, what stands in them, and whether one may be taken."""

import errno
import json
import os
import re
import stat
import time
from dataclasses import asdict, dataclass, fields
from enum import Enum
from pathlib import Path
from typing import Any, Final

from trainclient.checkpoint.owner import Owner
from trainclient.processes import has_ended, is_here

FORMAT: Final = 1
"""Version of what a lease holds: another field takes another format."""
RENEW_S: Final = 5.0
"""How often an owner renews."""
WATCH_PERIODS: Final = 3
"""Periods of the owner for which a lease is watched."""
MAX_WATCH_S: Final = 60.0
"""Longest watch, whatever a lease says of its period."""
BLOCK_BYTES: Final = 2048
"""Size of a lease, so that one write replaces all of it."""
POLL_S: Final = 0.2
LOOKS: Final = 100
"""How often the owner may change while somebody looks who it is."""


class LeaseError(ValueError):
    """An output that belongs to another run, or whose lease cannot be written or understood."""


class LeaseLostError(LeaseError):
    """Another run has taken over what this one owned."""


@dataclass(frozen=True, slots=True)
class Output:
    """What a lease protects: a folder of checkpoints, or a file."""

    name: str
    """What it is called in messages, with its path."""
    folder: Path
    """Folder that holds its lease."""
    stem: str = ".lease"
    """How the names of its leases begin."""
    option: str = "--checkpoint.directory"
    """Option that names what is leased."""

    @classmethod
    def file(cls, name: str, path: Path, option: str) -> "Output":
        """The lease of a file lies beside it; what links lead to it have the same one."""
        target = Path(os.path.realpath(path))
        return cls(name, target.parent, f".{target.name}.lease", option)

    def path(self, number: int) -> Path:
        """The lease of that number."""
        return self.folder / f"{self.stem}-{number:06d}"

    def draft(self, attempt: str) -> Path:
        """Where an attempt writes a lease before it has its number."""
        return self.folder / f"{self.stem}-{attempt}"

    def drafts(self) -> list[Path]:
        """The files of all attempts, including killed ones; OSError if the folder cannot be read."""
        form = re.compile(re.escape(self.stem) + r"-[0-9a-f]{32}")
        return [path for path in self.folder.iterdir() if form.fullmatch(path.name)]

    def numbers(self) -> list[int]:
        """Numbers of all leases that are there, the owner's last; OSError if the folder cannot be read."""
        form = re.compile(re.escape(self.stem) + r"-([0-9]{6}|[1-9][0-9]{6,})")
        found = (form.fullmatch(path.name) for path in self.folder.iterdir())
        return sorted(int(match[1]) for match in found if match)


class _Watched(Enum):
    """What becomes of a lease."""

    RENEWED = 0
    GONE = 1
    """Released, or taken by another run."""
    SILENT = 2


@dataclass(frozen=True, slots=True)
class Found:
    """A lease as somebody left it."""

    output: Output
    number: int
    content: bytes
    owner: Owner | None
    """None where it cannot be understood."""
    period_s: float = RENEW_S
    problem: str = ""
    """Why it cannot be understood."""

    @property
    def path(self) -> Path:
        """File of the lease that was found."""
        return self.output.path(self.number)

    @property
    def is_free(self) -> bool:
        """Whether its owner has provably ended."""
        return self.owner is not None and has_ended(self.owner.process)

    def refusal(self, what_is_known: str) -> LeaseError:
        """Why a second run may not write there."""
        return LeaseError(
            f"{self.output.name} belongs to another run: {self.owner}. {what_is_known}; or give another "
            f"{self.output.option}"
        )

    @property
    def whose(self) -> str:
        """The owner of the lease, for messages."""
        return str(self.owner or f"whoever wrote {self.path}")

    @property
    def note(self) -> str:
        """What is said when it is taken from an owner that may live."""
        return f"{self.output.name} is taken over from {self.whose}"

    def require_free(self, launch: str = "") -> str:
        """Raise LeaseError, with the owner and what to do, unless it may be taken.

        Args:
            launch: see `Owner`; of the run that asks.

        Returns:
            What a user should know of how it is taken; empty if nothing.
        """
        if self.owner is None:
            raise LeaseError(
                f"the lease {self.path} of {self.output.name} cannot be understood ({self.problem}); make sure that no "
                "run writes there, then give --take-over"
            )
        if self.is_free:
            return ""
        if is_here(self.owner.process):
            raise self.refusal("It is alive: wait for it, end it, or take over with --take-over")
        watched_s = min(self.period_s * WATCH_PERIODS, MAX_WATCH_S)
        becomes = self._watched(watched_s)
        if becomes is _Watched.GONE:
            return ""
        if becomes is _Watched.RENEWED:
            raise self.refusal(
                "It is alive: it renewed its lease while this run watched. Wait for it, end it, or take over with "
                "--take-over"
            )
        if launch and launch == self.owner.launch:  # which ends all processes before it starts them again
            return self.note
        raise self.refusal(
            f"It did not renew its lease in the {watched_s:.3g} s that this run watched, but only its own machine "
            "could tell that it has ended: if it has, take over with --take-over"
        )

    def _watched(self, seconds: float) -> "_Watched":
        """What becomes of the lease within that time, by this process's clock."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            time.sleep(min(POLL_S, seconds))
            now = current(self.output)
            if now is None or now.number != self.number:
                return _Watched.GONE
            if now.content != self.content:
                return _Watched.RENEWED
        return _Watched.SILENT


def current(output: Output) -> Found | None:
    """The lease of an output, if there is one.

    Raises:
        OSError: its folder cannot be read.
    """
    for _ in range(LOOKS):
        numbers = output.numbers() if output.folder.is_dir() else []
        if not numbers:
            return None
        try:
            return _read(output, numbers[-1])
        except FileNotFoundError:  # it was just released, or taken
            continue
    raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(output.folder))


def _read(output: Output, number: int) -> Found:
    path = output.path(number)
    content, problem = b"", "it is empty"
    for _ in range(5):  # without hard links it is empty for a moment
        try:
            content = _content(path)
        except FileNotFoundError:
            raise
        except OSError as error:
            problem = error.strerror or type(error).__name__
            break
        if content:
            return _understood(output, number, content)
        time.sleep(POLL_S / 2)
    return Found(output, number, content, None, problem=problem)


def _content(path: Path) -> bytes:
    """What a lease holds, which no link and no pipe can be; OSError if it cannot be read."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        return os.read(descriptor, BLOCK_BYTES + 1)
    finally:
        os.close(descriptor)


def _understood(output: Output, number: int, content: bytes) -> Found:
    try:
        data = json.loads(content)
        if not isinstance(data, dict) or "format" not in data:
            raise ValueError("no format")
    except (ValueError, RecursionError):
        return Found(output, number, content, None, problem="it is not a lease")
    if data["format"] != FORMAT:
        release = str(data.get("release", "unknown"))[:40]
        problem = f"it has format {str(data['format'])[:40]}, written by release {release}; this one knows {FORMAT}"
        return Found(output, number, content, None, problem=problem)
    names = [f.name for f in fields(Owner)]
    period = data.get("period_s")
    if not all(isinstance(data.get(name), str) for name in names) or not isinstance(period, int | float):
        return Found(output, number, content, None, problem="fields are missing")
    period_s = float(period) if 0 < period < MAX_WATCH_S else MAX_WATCH_S
    return Found(output, number, content, Owner(**{name: data[name] for name in names}), period_s)


def block(owner: Owner, number: int, renewals: int) -> bytes:
    """The content of a lease that has been renewed so often."""
    content: dict[str, Any] = {"format": FORMAT, "number": number, "period_s": RENEW_S, **asdict(owner)}
    return json.dumps(content | {"renewals": renewals}).encode().ljust(BLOCK_BYTES - 1) + b"\n"
