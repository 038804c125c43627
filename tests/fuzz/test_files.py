"""Hostile files: only our own errors, within bounds of memory and time, whatever bytes a file holds."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fuzz.files import TARGETS
from fuzz.mutation import Fuzzing, keep, kept

KINDS = (("tar",), ("parquet", "json", "txt"), ("image", "image member"), ("index", "tokens", "quarantine"))
"""Tars, sidecars, images, and indexes with what lies beside them: each has all of the seconds."""
SHARES = {target: 1 / len(kind) for kind in KINDS for target in kind}


def attempts(target: str, folder: Path, seconds: float, seed: int, inputs: list[Path]) -> int:
    """Try inputs in another process; keep the one at which it fails. Returns how many mutations were tried.

    What numpy warns of would be a wrong number: it is an error here.
    """
    line = [sys.executable, "-W", "error::RuntimeWarning", "-m", "fuzz.files", target, folder, seconds, seed, *inputs]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])}
    done = subprocess.run(list(map(str, line)), capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        data = (folder / "trying").read_bytes()
        found = keep(target, hashlib.sha256(data).hexdigest()[:16], data)
        pytest.fail(f"{found} ends the process with status {done.returncode}:\n{done.stderr[-4000:]}")
    return int(done.stdout)


@pytest.mark.parametrize("target", [name for name in TARGETS if kept(name)])
def test_kept_inputs(target: str, tmp_path: Path) -> None:
    attempts(target, tmp_path, 0, 0, kept(target))


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_new_inputs(target: str, tmp_path: Path, fuzzing: Fuzzing) -> None:
    assert attempts(target, tmp_path, fuzzing.seconds * SHARES[target], fuzzing.seed, []) > 0
