"""The trainer's own tests with other versions of torch, in environments that --torch-python names."""

import os
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("sharding", "exchange", "models", "checkpoint", "modules", "client", "program", "training", "orchestrate")
SLOW = ("tests/models/test_compiling.py", "tests/program/test_compiled_runs.py")


def bounds() -> Requirement:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (found,) = (
        requirement
        for requirement in map(Requirement, project["optional-dependencies"]["train"])
        if requirement.name == "torch"
    )
    return found


def test_contributors_read_which_versions_are_tested() -> None:
    oldest, newest = sorted(bounds().specifier, key=lambda bound: bound.operator, reverse=True)
    assert (oldest.operator, newest.operator) == (">=", "<")
    major, minor = map(int, newest.version.split("."))
    text = (ROOT / "CONTRIBUTING.md").read_text()
    assert f"torch {oldest.version} to {major}.{minor - 1}" in " ".join(text.split())


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_the_trainer_runs_with_another_torch(request: pytest.FixtureRequest) -> None:
    pythons = request.config.getoption("--torch-python")
    if not pythons:
        pytest.skip("no --torch-python names an environment with another torch; CONTRIBUTING.md says how to make one")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for python in pythons:
        code = "import torch; print(torch.__version__)"
        version = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
        assert bounds().specifier.contains(version.split("+")[0]), f"pyproject.toml admits no torch {version}"
        subprocess.run([python, "-m", "dataserver", "warm"], cwd=ROOT, check=True, capture_output=True)
        folders = ["tests/test_torch_compat.py", *(f"tests/{folder}" for folder in FOLDERS)]
        for arguments in ((*folders, "-m", "not slow and not long"), (*SLOW, "-m", "not long")):
            command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
            done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
            assert done.returncode == 0, f"torch {version}:\n{done.stdout[-4000:]}"
