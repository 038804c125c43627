"""What tests start processes with: it goes on where the process that they fork from has ended."""

import os
import socket
import subprocess
import sys

import ports
import pytest
from cli import preforked


def test_another_mother_follows_one_that_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    theirs.close()
    mother = subprocess.Popen([sys.executable, "-S", "-c", ""])
    monkeypatch.setattr(preforked, "_mother", (mother, ours))
    with pytest.raises(OSError, match=r"Broken pipe|has ended"):
        preforked._ask({"wait": 1}, [])
    assert preforked._mother is None
    assert ours.fileno() == -1
    assert mother.returncode is not None


def test_an_answer_that_a_timeout_cut_off_is_not_the_next_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    ours, theirs = socket.socketpair()
    mother = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
    monkeypatch.setattr(preforked, "_mother", (mother, ours))
    monkeypatch.setattr(preforked, "_exactly", interrupt)
    with theirs, pytest.raises(KeyboardInterrupt):
        preforked._ask({"wait": 1}, [])
    assert preforked._mother is None
    assert mother.returncode is not None


def test_a_process_of_another_mother_has_ended_when_it_is_gone() -> None:
    assert preforked.waited(os.getpid()) == [0, 0]
    gone = subprocess.Popen([sys.executable, "-S", "-c", ""])
    gone.wait()
    assert preforked.waited(gone.pid) == [gone.pid, 0]


UNREAPED = """
import os, sys
pid = os.fork()
if not pid:
    os.read(0, 1)
    os._exit(3)
print(pid, flush=True)
os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
print("ended", flush=True)
os.read(0, 1)
"""


def test_a_process_of_another_mother_has_ended_when_nobody_reaps_it() -> None:
    line = [sys.executable, "-S", "-c", UNREAPED]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        pid = int(other.stdout.readline())
        assert preforked.waited(pid) == [0, 0]
        other.stdin.write("\n")
        assert other.stdout.readline() == "ended\n"
        assert preforked.waited(pid) == [pid, 0]


def test_ports_are_free_where_the_system_gives_all_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "CANDIDATES", range(0))
    found = ports.free_ports(20)
    assert len({*found}) == 20
    (few,) = ports.free_ports(1)
    assert few not in found
    monkeypatch.setattr(ports, "CANDIDATES", range(few, few + 1))
    assert few not in ports.free_ports(2), "it was given before"
    monkeypatch.setattr(ports, "TRIES", 1)
    with pytest.raises(OSError, match=r"[01] ports are free; 9 are required"):
        ports.free_ports(9)
