"""Files and folders that are written whole or not at all, by whatever name they are asked for."""

import os
import stat
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import NoReturn

import pytest
from faults.disk import fill, missing, small_disk

from dataserver import outputs
from dataserver.outputs import OutputError, beside, require_writable, whole_folder, write_output, write_whole

needs_disk = pytest.mark.skipif(bool(missing()), reason=missing())
NOBODY = 65534


def interrupted() -> NoReturn:
    raise KeyboardInterrupt


def left(folder: Path) -> list[str]:
    """All that lies in a folder, hidden or not."""
    return sorted(path.name for path in folder.iterdir())


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def umask() -> object:
    """Of a group that shares its files."""
    before = os.umask(0o002)
    yield
    os.umask(before)


def test_a_new_file_has_what_the_umask_leaves_and_an_old_one_its_mode(tmp_path: Path, umask: object) -> None:
    path = tmp_path / "file"
    write_whole(path, "one")
    assert (path.read_text(), mode(path)) == ("one", 0o664)
    for kept in (0o600, 0o640, 0o755):
        path.chmod(kept)
        write_whole(path, b"two")
        assert (path.read_text(), mode(path)) == ("two", kept)
    if os.geteuid() == 0:
        os.chown(path, NOBODY, NOBODY)
        write_whole(path, b"three")
        assert (path.stat().st_uid, path.stat().st_gid, mode(path)) == (NOBODY, NOBODY, 0o755)
    assert left(tmp_path) == ["file"]


