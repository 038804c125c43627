"""The lease of an output: which run owns a folder or file, so that no second run writes there.

A lease is a small file beside what it protects. Its name ends with a number, which grows with each owner: whoever makes
the file of the next number, which only one can, is the owner from then on, and removes the file of the one before. The
owner rewrites its file every few seconds, through the handle that it made it with, so that it can never write into the
file of another owner. No file locks are used: on many network file systems they do nothing.

A lease is free when its owner has released it, or when its process has provably ended: it is on this machine, and no
process has its id and start time. Any other one is taken only when the user says so (`take_over`), or where the same
launcher has started the run again and nothing renews it. Who was thought dead, and was only stopped, finds its file
gone (`Lease.require`) before it publishes anything. Two clocks are never compared: a lease that is not renewed is one
whose content does not change while this process watches it.
"""

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from trainclient.checkpoint.lease_file import RENEW_S, LeaseError, LeaseLostError, Output, block, current
from trainclient.checkpoint.owner import Owner
from trainclient.processes import is_here

CONTENDERS: Final = 100
"""How many others may be faster before taking a lease is given up."""
_UNSUPPORTED: Final = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EINVAL)
"""What file systems without hard links say."""


@dataclass(frozen=True, slots=True)
class FollowedLease:
    """A lease of the run's first process, as another one of the run looks at it."""

    output: Output
    number: int

    @property
    def is_here(self) -> bool:
        """Whether this process sees it: a folder of that name on another machine's own disk has none."""
        try:
            return self.number in self.output.numbers()
        except OSError:
            return False

    def require(self) -> None:
        """Raise LeaseLostError if the run no longer owns the output; OSError if storage does not answer."""
        if not self.output.folder.is_dir() or self.output.numbers()[-1:] != [self.number]:
            raise _lost(self.output, self.number)


class Lease:
    """A lease that this process has; `take` makes one. Several threads may use it."""

    def __init__(self, output: Output, number: int, owner: Owner, descriptor: int, note: str = "") -> None:
        """Own what `take` has taken, through the descriptor of its file."""
        self.output = output
        self.number = number
        self.owner = owner
        self.note = note
        """What a user should know of how it was taken; empty if nothing."""
        self._descriptor = descriptor
        self._renewals = 0
        self._using = threading.Lock()

    @property
    def path(self) -> Path:
        """File of the lease in the folder that it protects."""
        return self.output.path(self.number)

    def renew(self) -> None:
        """Show that this process lives.

        Raises:
            LeaseLostError: it is no longer the owner, or has released it.
            OSError: storage does not answer; nothing is known.
        """
        with self._using:
            if self._descriptor < 0:  # released: its number may be another file's by now
                raise _lost(self.output, self.number)
            self._renewals += 1
            content = block(self.owner, self.number, self._renewals)
            try:
                os.pwrite(self._descriptor, content, 0)
                os.fsync(self._descriptor)  # on NFS nobody sees it before, and a file that is gone is known only here
            except OSError as error:
                if error.errno != errno.ESTALE:
                    raise
            self._require_own()

    require = renew
    """The check before something is published is one with storage, not with what this machine remembers of it."""

    def _require_own(self) -> None:
        try:
            with self.path.open("rb") as file:
                own = os.path.samestat(os.fstat(file.fileno()), os.fstat(self._descriptor))
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ESTALE, errno.ENOTDIR):
                raise
            own = False
        numbers = self.output.numbers() if self.output.folder.is_dir() else []
        if not own or numbers[-1:] != [self.number]:
            raise _lost(self.output, self.number)

    def release(self) -> None:
        """Give it up, if it is still this process's own."""
        with self._using:
            with contextlib.suppress(OSError):
                if os.path.samestat(self.path.stat(), os.fstat(self._descriptor)):
                    self.path.unlink()
            descriptor, self._descriptor = self._descriptor, -1
            os.close(descriptor)


