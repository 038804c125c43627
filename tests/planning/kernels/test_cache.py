"""Compiled code is found again, never stale, and never in the way."""

import ast
import os
import pwd
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dataserver.planning import compiled

ROOT = Path(__file__).parents[3]
CODE = (
    "import logging, sys, numpy as np; logging.basicConfig(level=logging.INFO, format='%(message)s');"
    "logging.getLogger('numba').setLevel(logging.WARNING);"
    "from dataserver.planning.kernels.greedy import longest_first;"
    "print(longest_first(np.array([5, 4, 3, 3]), np.arange(4), np.array([0, 4]), 2, 4).tolist())"
)


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of the planner, to change."""
    folder = tmp_path / "package"
    shutil.copytree(ROOT / "dataserver", folder / "dataserver", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def python(package: Path, code: str = CODE, **environment: str) -> subprocess.CompletedProcess[str]:
    given = {key: value for key, value in os.environ.items() if key != "NUMBA_CACHE_DIR"}
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=package,  # before PYTHONPATH in the order of the search
        env={**given, "PYTHONPATH": str(package), **environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )


def test_a_changed_callee_in_another_file_is_noticed(package: Path, tmp_path: Path) -> None:
    cache = {"NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    first, second = python(package, **cache), python(package, **cache)
    assert first.stdout == second.stdout == "[0, 1, 1, 0]\n"
    assert "compiling dataserver.planning.kernels.greedy._longest_first" in first.stderr
    assert second.stderr == ""
    heap = package / "dataserver" / "planning" / "kernels" / "heap.py"
    text = heap.read_text()
    assert "    entry, parent = heap[0], 0\n" in text
    heap.write_text(text.replace("    entry, parent = heap[0], 0\n", "    entry, parent = heap[0], 0\n    return\n"))
    assert python(package, **cache).stdout == "[0, 0, 0, 0]\n"


def test_nothing_is_collected_while_machine_code_is_made() -> None:
    """Collected in the middle, what numba has dropped could cost the object file that LLVM is about to hand over."""
    code = (
        "import gc, sys; import numpy as np; from dataserver.planning.kernels.compiling import machine_code\n"
        "def total(values): return values[0] + values[1]\n"
        "def collecting(phase, about):\n"
        "    frame = sys._getframe()\n"
        "    while frame := frame.f_back: seen.add(frame.f_code.co_name)\n"
        "seen = set(); gc.callbacks.append(collecting); gc.set_threshold(1)\n"
        "print(len(machine_code(total, (np.arange(2),))) > 0, '__enter__' in seen, 'machine_code' in seen)\n"
    )
    done = python(ROOT, code)
    assert done.stdout == "True True False\n"


def test_a_place_that_cannot_be_written_is_named_and_the_work_goes_on(package: Path, tmp_path: Path) -> None:
    file = tmp_path / "a-file"
    file.touch()
    done = python(package, NUMBA_CACHE_DIR=str(file))
    assert done.stdout == "[0, 1, 1, 0]\n"
    assert f"cannot be kept ({file}" in done.stderr


def test_a_damaged_file_is_compiled_anew(package: Path, tmp_path: Path) -> None:
    cache = {"NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    python(package, **cache)
    (kept,) = (tmp_path / "cache").rglob("*.loop")
    whole = kept.read_bytes()
    for damaged in (b"", whole[:-1], whole[:-1] + bytes([whole[-1] ^ 1])):
        kept.write_bytes(damaged)
        done = python(package, **cache)
        assert done.stdout == "[0, 1, 1, 0]\n"
        assert f"a compiled loop cannot be used ({kept} is damaged)" in done.stderr
    assert python(package, **cache).stderr == ""


def test_of_several_that_need_a_loop_at_once_one_compiles_it(package: Path, tmp_path: Path) -> None:
    cache = {"NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    together = (
        "import os, time; from pathlib import Path; from dataserver.planning.kernels import greedy\n"
        f"here = Path({str(tmp_path)!r}); (here / f'ready-{{os.getpid()}}').touch()\n"
        "while len(list(here.glob('ready-*'))) < 4: time.sleep(0.01)\n"
    )
    with ThreadPoolExecutor() as pool:
        done = list(pool.map(lambda _: python(package, together + CODE, **cache), range(4)))
    assert {one.stdout for one in done} == {"[0, 1, 1, 0]\n"}
    assert sum(one.stderr.count("compiling") for one in done) == 1
    assert sorted({one.stderr for one in done})[0] == ""
    assert python(package, **cache).stderr == ""


def test_a_read_only_installation_uses_what_was_compiled_before(package: Path, tmp_path: Path) -> None:
    """Nothing is written: neither beside the sources nor, since there is none, in the user's cache."""
    file = tmp_path / "a-file"
    file.touch()
    places = {"XDG_CACHE_HOME": str(file / "below"), "PYTHONDONTWRITEBYTECODE": "1"}
    first = python(package, **places)
    beside = package / "dataserver" / "planning" / "kernels" / "__pycache__"
    kept = sorted(beside.rglob("*"))
    assert "compiling" in first.stderr
    assert any(path.suffix == ".loop" for path in kept)
    refuse = "from dataserver.planning import compiled; compiled.made = lambda folder: False;"  # also to root
    second = python(package, code=refuse + CODE, **places)
    assert (second.stdout, second.stderr) == (first.stdout, "")
    assert sorted(beside.rglob("*")) == kept


