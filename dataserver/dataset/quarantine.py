"""Quarantine lists: samples that a job leaves out, pinned by the digest of the list's content.

The file is JSON lines `["SHARD", "KEY"]`. Its digest is that of the sorted, canonical content, so that two lists of
the same samples are the same list.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from dataserver.dataset.errors import QuarantineError
from dataserver.outputs import write_whole, writing

MAX_QUARANTINE_BYTES: Final = 256 << 20


class KeyedShard(Protocol):
    """What a mask needs of a shard."""

    @property
    def name(self) -> str: ...  # noqa: D102

    def keys(self) -> list[str]: ...  # noqa: D102


@dataclass(frozen=True)
class Quarantine:
    """Samples to leave out: keys by shard name."""

    keys: Mapping[str, frozenset[str]]

    @classmethod
    def from_samples(cls, samples: Iterable[tuple[str, str]]) -> "Quarantine":
        """Make a list of (shard name, key) pairs."""
        keys: dict[str, set[str]] = {}
        for shard, key in samples:
            keys.setdefault(shard, set()).add(key)
        return cls({shard: frozenset(keys[shard]) for shard in sorted(keys)})

    @classmethod
    def load(cls, path: Path) -> "Quarantine":
        """Read a list.

        Raises:
            QuarantineError: the file is missing, too large, or has a line that is not `["SHARD", "KEY"]`.
        """
        try:
            size = path.stat().st_size
            if size > MAX_QUARANTINE_BYTES:
                raise QuarantineError(f"{path} has {size} bytes, the limit is {MAX_QUARANTINE_BYTES}; shorten the list")
            lines = path.read_text("utf-8").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise QuarantineError(
                f"cannot read the quarantine list {path}: {error}; write one with dataserver lint"
            ) from error
        return cls.from_samples(_parse_line(path, number, line) for number, line in enumerate(lines, 1) if line)

    @cached_property
    def num_samples(self) -> int:
        """How many samples the list names."""
        return sum(len(keys) for keys in self.keys.values())

    @cached_property
    def digest(self) -> str:
        """Sha256 of the canonical content, hex."""
        return hashlib.sha256(self._content()).hexdigest()

    def save(self, path: Path) -> None:
        """Write the list as a whole; its folder is made. OutputError where it cannot be written."""
        with writing("--quarantine-file", path):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, self._content())

    def mask(self, shard: KeyedShard) -> npt.NDArray[np.bool_]:
        """Return bool[num samples]: True where the sample stays."""
        keys = shard.keys()
        listed = self.keys.get(shard.name)
        if listed is None:
            return np.ones(len(keys), np.bool_)
        return np.array([key not in listed for key in keys], np.bool_)

    def _content(self) -> bytes:
        pairs = [(shard, key) for shard in sorted(self.keys) for key in sorted(self.keys[shard])]
        return b"".join(json.dumps(pair).encode("ascii") + b"\n" for pair in pairs)


def _parse_line(path: Path, number: int, line: str) -> tuple[str, str]:
    try:
        pair = json.loads(line)
    except (ValueError, RecursionError):
        pair = None
    if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(part, str) for part in pair):
        raise QuarantineError(f'{path}, line {number}: found {line[:80]!r}, each line must be ["SHARD", "KEY"]')
    return pair[0], pair[1]