def _lost(output: Output, number: int) -> LeaseLostError:
    """Why the run with the lease of that number no longer owns an output."""
    with contextlib.suppress(OSError):
        if (taken := current(output)) is not None and taken.number != number:
            return LeaseLostError(
                f"{output.name} was taken over from this run by another one: {taken.whose}. This run ends, and what it "
                "had not published is dropped; start it again when the other one has ended"
            )
    return LeaseLostError(
        f"the lease {output.path(number)} of {output.name} is gone, so another run may own it by now; this run ends. "
        "Let nothing remove that file while a run lives, and start again"
    )


def take(output: Output, owner: Owner, *, take_over: bool = False, after: int = 0) -> Lease:
    """Become the owner of an output, whose folder is made.

    Args:
        output: what to own.
        owner: this run.
        take_over: take it even from a run that lives.
        after: the number of an owner before, whose lease need not be there any more.

    Raises:
        LeaseError: it belongs to another run, or the lease cannot be written or understood.
    """
    try:
        output.folder.mkdir(parents=True, exist_ok=True)
        for _ in range(CONTENDERS):
            found = current(output)
            number, note = after + 1, ""
            if found is not None:
                number = max(number, found.number + 1)
                note = found.note if take_over and not found.is_free else found.require_free(owner.launch)
            lease = _make(output, number, owner, note)
            if lease is not None:
                return lease
    except OSError as error:
        raise _unusable(output, error) from None
    raise LeaseError(f"{output.name} is taken by one run after the other; start one of them only")


def require_free(output: Output) -> None:
    """Raise LeaseError if an output can be seen to belong to another run at once; `take` looks longer."""
    try:
        found = current(output)
    except OSError as error:
        raise _unusable(output, error) from None
    if found is not None and (found.owner is None or is_here(found.owner.process)):
        found.require_free()


def _unusable(output: Output, error: OSError) -> LeaseError:
    reason = "it is no folder" if isinstance(error, FileExistsError) else error.strerror
    return LeaseError(
        f"{output.name} cannot be used ({reason}: {error.filename or output.folder}); check that this user may "
        f"write to {output.folder}, and its storage, or give another {output.option}"
    )


def _make(output: Output, number: int, owner: Owner, note: str) -> Lease | None:
    """Make the lease of a number, which only one process can; None if another one was faster."""
    written = output.draft(owner.attempt)
    descriptor = os.open(written, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    lease = Lease(output, number, owner, descriptor, note)
    try:
        os.write(descriptor, block(owner, number, 0))
        os.fsync(descriptor)
        made = _link(written, lease.path)
    except BaseException:
        os.close(descriptor)
        raise
    finally:
        written.unlink(missing_ok=True)
    if not made:
        os.close(descriptor)
        return None
    try:
        lease.require()
        for other in output.numbers():
            if other < number:
                output.path(other).unlink(missing_ok=True)
        for draft in output.drafts():
            draft.unlink(missing_ok=True)
    except BaseException:
        lease.release()
        raise
    return lease


def _link(written: Path, path: Path) -> bool:
    """Give a file its name at once with its content, unless another one has that name, or the owner removed it."""
    try:
        path.hardlink_to(written)
    except FileNotFoundError:
        return False
    except FileExistsError:
        return path.exists() and path.samefile(written)  # on NFS the answer to a link that was made may be lost
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        return _reserve_and_rename(written, path)
    return True


def _reserve_and_rename(written: Path, path: Path) -> bool:
    """The same where there are no hard links: an empty file reserves the name."""
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
    except FileExistsError:
        return False
    try:
        written.rename(path)
    except FileNotFoundError:
        path.unlink(missing_ok=True)
        return False
    return True


@contextlib.contextmanager
def renewed(leases: Sequence[Lease], lost: Callable[[str], None]) -> Iterator[None]:
    """Renew leases from a thread while it is entered.

    Args:
        leases: of this process.
        lost: called from the thread, once, with what is to be said when one is lost.
    """
    left = threading.Event()

    def beat() -> None:
        while not left.wait(RENEW_S):
            for lease in leases:
                try:
                    lease.renew()
                except LeaseLostError as error:
                    lost(str(error))
                    return
                except OSError:  # storage may answer again; nothing is published before it does
                    continue

    thread = threading.Thread(target=beat, name="leases", daemon=True)
    thread.start()
    try:
        yield
    finally:
        left.set()
        thread.join()
