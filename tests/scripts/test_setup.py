"""The first minutes: what `scripts/setup` and `scripts/demo` show, with a pip and a Python that only pretend."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PIP = """#!/bin/bash
[[ $2 != dataserver ]] || {{ sleep {compiling}; exit 0; }}
echo "Collecting torch==2.13.0"
echo "  {said}"
for i in $(seq {seconds}); do sleep 1; done
echo "{last}"
exit {code}
"""
WAIT_S = 60


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A repository with the two scripts, an environment that pretends, and no Node.js."""
    folder = tmp_path / "clone"
    (folder / "scripts").mkdir(parents=True)
    (folder / ".venv" / "bin").mkdir(parents=True)
    for name in ("setup", "demo"):
        shutil.copy(REPOSITORY / "scripts" / name, folder / "scripts")
    (folder / "scripts" / "run_demo.py").touch()
    (folder / "pyproject.toml").touch()
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("bash", "cat", "dirname", "grep", "head", "ls", "mkdir", "sed", "seq", "sha256sum", "sleep", "tail"):
        found = shutil.which(name)
        assert found is not None
        (tools / name).symlink_to(found)
    return folder


def pretend(clone: Path, **changes: object) -> None:
    """Give the environment another pip."""
    fields = {"seconds": 0, "said": "Using cached x", "last": "Successfully installed", "code": 0, "compiling": 0}
    for name in ("python", "pip"):
        tool = clone / ".venv" / "bin" / name
        tool.write_text(PIP.format(**(fields | changes)))
        tool.chmod(0o755)


def start(clone: Path, script: str, *arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PATH": str(clone.parent / "tools")}
    command = [clone / "scripts" / script, *arguments]
    return subprocess.Popen(command, env=environment, text=True, stderr=subprocess.PIPE, start_new_session=True)


def until(happens: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not happens():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def survivors(clone: Path) -> list[psutil.Process]:
    """Living processes that work in the clone, or on it."""
    return [
        p
        for p in psutil.process_iter(["cmdline", "status", "cwd"])
        if p.info["status"] != psutil.STATUS_ZOMBIE
        and any(str(clone) in word for word in (p.info["cwd"] or "", *(p.info["cmdline"] or ())))
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("Downloading torch-2.13.0.whl (800 MB)", "Downloading torch-2.13.0.whl (800 MB)"),
        pytest.param("Installing collected packages: mpmath, sympy, torch", "Unpacking torch", marks=pytest.mark.long),
        pytest.param("Hello", "Collecting torch==2.13.0", marks=pytest.mark.long),
    ],
)
def test_installing_says_what_it_does_every_few_seconds_and_happens_once(clone: Path, said: str, shown: str) -> None:
    (clone / ".venv" / "lib" / "python3.11" / "site-packages" / "torch").mkdir(parents=True)
    pretend(clone, seconds=6, said=said)
    setup = start(clone, "setup")
    _, errors = setup.communicate(timeout=WAIT_S)
    assert setup.returncode == 0, errors
    assert errors.splitlines()[0].startswith("Installing torch")
    assert f" s: {shown}\n" in errors
    again = start(clone, "setup")
    assert again.communicate(timeout=WAIT_S)[1] == ""
    assert again.returncode == 0


def test_a_failed_installation_shows_why_and_what_to_do(clone: Path) -> None:
    pretend(clone, last="ERROR: No space left on device", code=1)
    setup = start(clone, "setup")
    _, errors = setup.communicate(timeout=WAIT_S)
    assert setup.returncode == 1
    assert "    ERROR: No space left on device" in errors
    assert "network and some 5 GB" in errors
    assert not (clone / ".venv" / ".installed").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [(["--steps", "3", "--help"], 0, "usage: scripts/demo"), (["--layout", "foo"], 2, "invalid choice: 'foo'")],
)
def test_help_and_wrong_options_of_the_demo_install_nothing(
    clone: Path, arguments: list[str], code: int, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    pretend(clone)
    (clone.parent / "tools" / "python3").symlink_to(sys.executable)
    shutil.copytree(REPOSITORY / "scripts" / "demo_parts", clone / "scripts" / "demo_parts")
    demo = start(clone, "demo", *arguments)
    _, errors = demo.communicate(timeout=WAIT_S)
    assert demo.returncode == code
    assert said in capfd.readouterr().out + errors
    assert not (clone / ".venv" / ".installed").exists()


def test_without_a_python_the_demo_says_which_is_needed_whatever_is_asked(clone: Path) -> None:
    demo = start(clone, "demo", "--help")
    _, errors = demo.communicate(timeout=WAIT_S)
    assert (demo.returncode, errors) == (
        2, "scripts/setup: no Python found; Python 3.11 or newer with pip and venv is required\n"
    )  # fmt: skip


@pytest.mark.parametrize("script", ["setup", "demo"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_while_pip_runs_ends_it_with_one_line(clone: Path, script: str, number: signal.Signals) -> None:
    pretend(clone, seconds=600)
    process = start(clone, script)
    assert process.stderr is not None
    assert process.stderr.readline().startswith("Installing torch")
    process.send_signal(number)
    _, errors = process.communicate(timeout=WAIT_S)
    assert process.returncode == 130
    assert errors == "scripts/setup: interrupted; run it again, it goes on with what is there\n"
    until(lambda: not survivors(clone))  # members of a group that was killed may need a moment


def test_ctrl_c_while_kernels_are_compiled_ends_that_with_one_line(clone: Path) -> None:
    pretend(clone)
    assert start(clone, "setup").wait(WAIT_S) == 0
    pretend(clone, compiling=600)
    process = start(clone, "demo")
    until(lambda: any("dataserver" in (p.info["cmdline"] or ()) for p in survivors(clone)))
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=WAIT_S)
    assert (process.returncode, errors) == (
        130,
        "scripts/setup: interrupted; run it again, it goes on with what is there\n",
    )
    until(lambda: not survivors(clone))  # members of a group that was killed may need a moment


def test_ctrl_c_before_python_listens_ends_the_demo_with_one_line(clone: Path) -> None:
    pretend(clone)
    assert start(clone, "setup").wait(WAIT_S) == 0
    pretend(clone, seconds=600)
    process = start(clone, "demo")
    until(lambda: any("run_demo.py" in " ".join(p.info["cmdline"] or ()) for p in survivors(clone)))
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=WAIT_S)
    assert (process.returncode, errors) == (130, "scripts/demo: interrupted\n")
