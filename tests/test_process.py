"""What a process does first: descriptors that were closed, output that nobody takes, signals, and being process 1."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from cli.server_process import command, run
from shards import write_pairs

ROOT = Path(__file__).parents[1]
ENVIRONMENT = {**{n: v for n, v in os.environ.items() if n != "RANK"}, "PYTHONPATH": str(ROOT)}
CLOSED = [(1,), (2,), (0,), (0, 1, 2)]

OPENS = """
import os, sys
from dataserver import process
def command():
    with open(sys.argv[1], "w") as data:
        print("printed", flush=True)
        print("said", file=sys.stderr, flush=True)
        assert data.fileno() > 2, data.fileno()
        assert sys.stdin.read() == ""
        os.system("echo from a child; echo from a child >&2")
        data.write("data")
    return 0
sys.exit(process.run("program", command))
"""


def closing(numbers: tuple[int, ...], *line: str | Path) -> list[str]:
    """A command line that runs another one with descriptors closed."""
    closed = " ".join(f"{number}>&-" if number else "0<&-" for number in numbers)
    return ["sh", "-c", f'exec "$@" {closed}', "sh", *map(str, line)]


def ran(line: list[str], **options: object) -> "subprocess.CompletedProcess[str]":
    given = {"stdin": subprocess.DEVNULL, "capture_output": True, "env": ENVIRONMENT, **options}
    return subprocess.run(line, text=True, timeout=60, check=False, **given)  # type: ignore[call-overload]


@pytest.mark.parametrize("numbers", CLOSED)
def test_no_file_gets_the_number_of_what_was_closed(numbers: tuple[int, ...], tmp_path: Path) -> None:
    """Else all that is printed goes into it."""
    done = ran(closing(numbers, sys.executable, "-c", OPENS, tmp_path / "data"))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "data").read_text() == "data"
    assert done.stdout == ("" if 1 in numbers else "printed\nfrom a child\n")
    assert done.stderr == ("" if 2 in numbers else "said\nfrom a child\n")


def test_a_command_does_its_work_with_descriptors_closed(tmp_path: Path) -> None:
    folder = write_pairs(tmp_path / "d", 8, 4)
    assert run("index", folder, "--workers", "1").returncode == 0
    written = {path.name: path.read_bytes() for path in folder.iterdir() if path.name.endswith(".tar.index")}
    for path in folder.glob("*index*"):
        path.unlink()
    done = ran(closing((0, 1, 2), *command("index", folder, "--workers", "2")))
    assert done.returncode == 0, done.stderr
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.name in written} == written
    assert len(written) == 2


TALKS = """
import sys
from dataserver import process
def command():
    for _ in range(5000):
        print("a line that is longer than nothing", file=sys.stderr)
    print("h\\u00e9 \\udcfc \\u2014 done")
    return 0
sys.exit(process.run("program", command))
"""


def test_a_log_that_nobody_takes_ends_nothing() -> None:
    reads, writes = os.pipe()
    os.close(reads)
    for errors in (writes, os.open("/dev/full", os.O_WRONLY)):
        done = ran([sys.executable, "-c", TALKS], capture_output=False, stdout=subprocess.PIPE, stderr=errors)
        os.close(errors)
        assert (done.returncode, done.stdout) == (0, "hé \\xfc — done\n")


def test_what_the_locale_has_no_letters_for_is_escaped() -> None:
    plain = {**ENVIRONMENT, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    done = ran([sys.executable, "-c", TALKS], env=plain)
    assert (done.returncode, done.stdout) == (0, "h\\xe9 \\xfc \\u2014 done\n")


@pytest.mark.parametrize("program", ["dataserver", "trainclient"])
def test_output_that_cannot_be_written_is_one_line(program: str) -> None:
    line = [sys.executable, "-m", program, "--help"]
    with Path("/dev/full").open("w") as full:
        done = ran(line, capture_output=False, stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 2
    assert done.stderr == (
        f"{program}: the output cannot be written (No space left on device); send it where there is room\n"
    )
    reads, writes = os.pipe()
    os.close(reads)
    done = ran(line, capture_output=False, stdout=writes, stderr=subprocess.PIPE)
    os.close(writes)
    assert (done.returncode, done.stderr) == (1, "")


WAITS = """
import os, signal, sys, time
from dataserver import process
process.GRACE_S = 1
def command():
    if sys.argv[1] != "imports":
        process.imports_are_over()
    try:
        print("ready", flush=True)
        while True:
            time.sleep(0.05)  # Python acts on a signal that comes just before a sleep once that is over
    except KeyboardInterrupt as error:
        if sys.argv[1] == "hangs":
            while True:
                time.sleep(0.05)
        print("cleaned up", flush=True)
        return process.ended("program", error)
