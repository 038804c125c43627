"""What a user sees in the first second of any command: what it does, and no traceback."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cli.server_process import command, run

import dataserver.cli
import trainclient.__main__
from dataserver.planning.kernels.cache import COMPILING
from dataserver.serving.config import ServerConfig

ROOT = Path(__file__).parents[2]
TRAINCLIENT = [sys.executable, "-m", "trainclient"]
SILENT = socket.create_server(("127.0.0.1", 0))
"""Takes connections and says nothing, so that a command waits for it."""
COMMANDS = {
    "serve": command("serve", "--dataset", "d=/nothing-here"),
    "simulate": command("simulate", "--job", "no.yaml"),
    "index": command("index", "/nothing-here"),
    "lint": command("lint", "/nothing-here"),
    "convert": command("convert", "/nothing-here", "/nothing-there"),
    "describe": command("describe", "/nothing-here"),
    "plan": command("plan", "--job", "no.yaml", "--step", "0"),
    "fit": command("fit", "--job", "no.yaml", "--server", "127.0.0.1:1"),
    "towers": command("towers", "--job", "no.yaml"),
    "sizes": command("sizes", "/nothing-here", "--output", "/nothing-here/sizes.json"),
    "ray": command("ray", "--config", "no.yaml"),
    "top": command("top", "127.0.0.1:1"),
    "web": command("web", "127.0.0.1:1", "--listen", "127.0.0.1:0", "--web-cert", "/nothing-here"),
    "doctor": command("doctor", f"127.0.0.1:{SILENT.getsockname()[1]}"),
    "bench": command("bench", "/nothing-here"),
    "warm": command("warm"),
    "train": [*TRAINCLIENT, "train", "--job", "no.yaml", "--servers", "127.0.0.1:1"],
    "export": [*TRAINCLIENT, "export", "--checkpoint", "/nothing-here", "--module", "m", "--output", "/nothing-here"],
    "checkpoints": [*TRAINCLIENT, "checkpoints", "/nothing-here"],
    "orchestrate": [*TRAINCLIENT, "orchestrate"],
    "profile": [*TRAINCLIENT, "profile", "--backbone", "llama3-7b", "--output", "/nothing-here/profile.json"],
    "memory": [*TRAINCLIENT, "memory", "--memory-gb", "1", "--job", "no.yaml", "--servers", "127.0.0.1:1"],
}
MOMENTS_S = (0.0, 0.05, 0.2, 0.5)


def test_every_command_is_among_them() -> None:
    assert COMMANDS.keys() == dataserver.cli.COMMANDS.keys() | trainclient.__main__.SAYS.keys()


@pytest.mark.parametrize(
    ("name", "delay_s"),
    [
        pytest.param(name, delay_s, marks=[] if (i + j) % len(MOMENTS_S) == 0 else pytest.mark.long)
        for i, name in enumerate(COMMANDS)
        for j, delay_s in enumerate(MOMENTS_S)
    ],
)
def test_ctrl_c_ends_in_one_line(name: str, delay_s: float, tmp_path: Path) -> None:
    """Counted from the first line that the command says: before it, Python itself is starting."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    with subprocess.Popen(COMMANDS[name], stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        first = process.stderr.readline()
        assert first.startswith(f"{name}: "), first
        time.sleep(delay_s)
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
        process.wait(60)
    assert "Traceback" not in rest
    program = "dataserver" if name in dataserver.cli.COMMANDS else "trainclient"
    last = rest.strip().splitlines()[-1]
    assert last.startswith(f"{program}: ")
    # To a shell a process that its signal ended has status 130 as well; Python ends so where it had left signals alone.
    status = 130 if process.returncode == -signal.SIGINT else process.returncode
    if last.endswith(f"{program}: interrupted"):
        assert status == 130
    else:
        assert status == 2 or process.returncode == -signal.SIGINT, "it was quicker, and said what is wrong"


