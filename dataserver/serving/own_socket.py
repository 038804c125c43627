"""A Unix socket on which a server asks itself, so that what shows a fleet asks all of its servers in one way."""

from pathlib import Path

import grpc


class OwnSocket:
    """Needs no certificate, whatever the other addresses ask for: only this user can reach it, and calls show a token
    that this process alone knows (`Access.own_token`)."""

    def __init__(self, server: grpc.Server) -> None:
        """Have a server that has not begun listen on it."""
        from tempfile import TemporaryDirectory  # most servers show no pages

        self._folder = TemporaryDirectory(prefix="disttrain-")  # which this user alone may enter
        self.address = f"unix:{Path(self._folder.name) / 'own'}"
        server.add_insecure_port(self.address)

    def close(self) -> None:
        """Remove the socket and its folder."""
        self._folder.cleanup()
