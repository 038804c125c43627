"""Who a caller is and what it may do: the one function that says so, for gRPC and for the metrics' HTTP alike."""

import hmac
import secrets
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import grpc
from disttrain.v1 import errors_pb2

from dataserver.dataset import Dataset
from dataserver.jobs import Catalog
from dataserver.security import Tokens, Watched, load_tokens, token_in
from dataserver.serving.access.audit import Audit
from dataserver.serving.access.policy import EVERYBODY, Identity, Policy, Right, load_policy
from dataserver.serving.config import ServerConfig
from dataserver.serving.errors import DataServiceError

ITSELF: Final = "(this server)"
"""Name of the token that a server shows to itself; no token of a file has such a name."""
_SAN_KEYS: Final = ("peer_dns", "peer_uri", "peer_spiffe_id")
"""Names of a certificate in gRPC's authentication context, by kind. Its common name counts for nothing."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls, and from where."""

    identity: Identity
    address: str

    def __str__(self) -> str:
        return f"{self.identity.name} at {self.address}"


class Access:
    """Knows callers by what they show, and what they may do. Thread-safe."""

    def __init__(self, config: ServerConfig, catalog: Catalog) -> None:
        """Read tokens and policy.

        Raises:
            SecurityError: a file cannot be used.
        """
        self.audit = Audit()
        self.own_token: Final = secrets.token_hex(32)
        """For calls of this server to itself, which may do everything."""
        self._catalog = catalog
        self._with_certificates = config.client_ca is not None
        self._tokens: Watched[Tokens] | None = None
        self._policy: Watched[Policy] | None = None
        if (token_file := config.token_file) is not None:
            self._tokens = Watched([token_file], lambda: load_tokens(token_file))
        if (file := config.policy) is not None:
            names = catalog.datasets.keys()
            self._policy = Watched(
                [file], lambda: load_policy(file, names, self._token_names(), self._with_certificates)
            )

    @property
    def is_open(self) -> bool:
        """Whether everybody may do everything."""
        return self._tokens is None and not self._with_certificates

    @property
    def version(self) -> int:
        """A number that grows when somebody may no longer be let in, or do less."""
        return sum(watched.version for watched in (self._tokens, self._policy) if watched is not None)

    def problems(self) -> list[str]:
        """Why files cannot be used as they are now, so that what was read of them before counts."""
        watched = [one for one in (self._tokens, self._policy) if one is not None]
        return [one.problem for one in watched if one.problem]

    def in_use(self) -> bytes:
        """The tokens, by their SHA-256, and the policy that count now, the same for files that mean the same."""
        tokens = () if self._tokens is None else self._tokens.get().entries
        policy = "" if self._policy is None else self._policy.get().canonical()
        return "\n".join([*sorted(f"{name} {token.hex()}" for name, token in tokens), policy]).encode()

    def peers_token(self) -> str | None:
        """The token to show other servers."""
        return None if self._tokens is None else self._tokens.get().shown

    def token_name(self, authorization: Sequence[str]) -> str | None:
        """The name of the token in a call's `authorization`; None where the server asks for none.

        Raises:
            DataServiceError: UNAUTHENTICATED.
        """
        token = token_in(authorization)
        if token is not None and hmac.compare_digest(token, self.own_token):
            return ITSELF
        if self._tokens is None:
            return None
        name = None if token is None else self._tokens.get().name_of(token)
        if name is None:
            found = "none" if not authorization else "one that it does not know" if token else "another form"
            raise DataServiceError(
                errors_pb2.ERROR_REASON_UNAUTHENTICATED,
                f"this server asks for a token and found {found}: give the client a --token-file with one of its own",
            )
        return name

    def identify(self, token: str | None, certificates: Collection[str]) -> Identity:
        """Who shows a token of this name, and a certificate with these names.

        Raises:
            DataServiceError: PERMISSION_DENIED: the policy has no such identity.
        """
        if self._policy is None or token == ITSELF:
            known = token or next(iter(certificates), None)
            return EVERYBODY if known is None else EVERYBODY.model_copy(update={"name": known[:128]})
        identity = self._policy.get().find(token, certificates)
        if identity is None:
            shown = [f"token {token}"] * (token is not None) + [f"certificate {name}" for name in [*certificates][:4]]
            raise DataServiceError(
                errors_pb2.ERROR_REASON_PERMISSION_DENIED,
                f"no identity of this server's policy has {' and '.join(shown) or 'a certificate without names'}: add "
                "one to the server's --policy",
            )
        return identity

    def caller(self, context: grpc.ServicerContext) -> Caller:
        """Who calls.

        Raises:
            DataServiceError: UNAUTHENTICATED or PERMISSION_DENIED.
        """
        if self.is_open:
            return Caller(EVERYBODY, context.peer())
        token = self.token_name(authorization(context.invocation_metadata()))
        names = certificate_names(context.auth_context()) if self._with_certificates else ()
        return Caller(self.identify(token, names), context.peer())

    def require(self, context: grpc.ServicerContext, right: Right) -> Caller:
        """Who calls, and may do this.

        Raises:
            DataServiceError: UNAUTHENTICATED or PERMISSION_DENIED.
        """
        caller = self.caller(context)
        require_right(caller.identity, right)
        return caller

    def catalog(self, context: grpc.ServicerContext) -> Catalog:
        """What exists for the caller: its datasets, and all tokenizers."""
        if self.is_open:
            return self._catalog
        caller = self.caller(context)
        return replace(self._catalog, datasets=_Visible(self._catalog.datasets, caller, self.audit))

    def _token_names(self) -> frozenset[str] | None:
        return None if self._tokens is None else self._tokens.get().names


class _Visible(Mapping[str, Dataset]):
    """The datasets that exist for a caller. Asking for another one is written down."""

    def __init__(self, datasets: Mapping[str, Dataset], caller: Caller, audit: Audit) -> None:
        self._datasets, self._caller, self._audit = datasets, caller, audit

    def __getitem__(self, name: str) -> Dataset:
        found = self._datasets[name]
        if not self._caller.identity.may_read(name):
            self._audit.write(f"dataset {name}", str(self._caller), "the policy does not list it")
            raise KeyError(name)
        return found

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._datasets if self._caller.identity.may_read(name))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def require_right(identity: Identity, right: Right) -> None:
    """Raise PERMISSION_DENIED unless an identity may do something."""
    if not identity.has(right):
        raise DataServiceError(
            errors_pb2.ERROR_REASON_PERMISSION_DENIED,
            f"{identity.name} has the rights {', '.join(sorted(identity.rights))}; {right} is required: add it in the "
            "server's --policy, or ask with other credentials",
        )


def authorization(metadata: Sequence[tuple[str, str | bytes]] | None) -> list[str]:
    """The values of `authorization` in a call's metadata."""
    return [value for key, value in metadata or () if key == "authorization" and isinstance(value, str)]


def certificate_names(context: Mapping[str, Any]) -> tuple[str, ...]:
    """DNS names and URIs of the caller's certificate, by gRPC's authentication context: lists of bytes by kind."""
    found = [name.decode("utf-8", "replace") for key in _SAN_KEYS for name in context.get(key, ())]
    return tuple(dict.fromkeys(found))