MOMENTS = {
    "while it starts": "importing('{program}.cli')",
    "while it imports the command": "importing('{command}')",
    "behind its last line": "atexit.register(interrupt)",
}
SITE = """import atexit, os, signal, sys

def interrupt():
    os.kill(os.getpid(), {number})

def importing(name):
    class Finder:
        def find_spec(self, wanted, *_):
            if wanted == name:
                sys.meta_path.remove(finder)
                interrupt()
    finder = Finder()
    sys.meta_path.insert(0, finder)

"""


@pytest.mark.parametrize(
    ("moment", "number", "status", "words"),
    [
        *((moment, signal.SIGINT, 130, "interrupted") for moment in MOMENTS),
        ("while it imports the command", signal.SIGTERM, 143, "stopped by SIGTERM"),
    ],
)
@pytest.mark.parametrize(
    ("program", "name", "imports"),
    [
        ("dataserver", "simulate", "dataserver.cli.simulate"),
        ("trainclient", "export", "trainclient.checkpoint.export"),
    ],
)
def test_a_signal_ends_in_one_line_at_either_end_of_a_command(
    program: str, name: str, imports: str, moment: str, number: int, status: int, words: str, tmp_path: Path
) -> None:
    """The process interrupts itself, so that it is neither sooner nor later."""
    line = [sys.executable, "-m", program, name, "--no-such-flag"]
    (tmp_path / "sitecustomize.py").write_text(
        SITE.replace("{number}", str(int(number))) + MOMENTS[moment].format(program=program, command=imports)
    )
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", ""), str(ROOT), str(ROOT / "protos")])
    environment = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(line, capture_output=True, text=True, env=environment, timeout=120, check=False)
    assert done.stderr.endswith(f"{program}: {words}\n"), done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.count(words) == 1
    assert done.returncode == status


def test_what_is_mistyped_is_named_with_what_is_nearest() -> None:
    assert run("srve").refusal() == (
        "dataserver: there is no command 'srve'; did you mean serve?; `dataserver --help` lists all"
    )
    assert "--stpes is unknown; did you mean --steps?" in run("simulate", "--job", "a", "--stpes", "3").refusal()
    assert "--step" in run("plan", "--job", "a", "--step", "x").refusal()


WITHOUT_DOCSTRINGS = """
import json, sys
from cli.server_process import run
print(json.dumps({name: run(name, "--help").stdout for name in sys.argv[1:]}))
"""


def test_help_is_the_same_where_python_drops_docstrings() -> None:
    names = list(dataserver.cli.COMMANDS)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-OO", "-c", WITHOUT_DOCSTRINGS, *names],
        capture_output=True, text=True, env=environment, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {name: run(name, "--help").stdout for name in names}


def test_help_of_serve_shows_the_ranges_of_its_numbers() -> None:
    shown = run("serve", "--help").stdout
    ranges = {}
    for name, field in ServerConfig.model_json_schema()["properties"].items():
        limits = field.get("anyOf", [field])[0]
        if "minimum" in limits:
            ranges[name] = f"--{name.replace('_', '-')} {limits['minimum']}..{limits['maximum']}"
    assert len(ranges) == 11
    assert [name for name, range_ in ranges.items() if range_ not in shown] == []


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("plan", ["--step", "0"]),
        ("simulate", []),
        ("fit", ["--server", "127.0.0.1:1"]),
        ("towers", ["--devices", "8", "--devices-per-node", "8", "--device-bytes", "1"]),
    ],
)
def test_on_a_new_machine_what_plans_says_that_it_compiles(name: str, options: list[str], tmp_path: Path) -> None:
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    words = command(name, "--job", "no.yaml", *options)
    done = subprocess.run(words, capture_output=True, text=True, env=environment, timeout=120, check=False)
    assert f"{name}: {COMPILING}" in done.stderr.splitlines()
    assert "no dataset is configured" in done.stderr.splitlines()[-1]
