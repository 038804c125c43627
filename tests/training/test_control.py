"""The control channel: whoever dies, fails or stops ends the run, and everybody hears who it was."""

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
from torch.distributed import HashStore, TCPStore

from trainclient.exchange.transport import PeerLostError
from trainclient.training.control import Control, RunEndedError

TIMEOUT_S = 3.0
"""Longer than a busy machine keeps a process from running."""
WORLD = 3
DEADLINE_S = 2 * 15 + TIMEOUT_S
"""Twice what is promised."""
SCRIPT = """
import sys, threading
from torch.distributed import TCPStore
from trainclient.exchange.transport import PeerLostError
from trainclient.training.control import Control
port, rank, how, timeout_s = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], float(sys.argv[4])
store = TCPStore("127.0.0.1", port, is_master=False)
with Control(store, rank, 3, f"llm rank {rank}", lambda: f"forward of microbatch {rank}", timeout_s):
    print("ready", flush=True)
    sys.stdin.readline()
    if how == "fail":
        raise RuntimeError("the disk is\\nfull")
    if how == "lose":  # as a collective with the last process
        threading.Event().wait(timeout_s)
        raise PeerLostError("timed out")
    if how == "wait":
        threading.Event().wait()
"""


@contextmanager
def running(*hows: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that do so when they are told to."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with ExitStack() as stack:
        processes = []
        for rank in range(WORLD):
            given = str(server.port), str(rank), hows[rank], str(TIMEOUT_S)
            command = [sys.executable, "-c", SCRIPT, *given]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            processes.append(stack.enter_context(subprocess.Popen(command, text=True, **pipes)))  # type: ignore[call-overload]
        try:
            for process in processes:
                assert process.stdout is not None
                assert process.stdout.readline() == "ready\n"
            time.sleep(2)  # two beats
            yield processes
        finally:
            for process in processes:
                process.send_signal(signal.SIGCONT)
                process.kill()


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit code and stderr, within twice the promised time."""
    _, errors = process.communicate("go\n", timeout=DEADLINE_S)
    return process.returncode, errors


def tell(process: subprocess.Popen[str]) -> None:
    """To do what it shall."""
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "second", "what"),
    [
        (signal.SIGKILL, "wait", "ended; see what it has reported. Its last: forward of microbatch 2 (<string>"),
        (signal.SIGSTOP, "lose", "it is stopped or cut off. Its last: forward of microbatch 2 ("),
    ],
)
def test_a_process_that_is_gone_or_stopped_ends_all_and_is_named(
    number: signal.Signals, second: str, what: str
) -> None:
    """Also where a collective gives up before it is known that the process is stopped."""
    with running("wait", second, "wait") as processes:
        processes[2].send_signal(number)
        tell(processes[1])
        code, errors = ended(processes[0])
        assert code == 1
        assert errors.startswith("trainclient: global rank 2 (llm rank 2) ")
        assert what.partition(" (<")[0] in errors
        assert "The others: global rank 0 (llm rank 0): forward of microbatch 0" in errors
        assert "global rank 1 (llm rank 1): forward of microbatch 1" in errors
        code, errors = ended(processes[1])
        assert code == 1
        assert second == "lose" or not errors
        assert second == "wait" or "RunEndedError: global rank 2 (llm rank 2) has said nothing for" in errors


@pytest.mark.slow
def test_the_first_process_is_missed_too() -> None:
    with running("wait", "wait", "wait") as processes:
        processes[0].kill()
        for process in processes[1:]:
            code, errors = ended(process)
            assert code == 1
            assert errors.startswith("trainclient: global rank 0 ended; see what it has reported. Its last: forward of")


@pytest.mark.slow
def test_what_fails_says_why() -> None:
    with running("wait", "wait", "fail") as processes:
        tell(processes[2])
        code, errors = ended(processes[0])
        assert code == 1
        assert "global rank 2 (llm rank 2) failed: the disk is full. Its last: forward of microbatch 2" in errors


def control(store: HashStore, rank: int, world: int = 2) -> Control:
    return Control(store, rank, world, f"m rank {rank}", lambda: "nothing", TIMEOUT_S)


def test_processes_that_take_their_leave_are_not_missed() -> None:
    store = HashStore()
    first, second = control(store, 0), control(store, 1)
    with first:
        with second:
            time.sleep(0.5)
        time.sleep(0.5)
        assert not first._judged.is_set()


def test_a_lost_contact_is_explained_by_what_the_channel_knows() -> None:
    store = HashStore()
    first, second = control(store, 0), control(store, 1)

    def run() -> None:
        with first:
            time.sleep(0.5)
            second._peers[0].connection.close()
            raise PeerLostError("lost contact")

    words = r"global rank 1 \(m rank 1\) ended; .*global rank 0 \(m rank 0\): nothing"
    with pytest.raises(RunEndedError, match=words) as caught:
        run()
    assert caught.value.reports


def test_strangers_are_turned_away() -> None:
    store = HashStore()
    first, second = control(store, 0), control(store, 1)
    with first, second:
        address = first._listener.getsockname()  # type: ignore[union-attr]
        for word in (b'{"token": "no", "rank": 1}\n', b"GET / HTTP/1.1\r\n\r\n", b"[1]\n", b"x" * (1 << 15)):
            with socket.create_connection(address) as stranger:
                stranger.settimeout(10)
                stranger.sendall(word)
                with pytest.raises((ConnectionError, AssertionError)):
                    assert stranger.recv(1) == b"?"
        assert not first._judged.is_set()
        assert [peer.rank for peer in first._peers] == [1]