sys.exit(process.run("program", command))
"""


@pytest.mark.parametrize(
    ("what", "number", "status", "output", "errors"),
    [
        ("imports", signal.SIGTERM, 143, "", "program: stopped by SIGTERM\n"),
        ("imports", signal.SIGINT, 130, "", "program: interrupted\n"),
        ("works", signal.SIGTERM, 143, "cleaned up\n", "program: stopped by SIGTERM\n"),
        ("works", signal.SIGINT, 130, "cleaned up\n", "program: interrupted\n"),
        ("hangs", signal.SIGTERM, 143, "", "program: stopped by SIGTERM\n"),
    ],
)
def test_signals_end_a_command(what: str, number: int, status: int, output: str, errors: str) -> None:
    line = [sys.executable, "-c", WAITS, what]
    with subprocess.Popen(line, stdout=-1, stderr=-1, text=True, env=ENVIRONMENT) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        rest, said = process.communicate(timeout=60)
    assert (process.returncode, rest, said) == (status, output, errors)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_that_it_was_started_to_ignore_stays_ignored(number: signal.Signals) -> None:
    name = number.name.removeprefix("SIG")
    line = ["sh", "-c", f'trap "" {name}; exec "$@"', "sh", sys.executable, "-c", WAITS, "works"]
    with subprocess.Popen(line, stdout=-1, stderr=-1, text=True, env=ENVIRONMENT) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        other = signal.SIGINT if number == signal.SIGTERM else signal.SIGTERM
        process.send_signal(number)
        process.send_signal(other)
        process.communicate(timeout=60)
    assert process.returncode == 128 + other


def test_a_rank_of_torchrun_is_ended_by_the_system() -> None:
    """torchrun takes it for one that it ended itself, and says nothing of it."""
    line = [sys.executable, "-c", WAITS, "works"]
    with subprocess.Popen(line, stdout=-1, stderr=-1, text=True, env={**ENVIRONMENT, "RANK": "0"}) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (-signal.SIGTERM, "")


NAMESPACE = ["unshare", *(() if os.geteuid() == 0 else ("--map-root-user",)), "--pid", "--fork", "--kill-child"]
ORPHANS = """
import os, sys, time
from dataserver import process
def command():
    if os.fork() == 0:
        if os.fork() == 0:
            os._exit(0)  # an orphan, once its parent has ended
        time.sleep(0.2)
        os._exit(0)
    os.wait()
    print("ready", flush=True)
    if sys.argv[1] == "waits":
        time.sleep(60)
    if sys.argv[1] == "killed":
        os.kill(os.getpid(), 9)
    return 7
sys.exit(process.run("program", command))
"""


@pytest.fixture
def first() -> list[str]:
    """Begins the command line of a process 1."""
    tried = subprocess.run([*NAMESPACE, "true"], capture_output=True, text=True, timeout=60, check=False)
    if tried.returncode:
        pytest.skip(f"no process can be the first one of a namespace here: {tried.stderr.strip()}")
    return NAMESPACE


def test_the_first_process_passes_signals_on_and_reaps(first: list[str]) -> None:
    line = [*first, sys.executable, "-c", ORPHANS, "waits"]
    with subprocess.Popen(line, stdout=-1, stderr=-1, text=True, env=ENVIRONMENT) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        (one,) = psutil.Process(process.pid).children()
        until = time.monotonic() + 60
        while len(children := one.children()) > 1 or one.children(recursive=True) != children:
            assert time.monotonic() < until, children
            time.sleep(0.05)
        one.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (143, "program: stopped by SIGTERM\n")


@pytest.mark.parametrize(("what", "status", "words"), [("ends", 7, ""), ("killed", 137, "killed by the system")])
def test_the_first_process_ends_as_the_command_does(first: list[str], what: str, status: int, words: str) -> None:
    done = ran([*first, sys.executable, "-c", ORPHANS, what])
    assert (done.returncode, done.stdout) == (status, "ready\n")
    assert words in done.stderr
