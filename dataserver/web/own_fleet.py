"""A server and its peers, as the pages of this server ask them."""

from collections.abc import Sequence

import grpc

from dataserver.fleet.peer import Peer
from dataserver.security import Channels
from dataserver.serving.server import DataServer


class OwnFleet:
    """The server itself, asked with its own token; then its peers, with what it shows them. Thread-safe."""

    def __init__(self, server: DataServer) -> None:
        """Make it of a server that serves with --web-listen."""
        self._server = server
        self._own = Channels(token=lambda: server.access.own_token)

    @property
    def names(self) -> Sequence[str]:
        """Address of each server, as HOST:PORT."""
        return [self._server.address, *(peer.address for peer in self._others())]

    @property
    def version(self) -> int:
        """A number that grows when certificates change."""
        peers = self._server.peers
        return 0 if peers is None else peers.channels.version

    def open(self, name: str, options: Sequence[tuple[str, int | str]] = ()) -> grpc.Channel:
        """A channel to one of them."""
        peers = self._server.peers
        if peers is None or name == self._server.address:
            return self._own.open(self._server.own_address, options)
        found_by = next((peer.server_name for peer in self._others() if peer.address == name), "")
        return peers.channels.open(name, options, found_by)

    def _others(self) -> list[Peer]:
        """Peers by address, without this server as far as it has found itself among them."""
        peers = self._server.peers
        return [] if peers is None else [peer for peer in peers.others() if peer.address != self._server.address]
