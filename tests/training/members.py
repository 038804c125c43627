"""Processes that hear of each other over the control channel. To load torch in each would take seconds."""

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from cli.forked import forks
from torch.distributed import TCPStore

from trainclient.exchange.lost_ranks import RankLostError
from trainclient.training.control_channel import Control


@dataclass(frozen=True)
class Member:
    """One of the processes."""

    process: ForkServerProcess
    connection: Connection
    errors: Path
    """Its stderr."""

    def tell(self) -> None:
        """Have it do what it shall."""
        self.connection.send("go")

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def ended(self, deadline_s: float) -> tuple[int, str]:
        """Exit code and stderr, by the deadline."""
        self.process.join(deadline_s)
        assert self.process.exitcode is not None, "it runs on"
        return self.process.exitcode, self.errors.read_text()


@contextmanager
def running(folder: Path, hows: Sequence[str], timeout_s: float) -> Iterator[list[Member]]:
    """Processes that each do so when they are told to: wait, lose or fail."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = forks()
    members = []
    for rank, how in enumerate(hows):
        ours, theirs = context.Pipe()
        errors = folder / f"{rank}.stderr"
        given = (server.port, rank, len(hows), how, timeout_s, theirs, errors)
        members.append(Member(context.Process(target=_member, args=given), ours, errors))
    try:
        for member in members:
            member.process.start()
        for member in members:
            assert member.connection.recv() == "ready"
        time.sleep(2)  # two beats
        yield members
    finally:
        for member in members:
            if member.process.pid is not None:
                member.process.kill()
                member.process.join()


def _member(port: int, rank: int, world: int, how: str, timeout_s: float, connection: Connection, errors: Path) -> None:
    with errors.open("w") as file:
        os.dup2(file.fileno(), 2)
    store = TCPStore("127.0.0.1", port, is_master=False)
    with Control(store, rank, world, f"llm rank {rank}", lambda: f"forward of microbatch {rank}", timeout_s):
        connection.send("ready")
        connection.recv()
        if how == "fail":
            raise RuntimeError("[enforce fail at disk.cpp:1] err == 0. the disk is\nfull")
        if how == "lose":  # as a collective with the last process
            threading.Event().wait(timeout_s)
            raise RankLostError("timed out")
        threading.Event().wait()
