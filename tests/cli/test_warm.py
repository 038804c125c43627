"""Compiling ahead of time: once for a machine, and then nobody waits for a compiler."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from cli.server_process import command, serving
from serving.harness import index
from shards import write_pairs

TIMEOUT_S = 600
PLAN = """
import logging
logging.basicConfig(level=logging.INFO)
from builders.pipelined import sample_plan
print(sample_plan().hash.hex())
from dataserver.planning.planner import plan_step
from builders.colocated import MODULES, STREAM, colocated_job, samples_of
from builders.grouped import published_job
from builders.samples import texts
job = colocated_job(MODULES, **STREAM)
print(plan_step(job, 0, samples_of(job, (30, 10), 0, 3)).num_microbatches)
import numpy as np
print(plan_step(published_job(), 0, texts(np.arange(100, 60_100, 1_000))).num_microbatches)
from dataserver.planning.job.fields import Sizing
from dataserver.planning.stream.grids import patch_grid
from dataserver.video import video_digest
print(patch_grid(640, 480, Sizing().of_frames), video_digest())
"""


def run_warm(**environment: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, **environment}
    return subprocess.run(
        command("warm"), env=variables, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )


@pytest.mark.long
@pytest.mark.timeout(2 * TIMEOUT_S)
def test_two_servers_start_cold_at_once_and_plans_then_compile_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "cache"))
    folder = index(write_pairs(tmp_path / "d", 8, 8))
    warming = subprocess.Popen(command("warm"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with serving("--dataset", f"d={folder}") as server:
        code, served = server.end()
    warmed, warm_said = warming.communicate(timeout=TIMEOUT_S)
    assert (code, warming.returncode) == (0, 0), served + warm_said
    compiled = re.findall(r": compiled (dataserver\.\S+)", served + warm_said)
    assert len(compiled) == len(set(compiled)) > 20, "a kernel was compiled twice"
    assert "Traceback" not in served + warm_said
    assert str(tmp_path / "cache") in warmed
    again = run_warm()
    assert (again.stdout, again.stderr) == (warmed, "warm: looking for compiled kernels\n")
    tests = Path(__file__).resolve().parents[1]
    paths = f"{tests}:{tests.parent}:{tests.parent / 'scripts'}"
    done = subprocess.run(
        [sys.executable, "-c", PLAN],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=True,
        timeout=TIMEOUT_S,
    )
    assert "compiled" not in done.stderr


def test_nothing_is_compiled_where_the_compiler_is_off(tmp_path: Path) -> None:
    done = run_warm(NUMBA_CACHE_DIR=str(tmp_path / "cache"), NUMBA_DISABLE_JIT="1")
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.rglob("*.nb*"))


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    file = tmp_path / "a-file"
    file.touch()
    done = run_warm(NUMBA_CACHE_DIR=str(file), XDG_CACHE_HOME=str(file))
    assert done.returncode == 2
    assert f"compiled kernels cannot be cached: {file} and {file / 'disttrain'} cannot be written" in done.stderr
