"""Tests that need data from outside the repository say so, and are skipped, where it is not there."""

import os
import subprocess
import sys
from pathlib import Path

import conftest
import pytest

TESTS = Path(conftest.__file__).parent


@pytest.mark.parametrize("missing", ["none", "one", "all"])
def test_missing_data_skips(tmp_path: Path, missing: str) -> None:
    data = tmp_path / "data"
    for name in {"none": conftest.DATA_SETS, "one": conftest.DATA_SETS[1:], "all": ()}[missing]:
        (data / name).mkdir(parents=True)
    (tmp_path / "test_it.py").write_text("def test_it(shared_data):\n    print(shared_data)\n")
    folders = TESTS, TESTS.parent / "scripts"
    plugins = ["-p", "conftest", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-rs", "-s", *plugins, "test_it.py"],
        cwd=tmp_path,
        env={**os.environ, "DISTTRAIN_TEST_DATA": str(data), "PYTHONPATH": os.pathsep.join(map(str, folders))},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout
    if missing == "none":
        assert "1 passed" in done.stdout
        assert str(data) in done.stdout
    else:
        assert "1 skipped" in done.stdout
        assert f"{data} has no {conftest.DATA_SETS[0]}" in done.stdout.replace("\n", " ")
        assert "set DISTTRAIN_TEST_DATA" in done.stdout
