"""The control channel: each second every process says that it lives and what it does, and learns when the run is over.

The first process listens; the others connect. Whoever ends without a word closes its connection, which is noticed at
once; whoever is stopped goes silent. Then all processes end, with a message that names the one and says what each one
did last. Nothing of the training itself travels here, and it works while every other thread waits in a collective.
"""

import contextlib
import json
import os
import secrets
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from traceback import walk_stack, walk_tb
from types import FrameType, TracebackType
from typing import Any, Self

from torch._C._distributed_c10d import Store

from trainclient.exchange.lost_ranks import RankLostError, plain_text
from trainclient.processes import identity
from trainclient.stream.errors import ClientError
from trainclient.training.kill_process import kill_process
from trainclient.training.traceback_frames import is_ours, is_users

BEAT_S = 1.0
SILENT_S = 5.0
"""Seconds that a process may be late beyond `timeout_s`."""
GRACE_S = 3.0
"""Seconds for the main thread to find the error by itself and report it properly."""
MAX_LINE = 1 << 16
"""Longest line, in bytes, that is read."""
MAX_STRANGERS = 64
"""Connections of processes that have not said yet who they are, beyond one for each rank."""
MAX_DOING = 200
"""Longest text of what a process does, in characters."""
MAX_FRAMES = 2
"""Innermost functions of ours or the user's that a message names to say where a process was."""
MAX_NAMED = 64
"""Largest number of processes whose last operation a message tells."""
ADDRESS_KEY = "disttrain/control"


class RunEndedError(RankLostError):
    """Another process ended, failed or stopped; says which, and what all processes did last."""

    def __init__(self, message: str, *, reports: bool) -> None:
        super().__init__(message)
        self.reports = reports
        """Whether this process is the one to report it."""


@dataclass(slots=True)
class _Member:
    """The other end of one connection."""

    socket: socket.socket
    rank: int = -1
    """Its rank; -1 until it has introduced itself."""
    name: str = ""
    process: str = ""
    """Identity of the process, as of `processes.identity`."""
    doing: str = "nothing yet"
    heard: float = field(default_factory=time.monotonic)
    received: bytearray = field(default_factory=bytearray)

    @property
    def silent_s(self) -> float:
        """Seconds since its last message."""
        return time.monotonic() - self.heard

    def read_lines(self) -> list[bytes] | None:
        """The whole lines that have come since the last call; None if the other end is gone, or says too much."""
        try:
            data = self.socket.recv(1 << 16)
        except BlockingIOError:
            return []
        except OSError:
            return None
        *lines, rest = bytes(self.received + data).split(b"\n")
        self.received = bytearray(rest)
        return lines if data and all(len(line) <= MAX_LINE for line in (*lines, rest)) else None


