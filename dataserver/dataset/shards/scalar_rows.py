"""The scalar entries of a shard's .json members, kept until it is known whether they make its columns."""

from typing import Final

from dataserver.dataset.errors import Findings
from dataserver.dataset.kinds import UNUSABLE_COLUMN
from dataserver.dataset.shards.parts import Scalar
from dataserver.dataset.shards.sidecar_columns import EXCLUDED

MAX_SCALAR_BYTES: Final = 1 << 30
"""Most memory that the entries of one shard may take."""

_ENTRY_BYTES: Final = 64
"""Memory of an entry or of a name, besides the characters of a string."""


class ScalarRows:
    """Entries row by row. Beyond the limit a shard has none, rather than those that happened to come first."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Scalar]] = []
        self._names: dict[str, str] = {}
        """Names of entries, which all rows share."""
        self._num_bytes = 0

    def add(self, scalars: dict[str, Scalar], findings: Findings) -> None:
        """Append a row; the limit counts as a finding once."""
        entries = {} if self._num_bytes > MAX_SCALAR_BYTES else self._small(scalars)
        self.rows.append(entries)
        if self._num_bytes > MAX_SCALAR_BYTES and entries:
            self._drop(findings)

    def _small(self, scalars: dict[str, Scalar]) -> dict[str, Scalar]:
        """The entries that may make columns, whose memory is counted."""
        entries: dict[str, Scalar] = {}
        for name, value in scalars.items():
            if name in EXCLUDED:  # captions are kept as texts
                continue
            if name not in self._names:
                self._num_bytes += _ENTRY_BYTES + len(name)
            entries[self._names.setdefault(name, name)] = value
            self._num_bytes += _ENTRY_BYTES + (len(value) if isinstance(value, str) else 0)
        return entries

    def _drop(self, findings: Findings) -> None:
        for row in self.rows:
            row.clear()
        self._names = {}
        what = f"the entries of .json members need more than {MAX_SCALAR_BYTES} bytes, and none is kept"
        findings.add("", UNUSABLE_COLUMN, f"{what}; make smaller shards, or a parquet beside each")
