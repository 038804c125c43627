"""What can go wrong with a dataset as a whole, and the collector of what is wrong with single samples."""

import errno
import json
import unicodedata
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from dataserver.dataset.kinds import KINDS

MAX_FINDING_BYTES = 4 << 20
"""Limit of the details kept per shard, some 50,000 of them; the counts stay exact beyond it."""

MAX_DETAIL_CHARS = 200
MAX_KEY_CHARS = 1024


class DatasetError(ValueError):
    """A dataset cannot be used as it is; the message says what to change."""


class StaleIndexError(DatasetError):
    """An index is missing, older than its shard, or of another format; the message names the command to run."""


class TokensMissingError(DatasetError):
    """A shard's texts were not counted with this tokenizer; the message names the command to run."""


class TokenizingError(Exception):
    """A tokenizer cannot encode a text; the message is the tokenizer's own word."""


class TextTransformError(TokenizingError):
    """A transform of a user fails for a text before it is encoded."""


class TokenizingEndedError(TokenizingError):
    """Encoding a text took more time or memory than it may: a machine that is faster may encode it."""


class FilterError(DatasetError):
    """A filter expression is malformed, names an unknown column or compares values of different types."""


class CaptionError(DatasetError):
    """A caption that no sample of the dataset has."""


class QuarantineError(DatasetError):
    """A quarantine list cannot be read."""


class ShardReadError(DatasetError):
    """Storage did not give the bytes that the index promises: retriable, and says nothing about the sample."""


class SampleError(Exception):
    """One sample or member cannot be used; becomes an `Finding` and never leaves this folder."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(kind, detail)
        self.kind = kind
        self.detail = detail


class TarError(SampleError):
    """The rest of a tar cannot be read; `member` is the raw name of the member that is cut, where it is known."""

    def __init__(self, kind: str, detail: str, member: bytes | None = None) -> None:
        super().__init__(kind, detail)
        self.member = member


class RefusedShardError(Exception):
    """The rest of a shard cannot be read, so that no sample of it is used; says why, and never leaves this folder."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something odd in one shard: `kind` is one of `KINDS`, `key` the sample's key, empty where it belongs to none."""

    key: str
    kind: str
    detail: str


@dataclass(frozen=True, slots=True)
class ShardFinding:
    """One finding with the shard it is in; `key` is empty where it belongs to no sample."""

    shard: str
    key: str
    kind: str
    detail: str


@dataclass(slots=True)
class Findings:
    """Collects what is odd in one shard: exact counts by kind, and the first details, up to `MAX_FINDING_BYTES`."""

    counts: Counter[str] = field(default_factory=Counter)
    details: list[Finding] = field(default_factory=list)
    num_bytes: int = 0

    def add(self, key: str, kind: str, detail: str) -> None:
        """Count one finding; names and texts of hostile files are made printable and cut."""
        self.counts[kind] += 1
        whole = len(key) <= MAX_KEY_CHARS and is_safe(key)
        finding = Finding(key if whole else printable(key, MAX_KEY_CHARS), kind, printable(detail))
        self.num_bytes += len(finding.key) + len(kind) + len(finding.detail)
        if self.num_bytes <= MAX_FINDING_BYTES:
            self.details.append(finding)

    def add_all(self, other: "Findings") -> None:
        """Count all of another collector."""
        counts = self.counts + other.counts
        for found in other.details:
            self.add(found.key, found.kind, found.detail)
        self.counts = counts  # exact, also of what has no details

    def to_json(self) -> bytes:
        """Counts and details as files of an index hold them: a line of ASCII."""
        details = [[found.key, found.kind, found.detail] for found in self.details]
        return canonical({"counts": dict(sorted(self.counts.items())), "details": details})


@dataclass(frozen=True, slots=True)
class FindingReport:
    """The findings of one shard as its index holds them."""

    counts: Mapping[str, int]
    details: tuple[Finding, ...]

    @classmethod
    def from_json(cls, text: bytes) -> "FindingReport":
        """Read what `Findings.to_json` wrote. Raises ValueError, TypeError or KeyError for anything else."""
        content = json.loads(text)
        details = tuple(Finding(*detail) for detail in content["details"])
        if not KINDS.keys() >= content["counts"].keys() | {finding.kind for finding in details}:
            raise ValueError("it counts an unknown kind of finding")
        return cls(content["counts"], details)


_ENCODER: Final = json.JSONEncoder(separators=(",", ":"))


def canonical(value: Any) -> bytes:
    """The one spelling of a value that digests and headers are made of: a line of JSON, ASCII."""
    return _ENCODER.encode(value).encode("ascii") + b"\n"


_UNSAFE = frozenset({"Cc", "Cs", "Zl", "Zp"})
"""Controls, surrogates, and separators of lines and paragraphs."""
_OF_THE_FILE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EINVAL, errno.ELOOP)
"""What the system reports if a file is gone or is not the one expected; an empty file cannot be mapped (EINVAL)."""


def cannot_read(path: Path, error: BaseException | None) -> ShardReadError:
    """What to raise where storage does not give a file."""
    return ShardReadError(f"cannot read {path}: {error}; check the storage")


def is_of_storage(error: BaseException) -> bool:
    """Whether storage failed, which has a number; Arrow's own errors have none, nor has what is no regular file."""
    return isinstance(error, OSError) and error.errno is not None


def check_storage(path: Path, error: Exception) -> None:
    """Raise ShardReadError if a file could not be read for a reason that says nothing of what it holds."""
    if isinstance(error, OSError) and error.errno is not None and error.errno not in _OF_THE_FILE:
        raise cannot_read(path, error) from error


def is_safe(text: str) -> bool:
    """Say whether a name can stand in a path and in a line of a log: it has no control character and no line break.

    Spaces of any width, joiners and soft hyphens are safe.
    """
    return text.isprintable() or not any(unicodedata.category(character) in _UNSAFE for character in text)


def printable(text: str, max_chars: int = MAX_DETAIL_CHARS) -> str:
    """Escape what is not printable (surrogates too) and cut to `max_chars`."""
    cut = text[:max_chars]
    return cut if cut.isprintable() else cut.encode("unicode_escape", "backslashreplace").decode("ascii")