def test_what_a_link_leads_to_is_replaced_and_the_link_stays(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    target, link, second = tmp_path / "elsewhere" / "target", tmp_path / "link", tmp_path / "second"
    target.write_text("old")
    link.symlink_to("elsewhere/target")
    second.symlink_to(link)
    write_whole(second, "new")
    assert target.read_text() == "new"
    target.unlink()
    write_whole(second, "again")
    assert target.read_text() == "again", "as of a link whose target is not there yet"
    assert link.is_symlink()
    assert second.is_symlink()
    assert (left(tmp_path), left(target.parent)) == (["elsewhere", "link", "second"], ["target"])


def test_pipes_and_devices_are_written_to_as_they_are(tmp_path: Path) -> None:
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    require_writable("--output", pipe)
    write_whole(pipe, b"through")
    reader.join(30)
    assert read == [b"through"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    write_whole(Path("/dev/null"), b"nowhere")
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)
    with pytest.raises(OutputError, match=r"--output /dev/full cannot be written \(No space left on device\)"):
        write_output("--output", Path("/dev/full"), b"x")


@pytest.mark.parametrize("name", ["-", "/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"])
@pytest.mark.parametrize("is_file", [True, False])
def test_stdout_gets_it_after_what_was_said_before(name: str, is_file: bool, tmp_path: Path) -> None:
    """Also where a shell has led it to a file, which no other file must replace."""
    code = f"""
import sys
from pathlib import Path
from dataserver.outputs import tells_on, write_whole
sys.stdout.write("before\\n")
write_whole(Path({name!r}), "content\\n")
print("after")
print("said", file=tells_on(Path({name!r})))
"""
    with (tmp_path / "out").open("wb") as out:
        done = subprocess.run(
            [sys.executable, "-c", code], stdout=out if is_file else subprocess.PIPE, stderr=subprocess.PIPE, timeout=60
        )
    told = (tmp_path / "out").read_bytes() if is_file else done.stdout
    assert told == b"before\ncontent\nafter\n"
    on_stderr = name in ("-", "/dev/stdout") or "fd/1" in name
    assert done.stderr == (b"said\n" if on_stderr else b"")
    assert left(tmp_path) == ["out"]


def test_what_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    for error in (KeyboardInterrupt(), OSError(5, "Input/output error")):

        def fail(*_: object, error: BaseException = error) -> NoReturn:
            raise error

        monkeypatch.setattr(outputs.os, "fsync", fail)
        with pytest.raises(type(error)):
            write_whole(path, "new")
        with pytest.raises(type(error)), whole_folder(tmp_path / "a" / "b") as made:
            (made / "part").write_text("x")
        assert (left(tmp_path), path.read_text()) == (["file"], "old")


def test_a_folder_has_its_name_when_it_is_whole(tmp_path: Path, umask: object) -> None:
    path = tmp_path / "new" / "folder"
    with whole_folder(path) as made:
        assert not path.exists()
        assert made.parent == path.parent
        (made / "sub").mkdir()
        (made / "sub" / "file").write_text("x")
    assert (left(path.parent), left(path), mode(path)) == (["folder"], ["sub"], 0o775)
    for name in ("new/folder", "link"):
        (tmp_path / "link").unlink(missing_ok=True)
        (tmp_path / "link").symlink_to("nowhere")
        with pytest.raises(FileExistsError), whole_folder(tmp_path / name):
            pass
    with pytest.raises(KeyboardInterrupt), whole_folder(tmp_path / "another"):
        interrupted()
    assert left(tmp_path) == ["link", "new"]


def test_what_a_killed_process_left_of_a_folder_is_swept_a_day_later(tmp_path: Path) -> None:
    for name in ("folder", "other"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("shutil.rmtree", lambda *_, **__: None)
            with pytest.raises(KeyboardInterrupt), whole_folder(tmp_path / name):
                interrupted()
    (old,), (other,) = (list(tmp_path.glob(f".{name}.*")) for name in ("folder", "other"))
    with whole_folder(tmp_path / "folder"):
        assert old.exists(), "another process may be writing it"
    (tmp_path / "folder").rmdir()
    for path in (old, other):
        os.utime(path, (0, 0))
    with whole_folder(tmp_path / "folder"):
        pass
    assert left(tmp_path) == sorted([other.name, "folder"])


@pytest.mark.parametrize("name", ["x" * 255, "\u00e9" * 127, "a b\n.json"])
def test_any_name_that_a_file_can_have(name: str, tmp_path: Path) -> None:
    write_whole(tmp_path / name, "x")
    with whole_folder(tmp_path / "folder" / name):
        pass
    assert left(tmp_path) == sorted([name, "folder"])


def test_refusals_before_and_after_the_work_are_the_same(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "away").symlink_to("nowhere/file")
    for name, reason in (
        ("folder", "Is a directory"),
        ("nowhere/file", "No such file or directory"),
        ("file/below", "Not a directory"),
        ("loop", "Too many levels of symbolic links"),
        ("away", "No such file or directory"),
        ("x" * 256, "File name too long"),
    ):
        path = tmp_path / name
        said = f"--output {path} cannot be written ({reason}); name a file in a folder that exists and that you may "
        for act in (lambda path: require_writable("--output", path), lambda path: write_output("--output", path, "x")):
            with pytest.raises(OutputError) as refused:
                act(path)
            assert str(refused.value).startswith(said)
    assert left(tmp_path) == ["away", "file", "folder", "loop"]


@pytest.mark.skipif(os.geteuid() != 0, reason="another user's folder takes root to make")
def test_where_somebody_may_not_write() -> None:
    """A process of its own becomes a user who is not root."""
    with tempfile.TemporaryDirectory() as made:
        open_to_all = Path(made)
        open_to_all.chmod(0o755)
        (open_to_all / "mine").mkdir()
        (open_to_all / "mine").chmod(0o777)
        (open_to_all / "mine" / "read-only").write_text("old")
        (open_to_all / "theirs").write_text("old")
        refused_to_nobody(open_to_all, ("theirs", "new", "mine/read-only"))
        assert left(open_to_all) == ["mine", "theirs"]
        assert left(open_to_all / "mine") == ["read-only"]


def refused_to_nobody(folder: Path, names: tuple[str, ...]) -> None:
    """Have a user who is not root try to write these files."""
    code = f"""
import os, sys
from pathlib import Path
from dataserver.outputs import OutputError, require_writable, write_output
os.setgid({NOBODY}); os.setuid({NOBODY})
for name in {names!r}:
    for act in (lambda path: require_writable("--output", path), lambda path: write_output("--output", path, "x")):
        try:
            act(Path({str(folder)!r}) / name)
        except OutputError as error:
            assert "(Permission denied); name a file" in str(error), error
        else:
            sys.exit(name)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@needs_disk
def test_a_full_disk_keeps_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        (disk / "file").write_text("precious")
        filler = fill(disk)
        before = left(disk)
        with pytest.raises(OutputError, match=r"--output \S+ cannot be written \(No space left on device\); name"):
            write_output("--output", disk / "file", "x" * 10_000)
        with pytest.raises(OSError, match="No space left"), whole_folder(disk / "a" / "folder") as made:
            (made / "part").write_bytes(bytes(10_000))
        assert left(disk) == before
        assert (disk / "file").read_text() == "precious"
        filler.unlink()
        write_output("--output", disk / "file", "new")
        assert (disk / "file").read_text() == "new"


def test_a_file_that_was_beside_is_synced_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, synced = tmp_path / "file", []

    def sync(descriptor: int) -> None:
        synced.append((Path(f"/proc/self/fd/{descriptor}").readlink().name, path.exists()))

    monkeypatch.setattr(os, "fsync", sync)
    with beside(path) as temp:
        temp.write_text("x")
    assert synced == [(temp.name, False), (tmp_path.name, True)]