class Control:
    """This process's end of the control channel while it is entered."""

    def __init__(
        self, store: Store, rank: int, world_size: int, name: str, doing: Callable[[], str], timeout_s: float
    ) -> None:
        """Meet the others.

        Args:
            store: of this attempt; where the first process leaves its address.
            rank: of this process.
            world_size: of the run.
            name: what this process is, for messages.
            doing: what it does at the moment; called from a thread.
            timeout_s: how long a process may be silent.

        Raises:
            OSError: the first process cannot be reached.
        """
        self._rank, self._world_size, self._name, self._doing = rank, world_size, name, doing
        self._timeout_s = timeout_s + SILENT_S
        self._verdict, self._blamed, self._cause, self._left_at = "", -1, "", ""
        self._judged, self._leaving, self._left = threading.Event(), threading.Event(), threading.Event()
        self._sending, self._deciding = threading.Lock(), threading.Lock()
        self._members: list[_Member] = []
        self._gone: set[int] = set()
        self._listener: socket.socket | None = None
        if rank == 0:
            host = os.environ.get("MASTER_ADDR", "127.0.0.1")
            self._token = secrets.token_hex(16)
            local = host in ("localhost", "127.0.0.1", "::1")
            self._listener = socket.create_server(("127.0.0.1" if local else "", 0), backlog=min(world_size, 1024))
            port = self._listener.getsockname()[1]
            address = "127.0.0.1" if local else host
            store.set(ADDRESS_KEY, json.dumps([address, port, self._token, identity(), name]))
        elif world_size > 1:
            found_host, port, self._token, first, first_name = json.loads(store.get(ADDRESS_KEY))
            connection = socket.create_connection((found_host, port), timeout=timeout_s)
            member = _Member(connection, 0, f"global rank 0 ({first_name})", first)
            self._members.append(member)
            hello = {"token": self._token, "rank": rank, "name": name, "process": identity()}
            self._send(member, hello)
        self._main = threading.get_ident()
        self._thread = threading.Thread(target=self._watch, name="control", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._left_at = _stack_text(reversed(list(walk_tb(traceback))))
        self._leaving.set()
        # A collective gives up at `timeout_s`, when a stopped process is not yet known to be one.
        lost = isinstance(error, RankLostError)
        if lost and self._judged.wait(SILENT_S + GRACE_S):
            raise RunEndedError(self._verdict, reports=self.reports) from error
        failed = isinstance(error, Exception) and not getattr(error, "known_to_all", False)
        told = error is not None and failed and self._fail(error, lost=lost)
        self._left.set()
        self._thread.join()
        for member in self._members:
            if not failed:
                self._send(member, {"bye": True})
            member.socket.close()
        if self._listener is not None:
            self._listener.close()
        if told:
            raise RunEndedError(self._verdict, reports=lost and self.reports) from error

    def _fail(self, error: BaseException, *, lost: bool) -> bool:
        """Tell the others why this process ends. Returns whether the verdict says it for all.

        Whoever has lost contact knows no more than the verdict; of others that fail alike, one says it.
        """
        said = " ".join(plain_text(error).split())[:1000] or type(error).__name__
        cause = type(error).__name__ if isinstance(error, ClientError) else said  # servers fail all, each in its words
        if self._rank == 0 or (lost and self._silent):
            self._failed(None, said, cause, lost=lost)
        for member in self._members if self._rank else []:
            self._send(member, {"failed": said, "cause": cause, "lost": lost})
        judged = self._judged.wait(GRACE_S)
        return judged and (lost or (self._blamed != self._rank and self._cause == cause))

    @property
    def reports(self) -> bool:
        """Whether it is for this process to say what the control channel found."""
        return self._rank == 0 or 0 in self._gone

    def fail(self, said: str) -> None:
        """End the run from another thread than the main one, which may wait for long: this process fails with that."""
        self._failed(None, said, said, lost=False)

    def _watch(self) -> None:
        """The thread: beats, listens, judges."""
        with selectors.DefaultSelector() as selector:
            sources = [(p.socket, p) for p in self._members]
            for sock, member in [*sources, *([] if self._listener is None else [(self._listener, None)])]:
                sock.setblocking(False)
                selector.register(sock, selectors.EVENT_READ, member)
            beat = 0.0
            while not self._left.is_set() and not self._judged.is_set():
                for key, _ in selector.select(timeout=BEAT_S / 4):
                    self._read(key.data, selector)
                if time.monotonic() - beat >= BEAT_S:
                    beat = time.monotonic()
                    doing = {"doing": self._last()}
                    for member in [p for p in self._members if p.rank >= 0]:
                        self._send(member, doing)
                    self._look_for_silence(selector)
        if self._judged.is_set():
            self._end()

    def _read(self, member: _Member | None, selector: selectors.BaseSelector) -> None:
        """What has come from a member, or from one that joins. The first process reads thousands of them a second."""
        if member is None:
            assert self._listener is not None
            try:
                connection, _ = self._listener.accept()
            except OSError:  # who came has left again, or there is no descriptor left for it
                return
            if len(self._members) >= self._world_size + MAX_STRANGERS:
                connection.close()
                return
            connection.setblocking(False)
            self._members.append(_Member(connection))
            selector.register(connection, selectors.EVENT_READ, self._members[-1])
            return
        lines = member.read_lines()
        if lines is None or not all(self._take(member, line) for line in lines):
            self._drop(member, selector)
            if member.rank >= 0 and member.rank not in self._gone:
                self._lose(member)

    def _drop(self, member: _Member, selector: selectors.BaseSelector) -> None:
        selector.unregister(member.socket)
        self._members.remove(member)
        member.socket.close()

    def _take(self, member: _Member, line: bytes) -> bool:
        """Understand a line; False closes the connection, for a stranger or one that takes its leave."""
        try:
            word = json.loads(line)
        except (ValueError, RecursionError):
            return False
        member.heard = time.monotonic()
        if not isinstance(word, dict):
            return False
        if member.rank < 0:
            rank = word.get("rank")
            if not isinstance(rank, int) or not 0 < rank < self._world_size:
                return False
            if not secrets.compare_digest(str(word.get("token")).encode(), self._token.encode()):
                return False
            member.rank, member.name = rank, f"global rank {rank} ({str(word.get('name'))[:200]})"
            member.process = str(word.get("process", ""))[:200]
        if "end" in word and member.rank == 0:
            told = str(word.get("cause", "")), str(word.get("stopped", ""))
            self._decide(str(word["end"])[:MAX_LINE], int(word.get("rank", 0)), *told)
        elif "failed" in word:
            said, cause = (str(word.get(key, ""))[:1000] for key in ("failed", "cause"))
            self._failed(member, said, cause, lost=bool(word.get("lost")))
        elif "bye" in word:
            self._gone.add(member.rank)
            return False
        member.doing = str(word.get("doing", member.doing))[:MAX_DOING]
        return True

    def _look_for_silence(self, selector: selectors.BaseSelector) -> None:
        for member in [p for p in self._members if p.silent_s > self._timeout_s]:
            if member.rank < 0:  # a stranger
                self._drop(member, selector)
            else:
                self._miss(member)

    @property
    def _silent(self) -> list[_Member]:
        """Processes that have missed some beats."""
        return [p for p in self._members if p.rank >= 0 and p.silent_s > SILENT_S]

    def _lose(self, member: _Member) -> None:
        """A process has ended without a word; one that was silent before was killed for that."""
        if member.silent_s > SILENT_S:
            self._miss(member)
        else:
            self._judge(member, "ended; see what it has reported")

    def _miss(self, member: _Member) -> None:
        what = f"has said nothing for {member.silent_s:.0f} s; it is stopped or cut off"
        self._judge(member, what, silent=member.process)

    def _failed(self, member: _Member | None, said: str, cause: str, *, lost: bool) -> None:
        """A process says why it ends, this one if `member` is None. If it lost contact, a silent one is to blame."""
        if lost and self._silent:
            self._miss(max(self._silent, key=lambda p: p.silent_s))
        else:
            self._judge(member, f"failed: {said}", cause)

    def _judge(self, member: _Member | None, what: str, cause: str = "", silent: str = "") -> None:
        """One process is lost, this one if `member` is None, so the run is over."""
        own, doing = f"global rank {self._rank} ({self._name})", self._last()
        others = [
            (p.name, p.doing) for p in sorted(self._members, key=lambda p: p.rank) if p is not member and p.rank >= 0
        ]
        if member is not None:
            others.insert(0, (own, doing))
            self._gone.add(member.rank)
        name, doing, rank = (own, doing, self._rank) if member is None else (member.name, member.doing, member.rank)
        more = f"; and {len(others) - MAX_NAMED} more" if len(others) > MAX_NAMED else ""
        last = "; ".join(": ".join(other) for other in others[:MAX_NAMED]) or "none"
        self._decide(f"{name} {what}. Its last: {doing}. The others: {last}{more}", rank, cause, silent)

    def _decide(self, verdict: str, blamed: int, cause: str = "", silent: str = "") -> None:
        """The run is over: why, whose failure it is, what others may fail of likewise, and whose silence it was."""
        with self._deciding:
            if self._judged.is_set():
                return
            self._verdict, self._blamed, self._cause = verdict, blamed, cause
            if self._rank == 0:
                # Of one character JSON may make six bytes, and the cause comes with it.
                word = {"end": verdict[: MAX_LINE // 8], "rank": blamed, "cause": cause, "stopped": silent}
                for member in [p for p in self._members if p.rank >= 0]:
                    self._send(member, word)
            self._judged.set()
        kill_process(silent)

    def _end(self) -> None:
        """End the process, unless its main thread is about to."""
        if self._leaving.wait(GRACE_S):
            return
        if self.reports:
            sys.stderr.write(f"trainclient: {self._verdict}\n")
        sys.stderr.flush()
        os._exit(1)

    def _last(self) -> str:
        """What this process does, and where its main thread is in our own code."""
        frame = sys._current_frames().get(self._main)
        at = self._left_at or _stack_text(walk_stack(frame) if frame is not None else ())
        return f"{self._doing()} ({at or 'elsewhere'})"[:MAX_DOING]

    def _send(self, member: _Member, word: dict[str, Any]) -> None:
        """Send a line; one that cannot take it is found by its silence, or when it is read."""
        with self._sending, contextlib.suppress(OSError):
            member.socket.sendall(json.dumps(word).encode() + b"\n")


def _stack_text(frames: Iterable[tuple[FrameType, int]]) -> str:
    """The innermost places in our own code and the user's, of frames from the inside out."""
    own = (f for f in frames if is_ours(f[0].f_code.co_filename) or is_users(f[0].f_code.co_filename))
    named = (f"{Path(frame.f_code.co_filename).name}:{line} {frame.f_code.co_name}" for frame, line in own)
    return " < ".join(islice(named, MAX_FRAMES))
