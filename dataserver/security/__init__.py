"""What both ends of a connection show and check: certificates, tokens, and the files that they come from."""

from dataserver.security.certificates import KeyPair, certificates_in, load_authorities, load_pair, server_context
from dataserver.security.credentials import NO_CREDENTIALS, Channels, Credentials, tls_problem, with_hint
from dataserver.security.files import SecurityError, Watched, read_trusted
from dataserver.security.tokens import PEERS_TOKEN, Tokens, bearer, load_token, load_tokens, token_in

__all__ = [
    "NO_CREDENTIALS",
    "PEERS_TOKEN",
    "Channels",
    "Credentials",
    "KeyPair",
    "SecurityError",
    "Tokens",
    "Watched",
    "bearer",
    "certificates_in",
    "load_authorities",
    "load_pair",
    "load_token",
    "load_tokens",
    "read_trusted",
    "server_context",
    "tls_problem",
    "token_in",
    "with_hint",
]
