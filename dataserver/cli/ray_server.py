"""A data server as an actor of Ray: its process is the server."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dataserver.cli.serve import opened, pages_of
from dataserver.serving.config import ServerConfig
from dataserver.serving.server import DataServer

if TYPE_CHECKING:
    from dataserver.web.server_pages import ServerPages


class RayServer:
    """One server. Whoever made the actor calls `start` first."""

    def __init__(self) -> None:
        self._server: DataServer | None = None
        self._pages: ServerPages | None = None

    def start(self, settings: ServerConfig) -> str:
        """Open the datasets and serve; HOST:PORT.

        Raises:
            ConfigError: the address cannot be bound.
            DatasetError: a dataset cannot be opened on this node.
        """
        self._server = opened(settings)
        address = self._server.start()
        self._pages = pages_of(self._server)
        return address

    def serves(self) -> bool:
        """Whether it has not been drained."""
        return self._server is not None and not self._server.has_ended

    def look_for(self, addresses: Sequence[str]) -> None:
        """Share plans with the servers at these addresses from now on."""
        if self._server is not None and self._server.peers is not None:
            self._server.peers.look_for(addresses)

    def drain(self, grace_s: float) -> None:
        """Let open streams finish the microbatch in hand, then end."""
        if self._server is not None:
            self._server.drain(grace_s)
            self._server.wait()
        if self._pages is not None:
            self._pages.close()
