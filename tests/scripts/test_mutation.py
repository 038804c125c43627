"""Mutants: what is changed, what is not, which tests judge them, and what `scripts/mutate` prints and returns."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from mutation.equivalents import equivalents, key, row
from mutation.mutants import Mutant, sample

ROOT = Path(__file__).parents[2]


def mutants(folder: Path, code: str) -> set[str]:
    """The lines that mutants of the code have in place of its own."""
    (folder / "code.py").write_text(code)
    found = [mutant for seed in range(8) for mutant in sample(folder, ["code.py"], 1000, seed)]
    return {mutant.change[1] for mutant in found}


@pytest.mark.parametrize(
    ("line", "changed"),
    [
        ("x = a + b", {"x = a - b"}),
        ("x = a < b", {"x = a <= b", "x = a >= b"}),
        ("x = 7", {"x = 8", "x = 6"}),
        ("x = -a", {"x = a"}),
        ("x = a in b", {"x = a not in b"}),
        ("x = a not in b", {"x = a in b"}),
        ("x = max(a, b)", {"x = min(a, b)"}),
        ("x = a.any()", {"x = a.all()"}),
        ("x = key(a, max=b)", set()),
        ("a.call(b)[c].call()", {"pass"}),
        ("a[b]", set()),
        ("x += a", {"pass"}),
        ("raise a", {"pass"}),
        ("del a", {"pass"}),
        ("x = True", {"x = False"}),
        ("x = a and b", {"x = a or b"}),
        ("x = a if b else c", {"x = a if not b else c"}),
    ],
)
def test_what_is_changed(tmp_path: Path, line: str, changed: set[str]) -> None:
    assert {" ".join(text.split()) for text in mutants(tmp_path, line + "\n")} == changed


@pytest.mark.parametrize(
    "code",
    [
        "def f(a: int | None) -> dict[str, 3]: ...\n",
        "x: tuple[int, 3]\n",
        "@decorate(3 + 4)\nclass A(B[3]): ...\n",
        "for x in f: assert x + 1 < 3\n".replace("for x in f", "with f"),
        "_log.info('%d', 3 + 4)\n",
        "if TYPE_CHECKING:\n    x = 3\n",
        "x = zip(a, b, strict=True)\n",
        "import a\n'a text'\n",
    ],
)
def test_noise_is_left_alone(tmp_path: Path, code: str) -> None:
    assert mutants(tmp_path, code) == set()


def test_a_sample_is_its_seed_s(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text("".join(f"x{i} = {i} + a\n" for i in range(30)))
    first, again, other = (sample(tmp_path, ["code.py"], 20, seed) for seed in (1, 1, 2))
    assert first == again != other
    assert sample(tmp_path, ["code.py"], 5, 1) == first[:5]


def test_equivalents_are_read_as_they_are_printed(tmp_path: Path) -> None:
    source = "class A:\n    def b(self):\n        return self.x | 3\n"
    mutant = Mutant("code.py", 3, "A.b", source, source.replace("|", "&"))
    page = tmp_path / "page.md"
    page.write_text(f"| file | before | after | reason |\n|---|---|---|---|\n{row(mutant)}nobody minds |\n")
    assert equivalents(page) == {key(mutant): "nobody minds"}
    page.write_text(f"{row(mutant)} |\n")
    with pytest.raises(ValueError, match=r"page.md:1 is no row of file, scope, line before"):
        equivalents(page)


def test_equivalents_are_of_lines_that_are_there() -> None:
    for (path, scope, before, _), reason in equivalents(ROOT / "docs" / "mutants.md").items():
        text = " ".join((ROOT / path).read_text().split())
        assert before in text, f"{path} {scope} has no line {before} any more ({reason})"


CODE = """def positive(a):
    return a > 0


def grow(a):
    b = a + 1
    return b


def untested(a):
    return a * 2
"""
TESTS = """from dataserver.planning.code import grow, positive


def test_positive():
    assert [positive(a) for a in (-1, 0, 1)] == [False, False, True]


def test_grow():
    assert grow(1)
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with some code, of which tests notice one part, run one and miss one."""
    files = {
        "dataserver/__init__.py": "",
        "dataserver/planning/__init__.py": "",
        "dataserver/planning/warmup.py": "def warm_up(): ...\n",
        "dataserver/planning/code.py": CODE,
        "tests/planning/test_code.py": TESTS,
        "docs/mutants.md": "# Mutants\n",
        ".gitignore": "/build/\n",
        "pyproject.toml": '[tool.pytest.ini_options]\nmarkers = ["slow", "long"]\n',
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    return tmp_path


def mutate(repository: Path) -> subprocess.CompletedProcess[str]:
    options = ["--seed", "1", "--number", "50", "--workers", "1"]
    command = [sys.executable, "-m", "mutation", "dataserver/planning/code.py", *options]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "scripts")}
    return subprocess.run(command, cwd=repository, env=environment, capture_output=True, text=True, timeout=280)


@pytest.mark.slow
def test_survivors_are_named_and_fail_the_run(repository: Path) -> None:
    done = mutate(repository)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Recording which lines the tests of 1 files run" in done.stdout
    lines = [line for line in done.stdout.splitlines() if "/code.py:" in line]
    assert len(lines) == 6
    killed = [line for line in lines if " killed " in line]
    assert {line.partition(" in ")[2].partition(" (")[0] for line in killed} == {
        "grow: tests/planning/test_code.py::test_grow",
        "positive: tests/planning/test_code.py::test_positive",
    }
    assert len(killed) == 3
    survivors = [line for line in lines if "SURVIVED" in line]
    assert {line.partition(" in ")[2].partition(" (")[0] for line in survivors} == {
        "grow: 1 tests passed",
        "untested: no test runs this line",
    }
    assert "Seed 1: 3 of 6 mutants killed, 50.0 %" in done.stdout
    assert (repository / "dataserver/planning/code.py").read_text() == CODE

    rows = [line for line in done.stdout.splitlines() if line.startswith("| `")]
    assert len(rows) == 3
    (repository / "docs/mutants.md").write_text("".join(f"{line}nobody minds |\n" for line in rows))
    again = mutate(repository)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "Recording" not in again.stdout
    assert "equivalent  dataserver/planning/code.py:11 in untested: nobody minds" in again.stdout
    assert "Seed 1: 3 of 3 mutants killed, 100.0 %" in again.stdout
