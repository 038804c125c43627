"""Mutants: what is changed, what is not, which tests judge them, and what `scripts/mutate` prints and returns."""

import json
import os
import secrets
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from coverage import CoverageData
from mutation.__main__ import _report
from mutation.covering import Covering
from mutation.effort import INTERVAL_S, MARK, Effort, marked
from mutation.equivalents import equivalents, key, row
from mutation.mutants import Mutant, sample
from mutation.recording import Record, _combine, moved
from mutation.running import Verdict

ROOT = Path(__file__).parents[2]


def mutants(folder: Path, code: str) -> set[str]:
    """The lines that mutants of the code have instead of its own."""
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


CONSTANTS = """from typing import Final

_WAIT_S: Final = 0.5
SIZES = {"small": (1 << 20) - 1, "large": [-2 * SMALL]}
WORD = max(1, 2)
least = 3
PAIRS = [
    (7, 8),
]


class A:
    MOST = 4


def f(limit=5):
    MOST = 6
"""


def test_what_changes_a_constant_alone(tmp_path: Path) -> None:
    """Not what is computed by a call, and nothing in a class or function: these are behaviour."""
    (tmp_path / "code.py").write_text(CONSTANTS)
    found = sample(tmp_path, ["code.py"], 1000, 0)
    assert {mutant.line for mutant in found if mutant.of_constant} == {3, 4, 8}
    assert {mutant.line for mutant in found if not mutant.of_constant} == {5, 6, 13, 16, 17}


def test_constants_that_survive_stand_apart_and_leave_the_score_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "code.py").write_text(CONSTANTS)
    found = sample(tmp_path, ["code.py"], 1000, 0)
    survivors = [mutant for mutant in found if mutant.line in (3, 6)]
    killed = [mutant for mutant in found if mutant.line == 4][:1] + [found[0]] * 8
    verdicts = [Verdict(mutant, False, "", Effort("")) for mutant in survivors]
    verdicts += [Verdict(mutant, True, "", Effort("")) for mutant in killed]
    assert _report(verdicts, 1, False) == 0
    printed = capsys.readouterr().out
    assert "Seed 1: 9 of 10 mutants killed, 90.0 %" in printed
    rows, _, constants = printed.partition("\nConstants that survived, which the score leaves out:\n")
    assert rows.count("| `code.py`") == 1
    assert "`least = 3`" in rows
    assert constants.startswith("code.py:3\n       - _WAIT_S: Final = 0.5\n       + _WAIT_S: Final =")
    assert constants.count("code.py") == 1


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
    for (path, scope, before, _), reason in equivalents(ROOT / "scripts" / "mutation" / "equivalents.md").items():
        text = " ".join((ROOT / path).read_text().split())
        assert before in text, f"{path} {scope} has no line {before} any more ({reason})"


def test_lines_are_followed_to_where_they_are_now() -> None:
    then = ["a", "b", "c", "d", "e"]
    ran = {1: ["x"], 2: ["y"], 3: ["x", "z"], 5: ["w"]}
    assert moved(ran, then, then) == {**ran, 4: []}
    assert moved(ran, then, ["new", *then]) == {1: [], **{line + 1: ran.get(line, []) for line in range(1, 6)}}
    assert moved(ran, then, ["a", "B", "C", "C", "e", "f"]) == {
        1: ["x"],
        **{line: ["x", "y", "z"] for line in (2, 3, 4)},
        5: ["w"],
        6: ["w"],
    }
    assert moved(ran, then, ["a", "e"]) == {1: ["x"], 2: ["w"]}


SPINS = "while True: pass"


@contextmanager
def running(code: str) -> Iterator[tuple[Effort, "subprocess.Popen[bytes]"]]:
    """A marked Python process, which is killed in the end with all that it started."""
    effort = Effort(secrets.token_hex(8))
    process = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, MARK: effort.mark})
    try:
        yield effort, process
    finally:
        effort.end()
        process.wait()


def look(effort: Effort, times: int) -> None:
    for _ in range(times):
        time.sleep(INTERVAL_S)
        effort.look()


def test_sleep_is_no_computing() -> None:
    with running("import threading; threading.Event().wait()") as (effort, process):
        while effort.asleep_s < 1:
            look(effort, 1)
        computed = effort.computed_s
        look(effort, 4)
        assert effort.asleep_s >= 2
        assert effort.computed_s == computed
    assert process.returncode == -signal.SIGKILL


def test_computing_of_any_thread_or_process_is_no_sleep() -> None:
    """The one that computes is a thread of a child in a session of its own."""
    spins = f"import threading; threading.Thread(target=exec, args=({SPINS!r},)).start()"
    waits = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {spins!r}], start_new_session=True)"
    with running(waits) as (effort, process):
        while effort.computed_s < 1:
            look(effort, 1)
        asleep = effort.asleep_s
        look(effort, 4)
        assert effort.asleep_s == asleep
        assert len(list(marked(effort.mark))) == 2
    assert not list(marked(effort.mark))
    assert process.returncode == -signal.SIGKILL


