"""Processes of the demo: what a user sees of one that fails, and that none is left."""

import signal
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from demo_parts.processes import FailedError, Processes

IGNORES_SIGTERM = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready'); time.sleep(600)"


def processes(folder: Path, check: Callable[[], None] = lambda: None) -> Processes:
    return Processes(folder, lambda: None, check)


def script(text: str) -> list[str]:
    return [sys.executable, "-c", text]


def test_lines_are_handed_on_whole(tmp_path: Path) -> None:
    seen: list[str] = []
    with processes(tmp_path) as running:
        text = "import time; print('one', end='', flush=True); time.sleep(0.3); print(' line'); print('two')"
        running.run([running.start("counting", script(text))], seen.append)
    assert seen == ["one line", "two"]


def test_a_failure_shows_the_last_lines_of_its_log(tmp_path: Path) -> None:
    text = "import sys; [print('line', i) for i in range(50)]; sys.exit('dataserver: no shards there')"
    with processes(tmp_path) as running, pytest.raises(FailedError) as failed:
        running.run([running.start("indexing", script(text))], print)
    assert failed.value.code == 1
    shown = str(failed.value).splitlines()
    assert shown[0] == f"indexing ended with exit code 1. The end of {tmp_path / 'indexing.log'}:"
    assert "    dataserver: no shards there" in shown
    assert "    line 49" in shown
    assert "    line 1" not in shown


def test_a_killed_process_is_named_with_its_signal(tmp_path: Path) -> None:
    text = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    with processes(tmp_path) as running, pytest.raises(FailedError, match="training was killed by SIGKILL"):
        running.run([running.start("training", script(text))], print)


def test_one_of_several_that_fails_ends_the_wait(tmp_path: Path) -> None:
    with processes(tmp_path) as running:
        sleeper = running.start("measuring 0", script("import time; time.sleep(600)"))
        failing = running.start("measuring 1", script("import sys; sys.exit(3)"))
        with pytest.raises(FailedError, match="measuring 1 ended with exit code 3"):
            running.run([sleeper, failing], print)
    assert sleeper.process.returncode == -signal.SIGTERM


def test_a_server_that_ends_is_said_with_its_reason(tmp_path: Path) -> None:
    with processes(tmp_path) as running:
        server = running.start("server 0", script("import sys; sys.exit('dataserver: the port is taken')"))
        with pytest.raises(FailedError, match=r"(?s)server 0 ended with exit code 1.*the port is taken"):
            running.address(server)


def test_an_address_is_found_behind_other_lines(tmp_path: Path) -> None:
    text = "print('INFO loading'); print('listening on 127.0.0.1:5', flush=True); import time; time.sleep(600)"
    with processes(tmp_path) as running:
        assert running.address(running.start("server 0", script(text))) == "127.0.0.1:5"


def test_nothing_survives_an_interruption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a process that ignores SIGTERM, and a child of one that ends."""
    monkeypatch.setattr("demo_parts.processes.END_S", 0.5)
    parent = (
        f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {IGNORES_SIGTERM!r}]); time.sleep(600)"
    )
    others = set(psutil.Process().children(recursive=True))
    family: list[psutil.Process] = []

    def interrupt() -> None:
        family[:] = set(psutil.Process().children(recursive=True)) - others
        if sum(log.read_text().count("ready") for log in tmp_path.glob("*.log")) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), processes(tmp_path, interrupt) as running:
        running.run([running.start("one", script(IGNORES_SIGTERM)), running.start("two", script(parent))], print)
    assert len(family) == 3
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not alive
