"""Argument types that several commands share."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import tyro

from dataserver.addresses import expanded, split_address
from dataserver.cli.parsing import help_text
from dataserver.dataset import location
from dataserver.security import Credentials

if TYPE_CHECKING:
    from dataserver.planning.job.fields import Sizing, SpecModel

_SAYS_ITSELF = tyro.conf.arg(help_behavior_hint="")
"""The help text says what holds without the flag, and whether it may be repeated."""

DatasetPath = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="PATH")]
"""A folder of shards, or a shard, that a command reads."""
Addresses = Annotated[
    tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="ADDRESS...", help_behavior_hint="(required)")
]
Pairs = Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="NAME=PATH", help_behavior_hint="")]
"""A flag that is given several times, each with NAME=PATH."""
Entries = Annotated[tuple[str, ...], tyro.conf.UseAppendAction]
"""A flag that is given several times, with what its help shows."""
Transforms = Annotated[
    tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="NAME=VERSION", help_behavior_hint="")
]
"""A flag that is given several times, each with an installed transform and perhaps its options."""
Switch = Annotated[bool, tyro.conf.FlagCreatePairsOff, _SAYS_ITSELF]
"""A flag without a value."""
MaybePath = Annotated[Path | None, _SAYS_ITSELF]
MaybeInt = Annotated[int | None, _SAYS_ITSELF]
Text = Annotated[str, _SAYS_ITSELF]
"""A text that is empty without the flag."""
Address = Annotated[str | None, tyro.conf.arg(metavar="HOST:PORT", help_behavior_hint="")]

Words = Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="NAME", help_behavior_hint="")]
"""A flag that is given several times, each with a word."""
MAX_SERVERS: Final = 256
"""That one command talks to."""
BYTES: Final = "bytes"
"""The built-in tokenizer, which --tokenizer may name without a file."""


def _credentials(
    tls_ca: MaybePath = None, tls_cert: MaybePath = None, tls_key: MaybePath = None, token_file: MaybePath = None
) -> Credentials:
    """What to show servers.

    Args:
        tls_ca: PEM file of the authorities that sign servers' certificates. With it every connection is encrypted.
        tls_cert: PEM file of a certificate to show servers that ask for one (their --client-ca).
        tls_key: PEM file of the private key of --tls-cert.
        token_file: File with the token to show servers that ask for one. Needs --tls-ca, except for servers on this
            machine.
    """
    return Credentials(tls_ca, tls_cert, tls_key, token_file)


_credentials.__doc__ = help_text(_credentials)

ServerCredentials = Annotated[Credentials, tyro.conf.arg(name="", constructor=_credentials)]
"""The flags of every command that talks to servers: --tls-ca, --tls-cert, --tls-key, --token-file."""


def server_names(addresses: Iterable[str], may_be_none: bool = False) -> tuple[str, ...]:
    """The servers of a command line, each once: HOST:PORT or HOST:FIRST-LAST, separated by spaces or commas.

    Raises:
        ValueError: an address is none, or there are too many, or none though one is required.
    """
    names = tuple(dict.fromkeys(expanded([name for address in addresses for name in address.split(",") if name])))
    if not (0 if may_be_none else 1) <= len(names) <= MAX_SERVERS:
        raise ValueError(f"{len(names)} servers are named; 1 to {MAX_SERVERS} are required")
    for name in names:
        split_address(name, "a server")
    return names


def named_paths(flag: str, entries: Iterable[str]) -> dict[str, Path]:
    """The NAME=PATH entries of a repeated flag.

    Raises:
        ValueError: an entry has no name or no path, or a name stands twice.
    """
    found: dict[str, Path] = {}
    for entry in entries:
        name, separator, path = entry.partition("=")
        if not (separator and name and path):
            shown = "URL" if "://" in entry else entry  # it may hold a secret
            raise ValueError(f"--{flag} {shown}: NAME=PATH is required")
        if name in found:
            raise ValueError(f"--{flag} names {name!r} twice; give each name once")
        found[name] = location(Path(path))
    return found


def tokenizer_files(entries: Iterable[str]) -> dict[str, Path]:
    """The files that the entries of --tokenizer name; `bytes` alone is built in and has none.

    Raises:
        ValueError: as `named_paths`, or a file is called `bytes`.
    """
    found = named_paths("tokenizer", (entry for entry in entries if entry != BYTES))
    if BYTES in found:
        raise ValueError(f"--tokenizer {BYTES}={found[BYTES]}: {BYTES} is built in; give the file another name")
    return found


def sizing_of_job(path: Path) -> "Sizing":
    """The sizing of a job in a file.

    Raises:
        ValueError: the file cannot be read or used, or has no such sizing.
    """
    sizing = _stream_of_job(path).get("sizing", {})
    if not isinstance(sizing, dict):
        raise ValueError(f"--job {path} has no stream with a sizing; give a whole job")
    return sizing_of(**sizing)


def transforms_of_job(path: Path) -> "tuple[SpecModel, ...]":
    """The transforms of pixels of a job in a file, without those that users install.

    Raises:
        ValueError: the file cannot be read or used, or has no such transforms.
    """
    from pydantic import ValidationError

    from dataserver.planning.job.fields import InstalledPixels, TransformsOfPixels, describe

    given = {"transforms": _stream_of_job(path).get("transforms")}
    try:
        found = TransformsOfPixels.model_validate_json(json.dumps(given)).transforms or ()
    except ValidationError as error:
        raise ValueError(f"--job {path}: {describe(error, given, TransformsOfPixels)}") from None
    return tuple(one for one in found if not isinstance(one, InstalledPixels))


def _stream_of_job(path: Path) -> dict[str, Any]:
    from dataserver.job_files import read_job

    job = read_job(path)
    stream = job.get("stream") if isinstance(job, dict) else None
    if not isinstance(stream, dict):
        raise ValueError(f"--job {path} has no stream with a sizing; give a whole job")
    return stream


def sizing_of(**values: Any) -> "Sizing":
    """The sizing that flags ask for, by the names that a job has for its fields.

    Raises:
        ValueError: a value is beyond what a job may have; says which, and what is required.
    """
    from pydantic import ValidationError

    from dataserver.planning.job.fields import Sizing, describe

    try:
        return Sizing.model_validate_json(json.dumps(values))
    except ValidationError as error:
        raise ValueError(describe(error, values, Sizing)) from None
