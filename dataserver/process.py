"""What a process of either program does first, before it loads anything: its descriptors, its signals, process 1.

Whatever started it may have closed its input and output, may read none of it, and may have made it the first process of
a container, which gets no signal that it has no handler for, and whose duty is to reap whatever loses its parent.
"""

import codecs
import io
import os
import re
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import TYPE_CHECKING, Final, NoReturn

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

GRACE_S: Final = 5
"""What a command gets to clean up after SIGTERM."""
_FATAL: Final = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP, signal.SIGABRT}
"""Signals of errors of the process itself."""
_NOT_UTF8: Final = re.compile("[\ud800-\udfff]")
_ESCAPE: Final = "disttrain.escape"
"""Name of what escapes what cannot be encoded."""
_WORDS: Final = {signal.SIGINT: "interrupted", signal.SIGTERM: "stopped by SIGTERM"}


class Stopped(KeyboardInterrupt):
    """SIGTERM came. What cleans up after Ctrl-C does so after it too."""


def run(program: str, command: Callable[[], int]) -> int:
    """Run a command from its imports on, and give its exit status.

    SIGINT and SIGTERM end it in one line while it imports, with status 130 and 143; `imports_are_over` makes exceptions
    of them. A signal that the process was started to ignore stays ignored.
    """
    codecs.register_error(_ESCAPE, _escape)
    _open_missing()
    if os.getpid() == 1:
        _be_first(program)

    def end(number: int, _frame: FrameType | None) -> NoReturn:
        with suppress(OSError):
            os.write(2, f"{program}: {_WORDS[signal.Signals(number)]}\n".encode())
        os._exit(128 + number)

    defaults = (signal.SIG_DFL, signal.default_int_handler)
    numbers = [number for number in _WORDS if signal.getsignal(number) in defaults and not _ends_itself(number)]
    for number in numbers:
        signal.signal(number, end)
    try:
        return command()
    finally:
        for number in numbers:
            signal.signal(number, end)


def imports_are_over() -> None:
    """Make SIGINT and SIGTERM exceptions from here on, so that commands clean up: KeyboardInterrupt and `Stopped`."""
    if signal.getsignal(signal.SIGINT) not in (signal.SIG_IGN, signal.default_int_handler):
        signal.signal(signal.SIGINT, signal.default_int_handler)
    at_once = signal.getsignal(signal.SIGTERM)
    if not callable(at_once):
        return

    def stop(_number: int, _frame: FrameType | None) -> NoReturn:
        # What is raised inside a finalizer is lost, and what cleans up may wait: a second signal ends it, or the alarm.
        signal.signal(signal.SIGTERM, at_once)
        signal.signal(signal.SIGALRM, lambda *_: at_once(signal.SIGTERM, None))
        signal.alarm(GRACE_S)
        raise Stopped

    signal.signal(signal.SIGTERM, stop)


def ended(program: str, error: KeyboardInterrupt) -> int:
    """Say which signal ended a command; returns its exit status."""
    number = signal.SIGTERM if isinstance(error, Stopped) else signal.SIGINT
    sys.stderr.write(f"{program}: {_WORDS[number]}\n")
    return 128 + number


def with_output(command: Callable[[], int], report: Callable[[Exception], int]) -> int:
    """The exit status of a command, whose output is written when this returns.

    Args:
        command: what it raises, other than errors of the output, passes through.
        report: says in one line what is wrong, and gives the exit status.
    """
    try:
        try:
            return command()
        finally:
            sys.stdout.flush()  # else Python does it when it ends, and prints a traceback where that is impossible
    except OSError as error:
        drop_output()
        if isinstance(error, BrokenPipeError):  # whoever read the output, such as `head`, has seen enough
            return 1
        return report(ValueError(f"the output cannot be written ({error.strerror}); send it where there is room"))


