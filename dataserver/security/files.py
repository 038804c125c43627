"""Files that decide who is trusted: nobody else may write them, or read the secret ones, and they are read again."""

import logging
import os
import stat
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic
from typing import Final, Generic, TypeVar

MAX_FILE_BYTES: Final = 1 << 20
LOOK_EVERY_S: Final = 1.0
"""Time between two looks at whether a file has changed."""
_ROOT: Final = 0
_OTHERS_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH
_OTHERS_ANYTHING: Final = stat.S_IRWXG | stat.S_IRWXO
_MORE_THAN_GROUP_READS: Final = _OTHERS_ANYTHING & ~stat.S_IRGRP

T = TypeVar("T")
_log = logging.getLogger(__name__)


class SecurityError(ValueError):
    """A certificate, key, token file or policy that cannot be used; the message names the file and what to change."""


def read_trusted(path: Path, what: str, *, secret: bool = False) -> bytes:
    """The bytes of a file that only its owner may change, this user or root.

    Args:
        path: of the file.
        what: it holds, for errors, such as "private key".
        secret: whether others may not read it either. Root's may be read by a group, as Kubernetes mounts secrets.

    Raises:
        SecurityError: it cannot be read, is too large, or others may change it, or read it where it is secret.
    """
    try:
        with open(path, "rb", opener=_without_waiting) as file:
            _check(os.fstat(file.fileno()), path, what, secret)
            found = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise SecurityError(f"the {what} {path} cannot be read: {error.strerror}") from None
    if len(found) > MAX_FILE_BYTES:
        raise SecurityError(f"the {what} {path} has more than {MAX_FILE_BYTES} bytes; name the right file")
    return found


def _without_waiting(path: str, flags: int) -> int:
    """Open a file; a pipe, for which one would wait, is opened at once and refused then."""
    return os.open(path, flags | os.O_NONBLOCK)


def _check(about: os.stat_result, path: Path, what: str, secret: bool) -> None:
    if not stat.S_ISREG(about.st_mode):
        raise SecurityError(f"the {what} {path} is no regular file; name one")
    if about.st_uid not in (_ROOT, os.geteuid()):
        raise SecurityError(
            f"the {what} {path} belongs to user {about.st_uid}, and this process runs as {os.geteuid()}: a file of "
            "this user or of root is required; chown it, or copy it"
        )
    mode = stat.S_IMODE(about.st_mode)
    if not secret:
        if mode & _OTHERS_WRITE:
            raise SecurityError(f"others may write the {what} {path} (mode {mode:04o}); run chmod go-w {path}")
        return
    if mode & (_MORE_THAN_GROUP_READS if about.st_uid == _ROOT else _OTHERS_ANYTHING):
        most = "0640" if about.st_uid == _ROOT else "0600"
        raise SecurityError(
            f"others may read or write the {what} {path} (mode {mode:04o}); {most} or less is required: run "
            f"chmod 600 {path}, or set defaultMode: 0440 where Kubernetes mounts it"
        )


class Watched(Generic[T]):
    """What files say, read again within about a second after they change. Thread-safe.

    What cannot be used changes nothing: what was read before stays in use, and the log says so once. It is tried again,
    since some of it may be used later, such as a certificate that is not valid yet by this machine's clock.
    """

    def __init__(self, paths: Sequence[Path], load: Callable[[], T]) -> None:
        """Read the files.

        Args:
            paths: the files; a link counts as what it leads to.
            load: reads and checks them.

        Raises:
            SecurityError: they cannot be used.
        """
        self._paths = tuple(paths)
        self._load = load
        self._seen = self._states()
        self._value = load()
        self._version = 0
        self._problem = ""
        """Why the files cannot be used as they are now."""
        self._look_at = monotonic() + LOOK_EVERY_S
        self._lock = threading.Lock()
        """Held by the thread that looks; others go on with what was read before."""

    def get(self) -> T:
        """Return what the files say, after a look at them where one is due."""
        if monotonic() >= self._look_at and self._lock.acquire(blocking=False):
            try:
                self._look()
            finally:
                self._lock.release()
        return self._value

    @property
    def version(self) -> int:
        """A number that grows with every change that was taken over."""
        self.get()
        return self._version

    @property
    def problem(self) -> str:
        """Why the files cannot be used as they are now; empty where what they say is in use."""
        self.get()
        return self._problem

    def _look(self) -> None:
        self._look_at = monotonic() + LOOK_EVERY_S
        states = self._states()
        if states == self._seen and not self._problem:
            return
        self._seen = states  # before reading: what changes meanwhile is read with the next look
        try:
            self._value = self._load()
        except SecurityError as error:
            if str(error) != self._problem:
                _log.warning("%s; what was read before stays in use", error)
            self._problem = str(error)
        else:
            self._problem = ""
            self._version += 1
            _log.info("read again: %s", ", ".join(map(str, self._paths)))

    def _states(self) -> tuple[object, ...]:
        return tuple(map(_state, self._paths))


def _state(path: Path) -> object:
    """What changes when a file does, or when a link leads to another one."""
    try:
        found = path.stat()
    except OSError as error:
        return error.errno
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_mode, found.st_uid
