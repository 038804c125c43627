"""What `dataserver doctor` says of servers to which it happened: each in a process of its own."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from builders.authority import Authority
from cli.server_process import run
from faults import clock, disk
from faults.clock import WallClock
from faults.processes import Member
from serving.harness import index
from shards import write_pairs

from dataserver.planning.kernels.cache import user_cache

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

OLDER = """
import importlib.metadata as metadata

version = metadata.version
metadata.version = lambda name: "0.0.9" if name == "disttrain" else version(name)
"""


class Fleet:
    """Servers of one dataset, which end with the test."""

    def __init__(self, root: Path, stack: ExitStack) -> None:
        self.root, self.stack = root, stack
        self.folder = index(write_pairs(root / "pairs", 8, 8))

    def start(
        self, name: str, *flags: str | Path, prefix: Sequence[str] = (), environment: Mapping[str, str] | None = None
    ) -> Member:
        log = self.root / f"{name}.log"
        kernels = {} if (cache := user_cache()) is None else {"NUMBA_CACHE_DIR": str(cache)}  # they stay where they are
        own = {**kernels, **(environment or {})}
        member = Member(["--dataset", f"pairs={self.folder}", *flags], log, prefix=prefix, environment=own)
        self.stack.callback(member.close)
        return member


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with ExitStack() as stack:
        yield Fleet(tmp_path, stack)


def findings(*arguments: str | Path, servers: int = 1) -> dict[str, str]:
    """What is wrong, by server and finding, with the remedy of each; and all servers answered."""
    done = run("doctor", *arguments)
    assert "Traceback" not in done.stderr
    first, *lines = done.stdout.splitlines()
    assert first.startswith(f"{servers} of {servers} servers answer"), done.stdout
    found = dict(zip(lines[:-1:2], (line.strip() for line in lines[1:-1:2]), strict=True))
    assert done.returncode == (1 if found else 0)
    return found


def test_servers_of_two_releases(fleet: Fleet, tmp_path: Path) -> None:
    (tmp_path / "older").mkdir()
    (tmp_path / "older" / "sitecustomize.py").write_text(OLDER)
    old = fleet.start("old", environment={"PYTHONPATH": str(tmp_path / "older")})
    new = fleet.start("new")
    found = findings(old.address, new.address, servers=2)
    assert {text.partition(", build ")[0] for text in found} >= {f"{old.address}: release 0.0.9"}
    assert len(found) == 2
    assert all("finish the rolling upgrade" in remedy for remedy in found.values())


def test_few_files_are_allowed(fleet: Fleet) -> None:
    few = fleet.start("few", prefix=["bash", "-c", 'ulimit -n 300; exec "$@"', "few"])
    (text, remedy), *more = findings(few.address).items()
    assert text.startswith(f"{few.address}: it may open 300 files; ")
    assert remedy.startswith("raise the hard limit (ulimit -Hn ")
    assert more == []


@pytest.mark.skipif(bool(clock.missing()), reason=clock.missing() or "can be had")
@pytest.mark.parametrize(("offset_s", "way"), [(60, "ahead of"), (-60, "behind")])
def test_a_clock_is_off_by_a_minute(fleet: Fleet, tmp_path: Path, offset_s: int, way: str) -> None:
    wall = WallClock(tmp_path)
    server = fleet.start("clock", environment=wall.environment)
    assert findings(server.address) == {}
    wall.jump_to(offset_s)
    assert findings(server.address) == {
        f"{server.address}: clock 60 s {way} this machine's": "run NTP on both machines"
    }


@pytest.mark.skipif(bool(disk.missing()), reason=disk.missing() or "can be had")
def test_the_cache_is_full(fleet: Fleet, tmp_path: Path) -> None:
    folder = fleet.stack.enter_context(disk.small_disk(tmp_path / "cache-full", 64))
    server = fleet.start("full", "--cache-dir", folder)
    disk.fill(folder)
    found = findings(server.address)
    assert found.keys() == {f"{server.address}: 0 MiB are left on the disk of --cache-dir"}
    assert "make room, or name another folder" in next(iter(found.values()))


def test_a_certificate_expires_and_has_expired(fleet: Fleet, tmp_path: Path) -> None:
    authority = Authority(tmp_path / "pki")
    names = ("localhost", "127.0.0.1")

    def until(**left: float) -> None:
        end = (datetime.now(UTC) + timedelta(**left)).replace(tzinfo=None, microsecond=0)
        authority.issue("server", *names, not_after=end)

    until(days=3)
    pair = ("--tls-cert", authority.folder / "server.pem", "--tls-key", authority.folder / "server.key")
    server = fleet.start("tls", *pair, "--metrics-listen", "127.0.0.1:0")
    ((text, remedy),) = findings(server.address, "--tls-ca", authority.file).items()
    assert text.startswith(f"{server.address}: its certificate expires in 3.0 days, at ")
    assert remedy == "replace the files of --tls-cert and --tls-key; it reads them again by itself"
    until(seconds=40)  # it is read when somebody asks, and then used until it expires
    end = time.monotonic() + 120
    while "has expired" not in (said := run("doctor", server.address, "--tls-ca", authority.file).stdout):
        assert time.monotonic() < end, said
        time.sleep(1)
    assert said.startswith("0 of 1 servers answer")
    assert f"{server.address}: its certificate has expired" in said
    until(days=90)
    end = time.monotonic() + 30
    while run("doctor", server.address, "--tls-ca", authority.file).returncode:
        assert time.monotonic() < end, server.log.read_text()
        time.sleep(1)
    assert "read again" in server.log.read_text()