def escaped(text: str) -> str:
    """Text with what is not UTF-8 in it escaped: of names of files, which are any bytes, as `gr\\xfc\\xdfe`."""
    return _NOT_UTF8.sub(lambda found: _of(ord(found[0])), text)


def in_one_line(error: Exception) -> str:
    """What an error says, on one line, escaped; of text that must be UTF-8, which."""
    if isinstance(error, UnicodeEncodeError):
        return f"{escaped(error.object)} is not UTF-8, which is required here; use another name"
    return escaped(" ".join(str(error).split()))


def _of(surrogate: int) -> str:
    """How a surrogate is written. Python has those from U+DC80 on for the bytes of a name that are not UTF-8."""
    return f"\\x{surrogate - 0xDC00:02x}" if 0xDC80 <= surrogate <= 0xDCFF else f"\\u{surrogate:04x}"


def _escape(error: UnicodeError) -> tuple[str, int]:
    """Escape what an encoding, of output, does not have."""
    assert isinstance(error, UnicodeEncodeError)
    text = escaped(error.object[error.start : error.end])
    return text.encode("ascii", "backslashreplace").decode("ascii"), error.end


def children_of(pid: int) -> list[int]:
    """The processes that a process started, those that ended and were not waited for included; by all its threads.

    None where it is gone, or where the kernel does not tell (CONFIG_PROC_CHILDREN).
    """
    from pathlib import Path  # what a process does first goes without

    found: list[int] = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # its thread has ended since
            found += map(int, file.read_text(encoding="ascii").split())
    return found


def drop_output() -> None:
    """Let what is left of the output go nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _ends_itself(number: signal.Signals) -> bool:
    """Whether a process is better ended by the system: torchrun takes one that SIGTERM killed for ended by itself."""
    return number == signal.SIGTERM and "RANK" in os.environ


def _open_missing() -> None:
    """Let what was closed lead nowhere: else a file or socket gets its number, and what is printed goes there.

    What cannot be printed on stderr is dropped and what cannot be encoded is escaped, so that no line of a log ends the
    work; an error of stdout, which holds results, is for the command to tell.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it gets the lowest number that is free
    if sys.stdin is None:
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors=_ESCAPE)
    if sys.stderr is None or sys.stderr is sys.__stderr__:
        encoding = "utf-8" if sys.stderr is None else sys.stderr.encoding
        lines = io.BufferedWriter(_Lossy(2, "w", closefd=False))
        sys.stderr = io.TextIOWrapper(lines, encoding, _ESCAPE, line_buffering=True)


class _Lossy(io.FileIO):
    """A file that drops what it cannot take."""

    def write(self, data: "ReadableBuffer", /) -> int:
        """Write what can be written; says that all was where nothing can be."""
        with suppress(OSError):
            if written := super().write(data):
                return written
        return memoryview(data).nbytes


def _be_first(program: str) -> None:
    """Go on in a process that is not the first one; the first passes signals on, reaps, and ends as that one does."""
    everything = signal.valid_signals() - _FATAL
    before = signal.pthread_sigmask(signal.SIG_BLOCK, everything)
    try:
        child = os.fork()
    except OSError:  # no further process may be started: it serves as the first one
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return
    if child == 0:
        os.setpgid(0, 0)  # else the terminal's Ctrl-C reaches it, and the first process passes another one on
        with suppress(OSError):  # no terminal
            os.tcsetpgrp(0, os.getpgrp())
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return
    while True:
        number = signal.sigwait(everything)
        if number != signal.SIGCHLD:
            os.kill(child, number)
            continue
        for status in _reaped(child):
            code = os.waitstatus_to_exitcode(status)
            if code == -signal.SIGKILL:
                with suppress(OSError):
                    os.write(2, f"{program}: killed by the system, as where memory runs out, or by hand\n".encode())
            os._exit(code if code >= 0 else 128 - code)


def _reaped(child: int) -> list[int]:
    """Reap what has ended; the status of the child if it is among it."""
    found = []
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            found += [ended[1]] if ended[0] == child else []
    return found