def test_a_busy_machine_takes_no_effort() -> None:
    """Beside another process on its only core, one with the least weight hardly gets any of it."""
    here = f"import os; os.sched_setaffinity(0, {{{min(os.sched_getaffinity(0))}}})"
    with running(f"{here}\n{SPINS}"), running(f"{here}; os.nice(19)\n{SPINS}") as (effort, _):
        look(effort, 12)
        began = effort.seconds
        look(effort, 12)
        assert effort.seconds - began < 12 * INTERVAL_S / 2


def test_children_that_ended_count() -> None:
    child = "import time\nwhile time.process_time() < 1.1: pass"  # the system may count a hundredth less
    waits = f"import subprocess, sys, time; subprocess.run([sys.executable, '-c', {child!r}]); time.sleep(60)"
    with running(waits) as (effort, _):
        while effort.asleep_s < 1:
            look(effort, 1)
        assert effort.computed_s >= 1


def covering(folder: Path, ran: dict[str, list[int]], tests: list[str], path: str) -> Covering:
    """Of tests that took a second each, where those, or the processes of those files, ran these lines of a file."""
    data = CoverageData(str(folder / "lines"))
    for context, lines in ran.items():
        data.set_context(context)
        data.add_lines({path: lines})
    data.write()
    (folder / "digests.json").write_text("{}")
    (folder / "times.json").write_text(json.dumps(dict.fromkeys(tests, 1.0)))
    return Covering([(Record(folder), {test.partition("::")[0] for test in tests})])


def test_all_cases_of_the_folder_that_mirrors_come_before_the_tests_of_others(tmp_path: Path) -> None:
    source = "def f(a):\n    return a + 1\n"
    mutant = Mutant("dataserver/planning/job/fields/code.py", 2, "f", source, source.replace("+", "-"))
    near, far = "tests/planning/job/fields/test_code.py", "tests/serving/test_jobspec_code.py"
    tests = [f"{file}::test_{name}[{case}]" for file in (near, far) for name in "ab" for case in range(3)]
    found = covering(tmp_path, {test: [2] for test in tests}, tests, mutant.path).tests(mutant)
    cases = [f"{file}::test_{name}[{case}]" for file in (near, far) for case in range(3) for name in "ab"]
    assert found == cases


def test_tests_whose_processes_run_the_line_stand_where_their_path_does(tmp_path: Path) -> None:
    """Behind those of their words that run it themselves, however few lines of the file these run."""
    source = "def f(a):\n    b = a + 1\n    return b\n"
    mutant = Mutant("trainclient/program/code.py", 2, "f", source, source.replace("+", "-"))
    files = [f"tests/{name}.py" for name in ("program/test_code", "program/test_run", "client/test_code")]
    tests = [f"{file}::test_{name}" for file in files for name in "ab"]
    started = {file: [1, 2, 3] for file in files}
    found = covering(tmp_path, {**started, tests[1]: [2], tests[5]: [2]}, tests, mutant.path).tests(mutant)
    assert found == [tests[n] for n in (1, 0, 2, 3, 5, 4)]


def test_defaults_are_judged_by_the_tests_that_run_the_function(tmp_path: Path) -> None:
    """Its first line runs where it is imported, which is what a test happened to do first."""
    source = "def f(a, b=1):\n    return a + b\n"
    mutant = Mutant("trainclient/program/code.py", 1, "f", source, source.replace("b=1", "b=0"))
    tests = [f"tests/program/test_code.py::test_{name}" for name in "ab"]
    assert covering(tmp_path, {tests[0]: [1], tests[1]: [2]}, tests, mutant.path).tests(mutant) == tests[1:]


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
    """A repository with some code; tests notice one part, run one and miss one."""
    files = {
        "dataserver/__init__.py": "",
        "dataserver/planning/__init__.py": "",
        "dataserver/cli/__init__.py": "",
        "dataserver/cli/warm.py": "def warm_up(): ...\n",
        "dataserver/planning/code.py": CODE,
        "tests/planning/test_code.py": TESTS,
        "scripts/mutation/equivalents.md": "# Mutants\n",
        ".gitignore": "/build/\n",
        "pyproject.toml": '[tool.pytest.ini_options]\nmarkers = ["slow", "long"]\n',
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    return tmp_path


MUTATE = ["-m", "mutation"]
IMPATIENT = ["-c", "import sys, mutation.__main__ as m; m.judge.__globals__['PATIENCE'] = 5, 0; sys.exit(m.main())"]


def starting(repository: Path, program: list[str], *more: str) -> subprocess.Popen[str]:
    options = ["--seed", "1", "--number", "50", "--workers", "1", *more]
    command = [sys.executable, *program, "dataserver/planning/code.py", *options]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "scripts")}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=repository, env=environment, text=True, **pipes)  # type: ignore[call-overload]


