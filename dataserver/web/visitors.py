"""Who may see the pages: whoever has a token of a file, or all that the tokens and policy of a server let in."""

import threading
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Final, Protocol

from disttrain.v1 import errors_pb2

from dataserver.dataset import Dataset
from dataserver.security import Tokens, Watched, token_in
from dataserver.serving.access import EVERYBODY, Access, Identity, Right, require_right
from dataserver.serving.errors import DataServiceError

FLEET_PATH: Final = "/api/fleet"
MayRead = Callable[[str], bool]
"""Whether a dataset of this name may be shown to who asks."""


class RefusedError(Exception):
    """A visitor who may not see something; the message says what is required."""

    def __init__(self, message: str, why: str, status: HTTPStatus = HTTPStatus.UNAUTHORIZED) -> None:
        """Refuse with a status.

        Args:
            message: for the visitor.
            why: for the log of the server.
            status: UNAUTHORIZED where a browser shall ask for a token, or FORBIDDEN.
        """
        super().__init__(message)
        self.why, self.status = why, status


class Door(Protocol):
    """Lets visitors in, or refuses them. Thread-safe."""

    def let_in(self, path: str, authorization: Sequence[str], certificates: Sequence[str]) -> None:
        """Let a request through.

        Args:
            path: that is asked for.
            authorization: tokens that are shown, in the form of `Bearer TOKEN`.
            certificates: DNS names and URIs of the visitor's certificate.

        Raises:
            RefusedError: it may not be answered.
        """


class TokenDoor:
    """Lets those in who have one of the tokens of a file."""

    def __init__(self, tokens: Watched[Tokens]) -> None:
        self._tokens = tokens

    def let_in(self, _path: str, authorization: Sequence[str], _certificates: Sequence[str]) -> None:
        """Let a request with a token through."""
        token = token_in(authorization)
        if token is None or self._tokens.get().name_of(token) is None:
            why = "no token" if token is None else "unknown token"
            raise RefusedError("a token of --web-tokens is required, as the password", why)


class ServerDoor:
    """Lets those in whom a server knows, and says what each may see.

    A thread answers one request at a time, and remembers whose it is.
    """

    def __init__(self, access: Access, datasets: Mapping[str, Dataset]) -> None:
        self._access, self._datasets = access, datasets
        self._of_thread = threading.local()

    def let_in(self, path: str, authorization: Sequence[str], certificates: Sequence[str]) -> None:
        """Let a request through whose visitor has the right for it: `metrics` for the fleet, `read` for datasets."""
        self._of_thread.identity = None
        try:
            identity = self._identity(authorization, certificates)
            if path.startswith("/api/"):
                require_right(identity, Right.METRICS if path == FLEET_PATH else Right.READ)
        except DataServiceError as error:
            is_unknown = error.reason == errors_pb2.ERROR_REASON_UNAUTHENTICATED
            message = "a token of this server is required, as the password" if is_unknown else error.message
            status = HTTPStatus.UNAUTHORIZED if is_unknown else HTTPStatus.FORBIDDEN
            raise RefusedError(message, error.message, status) from None
        self._of_thread.identity = identity

    def may_read(self, dataset: str) -> bool:
        """Whether a dataset exists for the visitor whose request this thread answers."""
        identity: Identity | None = self._of_thread.identity
        return identity is not None and identity.may_read(dataset)

    def fingerprints(self) -> dict[str, str]:
        """Those of the server's datasets that exist for this visitor."""
        return {name: dataset.fingerprint for name, dataset in self._datasets.items() if self.may_read(name)}

    def _identity(self, authorization: Sequence[str], certificates: Sequence[str]) -> Identity:
        if self._access.is_open:
            return EVERYBODY
        return self._access.identify(self._access.token_name(authorization), certificates)
