"""The cache of rewritten assertions is the one that pytest would make."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import rewrite_assertions

TEST = "def test_it():\n    number = 3\n    assert number + 1 == 5\n"


def test_pytest_takes_what_was_rewritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And shows the values in an assertion that fails, as ever."""
    folder = tmp_path / "below"
    folder.mkdir()
    (folder / "test_it.py").write_text(TEST)
    (folder / "conftest.py").write_text("")
    (folder / "helper.py").write_text("assert True")
    monkeypatch.setattr(sys, "argv", ["rewrite_assertions.py", str(tmp_path)])
    rewrite_assertions.main()
    caches = {path: (path.stat().st_ino, path.read_bytes()) for path in (folder / "__pycache__").iterdir()}
    assert sorted(path.name.partition(".")[0] for path in caches) == ["conftest", "test_it"]
    line = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", tmp_path, "--import-mode=importlib"]
    done = subprocess.run([*line, folder], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert "assert (3 + 1) == 5" in done.stdout
    now = {path: (path.stat().st_ino, path.read_bytes()) for path in (folder / "__pycache__").iterdir()}
    assert now == caches
    assert not rewrite_assertions.rewrite_module(folder / "test_it.py")
    (folder / "test_it.py").write_text(TEST.replace("5", "6"))
    assert rewrite_assertions.rewrite_module(folder / "test_it.py")


def test_another_pytest_is_left_to_itself(tmp_path: Path) -> None:
    """One without these functions: the script says so in one line, and does not fail."""
    changed = tmp_path / "changed" / "_pytest" / "assertion"
    changed.mkdir(parents=True)
    for module in (changed.parent / "__init__.py", changed / "__init__.py", changed / "rewrite.py"):
        module.write_text("")
    (tmp_path / "test_it.py").write_text(TEST)
    line = [sys.executable, rewrite_assertions.__file__, tmp_path]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "changed")}
    done = subprocess.run(line, capture_output=True, text=True, check=True, env=environment)
    assert re.fullmatch(r"assertions of tests are left for pytest to rewrite \(AttributeError: .*\)\n", done.stdout)
    assert not done.stderr
    assert not (tmp_path / "__pycache__").exists()
