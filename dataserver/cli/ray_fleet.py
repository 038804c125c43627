"""A fleet as actors of a Ray cluster: as many servers as its free cores allow, and another for each that is lost."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Final

from dataserver.addresses import joined
from dataserver.cli.ray_cluster import RayError
from dataserver.cli.ray_server import RayServer
from dataserver.serving.config import ConfigError, ServerConfig

ANSWER_S: Final = 1.0
"""Time in which servers answer whether they still serve; one that does not is asked again."""
MOST_TRIES: Final = 3
"""Starts that may fail before any server has started."""
MOST_WAIT_S: Final = 60.0
"""Longest time until another start is tried on a node."""

Configure = Callable[[str, tuple[str, ...], float], ServerConfig]
"""The configuration of a server, from its address, all addresses, and its share of its node's memory in bytes."""
_log = logging.getLogger(__name__)


@dataclass
class Member:
    """A server that was started or is about to be."""

    address: str
    node: str
    actor: Any
    starting: Any
    """Reference to its start, until that is over."""


@dataclass
class _Failures:
    """Starts that failed on a node, since one last succeeded."""

    count: int = 0
    until: float = 0.0
    """When another is tried, on the steady clock."""


@dataclass
class RayFleet:
    """The servers, as of the last look."""

    ray: Any
    cores: int
    """Cores that each server gets on its node."""
    first_port: int
    configure: Configure
    members: dict[str, Member] = field(default_factory=dict)
    """The fleet's servers by address."""
    _failures: dict[str, _Failures] = field(default_factory=dict)
    _taken: set[str] = field(default_factory=set)
    """Addresses at which a server could not start."""
    _told: tuple[str, ...] = ()
    _any_started: bool = False

    @property
    def addresses(self) -> tuple[str, ...]:
        """Those of servers that serve."""
        return tuple(sorted(m.address for m in self.members.values() if m.starting is None))

    def look(self) -> None:
        """Note who was lost or has started, start servers where cores are free, and tell all who is there.

        Raises:
            RayError: no server can be started at all.
        """
        nodes = {node["NodeID"]: node for node in self.ray.nodes() if node["Alive"]}
        self._hear()
        self._fill(nodes)
        if not self.members and not self._any_started and not any(f.count for f in self._failures.values()):
            most = max((node["Resources"].get("CPU", 0) for node in nodes.values()), default=0)
            raise RayError(
                f"no node of the Ray cluster has {self.cores} free cores for a server (the largest of {len(nodes)} has "
                f"{most:.0f}); add nodes, or lower --cores"
            )
        if self.addresses != self._told:
            self._told = self.addresses
            for address in self._told:
                self.members[address].actor.look_for.remote(self._told)

    def drain(self, grace_s: float) -> None:
        """Let all servers end in order, and wait for it."""
        ends = [m.actor.drain.remote(grace_s) for m in self.members.values() if m.starting is None]
        if ends:
            self.ray.wait(ends, num_returns=len(ends), timeout=grace_s + 10)

    def _hear(self) -> None:
        asked = {member.starting or member.actor.serves.remote(): member for member in self.members.values()}
        if not asked:
            return
        done, _ = self.ray.wait(list(asked), num_returns=len(asked), timeout=ANSWER_S)
        for reference in done:
            member = asked[reference]
            try:
                found = self.ray.get(reference)
            except self.ray.exceptions.RayTaskError as error:
                self._failed(member, error.cause)
            except self.ray.exceptions.RayError as error:
                self._lost(member, type(error).__name__)
            else:
                if member.starting is not None:
                    member.starting, self._any_started = None, True
                    self._failures.pop(member.node, None)
                    _log.info("server %s serves on node %s", member.address, member.node[:12])
                elif not found:
                    self._lost(member, "it was drained")

    def _failed(self, member: Member, why: Exception) -> None:
        failures = self._failures.setdefault(member.node, _Failures())
        failures.count += 1
        failures.until = monotonic() + min(2.0**failures.count, MOST_WAIT_S)
        if isinstance(why, ConfigError):  # such as a port that another program has; a dataset may come back
            self._taken.add(member.address)
        self._forget(member)
        if not self._any_started and sum(f.count for f in self._failures.values()) >= MOST_TRIES:
            raise RayError(f"no server starts on the Ray cluster: {why}")
        _log.warning("server %s did not start: %s", member.address, why)

    def _lost(self, member: Member, why: str) -> None:
        _log.warning("server %s is lost (%s); another one takes over", member.address, why)
        self._forget(member)

    def _forget(self, member: Member) -> None:
        del self.members[member.address]
        self.ray.kill(member.actor)

    def _fill(self, nodes: Mapping[str, Mapping[str, Any]]) -> None:
        from ray._private.state import available_resources_per_node  # a DeveloperAPI, exported nowhere else

        free = available_resources_per_node()
        for name, node in nodes.items():
            failures = self._failures.get(name)
            if failures is not None and monotonic() < failures.until:
                continue
            here = [member for member in self.members.values() if member.node == name]
            if any(member.starting is not None for member in here):  # what they take is not counted yet
                continue
            total = node["Resources"].get("CPU", 0)
            cores = min(free.get(name, {}).get("CPU", 0), total - len(here) * self.cores)
            for _ in range(int(cores // self.cores)):
                self._start(name, node)

    def _start(self, name: str, node: Mapping[str, Any]) -> None:
        address = self._free_address(node["NodeManagerAddress"])
        share = node["Resources"].get("memory", 0) * self.cores / node["Resources"]["CPU"]
        settings = self.configure(address, (*self.addresses, address), share)
        on_node = self.ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(name, soft=False)
        options = {"num_cpus": self.cores, "max_restarts": 0, "max_concurrency": 4, "scheduling_strategy": on_node}
        try:
            actor = self.ray.remote(RayServer).options(name=address, **options).remote()
        except ValueError:  # Ray still has the name of one that was lost: at the next look
            return
        self.members[address] = Member(address, name, actor, actor.start.remote(settings))

    def _free_address(self, host: str) -> str:
        for port in range(self.first_port, 1 << 16):
            address = joined(host, port)
            if address not in self.members and address not in self._taken:
                return address
        raise RayError(f"no port from {self.first_port} on is left at {host}; lower --first-port")
