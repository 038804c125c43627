"""The control channel: whoever dies, fails or stops ends the run, and everybody hears who it was."""

import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, nullcontext
from pathlib import Path

import pytest
from torch.distributed import HashStore
from training.members import running

from trainclient.exchange.lost_ranks import RankLostError
from trainclient.processes import identity
from trainclient.training import control_channel as control_module
from trainclient.training.control_channel import Control, RunEndedError
from trainclient.training.kill_process import kill_process

TIMEOUT_S = 3.0
"""Longer than a busy machine keeps a process from running."""
DEADLINE_S = 2 * 15 + TIMEOUT_S
"""Twice what is promised."""
IN_RUN = rf"\({re.escape(Path(__file__).name)}:\d+ run\)"
"""Where a test's own function was, as the channel says it."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "second", "what"),
    [
        (signal.SIGKILL, "wait", "ended; see what it has reported. Its last: forward of microbatch 2 ("),
        (signal.SIGSTOP, "lose", "it is stopped or cut off. Its last: forward of microbatch 2 ("),
    ],
)
def test_a_process_that_is_gone_or_stopped_ends_all_and_is_named(
    tmp_path: Path, number: signal.Signals, second: str, what: str
) -> None:
    """Also where a collective gives up before it is known that the process is stopped. Nothing is left of that one."""
    with running(tmp_path, ("wait", second, "wait"), TIMEOUT_S) as members:
        members[2].signal(number)
        members[1].tell()
        code, errors = members[0].ended(DEADLINE_S)
        assert code == 1
        assert errors.startswith("trainclient: global rank 2 (llm rank 2) ")
        assert what in errors
        assert "The others: global rank 0 (llm rank 0): forward of microbatch 0" in errors
        assert "global rank 1 (llm rank 1): forward of microbatch 1" in errors
        code, errors = members[1].ended(DEADLINE_S)
        assert code == 1
        assert second == "lose" or not errors
        assert second == "wait" or "RunEndedError: global rank 2 (llm rank 2) has said nothing for" in errors
        assert members[2].ended(DEADLINE_S)[0] == -signal.SIGKILL


@pytest.mark.slow
def test_the_first_process_is_missed_too(tmp_path: Path) -> None:
    with running(tmp_path, ("wait", "wait", "wait"), TIMEOUT_S) as members:
        members[0].signal(signal.SIGKILL)
        for member in members[1:]:
            code, errors = member.ended(DEADLINE_S)
            assert code == 1
            assert errors.startswith("trainclient: global rank 0 (llm rank 0) ended; see what it has reported. Its l")


@pytest.mark.slow
def test_what_fails_says_why_and_of_several_that_fail_alike_one(tmp_path: Path) -> None:
    with running(tmp_path, ("wait", "fail", "fail"), TIMEOUT_S) as members:
        for member in members[1:]:
            member.tell()
        code, errors = members[0].ended(DEADLINE_S)
        assert code == 1
        (said,) = (k for k in (1, 2) if f"global rank {k} (llm rank {k}) failed: the disk is full. Its last" in errors)
        (_, loud), (_, quiet) = (members[k].ended(DEADLINE_S) for k in (said, 3 - said))
        assert loud.endswith("err == 0. the disk is\nfull\n")
        assert "RunEndedError: global rank" in quiet


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
            second._members[0].socket.close()
            raise RankLostError("lost contact")

    words = r"global rank 1 \(m rank 1\) ended; .*global rank 0 \(m rank 0\): nothing"
    with pytest.raises(RunEndedError, match=words) as caught:
        run()
    assert caught.value.reports


@pytest.mark.parametrize(
    ("beats", "words"),
    [
        (False, rf"global rank 1 \(m rank 1\) has said nothing for \d s; .*: nothing {IN_RUN}$"),
        (True, rf"global rank 0 \(m rank 0\) failed: timed .*: nothing {IN_RUN}\. .*1\): no"),
    ],
)
def test_of_a_contact_that_is_lost_early_who_is_silent_is_the_reason(
    monkeypatch: pytest.MonkeyPatch, beats: bool, words: str
) -> None:
    """A collective that began long before a process was stopped gives up long before that one is missed."""
    for name, seconds in (("BEAT_S", 0.05), ("SILENT_S", 2.0), ("GRACE_S", 0.1)):
        monkeypatch.setattr(control_module, name, seconds)
    store = HashStore()
    first, second = control(store, 0), control(store, 1)
    second._leaving.set()  # it would end this process

    def run() -> None:
        with first:
            time.sleep(0.5)
            raise RankLostError("timed out")

    with second if beats else nullcontext(), pytest.raises(RunEndedError, match=words) as caught:
        run()
    assert caught.value.reports


def test_where_a_process_is_is_found_out_once_for_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """There may be thousands of them, and each look walks the stack of the thread that trains."""
    monkeypatch.setattr(control_module, "BEAT_S", 0.05)
    looks, beats, store = list[str](), list[None](), HashStore()

    def doing() -> str:
        looks.append("looks")
        return "nothing"

    first = Control(store, 0, 9, "m rank 0", doing, TIMEOUT_S)
    monkeypatch.setattr(first, "_look_for_silence", lambda _: beats.append(None))
    with ExitStack() as stack:
        for member in (first, *(control(store, rank, 9) for rank in range(1, 9))):
            stack.enter_context(member)
        until = time.monotonic() + TIMEOUT_S
        while [m.rank >= 0 for m in first._members] != [True] * 8 and time.monotonic() < until:
            time.sleep(0.01)
        begun = len(looks), len(beats)
        time.sleep(0.5)
        assert 0 < len(looks) - begun[0] <= len(beats) - begun[1] + 1


STRANGE = (
    b'{"token": "no", "rank": 1}\n',
    b"GET / HTTP/1.1\r\n\r\n",
    b"[1]\n",
    b"[" * 9000 + b"\n",
    b"x" * (1 << 17),
)


def test_strangers_are_turned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that say nothing, too."""
    monkeypatch.setattr(control_module, "BEAT_S", 0.05)
    monkeypatch.setattr(control_module, "SILENT_S", 2 - TIMEOUT_S)
    store = HashStore()
    first, second = control(store, 0), control(store, 1)
    with first, second:
        address = first._listener.getsockname()  # type: ignore[union-attr]
        for word in STRANGE:
            with socket.create_connection(address) as stranger:
                stranger.settimeout(10)
                stranger.sendall(word)
                with pytest.raises((ConnectionError, AssertionError)):
                    assert stranger.recv(1) == b"?"
        with socket.create_connection(address) as stranger:
            stranger.settimeout(10)
            assert stranger.recv(1) == b""
        assert not first._judged.is_set()
        assert [member.rank for member in first._members] == [1]


def test_a_process_is_ended_by_its_identity_alone() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        found = identity(process.pid)
        boot, namespace, started, number = found.split()
        assert number == str(process.pid)
        others = f"{boot[::-1]} {namespace}", f"{boot} {namespace}0"
        for other in (f"{others[0]} {started}", f"{others[1]} {started}", f"{boot} {namespace} {int(started) - 1}"):
            kill_process(f"{other} {number}")
        for nothing in ("", "?", "a b c d", f"{boot} {namespace} {started} 0", identity()):
            kill_process(nothing)
        assert process.poll() is None
        kill_process(found)
        assert process.wait(DEADLINE_S) == -signal.SIGKILL
    kill_process(found)
    assert identity(process.pid) == ""
