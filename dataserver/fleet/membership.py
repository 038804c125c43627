"""Which servers of the fleet are live, and which of them owns a step.

Addresses are looked up again and again, and every address is asked again and again who answers there. Servers are told
apart by what they answer: one that has several names counts once, and this server finds itself in its own list.
"""

import hashlib
import logging
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from time import monotonic
from typing import Final

import grpc
from disttrain.v1.peer_service_pb2 import GreetResponse

from dataserver.addresses import is_number, joined, split_address
from dataserver.dataset import printable
from dataserver.fleet.build import build_id
from dataserver.fleet.peer import GREET_S, INSTANCE_BYTES, Peer
from dataserver.fleet.peer_health import PeerHealth
from dataserver.security import Channels

LOOK_EVERY_S: Final = 1.0
"""Time between two questions to the same address, in small fleets."""
GREETINGS_PER_S: Final = 5
"""In larger fleets so many servers are asked a second, so that a server spends one or two hundredths of a core on it,
whatever their number."""
RESOLVE_EVERY_S: Final = 10.0
"""Time between two look-ups of the names."""
PATIENCE_S: Final = 15.0
"""Time after the start in which a peer that never answered is no news."""
MAX_BUILD_CHARS: Final = 64

_log = logging.getLogger(__name__)


class Peers:
    """The other servers of the fleet. Thread-safe."""

    def __init__(self, names: Sequence[str], instance: bytes, channels: Channels) -> None:
        """Know the names; `start` looks for them.

        Args:
            names: HOST:PORT of each; a host may stand for several addresses.
            instance: what this server answers to Greet.
            channels: opens channels to them.
        """
        self.instance = instance
        self.channels = channels
        self._version = channels.version
        """Version of the certificates that the channels of all peers have."""
        self._names = tuple(dict.fromkeys(names))
        self._health = PeerHealth()
        self._lock = threading.Lock()
        """Guards the names, and the four attributes below it."""
        self._peers: dict[str, Peer] = {}
        """By address. Peers that are gone are closed."""
        self._told: dict[str, str] = {}
        """What the log said last of addresses and names; that all is well is empty."""
        self._stand_for: dict[str, list[str]] = {}
        """The addresses of each name that was looked up, which may be none."""
        self._found: dict[str, str] = {}
        """The name that each address was found by; empty for one that stands in the list itself."""
        self._began = monotonic()
        self._resolved = threading.Event()
        """Set when all names have been looked up once, and `_looked` when everybody was asked once."""
        self._looked = threading.Event()
        self._news = threading.Event()
        """Set where there is reason to look at once."""
        self._ended = threading.Event()

    def start(self) -> None:
        """Look for peers from now on: they can greet this server as well."""
        self._began = monotonic()
        if not self._names:
            self._resolved.set()
        self._find(self._names)
        threading.Thread(target=self._look, name="peers", daemon=True).start()

    def look_for(self, names: Sequence[str]) -> None:
        """Look for peers under these names from now on, and no others."""
        with self._lock:
            new = [name for name in names if name not in self._names]
            self._names = tuple(dict.fromkeys(names))
            self._stand_for = {name: found for name, found in self._stand_for.items() if name in self._names}
            self._found = self._all_found()
        self._find(new)
        self._news.set()

    def ranked(self, job_id: str, step: int) -> list[Peer | None]:
        """Live servers that may be asked for the plan of a step, its owner first; None is this one."""
        return self.ranked_by(lambda instance: _weight(instance, job_id, step), job_id)

    def ranked_by(self, weight: Callable[[bytes], bytes], *names: str) -> list[Peer | None]:
        """Live servers by what rendezvous hashing gives their instances, the largest first; None is this one.

        Args:
            weight: of an instance.
            names: of jobs, or of what else servers ask each other for; one that is set aside for any is left out.
        """
        self._looked.wait(max(0.0, self._began + 2 * GREET_S - monotonic()))  # after the start, and not longer
        named: dict[bytes, Peer | None] = {self.instance: None}
        for peer in self.peers():
            said = peer.said
            if said is not None and said.build == build_id() and all(map(peer.serves, names)):
                named.setdefault(said.instance, peer)
        return [named[instance] for instance in sorted(named, key=weight, reverse=True)]

    def peers(self) -> list[Peer]:
        """All addresses, this server's own among them if it is listed."""
        with self._lock:
            return [self._peers[address] for address in sorted(self._peers)]

    def others(self) -> list[Peer]:
        """All addresses but those at which this server itself has answered."""
        return [peer for peer in self.peers() if (said := peer.said) is None or said.instance != self.instance]

    def lost(self, peer: Peer, why: str) -> None:
        """Note that a peer does not answer; said once until it answers again."""
        peer.hear(None)
        young = monotonic() < self._began + PATIENCE_S  # servers that are started together take some seconds
        if (peer.answered or not young) and self._is_news(peer.address, "silent"):
            _log.warning(
                "peer %s does not answer (%s): its steps are planned elsewhere; %d of %d other servers are live",
                *(peer.address, why, *self.count()),
            )

    def close(self) -> None:
        """Stop looking, and end all calls."""
        self._ended.set()
        self._news.set()
        self._replace({})

    def _look(self) -> None:
        while True:
            self._news.clear()
            if self._ended.is_set():
                return
            resolved = self._resolved.is_set()
            if self._version != (version := self.channels.version):
                self._version = version
                self._replace({})  # channels go on with the certificates that they were opened with
            self._replace(self._found)
            peers = self.peers()
            try:
                self._ask(peers)
            except (grpc.FutureCancelledError, ValueError):  # they were closed meanwhile, as `close` does
                continue
            if resolved:
                self._looked.set()
            self._news.wait(max(LOOK_EVERY_S, len(peers) / GREETINGS_PER_S))

    def _ask(self, peers: Sequence[Peer]) -> None:
        """Ask all who they are."""
        for peer, call in [(peer, peer.greet()) for peer in peers]:
            try:
                said = call.result()
            except grpc.RpcError as error:
                if not self._ended.is_set():
                    self.lost(peer, _why(error))
            else:
                if not self._ended.is_set():
                    self._heard(peer, said)

    def _heard(self, peer: Peer, said: GreetResponse) -> None:
        if len(said.instance) != INSTANCE_BYTES:
            self.lost(peer, f"its instance has {len(said.instance)} bytes, not {INSTANCE_BYTES}")
            return
        peer.hear(said)
        fits = said.build == build_id()
        if self._is_news(peer.address, "" if fits else "foreign"):
            if fits and said.instance != self.instance:
                _log.info("peer %s answers; %d of %d other servers are live", peer.address, *self.count())
            elif not fits:
                _log.warning(
                    "peer %s is build %s, and this server is %s: they share no plans until both are of one release",
                    *(peer.address, printable(said.build, MAX_BUILD_CHARS), build_id()),
                )

    def _find(self, names: Sequence[str]) -> None:
        """Begin to look names up; numbers stand for themselves."""
        for name in names:
            if is_number(split_address(name, "peers")[0]):
                self._keep(name, _addresses(name))
            else:
                threading.Thread(target=self._resolve, args=(name,), name=f"name {name}", daemon=True).start()

    def _resolve(self, name: str) -> None:
        """Look a name up again and again, apart from all else: one look-up may take half a minute."""
        while name in self._names and not self._ended.is_set():
            try:
                found = _addresses(name)
                self._is_news(f"name {name}", "")
            except OSError as error:
                found = None  # what was found before may still be there
                if self._is_news(f"name {name}", "unknown") and not self._ended.is_set():
                    problem = error.strerror or str(error)
                    _log.warning("peer %s: the name cannot be looked up (%s); it is tried again", name, problem)
            self._keep(name, found)
            self._ended.wait(RESOLVE_EVERY_S)

    def _keep(self, name: str, found: list[str] | None) -> None:
        """Note what a name stands for, or that it was looked up in vain."""
        with self._lock:
            if name not in self._names:
                return
            before = self._found
            self._stand_for[name] = self._stand_for.get(name, []) if found is None else found
            self._found = self._all_found()
            last = len(self._stand_for) == len(self._names) and not self._resolved.is_set()
            if last:
                self._resolved.set()
            if last or self._found != before:
                self._news.set()

    def _all_found(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for known in self._names:
            host, _ = split_address(known, "peers")
            for address in self._stand_for.get(known, ()):  # of two names for one address the first counts
                found.setdefault(address, "" if is_number(host) else host)
        return found

    def _replace(self, addresses: Mapping[str, str]) -> None:
        """Know these addresses, each with the name that it was found by, and no others."""
        with self._lock:
            wanted = {} if self._ended.is_set() else dict(addresses)
            gone = [peer for address, peer in self._peers.items() if address not in wanted]
            self._peers = {
                address: self._peers.get(address) or Peer(address, self._health, self.channels, name)
                for address, name in wanted.items()
            }
        for peer in gone:
            peer.close()

    def _is_news(self, name: str, state: str) -> bool:
        """Whether something else, or nothing, was told of a name before."""
        with self._lock:
            before, self._told[name] = self._told.get(name), state
        return before != state

    def count(self) -> tuple[int, int]:
        """Live servers and known addresses, without this server."""
        others = [peer.said for peer in self.others()]
        return len({said.instance for said in others if said is not None and not said.draining}), len(others)


def _weight(instance: bytes, job_id: str, step: int) -> bytes:
    """Rendezvous hashing (Thaler and Ravishankar 1998): the largest owns, and one that leaves moves its steps alone."""
    return hashlib.sha256(instance + job_id.encode() + step.to_bytes(8, "little")).digest()


def _addresses(name: str) -> list[str]:
    """The addresses that HOST:PORT stands for."""
    host, port = split_address(name, "peers")
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [joined(str(address[0]), port) for *_, address in found]


def _why(error: grpc.RpcError) -> str:
    code = error.code()
    return printable(error.details() or code.name) if code is not grpc.StatusCode.DEADLINE_EXCEEDED else "in time"
