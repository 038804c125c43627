"""Transforms of users in processes: what they make, and what becomes of those that fail, stay or start processes."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from transforms.packages import write_package

from dataserver.planning.job.fields import InstalledPixels, InstalledTransform
from dataserver.process import children_of
from dataserver.transforms import (
    Kind,
    TransformError,
    TransformFailedError,
    TransformPool,
    TransformUnavailableError,
    TransformUnknownError,
    named_versions,
)
from dataserver.transforms.process import TransformProcess

PIXELS = np.random.Generator(np.random.Philox(3)).integers(0, 200, (37, 29, 3), np.uint8)
WORDS = (7, 8, 9, 2**64 - 1)


def wanted(name: str, **options: bool | int | str) -> InstalledPixels:
    return InstalledPixels(kind="installed", name=name, version="1.2.0", options=options or None)


def pool(*names: str, timeout_s: float = 30) -> TransformPool:
    return TransformPool.of(dict.fromkeys(names, "1.2.0"), timeout_s)


@pytest.fixture(scope="module")
def mixed() -> Iterator[TransformPool]:
    """A pool whose transforms misbehave in ways that leave their process alive."""
    found = pool(
        *("tint", "raises", "crops", "floats", "nothing", "prints", "variables"),
        *("eats", "no_file", "no_thread", "mute", "exits", "forges"),
    )
    yield found
    found.close()


def processes_of(found: TransformPool) -> list[int]:
    return [process.pid for process in found._idle]


def test_pixels_are_what_the_function_makes_of_them(mixed: TransformPool) -> None:
    rng = np.random.Generator(np.random.Philox(key=[7, 8]))
    expected = np.clip(PIXELS + rng.integers(0, 90, 3), 0, 255).astype(np.uint8)
    before = PIXELS.copy()
    for pixels in (PIXELS, np.asfortranarray(PIXELS)):
        assert np.array_equal(mixed.pixels(pixels, wanted("tint", most=90), WORDS), expected)
    assert np.array_equal(PIXELS, before)
    assert not np.array_equal(mixed.pixels(PIXELS, wanted("tint", most=90), (1, *WORDS[1:])), expected)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("raises", "it raised ValueError: no such colour"),
        ("crops", r"it returned uint8 \[37, 28, 3\]; an array uint8 \[37, 29, 3\] is required"),
        ("floats", r"it returned float64 \[37, 29, 3\]"),
        ("nothing", "it returned NoneType"),
        ("mute", r"it raised Mute: \(its message raises an error as well\)"),
        ("exits", "it raised SystemExit: 3"),
        ("forges", r"it raised ValueError: a\\nERROR all is lost"),
    ],
)
def test_one_that_fails_makes_its_image_invalid_and_stays(mixed: TransformPool, name: str, why: str) -> None:
    mixed.pixels(PIXELS, wanted("tint"), WORDS)
    before = processes_of(mixed)
    with pytest.raises(TransformFailedError, match=f"the transform {name}=1.2.0 failed: {why}"):
        mixed.pixels(PIXELS, wanted(name), WORDS)
    assert processes_of(mixed) == before


def test_what_it_prints_is_no_answer(mixed: TransformPool) -> None:
    assert np.array_equal(mixed.pixels(PIXELS, wanted("prints"), WORDS), 255 - PIXELS)


def test_it_sees_no_secrets_of_the_environment(mixed: TransformPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    with pytest.raises(TransformFailedError, match="PYTHONHASHSEED") as failed:
        pool("variables").pixels(PIXELS, wanted("variables"), WORDS)
    assert "AWS" not in str(failed.value)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("eats", "it raised .*MemoryError"),
        ("no_file", "it raised OSError: .*Too many open files"),
        ("no_thread", "it raised RuntimeError: can't start new thread"),
    ],
)
def test_what_the_machine_lacks_says_nothing_about_the_image(mixed: TransformPool, name: str, why: str) -> None:
    """And a process that took all memory is not asked again."""
    mixed.pixels(PIXELS, wanted("tint"), WORDS)
    (pid,) = processes_of(mixed)
    with pytest.raises(TransformUnavailableError, match=f"{name}=1.2.0 could not run on this machine.* MiB: {why}"):
        mixed.pixels(PIXELS, wanted(name), WORDS)
    assert not processes_of(mixed)
    assert not _runs(pid)


def test_a_result_larger_than_allowed_is_not_read(mixed: TransformPool) -> None:
    with pytest.raises(TransformUnavailableError, match="gave 12 bytes, of 12 that are there; at most 11 are allowed"):
        mixed.call(mixed.installed["tint"], wanted("tint"), {"kind": "nothing"}, bytes(12), 30, 11)
    assert not processes_of(mixed)


def test_what_it_started_ends_with_it_however_late_it_is_killed() -> None:
    installed = pool("starts").installed["starts"]
    process = TransformProcess()
    process.load(installed)
    process._write(bytes(3))
    asked = {"kind": "pixels", "shape": [1, 1, 3], "words": WORDS, "options": {}, "value": installed.value, "bytes": 3}
    assert process._answer(installed, asked, 30)["ends"]
    time.sleep(0.2)  # as on a busy machine
    (child,) = children_of(process.pid)
    process.close()
    until = time.monotonic() + 20
    while _runs(child) and time.monotonic() < until:  # a signal takes effect when its process has its turn
        time.sleep(0.05)
    assert not _runs(child)


def test_what_one_that_died_had_started_is_killed() -> None:
    process = TransformProcess()
    installed = pool("leaves_and_dies").installed["leaves_and_dies"]
    process.load(installed)
    asked = {"kind": "pixels", "shape": [1, 1, 3], "words": WORDS, "options": {}}
    with pytest.raises(TransformUnavailableError, match="died"):
        process.call(installed, asked, bytes(3), 30, 3)
    until = time.monotonic() + 10
    while _in_session(process.pid) and time.monotonic() < until:
        time.sleep(0.02)
    assert not _in_session(process.pid)


def _in_session(pid: int) -> list[str]:
    """Processes that run in the session that one began."""
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, _, session = file.read_text().rpartition(")")[2].split()[:4]
            if int(session) == pid and state != "Z":
                found.append(file.parent.name)
    return found


@pytest.mark.parametrize(
    "name", ["sleeps", *(pytest.param(name, marks=pytest.mark.long) for name in ("spins", "leaves"))]
)
def test_one_that_never_ends_is_killed_with_all_it_started(name: str) -> None:
    found = pool(name, "tint", timeout_s=1)
    found.check()
    (pid,) = processes_of(found)
    seen: set[int] = set()
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.02):
            seen.update(children_of(pid))

    with ThreadPoolExecutor(1) as watching:
        watching.submit(watch)
        with pytest.raises(TransformUnavailableError, match=f"{name}=1.2.0 took more than 1 s and was killed"):
            found.pixels(PIXELS, wanted(name), WORDS)
        ended.set()
    assert bool(seen) == (name == "leaves")
    until = time.monotonic() + 10
    while any(_runs(one) for one in (pid, *seen)) and time.monotonic() < until:
        time.sleep(0.02)
    assert not [one for one in (pid, *seen) if _runs(one)]
    assert found.pixels(PIXELS, wanted("tint", most=1), WORDS).tobytes() == PIXELS.tobytes(), "by another process"
    found.close()


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_neighbour_is_not_slowed_by_one_that_never_ends() -> None:
    found = pool("sleeps", "tint", timeout_s=5)
    with ThreadPoolExecutor(1) as other:
        slow = other.submit(found.pixels, PIXELS, wanted("sleeps"), WORDS)
        for _ in range(3):
            found.pixels(PIXELS, wanted("tint"), WORDS)
        assert not slow.done()
        assert isinstance(slow.exception(), TransformUnavailableError)
    found.close()


def test_one_that_forks_fails_and_its_process_is_replaced() -> None:
    found = pool("forks", "tint")
    found.pixels(PIXELS, wanted("tint"), WORDS)
    (pid,) = processes_of(found)
    for _ in range(2):  # the same verdict every time
        with pytest.raises(TransformFailedError, match="it started a process and did not wait for its end"):
            found.pixels(PIXELS, wanted("forks"), WORDS)
        assert not processes_of(found)
    assert not _runs(pid)
    assert found.pixels(PIXELS, wanted("tint", most=1), WORDS).tobytes() == PIXELS.tobytes()
    found.close()


def test_one_that_dies_says_nothing_about_the_image() -> None:
    found = pool("dies")
    with pytest.raises(TransformUnavailableError, match=r"the process of the transform dies=1\.2\.0 died"):
        found.pixels(PIXELS, wanted("dies"), WORDS)
    assert not processes_of(found)


def test_processes_end_with_the_pool_and_without_it() -> None:
    process = TransformProcess()
    assert _runs(process.pid)
    process.close()
    assert process.is_over
    assert not _runs(process.pid)
    process = TransformProcess()
    process._connection.close()  # as when the server was killed
    until = time.monotonic() + 20
    while _runs(process.pid) and time.monotonic() < until:
        time.sleep(0.02)
    assert not _runs(process.pid)


def test_only_what_the_operator_named_can_be_asked_for(mixed: TransformPool) -> None:
    with pytest.raises(TransformUnknownError, match=r"asks for the transform spins=1\.2\.0, and there are \['crops="):
        mixed.pixels(PIXELS, wanted("spins"), WORDS)
    other = wanted("tint").model_copy(update={"version": "1.3.0"})
    with pytest.raises(TransformUnknownError, match=r"asks for the transform tint=1\.3\.0.*--transform tint=1\.3\.0"):
        mixed.find(other, Kind.PIXELS)
    with pytest.raises(TransformUnknownError, match="is one of pixels, and the job asks for one of text"):
        mixed.find(wanted("tint"), Kind.TEXT)


@pytest.mark.parametrize(
    ("named", "kinds", "message"),
    [
        ({"tin": "1.2.0"}, Kind, "no installed package has a transform 'tin', there are .*'tint'"),
        ({"tint": "2"}, Kind, "the transform 'tint' is installed in version 1.2.0, and 2 is named"),
        ({"shout": "3.1"}, [Kind.PIXELS], r"--transform shout=3\.1 is a transform of text, and those of pixels are"),
    ],
)
def test_operators_can_name_only_what_is_installed(named: dict[str, str], kinds: list[Kind], message: str) -> None:
    with pytest.raises(TransformError, match=message):
        TransformPool.of(named, kinds=kinds)


def test_a_name_in_two_packages_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_package(tmp_path, "others", "1.2.0", "disttrain_test_others", "", {"pixels": {"tint": "os:getpid"}})
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(TransformError, match="several transforms are called 'tint'"):
        pool("tint")


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("disttrain_test_broken:f", "ZeroDivisionError: division by zero"),
        ("disttrain_test_none:f", "ModuleNotFoundError"),
        ("os:curdir", "os:curdir is a str; a function is required"),
    ],
)
def test_what_cannot_be_imported_is_refused_at_the_start(
    value: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_package(tmp_path, "broken", "1", "disttrain_test_broken", "1 / 0", {"pixels": {"broken": value}})
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(TransformError, match=f"the transform broken=1 cannot be used: {why}"):
        TransformPool.of({"broken": "1"}).check()


def test_flags_name_versions() -> None:
    assert named_versions("transform", ("a=1.0", "b=2.0+cpu")) == {"a": "1.0", "b": "2.0+cpu"}
    for entries, message in ((("a",), "NAME=VERSION is required"), (("a=1", "a=2"), "names 'a' twice")):
        with pytest.raises(ValueError, match=message):
            named_versions("transform", entries)


def test_options_and_versions_are_told_apart() -> None:
    keys = {
        InstalledTransform(name=name, version=version, options=options).key()
        for name, version in (("a", "1"), ("a", "2"), ("b", "1"))
        for options in (None, {"x": 1}, {"x": True}, {"x": "1"}, {"x": 1, "y": 1})
    }
    assert len(keys) == 15
    assert InstalledTransform(name="a", version="1", options={}).key() == "a=1 {}"
