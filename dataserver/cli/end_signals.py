"""Waiting for the signals that end a command that serves."""

import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

ENDED: Final = 0
"""What `wake` makes the wait return: no signal has this number."""
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def end_signals() -> Iterator[tuple[Callable[..., int | None], Callable[[], object]]]:
    """A function that waits for the next SIGTERM or SIGINT, and `wake`, which makes it return `ENDED`.

    The function may be told for how many seconds to wait at most; it returns None where nothing comes.

    Python runs signal handlers in the main thread, which a signal delivered to another thread, or just before the main
    thread begins to wait, does not wake. The byte that Python writes for each signal does. It is acted upon in ordinary
    code, so that no lock is held there, as one might be where a handler interrupts.
    """
    reader, writer = socket.socketpair()
    ended = threading.Event()

    def wake() -> None:
        ended.set()
        with suppress(BlockingIOError):  # as many signals as it takes are waiting there: these wake as well
            writer.send(bytes([ENDED]))

    def next_signal(timeout_s: float | None = None) -> int | None:
        reader.settimeout(timeout_s)
        number = None
        while number not in _SIGNALS and not ended.is_set():  # others with a handler write there, too
            try:
                number = reader.recv(1)[0]
            except (TimeoutError, BlockingIOError):
                return None
        return ENDED if ended.is_set() else number

    with reader, writer:
        writer.setblocking(False)
        # Before the handlers: a signal in between still has its default action instead of being lost.
        before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        handlers = {number: signal.signal(number, lambda *_: None) for number in _SIGNALS}
        try:
            yield next_signal, wake
        finally:
            for number, handler in handlers.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: it was not Python's
            signal.set_wakeup_fd(before)
