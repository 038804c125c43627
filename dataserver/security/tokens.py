"""Bearer tokens: a server's file of several, a client's file of one, and how a call carries one."""

import hmac
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Final

from dataserver.security.files import SecurityError, read_trusted

PEERS_TOKEN: Final = "peers"  # noqa: S105 (a name)
"""Name of the token that a server shows its peers."""
MAX_TOKENS: Final = 1024
_TOKEN: Final = re.compile(r"[A-Za-z0-9._~+/=-]{32,1024}")
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_SCHEME: Final = "Bearer "
_FORM: Final = "32 to 1024 letters, digits or ._~+/=- are required, such as `openssl rand -hex 32` prints"


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens of a server, by name: several may have one name, so that a token can be replaced."""

    entries: tuple[tuple[str, bytes], ...]
    """Name and SHA-256 of each."""
    shown: str | None = field(default=None, repr=False)
    """The token to show peers; None where there is none of that name."""

    def name_of(self, token: str) -> str | None:
        """The name of a token, or None. Takes as long for one that is not there as for any other."""
        given, found = sha256(token.encode("utf-8", "surrogatepass")).digest(), None
        for name, digest in self.entries:
            if hmac.compare_digest(digest, given):
                found = name
        return found

    @property
    def names(self) -> frozenset[str]:
        """Names of all token holders."""
        return frozenset(name for name, _ in self.entries)


def load_tokens(path: Path) -> Tokens:
    """Read a server's file: lines of NAME TOKEN; empty lines and those that begin with # count for nothing.

    Raises:
        SecurityError: it cannot be used; names the line, and quotes nothing: a token may stand first in it.
    """
    entries: list[tuple[str, bytes]] = []
    shown: str | None = None
    for number, line in _lines(path, "token file"):
        where = f"the token file {path}, line {number}"
        name, *tokens = line.split()
        if not _NAME.fullmatch(name) or len(tokens) != 1:
            raise SecurityError(f"{where}: NAME TOKEN is required, two words")
        if not _TOKEN.fullmatch(tokens[0]):
            raise SecurityError(f"{where}: its second word has another form; {_FORM}")
        digest = sha256(tokens[0].encode()).digest()
        if any(digest == other for _, other in entries):
            raise SecurityError(f"{where}: its token stands there twice; each may stand once")
        entries.append((name, digest))
        if name == PEERS_TOKEN and shown is None:
            shown = tokens[0]
    if not 1 <= len(entries) <= MAX_TOKENS:
        raise SecurityError(f"the token file {path} holds {len(entries)} tokens; 1 to {MAX_TOKENS} are required")
    return Tokens(tuple(entries), shown)


def load_token(path: Path) -> str:
    """Read a client's file: one token, alone.

    Raises:
        SecurityError: it cannot be used.
    """
    lines = [line for _, line in _lines(path, "token file")]
    if len(lines) != 1 or not _TOKEN.fullmatch(lines[0]):
        raise SecurityError(f"the token file {path} holds {len(lines)} lines or another form; one token alone: {_FORM}")
    return lines[0]


def bearer(token: str) -> tuple[str, str]:
    """The entry of a call's metadata that carries a token."""
    return "authorization", _SCHEME + token


def token_in(values: Iterable[str]) -> str | None:
    """The token in the values of `authorization`; None where there is none, or several."""
    found = list(values)
    if len(found) != 1 or not found[0].startswith(_SCHEME):
        return None
    token = found[0].removeprefix(_SCHEME)
    return token if _TOKEN.fullmatch(token) else None


def _lines(path: Path, what: str) -> list[tuple[int, str]]:
    try:
        text = read_trusted(path, what, secret=True).decode("ascii")
    except UnicodeDecodeError:
        raise SecurityError(f"the {what} {path} is not ASCII; {_FORM}") from None
    stripped = ((number, line.strip()) for number, line in enumerate(text.splitlines(), 1))
    return [(number, line) for number, line in stripped if line and not line.startswith("#")]
