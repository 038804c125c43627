"""A fleet of real servers, each behind a network of its own, to which anything may happen."""

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc
from faults import clock, disk
from faults.clients import hostile_neighbour, slow_reader
from faults.clock import WallClock
from faults.disk import fill, small_disk
from faults.processes import Member, stopped
from faults.relay import Mode, Relay
from ports import free_addresses

DELAY_S = 0.02
LOG_KIB = 64
"""Of a server's disk, for its log."""
HOURS_OF_LOG_KIB = 4096
"""Of one that takes blocks as well."""
HALF_A_CHUNK = 100_000
"""Bytes that still come before the network stops."""
YEAR_S = 365 * 86400


class Site:
    """One server: its process, its network, its clock and the disk that takes its log and its blocks."""

    def __init__(
        self,
        stack: contextlib.ExitStack,
        flags: Sequence[str | Path],
        folder: Path,
        listen: str,
        relay: Relay,
        data_relay: Relay,
        block_bytes: int = 0,
    ) -> None:
        folder.mkdir()
        disk_missing, clock_missing = disk.missing(), clock.missing()
        kib = LOG_KIB + (2 * block_bytes >> 10) + (HOURS_OF_LOG_KIB if block_bytes else 0)
        self.disk = None if disk_missing else stack.enter_context(small_disk(folder / "disk", kib))
        if block_bytes:
            blocks = (self.disk or folder) / "blocks"
            flags = [*flags, "--block-cache-dir", blocks, "--block-cache-bytes", str(block_bytes)]
        self.clock = None if clock_missing else WallClock(folder)
        environment = self.clock.environment if self.clock is not None else {}
        self.member = Member(flags, (self.disk or folder) / "server.log", listen=listen, environment=environment)
        stack.callback(self.member.close)
        self.relay = relay
        self.data_relay = data_relay
        """In front of its data port, at the host at which clients find the other one."""

    @property
    def address(self) -> str:
        """Where clients find it."""
        return self.relay.address

    def restart(self) -> None:
        """Start the server again as whatever supervises it does: once more where its store did not answer."""
        for tries_left in (2, 1, 0):
            try:
                self.member.start()
            except AssertionError as error:
                last = str(error).strip().rpartition("\n")[2]
                if not (tries_left and last.startswith("dataserver: dataset path ") and "does not answer" in last):
                    raise
            else:
                return


def sites_of(
    stack: contextlib.ExitStack,
    flags: Sequence[str | Path],
    folder: Path,
    count: int,
    *,
    peers: bool,
    block_bytes: int = 0,
) -> list[Site]:
    """The servers of a fleet; as peers they know each other, and ask each other over the same networks as clients.

    With `block_bytes` each has so many bytes for blocks of objects, on the disk that faults fill.
    """
    free = free_addresses(2 * count)
    addresses, data = free[:count], free[count:]
    # Each network is an address of the loopback device, so that the data port has the same number on both sides.
    hosts = [f"127.0.{os.getpid() % 250 + 1}.{number + 1}" for number in range(count)]
    relays = [Relay(address, host) for address, host in zip(addresses, hosts, strict=True)]
    data_relays = [
        Relay(address, host, int(address.rpartition(":")[2])) for address, host in zip(data, hosts, strict=True)
    ]
    for relay in (*relays, *data_relays):
        stack.callback(relay.close)
    if peers:
        flags = [*flags, "--peers", ",".join(relay.address for relay in relays)]
    found = []
    for number in range(count):
        own = [*flags, "--data-listen", data[number]]
        folder_of = folder / f"server{number}"
        networks = relays[number], data_relays[number]
        found.append(Site(stack, own, folder_of, addresses[number], *networks, block_bytes))
    return found


@dataclass(frozen=True)
class Jobs:
    """What other clients ask for."""

    same: str
    """The job that is being read."""
    odd: dict[str, Any]
    """One that costs much and gives little."""


Fault = Callable[[Site, Jobs], contextlib.AbstractContextManager[object]]
"""What happens from the beginning of the block to its end."""


@contextlib.contextmanager
def _killed(site: Site, jobs: Jobs) -> Any:
    site.member.kill()
    yield
    site.restart()


@contextlib.contextmanager
def _drained(site: Site, jobs: Jobs) -> Any:
    site.member.drain()
    yield
    assert site.member.wait() == 0, site.member.log.read_text()
    site.restart()


def _network(mode: Mode, *, grpc_too: bool = True, **options: Any) -> Fault:
    """Something happens to data connections, and to all others of the server as well."""

    @contextlib.contextmanager
    def fault(site: Site, jobs: Jobs) -> Any:
        relays = [site.data_relay, *[site.relay] * grpc_too]
        for relay in relays:
            relay.set(mode, **options)
        yield
        for relay in relays:
            relay.set(Mode.PASS)

    return fault


def _clock(offset_s: int) -> Fault:
    @contextlib.contextmanager
    def fault(site: Site, jobs: Jobs) -> Any:
        if site.clock is not None:
            site.clock.jump_to(offset_s)
        yield
        if site.clock is not None:
            site.clock.jump_to(0)

    return fault


@contextlib.contextmanager
def _full_disk(site: Site, jobs: Jobs) -> Any:
    filler = fill(site.disk) if site.disk is not None else None
    yield
    if filler is not None:
        filler.unlink()


@contextlib.contextmanager
def _slow_reader(site: Site, jobs: Jobs) -> Any:
    over = threading.Event()

    def hold() -> None:
        with contextlib.suppress(grpc.RpcError), slow_reader(site.address, jobs.same):
            over.wait()

    with _beside(hold):
        yield
        over.set()


@contextlib.contextmanager
def _hostile_neighbour(site: Site, jobs: Jobs) -> Any:
    def disturb() -> None:
        with contextlib.suppress(grpc.RpcError):
            hostile_neighbour(site.address, jobs.odd)

    with _beside(disturb):
        yield


@contextlib.contextmanager
def _beside(work: Callable[[], None]) -> Any:
    thread = threading.Thread(target=work)
    thread.start()
    yield
    thread.join()


FAULTS: Final[dict[str, Fault]] = {
    "kill": _killed,
    "drain": _drained,
    "stop": lambda site, _: stopped(site.member.process),
    "freeze": _network(Mode.FREEZE),
    "half a chunk": _network(Mode.FREEZE, after_bytes=HALF_A_CHUNK),
    "drop": _network(Mode.DROP),
    "reset": _network(Mode.RESET),
    "delay": _network(Mode.PASS, delay_s=DELAY_S),
    "data connections freeze": _network(Mode.FREEZE, grpc_too=False),
    "data connections stop in a payload": _network(Mode.FREEZE, grpc_too=False, after_bytes=HALF_A_CHUNK),
    "data connections vanish": _network(Mode.DROP, grpc_too=False),
    "data connections are reset": _network(Mode.RESET, grpc_too=False),
    "clock a year ahead": _clock(YEAR_S),
    "clock a year back": _clock(-YEAR_S),
    "full disk": _full_disk,
    "slow reader": _slow_reader,
    "hostile neighbour": _hostile_neighbour,
}
