"""The policy of a server: a YAML file of identities, their datasets, rights and limits."""

import json
import logging
import re
from collections.abc import Collection, Iterable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from dataserver.planning.job.fields import Name, TextError, describe, is_name, parse_yaml
from dataserver.security import SecurityError, read_trusted

ALL: Final = "*"
"""The entry of a policy that stands for all datasets."""
MAX_IDENTITIES: Final = 1024
_DNS_NAME: Final = re.compile(r"(?=.{1,253}$)[A-Za-z0-9_]([A-Za-z0-9_-]*)(\.[A-Za-z0-9_]([A-Za-z0-9_-]*))*")
_URI: Final = re.compile(r"[a-z][a-z0-9+.-]*://[!-~]{1,2000}")

_log = logging.getLogger(__name__)


class Right(StrEnum):
    """What an identity may do."""

    READ = "read"
    """Everything about its datasets: create jobs, read streams and plans, report times."""
    METRICS = "metrics"
    """See the numbers of the server, of all jobs."""
    ADMIN = "admin"
    """Drain the server; also all of the above, for its datasets."""


def _certificate(name: str) -> str:
    if not (_DNS_NAME.fullmatch(name) or _URI.fullmatch(name)):
        raise ValueError("a DNS name or a URI such as spiffe://example.org/trainer is required")
    return name


def _dataset(name: str) -> str:
    if name != ALL and not is_name(name):
        raise ValueError(f'the name of a dataset is required, or "{ALL}" for all')
    return name


class Identity(BaseModel):
    """Who calls, and what it may do. Of several that fit a call the first counts."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    name: Name
    certificate: Annotated[str, AfterValidator(_certificate)] | None = None
    """Subject alternative name of its certificate: a DNS name, or a URI such as spiffe://example.org/trainer."""
    token: Name | None = None
    """Name of its token in --token-file. With `certificate` beside it, a call has to show both."""
    datasets: frozenset[Annotated[str, AfterValidator(_dataset)]] = frozenset()
    """Datasets that exist for it; "*" stands for all."""
    rights: frozenset[Right] = frozenset({Right.READ})
    streams: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Streams that it may have open at once."""
    jobs: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Jobs that it may have streams of at once."""
    bytes_per_s: Annotated[int, Field(ge=1 << 10, le=1 << 50)] | None = None
    """Bytes a second that all of its streams together get, averaged over a few microbatches."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.certificate is None and self.token is None:
            raise ValueError("a certificate or a token is required, by which it is known")
        return self

    def is_shown(self, token: str | None, certificates: Collection[str]) -> bool:
        """Whether a call shows what this identity has to show.

        Args:
            token: name of the token of the call, if any.
            certificates: DNS names and URIs of its certificate.
        """
        return self.token in (None, token) and (self.certificate is None or self.certificate in certificates)

    def may_read(self, dataset: str) -> bool:
        """Whether a dataset exists for it."""
        return ALL in self.datasets or dataset in self.datasets

    def has(self, right: Right) -> bool:
        """Whether it may do something."""
        return right in self.rights or Right.ADMIN in self.rights


EVERYBODY: Final = Identity.model_construct(
    name="everybody", datasets=frozenset({ALL}), rights=frozenset({Right.ADMIN})
)
"""Whoever calls a server that knows no identities."""


class Policy(BaseModel):
    """The identities of a server."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    identities: Annotated[tuple[Identity, ...], Field(min_length=1, max_length=MAX_IDENTITIES)]

    @model_validator(mode="after")
    def _check(self) -> Self:
        _require_unique("name", (identity.name for identity in self.identities))
        _require_unique("pair of certificate and token", ((i.certificate, i.token) for i in self.identities))
        return self

    def canonical(self) -> str:
        """JSON of the identities in their order, which counts; sets are sorted."""
        found = [identity.model_dump(mode="json") for identity in self.identities]
        for one in found:
            one.update(datasets=sorted(one["datasets"]), rights=sorted(one["rights"]))
        return json.dumps(found, sort_keys=True)

    def find(self, token: str | None, certificates: Collection[str]) -> Identity | None:
        """The identity of a call, by the name of its token and the names in its certificate."""
        return next((identity for identity in self.identities if identity.is_shown(token, certificates)), None)


def load_policy(path: Path, datasets: Collection[str], tokens: Collection[str] | None, certificates: bool) -> Policy:
    """Read a policy.

    Args:
        path: of the YAML file.
        datasets: names of the server's datasets.
        tokens: names of its tokens; None where it asks for none.
        certificates: whether it asks for certificates.

    Raises:
        SecurityError: the file cannot be used, or names datasets that the server does not have. It tells fields and
            lines and quotes nothing, of the file or of `datasets`: a secret may stand in a wrong field, and whoever has
            the right `metrics` is told.
    """
    try:
        data = parse_yaml(read_trusted(path, "policy"))
        policy = Policy.model_validate(data if isinstance(data, dict) else {})
    except TextError as error:
        where = "" if error.line is None else f", line {error.line},"
        raise SecurityError(
            f"the policy {path}{where} cannot be used: one document of YAML in UTF-8 is required, of mappings and "
            "lists that are not nested deeply, with keys that are texts and stand once, without tags or many aliases"
        ) from None
    except ValidationError as error:
        problem = describe(error, data, Policy, quoted=False).removeprefix("job: ")
        raise SecurityError(f"the policy {path} is not valid: {problem}") from None
    for number, identity in enumerate(policy.identities):
        where = f"the policy {path}, identities.{number}"
        listed = data["identities"][number].get("datasets", ())  # as they stand there, for their positions
        unknown = [f"{where}.datasets.{n}" for n, name in enumerate(listed) if name != ALL and name not in datasets]
        if unknown:
            raise SecurityError(f"{unknown[0]}: the server has no dataset of that name; correct it, or add --dataset")
        if identity.token is not None and tokens is None:
            raise SecurityError(f"{where}: the server asks for no tokens; add --token-file, or name a certificate")
        if identity.token is not None and identity.token not in (tokens or ()):  # it may have been revoked there
            _log.warning("%s.token: --token-file has no token of that name, so this identity cannot call", where)
        if identity.certificate is not None and not certificates:
            raise SecurityError(f"{where}: the server asks for no certificates; add --client-ca, or name a token")
    return policy


def _require_unique(what: str, found: Iterable[object]) -> None:
    first: dict[object, int] = {}
    for number, one in enumerate(found):
        if first.setdefault(one, number) != number:
            raise ValueError(
                f"identities.{first[one]} and identities.{number} have the same {what}; each needs its own"
            )
