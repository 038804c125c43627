"""Compiling ahead of time: once for a machine, by one process, and only what is complete is called so."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from cli.server_process import command, refused, serving
from planning.test_warmup import plan_and_say
from serving.harness import index
from shards import write_pairs

from dataserver.cli import warm
from dataserver.planning.compiled import is_warm

TIMEOUT_S = 250


@pytest.fixture
def cold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache for this process and those that it starts."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(folder))
    return folder


@pytest.mark.slow
def test_a_cold_server_compiles_for_all_and_then_listens(cold: Path, tmp_path: Path) -> None:
    folder = index(write_pairs(tmp_path / "d", 8, 8))
    warming = subprocess.Popen(command("warm"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with serving("--dataset", f"d={folder}") as server:
        assert is_warm()
        code, served = server.end()
    warmed, warm_said = warming.communicate(timeout=TIMEOUT_S)
    assert (code, warming.returncode) == (0, 0), served + warm_said
    waited, compiled = ("another process compiles the planner's loops" in said for said in (warm_said, served))
    assert waited != compiled, "one of the two compiles, the other waits for it"
    if waited:
        assert warmed.startswith("0 loops compiled in ")
        assert str(cold) in warmed
        starts, ends = served.index("compiling the planner's loops for this processor"), served.index(" loops in ")
        assert starts < ends
    else:
        assert "compiled dataserver.planning.kernels.pipeline._climb\n" in warmed
        assert "once (up to 20 s)" in warm_said
    assert "Traceback" not in served + warm_said
    again = subprocess.run(command("warm"), capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    assert again.stdout.startswith("0 loops compiled in ")
    assert again.stderr == "warm: looking for compiled loops\n"
    compiled, planned = plan_and_say(cold)
    assert not compiled
    assert "compiling" not in planned


LEFT_OUT = """
from dataserver.cli import warm
warm.SHARES = warm.SHARES[:1]
warm.compile_all(print)
"""


@pytest.mark.long
def test_what_is_left_out_is_named_and_nothing_is_called_complete(cold: Path) -> None:
    """In a process of its own, since kernels know from their import where they are kept."""
    line = [sys.executable, "-c", LEFT_OUT]
    done = subprocess.run(line, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert re.search(r"ValueError: compiling left out .*kernels\.greedy\._difference", done.stderr), done.stderr
    assert cold.exists()
    assert not is_warm()


def test_commands_start_no_second_process_that_compiles(cold: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[object] = []
    monkeypatch.setattr(warm.subprocess, "Popen", lambda *arguments, **_: started.append(arguments))
    warm.compile_behind()
    assert len(started) == 1
    folder = warm.place()
    assert folder is not None
    with warm._turn(folder, lambda _: None):
        warm.compile_behind()
    assert len(started) == 1


def test_index_has_a_process_compile_behind_it_and_lint_does_not(cold: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(warm.subprocess, "Popen", lambda line, **_: started.append(line))
    assert "nothing-here" in refused("lint", "/nothing-here")
    assert started == []
    assert "nothing-here" in refused("index", "/nothing-here")
    assert started == [command("warm")]


def test_nothing_is_compiled_where_the_compiler_is_off(cold: Path) -> None:
    environment = {**os.environ, "NUMBA_DISABLE_JIT": "1"}
    done = subprocess.run(
        command("warm"), env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=True
    )
    assert done.stdout.startswith("0 loops compiled in ")
    assert not cold.exists()


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    file = tmp_path / "a-file"
    file.touch()
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(file)}
    done = subprocess.run(
        command("warm"), env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 2
    assert f"none of {file}" in done.stderr
