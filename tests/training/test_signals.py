"""Signals reach a process that waits in native code."""

import signal
import subprocess
import sys

import pytest

from trainclient.training.signals import LAUNCHER_PID

SCRIPT = """
import ctypes, sys
from trainclient.training.signals import StopSignals
with StopSignals(float(sys.argv[1])) as stop:
    print("ready", flush=True)
    if sys.argv[2] == "stuck":  # like a collective: no signal interrupts a mutex, and no Python handler runs
        mutex = ctypes.create_string_buffer(64)
        ctypes.CDLL(None).pthread_mutex_lock(mutex)
        ctypes.CDLL(None).pthread_mutex_lock(mutex)
    stop._requested.wait()
print("left", flush=True)
"""


def start(grace: str, how: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SCRIPT, grace, how]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_process_that_leaves_in_time(number: signal.Signals) -> None:
    process = start("60", "free")
    process.send_signal(number)
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, output, errors) == (0, "left\n", "")


def test_a_process_that_is_stuck() -> None:
    process = start("0.2", "stuck")
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert output == ""
    assert errors == f"process {process.pid} did not finish its step in 0.2 s: ended\n"


def test_a_launcher_that_is_gone_already(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    monkeypatch.setenv(LAUNCHER_PID, str(gone.pid))
    process = start("60", "free")
    assert process.stdout is not None
    assert process.stdout.read() == "left\n"  # not communicate: it would miss what readline has buffered
    assert process.wait(timeout=60) == 0


def test_signals_work_where_the_launcher_cannot_be_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LAUNCHER_PID, "-1")  # refused by the system, as pidfd_open is in some containers
    process = start("60", "free")
    process.send_signal(signal.SIGTERM)
    assert process.stdout is not None
    assert process.stdout.read() == "left\n"
    assert process.wait(timeout=60) == 0
