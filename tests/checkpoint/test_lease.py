"""Who owns a folder: of several processes one, until it has provably ended or somebody says otherwise."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from trainclient.checkpoint import lease as lease_module
from trainclient.checkpoint import lease_file
from trainclient.checkpoint.lease import Lease, renewed, take
from trainclient.checkpoint.lease_file import LeaseError, LeaseLostError, Output, block
from trainclient.checkpoint.owner import Owner
from trainclient.processes import has_ended, identity

WAIT_S = 60
ELSEWHERE = "00000000-0000-0000-0000-000000000000 pid:[1] 1 1"
"""A process of another machine."""
OWNS = """
import sys, time
from pathlib import Path
from trainclient.checkpoint.lease import LeaseLostError, take
from trainclient.checkpoint.lease_file import Output
from trainclient.checkpoint.owner import Owner
lease = take(Output("the folder", Path(sys.argv[1])), Owner.here("first"))
print("owns", flush=True)
sys.stdin.readline()
try:
    lease.require()
    print("still owns", flush=True)
except LeaseLostError as error:
    print(error, flush=True)
"""


@pytest.fixture
def output(tmp_path: Path) -> Output:
    return Output("the folder of checkpoints", tmp_path / "ckpt")


@contextmanager
def owning(folder: Path) -> "Iterator[subprocess.Popen[str]]":
    """Another process that owns a folder."""
    words = [sys.executable, "-c", OWNS, str(folder)]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "owns\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def elsewhere(output: Output, **fields: str) -> Lease:
    """A lease that a process of another machine seems to have."""
    return take(output, replace(Owner.here("far"), host="gone-1", process=ELSEWHERE, **fields))


def test_one_owner_after_the_other(output: Output) -> None:
    first = take(output, Owner.here("first"))
    with pytest.raises(LeaseError) as caught:
        take(output, Owner.here("second"))
    said = str(caught.value)
    assert "\n" not in said
    assert f"belongs to another run: run first, process {os.getpid()} on {first.owner.host}, attempt" in said
    assert first.owner.since in said
    assert "give another --checkpoint.directory" in said
    first.require()
    first.release()
    assert list(output.folder.iterdir()) == []
    take(output, Owner.here("second")).release()


def test_of_many_at_once_one_is_the_owner(output: Output) -> None:
    with owning(output.folder) as process:
        process.kill()
        process.wait()
    begin = threading.Barrier(8)

    def contend(number: int) -> Lease | None:
        begin.wait()
        try:
            return take(output, Owner.here(str(number)))
        except LeaseError:
            return None

    with ThreadPoolExecutor(8) as pool:
        owners = [lease for lease in pool.map(contend, range(8)) if lease is not None]
    assert [lease.number for lease in owners] == [2]
    owners[0].require()
    assert [path.name for path in output.folder.iterdir()] == [".lease-000002"]


@pytest.mark.parametrize("reaped", [False, True])
def test_a_killed_owner_is_followed(output: Output, reaped: bool) -> None:
    with owning(output.folder) as process:
        found = identity(process.pid)
        assert not has_ended(found)
        with pytest.raises(LeaseError, match=f"process {process.pid} on .*It is alive: wait for it, end it"):
            take(output, Owner.here("second"))
        process.kill()
        if reaped:
            process.wait()
        else:
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert has_ended(found)
        lease = take(output, Owner.here("second"))
        assert (lease.number, lease.note) == (2, "")


def test_another_process_with_the_same_id_is_not_the_owner(output: Output) -> None:
    boot, namespace, started, pid = identity().split()
    process = f"{boot} {namespace} {int(started) - 1} {pid}"
    lease = take(output, replace(Owner.here("before"), process=process))
    assert take(output, Owner.here("after")).number == lease.number + 1


def test_a_lease_that_was_released_writes_into_no_other_file(output: Output, tmp_path: Path) -> None:
    """As by a thread that still saves a checkpoint when its run fails; the number of its descriptor is used again."""
    lease = take(output, Owner.here("first"))
    number = lease._descriptor
    lease.release()
    other = os.open(tmp_path / "other", os.O_RDWR | os.O_CREAT)
    os.dup2(other, number)
    with pytest.raises(LeaseLostError, match="is gone, so another run may own it"):
        lease.require()
    assert os.fstat(number).st_size == 0
    for descriptor in {other, number}:
        os.close(descriptor)


def test_who_was_stopped_finds_out(output: Output) -> None:
    with owning(output.folder) as process:
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(LeaseError, match="It is alive"):
            take(output, Owner.here("second"))
        lease = take(output, Owner.here("second"), take_over=True)
        assert lease.note.startswith(
            f"the folder of checkpoints is taken over from run first, process {process.pid} on"
        )
        content = lease.path.read_bytes()
        process.send_signal(signal.SIGCONT)
        said, _ = process.communicate("go on\n", timeout=WAIT_S)
        assert said.startswith("the folder was taken over from this run by another one: run second, process ")
        assert lease.path.read_bytes() == content
        lease.require()


def test_who_took_over_may_be_of_another_release(output: Output) -> None:
    lease = take(output, Owner.here("first"))
    output.path(lease.number + 1).write_text('{"format": 2}')
    with pytest.raises(LeaseLostError, match=r"by another one: whoever wrote .*/\.lease-000002\. This run ends"):
        lease.require()


def test_a_lease_that_vanishes_is_lost(output: Output) -> None:
    lease = take(output, Owner.here("first"))
    lease.path.unlink()
    with pytest.raises(LeaseLostError, match=r"\.lease-000001 of the folder of checkpoints is gone"):
        lease.require()
    other = take(output, Owner.here("second"))
    assert other.number == 1
    for _ in range(2):
        with pytest.raises(LeaseLostError):
            lease.renew()
    lease.release()
    other.require()


def test_an_owner_elsewhere_is_watched(output: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_file, "RENEW_S", 0.2)
    lease = elsewhere(output, launch="torchrun")
    with pytest.raises(LeaseError, match=r"on gone-1, .* did not renew its lease in the 0\.6 s that this run watched"):
        take(output, Owner.here("second"))
    monkeypatch.setattr(lease_module, "RENEW_S", 0.05)
    lost: list[str] = []
    with renewed([lease], lost.append):
        for launch in ("", "torchrun"):
            with pytest.raises(LeaseError, match="It is alive: it renewed its lease while this run watched"):
                take(output, Owner.here("second", launch=launch))
    again = take(output, Owner.here("second", launch="torchrun"))
    assert "is taken over from run far, process" in again.note
    with renewed([lease], lost.append):
        until = time.monotonic() + WAIT_S
        while not lost and time.monotonic() < until:
            time.sleep(0.01)
    assert [text.partition(":")[0] for text in lost] == [
        "the folder of checkpoints was taken over from this run by another one"
    ]


def test_what_is_released_while_it_is_watched_is_free(output: Output) -> None:
    lease = elsewhere(output)
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(take, output, Owner.here("second"))
        time.sleep(0.1)
        lease.release()
        assert second.result(WAIT_S).note == ""


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "it is empty"),
        (b"\x00" * 100, "it is not a lease"),
        (b"[" * 100_000, "it is not a lease"),
        (b"[]", "it is not a lease"),
        (json.dumps({"format": 1}).encode(), "fields are missing"),
        (
            json.dumps({"format": 2, "release": "7.1"}).encode(),
            "it has format 2, written by release 7.1; this one knows 1",
        ),
    ],
)
def test_what_cannot_be_understood_is_named_and_not_taken(output: Output, content: bytes, problem: str) -> None:
    output.folder.mkdir()
    output.path(41).write_bytes(content)
    with pytest.raises(LeaseError) as caught:
        take(output, Owner.here("second"))
    said = str(caught.value)
    assert f"{output.path(41)} of the folder of checkpoints cannot be understood ({problem})" in said
    assert "give --take-over" in said
    assert output.path(41).read_bytes() == content
    lease = take(output, Owner.here("second"), take_over=True)
    assert lease.number == 42
    assert [path.name for path in output.folder.iterdir()] == [".lease-000042"]


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda path: path.symlink_to("nothing"), "Too many levels of symbolic links"),
        (os.mkfifo, "it is no regular file"),
        (Path.mkdir, "it is no regular file"),
    ],
    ids=["dangling link", "pipe", "folder"],
)
def test_what_is_no_file_is_no_lease(output: Output, make: Callable[[Path], None], problem: str) -> None:
    output.folder.mkdir()
    make(output.path(41))
    with pytest.raises(LeaseError, match=rf"cannot be understood \({problem}\); make sure that no run writes there"):
        take(output, Owner.here("second"))


def test_numbers_of_any_length(output: Output) -> None:
    output.folder.mkdir()
    for name in ("0000007", "٠٠٠٠٠٠٨"):  # which no lease of ours is called
        (output.folder / f".lease-{name}").write_text("")
    output.path(10**18 - 1).write_text("")
    lease = take(output, Owner.here("second"), take_over=True)
    assert lease.number == 10**18
    lease.renew()
    with pytest.raises(LeaseError, match="belongs to another run"):
        take(output, Owner.here("third"))


def test_a_lease_from_the_future_is_named(output: Output) -> None:
    future = "2999-01-01T00:00:00+00:00"
    lease = take(output, replace(Owner.here("first"), since=future))
    with pytest.raises(LeaseError, match=r"since 2999-01-01T00:00:00\+00:00 \(later than this machine's clock: check"):
        take(output, Owner.here("second"))
    lease.release()
    dead = f"{identity().rpartition(' ')[0]} 4194305"
    take(output, replace(Owner.here("first"), since=future, process=dead))
    assert take(output, Owner.here("second")).note == ""


def test_files_with_other_names_are_left_alone(output: Output) -> None:
    output.folder.mkdir()
    output.draft("0f" * 16).write_text("of an attempt that was killed then")
    names = {".lease-x", ".lease-1", ".lease", ".metrics.jsonl.lease-000003"}
    for name in names:
        (output.folder / name).write_text("")
    lease = take(output, Owner.here("first"))
    lease.release()
    assert {path.name for path in output.folder.iterdir()} == names


def test_a_folder_that_cannot_be_written_is_named(output: Output, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    inside = Output("the folder of checkpoints", tmp_path / "file" / "ckpt")
    with pytest.raises(
        LeaseError, match=rf"cannot be used \(Not a directory: .*check that this user may write to {inside.folder}"
    ):
        take(inside, Owner.here("first"))
    with pytest.raises(LeaseError, match=rf"cannot be used \(it is no folder: {tmp_path}/file\); check"):
        take(Output("the folder of checkpoints", tmp_path / "file"), Owner.here("first"))
    if os.geteuid() == 0:
        read_only = tmp_path / "read_only"
        read_only.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", read_only], check=True)
        try:
            with pytest.raises(LeaseError, match=r"cannot be used \(Read-only file system: .*give another --metrics"):
                take(Output.file("the metrics file", read_only / "m.jsonl", "--metrics"), Owner.here("first"))
        finally:
            subprocess.run(["umount", read_only], check=True)


def test_storage_without_hard_links(output: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, target: Path) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM), str(path))

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    lease = take(output, Owner.here("first"))
    with pytest.raises(LeaseError, match="It is alive"):
        take(output, Owner.here("second"))
    assert take(output, Owner.here("second"), take_over=True).number == 2
    with pytest.raises(LeaseLostError):
        lease.require()


def test_renewing_replaces_all_of_it(output: Output) -> None:
    lease = take(output, Owner.here("first"))
    for renewals in (2, 3):  # it was looked at once when it was made
        lease.renew()
        assert lease.path.read_bytes() == block(lease.owner, 1, renewals)
    assert len(lease.path.read_bytes()) == lease_file.BLOCK_BYTES