def mutate(repository: Path, program: list[str] = MUTATE, *more: str) -> subprocess.CompletedProcess[str]:
    with starting(repository, program, *more) as process:
        printed = process.communicate(timeout=280)
    return subprocess.CompletedProcess(process.args, process.returncode, *printed)


@pytest.mark.long
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
    (repository / "scripts/mutation/equivalents.md").write_text("".join(f"{line}nobody minds |\n" for line in rows))
    again = mutate(repository)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "Recording" not in again.stdout
    assert "equivalent  dataserver/planning/code.py:11 in untested: nobody minds" in again.stdout
    assert "Seed 1: 3 of 3 mutants killed, 100.0 %" in again.stdout

    (repository / "dataserver/planning/code.py").write_text(f'"""Changed."""\n\n{CODE}')
    earlier = mutate(repository, MUTATE, "--earlier")
    assert "Recording" not in earlier.stdout
    assert "Seed 1: 3 of 3 mutants killed, 100.0 %" in earlier.stdout


TWICE_TESTED = """from dataserver.planning.code import grow, positive


def test_a_call():
    grow(1)


def test_grow():
    assert grow(1) == 2
    assert not positive(0)
"""


@pytest.mark.long
def test_tests_that_took_less_than_recorded_leave_time_for_more(repository: Path) -> None:
    """Recorded as half a minute each, only one would fit."""
    (repository / "tests/planning/test_code.py").write_text(TWICE_TESTED)
    mutate(repository)
    (times,) = repository.glob("build/mutants/record-*/times.json")
    times.write_text(json.dumps(dict.fromkeys(json.loads(times.read_text()), 30.0)))
    done = mutate(repository)
    assert "Recording" not in done.stdout
    killed = [line for line in done.stdout.splitlines() if " killed " in line and "in grow:" in line]
    assert killed
    assert all("::test_grow (" in line for line in killed)


HANGING = """from threading import Lock


def down(a):
    while a > 0:
        a -= 1


def twice(a: Lock):
    a.acquire()
    a.release()
    a.acquire()
"""
NEVER_HANG = """from threading import Lock

from dataserver.planning.code import down, twice


def test_down():
    down(3)


def test_twice():
    twice(Lock())
"""


@pytest.mark.long
def test_a_mutant_that_computes_or_sleeps_for_ever_is_killed(repository: Path) -> None:
    (repository / "dataserver/planning/code.py").write_text(HANGING)
    (repository / "tests/planning/test_code.py").write_text(NEVER_HANG)
    done = mutate(repository, IMPATIENT)
    hung = [line for line in done.stdout.splitlines() if ": hung (" in line]
    assert {line.partition(" in ")[2].partition(":")[0] for line in hung} == {"down", "twice"}, (
        done.stdout + done.stderr
    )
    computed = [int(line.partition("hung (")[2].partition(" s of CPU")[0]) for line in hung]
    assert max(computed) >= 4, "the loop computes"
    assert min(computed) <= 2, "the deadlock sleeps"


@pytest.mark.long
@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_what_was_judged_before_it_was_stopped_counts(repository: Path, stop: signal.Signals) -> None:
    with starting(repository, MUTATE) as process:
        assert process.stdout is not None
        lines: list[str] = []
        while not any("/code.py:" in line for line in lines):
            lines.append(process.stdout.readline())
            assert lines[-1], "it ended without a mutant"
        process.send_signal(stop)
        rest, errors = process.communicate(timeout=60)
    judged = [line for line in [*lines, *rest.splitlines()] if "/code.py:" in line]
    killed = sum(" killed " in line for line in judged)
    assert process.returncode == 1, errors
    assert f"Seed 1: {killed} of {len(judged)} mutants judged before it was stopped killed, " in rest
    assert 1 <= len(judged) < 6
    assert (repository / "build/mutants/worker-0/tree/dataserver/planning/code.py").read_text() == CODE
    assert not errors


def test_a_process_that_was_killed_as_it_wrote_its_lines_leaves_those_of_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = tmp_path / "tree"
    for n in range(2):
        part = CoverageData(str(tmp_path / f"data.{n}"))
        part.set_context("test")
        part.add_lines({str(tree / f"{n}.py"): [3, 5]})
        part.write()
    (tmp_path / "data.cut").write_bytes((tmp_path / "data.0").read_bytes()[:5000])
    shutil.copyfile(tmp_path / "data.0", tmp_path / "data.begun")
    with closing(sqlite3.connect(tmp_path / "data.begun")) as begun:
        begun.execute("delete from coverage_schema")
        begun.commit()
    _combine(tmp_path, tree)
    found = CoverageData(str(tmp_path / "lines"))
    found.read()
    assert {file: found.contexts_by_lineno(file) for file in ("0.py", "1.py")} == {
        file: {3: ["test"], 5: ["test"]} for file in ("0.py", "1.py")
    }
    assert not list(tmp_path.glob("data.*"))
    assert capsys.readouterr().out.count("A process of the tests was killed as it wrote its lines: ") == 2
