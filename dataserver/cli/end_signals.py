"""Waiting for the signals that end a command that serves."""

import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

ENDED: Final = 0
"""What `wake` makes the wait return: no signal has this number."""


@contextmanager
def end_signals() -> Iterator[tuple[Callable[[], int], Callable[[], object]]]:
    """A function that waits for the next SIGTERM or SIGINT, and `wake`, which makes it return `ENDED`.

    Python runs signal handlers in the main thread, which a signal delivered to another thread, or just before the main
    thread begins to wait, does not wake. The byte that Python writes for each signal does. It is acted upon in ordinary
    code, so that no lock is held there, as one might be where a handler interrupts.
    """
    reader, writer = socket.socketpair()
    with reader, writer:
        writer.setblocking(False)
        # Before the handlers: a signal in between still has its default action instead of being lost.
        before = signal.set_wakeup_fd(writer.fileno())
        handlers = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield lambda: reader.recv(1)[0], lambda: writer.send(bytes([ENDED]))
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(before)
