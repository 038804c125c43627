"""Files and folders that are written whole or not at all: under another name beside theirs, then renamed.

What fails leaves nothing behind, and what was there as it was. Servers and trainers use this alike; it imports nothing
of ours.
"""

import errno
import os
import re
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, TextIO

TEMP_SUFFIX: Final = ".disttrain-tmp"
"""Nobody else's files have it, so that old ones may be removed."""
TEMP_LIFETIME_S: Final = 86_400.0
"""Something temporary is written within hours; what is older was left by a killed process."""
STDOUT: Final = 1
_STREAMS: Final = {"-": STDOUT, "/dev/stdout": STDOUT, "/dev/stderr": 2}
_DESCRIPTOR: Final = re.compile(r"/(?:dev|proc/self)/fd/(\d{1,9})")
_LONGEST_PART: Final = 48
"""Characters of a name that stand in a temporary one: with all of them it could be too long."""


class OutputError(ValueError):
    """A file or folder that cannot be written; the message names what asked for it, and why."""


@contextmanager
def writing(flag: str, path: Path, what: str = "a file") -> Iterator[None]:
    """Say which flag names what cannot be written.

    Raises:
        OutputError: the storage refused what was done meanwhile.
        BrokenPipeError: who read it is gone.
    """
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(
            f"{flag} {path} cannot be written ({error.strerror or error}); name {what} in a folder that exists and"
            " that you may write to, with room on its disk"
        ) from error


def require_writable(flag: str, path: Path | None) -> None:
    """Raise OutputError now where a file could not be written after much work, as far as that can be told."""
    if path is None or descriptor_of(path) is not None:
        return
    with writing(flag, path):
        if _is_special(path):
            return
        target = Path(os.path.realpath(path))
        _replaced(target)
        target.parent.stat()  # one that is not there is said as that
        if not os.access(target.parent, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def write_output(flag: str, path: Path, content: bytes | str) -> None:
    """`write_whole` for a file that a flag names; OutputError where it cannot be written."""
    with writing(flag, path):
        write_whole(path, content)


def write_whole(path: Path, content: bytes | str) -> None:
    """Write a file as a whole, or leave what is there.

    A link stays, and what it leads to is replaced. Pipes, devices and open descriptors (`/dev/stdout`, `-`) are written
    to as they are. A file keeps its mode; a new one has what the umask leaves.

    Raises:
        OSError: it cannot be written.
    """
    data = content.encode(errors="surrogateescape") if isinstance(content, str) else content
    number = descriptor_of(path)
    if number is not None:
        if number == STDOUT and sys.stdout is not None:
            sys.stdout.flush()
        with os.fdopen(os.dup(number), "wb") as stream:
            stream.write(data)
    elif _is_special(path):
        with path.open("wb") as stream:
            stream.write(data)
    else:
        with beside(Path(os.path.realpath(path))) as temp:
            temp.write_bytes(data)


def tells_on(path: Path | None) -> TextIO:
    """Where a command says what it did: stdout, unless the file that it wrote is that."""
    return sys.stderr if path is not None and descriptor_of(path) == STDOUT else sys.stdout


def descriptor_of(path: Path) -> int | None:
    """The open descriptor that a path stands for; None: it is the name of a file."""
    found = _DESCRIPTOR.fullmatch(str(path))
    return int(found[1]) if found else _STREAMS.get(str(path))


@contextmanager
def beside(path: Path) -> Iterator[Path]:
    """Yield the path of an empty file in the folder of `path`; on success it is synced and takes its place.

    Raises:
        OSError: it cannot be written; `path` is a folder, or may not be written to.
    """
    before, temp = _replaced(path), _temporary(path)
    os.close(os.open(temp, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666))
    try:
        yield temp
        descriptor = os.open(temp, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if before is not None:
                with suppress(PermissionError):  # only root gives files away
                    os.fchown(descriptor, before.st_uid, before.st_gid)
                os.fchmod(descriptor, stat.S_IMODE(before.st_mode))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        temp.replace(path)
    except BaseException:
        temp.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Yield an empty folder beside `path`; on success all of it is synced, and it takes that name.

    Raises:
        OSError: it cannot be written, or there is something at `path`.
    """
    import shutil  # servers need none

    if os.path.lexists(path):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
    made = [folder for folder in (path.parent, *path.parent.parents) if not folder.exists()]
    temp = _temporary(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for old in path.parent.glob(f".*{TEMP_SUFFIX}"):
            with suppress(FileNotFoundError):  # of another one, which has just become whole
                if old.name.startswith(_prefix(path)) and old.stat().st_mtime < time.time() - TEMP_LIFETIME_S:
                    shutil.rmtree(old, ignore_errors=True)
        temp.mkdir()
        yield temp
        for file in temp.rglob("*"):
            _sync(file)
        _sync(temp)
        temp.rename(path)
    except BaseException:
        shutil.rmtree(temp, ignore_errors=True)
        for folder in made:
            with suppress(OSError):  # something else lies in it by now
                folder.rmdir()
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Put the names in a folder on storage, where its file system can."""
    try:
        _sync(folder)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _prefix(path: Path) -> str:
    return f".{path.name[:_LONGEST_PART]}."


def _temporary(path: Path) -> Path:
    return path.with_name(f"{_prefix(path)}{os.urandom(6).hex()}{TEMP_SUFFIX}")


def _is_special(path: Path) -> bool:
    """Whether a path leads to what is neither a file nor a folder."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def _replaced(path: Path) -> os.stat_result | None:
    """What a file will replace; OSError where it is a folder, or may not be written to."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    return found
