"""Compiled kernels are found again, never stale, never somebody else's, and never in the way."""

import os
import pwd
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import pytest

from dataserver.planning.kernels import cache, compiler

ROOT = Path(__file__).parents[3]
KERNEL = "compiled dataserver.planning.kernels.greedy._longest_first\n"
IMPORT = (
    "import logging, numpy as np; logging.basicConfig(level=logging.INFO, format='%(message)s');"
    "logging.getLogger('numba').setLevel(logging.WARNING);"
    "from dataserver.planning.kernels import cache, greedy\n"
)
PLAN = "print(greedy.longest_first(np.array([5, 4, 3, 3]), np.arange(4), np.array([0, 4]), 2, 4).tolist())\n"
PLANNED = "[0, 1, 1, 0]\n"


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of the planner, to change."""
    folder = tmp_path / "package"
    shutil.copytree(ROOT / "dataserver", folder / "dataserver", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that this process takes for the user's cache."""
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cache, "_named", None)  # a server of this process may have named one
    cache.folder.cache_clear()
    yield tmp_path / "disttrain"
    cache.folder.cache_clear()


def python(package: Path, code: str = IMPORT + PLAN, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=package,  # before PYTHONPATH in the order of the search
        env={**os.environ, "PYTHONPATH": str(package), **environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=200,
    )


def test_a_changed_callee_in_another_file_is_noticed(package: Path, tmp_path: Path) -> None:
    where = {"NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    first, second = python(package, **where), python(package, **where)
    assert first.stdout == second.stdout == PLANNED
    assert (first.stderr, second.stderr) == (KERNEL, "")
    heap = package / "dataserver" / "planning" / "kernels" / "heap.py"
    text = heap.read_text()
    assert "    entry, parent = heap[0], 0\n" in text
    heap.write_text(text.replace("    entry, parent = heap[0], 0\n", "    entry, parent = heap[0], 0\n    return\n"))
    assert python(package, **where).stdout == "[0, 0, 0, 0]\n"


def test_of_processes_that_need_a_kernel_at_once_one_compiles_it(tmp_path: Path) -> None:
    where = {"NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    together = (
        "import os, time; from pathlib import Path\n"
        f"here = Path({str(tmp_path)!r}); (here / f'ready-{{os.getpid()}}').touch()\n"
        "while len(list(here.glob('ready-*'))) < 2: time.sleep(0.01)\n"
    )
    with ThreadPoolExecutor() as pool:
        done = list(pool.map(lambda _: python(ROOT, IMPORT + together + PLAN, **where), range(2)))
    assert {one.stdout for one in done} == {PLANNED}
    assert sorted(one.stderr for one in done) == ["", KERNEL]
    assert python(ROOT, **where).stderr == ""


@pytest.mark.long
def test_a_damaged_cache_is_compiled_again(tmp_path: Path) -> None:
    where = {"NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    python(ROOT, **where)
    for ending, error in (("nbi", "EOFError"), ("nbc", "UnpicklingError")):
        (damaged,) = (tmp_path / "cache").rglob(f"*.{ending}")
        damaged.write_bytes(damaged.read_bytes()[:-1] if ending == "nbc" else b"")
        done = python(ROOT, **where)
        assert done.stdout == PLANNED
        assert done.stderr == f"the cache of compiled kernels is damaged ({error}): they are compiled again\n{KERNEL}"
    assert python(ROOT, **where).stderr == ""


@pytest.mark.parametrize("error", [EOFError, ValueError, ModuleNotFoundError, OverflowError])
def test_what_cannot_be_unpickled_is_compiled_again(
    error: type[Exception], fresh: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One bit of a file is enough for nearly any error."""
    folder = cache.folder()
    assert folder is not None
    (folder / "kernels").mkdir()
    assert compiler._Cache(Mock(load_overload=Mock(side_effect=error))).load_overload("signature", "target") is None
    assert not any(path.is_dir() for path in folder.iterdir())
    folder.rmdir()
    assert compiler._Cache(Mock(load_overload=Mock(side_effect=error))).load_overload("signature", "target") is None
    said = f"the cache of compiled kernels is damaged ({error.__name__}): they are compiled again"
    assert caplog.messages == [said] * 2


def test_where_nothing_can_be_written_kernels_are_compiled_all_the_same(tmp_path: Path) -> None:
    file = tmp_path / "a-file"
    file.touch()
    code = f"{IMPORT}print(cache.folder(), cache.is_complete(), cache.tried())\n{PLAN}"
    done = python(ROOT, code, NUMBA_CACHE_DIR=str(file), XDG_CACHE_HOME=str(file))
    assert done.stdout == f"None False {file} and {file / 'disttrain'}\n{PLANNED}"


def test_a_cache_that_can_no_longer_be_written_is_named_and_the_work_goes_on(tmp_path: Path) -> None:
    full = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"
    code = f"{IMPORT}{full}{PLAN}"
    done = python(ROOT, code, NUMBA_CACHE_DIR=str(tmp_path))
    assert done.stdout == PLANNED
    assert "a compiled kernel cannot be cached" in done.stderr


def test_a_cache_that_is_lost_is_named_and_the_work_goes_on(tmp_path: Path) -> None:
    """Before a kernel is used first, or where it is used before and then with arrays of another type."""
    lose = "import shutil; found = cache.folder(); shutil.rmtree(found); found.write_text('')\n"
    other_type = PLAN.replace("np.arange(4)", "np.arange(4, dtype=np.int32)")
    for code in (f"{IMPORT}{lose}{PLAN}", f"{IMPORT}{PLAN}{lose}{other_type}"):
        done = python(ROOT, code, NUMBA_CACHE_DIR=str(tmp_path))
        assert done.stdout == PLANNED * code.count("print(greedy")
        assert done.stderr.count("a compiled kernel cannot be cached") == 1
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()


def test_code_of_others_is_not_loaded(fresh: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Numba unpickles what it finds."""
    folder = cache.folder()
    assert folder is not None
    assert folder.parent == fresh
    assert folder.stat().st_mode & 0o777 == 0o700
    (folder / "inner").mkdir()
    (folder / "inner" / "code.nbi").touch()
    for path in (folder, folder / "inner", folder / "inner" / "code.nbi"):
        folder.chmod(0o755)
        path.chmod(0o775)
        cache.folder.cache_clear()
        assert cache.folder() is None
        assert f"others may write to {path}" in caplog.text
        path.chmod(0o755)
        caplog.clear()
    fresh.chmod(0o775)  # others may put another folder there
    cache.folder.cache_clear()
    assert cache.folder() is None
    assert f"others may write to {fresh}." in caplog.text
    fresh.chmod(0o1777)  # but not here
    cache.folder.cache_clear()
    assert cache.folder() == folder
    fresh.chmod(0o755)
    (folder / "link").symlink_to("/etc/passwd")
    cache.folder.cache_clear()
    assert cache.folder() is None
    folder.chmod(0o700)  # nobody else gets to what lies inside
    cache.folder.cache_clear()
    assert cache.folder() == folder


def test_a_new_folder_is_used_whatever_the_umask(fresh: Path) -> None:
    before = os.umask(0o002)
    try:
        assert cache.folder() is not None
    finally:
        os.umask(before)
    assert fresh.stat().st_mode & 0o022 == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_is_not_used(fresh: Path) -> None:
    folder = cache.folder()
    assert folder is not None
    os.chown(folder, 12345, 12345)
    cache.folder.cache_clear()
    assert cache.folder() is None


@pytest.mark.parametrize("writable", [True, False])
def test_code_that_ships_with_an_image_is_copied(
    fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writable: bool
) -> None:
    """To the user's cache, or, where that cannot be written either, to a folder of this process."""
    shipped = tmp_path / "image" / cache._name()
    (shipped / "kernels_1").mkdir(parents=True)
    shipped.chmod(0o755)
    (shipped / "kernels_1" / "code.nbi").write_bytes(b"code")
    (shipped / cache._COMPLETE).touch()
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(shipped.parent))
    read_only = [shipped] if writable else [shipped, fresh / cache._name()]
    monkeypatch.setattr(os, "access", lambda path, _: path not in read_only)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = cache.folder()
    assert folder is not None
    assert folder.parent == (fresh if writable else tmp_path)
    assert (folder / "kernels_1" / "code.nbi").read_bytes() == b"code"
    assert cache.is_complete()


def test_a_folder_can_be_named_and_the_variable_wins(
    fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "_named", None)
    cache.use(tmp_path / "named")
    assert cache.folder() == tmp_path / "named" / cache._name()
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "variable"))
    cache.folder.cache_clear()
    assert cache.folder() == tmp_path / "variable" / cache._name()
    assert not cache.is_complete()
    cache.set_complete()
    assert cache.is_complete()
    cache.clear()
    assert not cache.is_complete()


def test_the_newest_folders_of_other_sources_stay(fresh: Path) -> None:
    for age in range(12):
        (fresh / f"kernels-{age}").mkdir(parents=True)
        os.utime(fresh / f"kernels-{age}", (1000 - age, 1000 - age))
    (fresh / "other").mkdir()
    assert cache.folder() == fresh / cache._name()
    assert {path.name for path in fresh.iterdir()} == {cache._name(), "other", *(f"kernels-{n}" for n in range(8))}


def test_a_user_without_a_home_has_no_cache(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in containers that run as any user."""
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: {}[uid])
    monkeypatch.setattr(cache, "_named", None)
    assert cache.folder() is None
    assert "without a home" in cache.tried()


def test_machine_code_is_of_a_processor_or_of_the_one_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["processor : 0", "model name : M", "flags : a b", "bogomips : 1", "flags : a b"]
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: "\n".join(lines))
    monkeypatch.setattr("platform.machine", lambda: "x86")
    monkeypatch.setenv("NUMBA_CPU_NAME", "skylake")
    assert cache._processor() == ["x86", "flags : a b", "model name : M", "NUMBA_CPU_NAME=skylake"]
    monkeypatch.setenv("NUMBA_CPU_FEATURES", "+avx2")
    assert cache._processor() == ["x86", "NUMBA_CPU_FEATURES=+avx2", "NUMBA_CPU_NAME=skylake"]
    monkeypatch.delenv("NUMBA_CPU_FEATURES")
    monkeypatch.setenv("NUMBA_CPU_NAME", "generic")
    assert cache._processor() == ["x86", "NUMBA_CPU_NAME=generic"]
    monkeypatch.delenv("NUMBA_CPU_NAME")

    def missing(*_: object, **__: object) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", missing)
    monkeypatch.setattr("platform.processor", lambda: "arm")
    assert cache._processor() == ["x86", "arm"]