def test_a_user_without_a_home_has_the_folder_beside_the_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in containers that run as any user."""
    for name in ("HOME", "XDG_CACHE_HOME", "NUMBA_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: {}[uid])
    (folder,) = compiled.folders()
    assert folder.parent.parent.name == "kernels"


def test_a_kernel_is_kept_wherever_one_of_the_folders_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dataserver.planning.kernels.files import LoopFiles

    first, second = tmp_path / "first", tmp_path / "second"
    monkeypatch.setattr(compiled, "folders", lambda: [first, second])
    files = LoopFiles("greedy.longest_first", b"stamp")
    assert not files.kept()
    second.mkdir()
    (second / "greedy.longest_first_within-1.loop").touch()
    assert not files.kept()
    (second / "greedy.longest_first-1.loop").touch()
    assert files.kept()


def test_kernels_are_not_compiled_until_they_were_used_once(package: Path, tmp_path: Path) -> None:
    code = (
        "from dataserver.planning import kernels; before = kernels.not_compiled();"
        f"{CODE.replace('print', '')}; print(before); print(kernels.not_compiled())"
    )
    before, after = (
        ast.literal_eval(line) for line in python(package, code, NUMBA_CACHE_DIR=str(tmp_path)).stdout.splitlines()
    )
    folder = ROOT / "dataserver" / "planning" / "kernels"
    kernels = {
        f"dataserver.planning.kernels.{file.stem}.{name}"
        for file in folder.glob("*.py")
        for name in re.findall(r"^@kernel\ndef (\w+)", file.read_text(), re.MULTILINE)
    }
    assert before == sorted(kernels)
    assert after == sorted(kernels - {"dataserver.planning.kernels.greedy._longest_first"})


def test_the_newest_folders_of_other_sources_stay(tmp_path: Path) -> None:
    for age in range(12):
        (tmp_path / f"kernels-{age}").mkdir()
        (tmp_path / f"kernels-{age}" / "file").touch()
        os.utime(tmp_path / f"kernels-{age}", (1000 - age, 1000 - age))
    (tmp_path / "other").mkdir()
    assert compiled.made(tmp_path / "kernels-new")
    assert {path.name for path in tmp_path.iterdir()} == {"kernels-new", "other", *(f"kernels-{n}" for n in range(8))}
    (tmp_path / "kernels-x").mkdir()
    assert compiled.made(tmp_path / "kernels-new")
    assert len(list(tmp_path.iterdir())) == 11, "nothing is removed where the folder is there"
    (tmp_path / "file").touch()
    assert not compiled.made(tmp_path / "file" / "kernels-new")


def test_the_places_of_compiled_loops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = compiled._name()
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    beside = Path(compiled.__file__).parent / "kernels" / "__pycache__" / name
    assert compiled.folders() == [beside, tmp_path / "disttrain" / name]
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "named"))
    assert compiled.folders() == [tmp_path / "named" / name]
    assert compiled.place() == tmp_path / "named" / name
    assert compiled.warm_folder() is None
    compiled.mark_warm()
    assert compiled.warm_folder() == tmp_path / "named" / name


def test_machine_code_is_of_a_processor_and_of_what_numba_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["processor : 0", "model name : M", "flags : a b", "bogomips : 1", "flags : a b"]
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: "\n".join(lines))
    monkeypatch.setenv("NUMBA_CPU_NAME", "generic")
    monkeypatch.setattr("platform.machine", lambda: "x86")
    assert compiled._processor() == ["x86", "flags : a b", "model name : M", "NUMBA_CPU_NAME=generic"]

    def missing(*_: object, **__: object) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", missing)
    monkeypatch.setattr("platform.processor", lambda: "arm")
    assert compiled._processor() == ["x86", "arm", "NUMBA_CPU_NAME=generic"]
