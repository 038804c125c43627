"""Which row of a sidecar belongs to which sample, and what is said of those that belong to none."""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc

from dataserver.dataset.errors import DatasetError, Findings, printable
from dataserver.dataset.kinds import ROW_WITHOUT_SAMPLE, SAMPLE_WITHOUT_ROW
from dataserver.dataset.shards.lone_texts import SUCCESS


@dataclass(frozen=True, slots=True)
class RowMatch:
    """How the rows of a sidecar find their samples."""

    by_last_part: bool = False
    """Compare what follows the last slash of both keys."""
    seen_keys: Collection[str] = field(default_factory=tuple)
    """Keys of all samples in the tar, those that are left out too."""
    is_of_all: bool = False
    """Whether there are rows for the samples of other shards, too: nothing is said of those without a sample."""

    def rows(
        self, known: pa.Array, statuses: pa.Array | None, keys: Sequence[str], name: str, findings: Findings
    ) -> pa.Array:
        """Return the row of each sample, null where there is none. Of a repeated key the first row counts.

        Args:
            known: keys of the rows.
            statuses: of the rows; those that are no success have no sample.
            keys: of the samples.
            name: of the sidecar, for messages.
            findings: where rows without a sample and samples without a row are counted.

        Raises:
            DatasetError: no row finds a sample.
        """
        wanted = self.form(keys, self.seen_keys)
        rows = pa.array(self.form(known.to_pylist()), pa.string()) if self.by_last_part else known
        found = pc.index_in(pa.array(wanted, pa.string()), value_set=rows, skip_nulls=True)
        if self.is_of_all:
            return found
        seen = self.form({*keys, *self.seen_keys})
        has_sample = pc.is_in(rows, value_set=pa.array(seen, pa.string()), skip_nulls=True)
        if seen and len(rows) and not pc.any(has_sample).as_py():
            raise self._mismatch(known, sorted({*keys, *self.seen_keys}), name)
        report_samples(found.is_valid(), keys, name, findings)
        failed = pa.array([False] * len(rows), pa.bool_()) if statuses is None else pc.not_equal(statuses, SUCCESS)
        lost = pc.invert(pc.or_(has_sample, pc.fill_null(failed, False)))
        count = pc.sum(lost).as_py() or 0
        if count:
            first = known.filter(lost)[0].as_py()
            detail = f"{count} of {len(rows)} rows of {name} have no sample in the tar, the first is {first!a}"
            findings.add("", ROW_WITHOUT_SAMPLE, detail)
        report_repeated(known, name, findings)
        return found

    def form(self, keys: Collection[str | None], among: Collection[str] = ()) -> list[str | None]:
        """What is compared. Where the last part is that of several keys, here or among others, none has a row."""
        if not self.by_last_part:
            return list(keys)
        parts = [None if key is None else _last_part(key) for key in keys]
        counts = Counter([*parts, *(_last_part(key) for key in {*among}.difference(keys))])
        return [part if counts[part] == 1 else None for part in parts]

    def _mismatch(self, known: pa.Array, seen: Sequence[str], name: str) -> DatasetError:
        last_parts = {_last_part(key) for key in seen}
        row = next((key for key in known.to_pylist() if key is not None), None)
        if row is None:
            return DatasetError(
                f"no row of {name} belongs to a sample of its tar: its column key is null in each row; write the keys"
                f" of samples there, such as {printable(seen[0])!a}, or remove it"
            )
        remedy = f"put the {name} beside it that was written with it, or remove it"
        if not self.by_last_part and any(k is not None and _last_part(k) in last_parts for k in known.to_pylist()):
            remedy = "they match by the last part of their paths: index with --metadata-keys last-part"
        shown = f"{printable(seen[0])!a} where the rows of {name} say {printable(row)!a}"
        return DatasetError(
            f"no row of {name} belongs to a sample of its tar: the samples are called {shown}; {remedy}"
        )


def report_samples(has_row: pa.BooleanArray, keys: Sequence[str], name: str, findings: Findings) -> None:
    """Count samples without a row, of those of these keys."""
    if num_lacking := len(keys) - (pc.sum(has_row).as_py() or 0):
        first = keys[pc.index(has_row, False).as_py()]
        detail = f"{num_lacking} of {len(keys)} samples have no row in {name}, the first is {first!a}"
        findings.add("", SAMPLE_WITHOUT_ROW, f"{detail}; their columns are null, which no comparison holds for")


def report_repeated(known: pa.Array, name: str, findings: Findings) -> None:
    """Count rows whose key an earlier row has."""
    keys = known.drop_null()
    if count := len(keys) - pc.count_distinct(keys).as_py():
        first = repeated_keys(keys)[0].as_py()
        detail = f"{count} of {len(known)} rows of {name} repeat the key of an earlier row, which counts, the first is"
        findings.add("", ROW_WITHOUT_SAMPLE, f"{detail} {first!a}")


def repeated_keys(known: pa.Array) -> pa.Array:
    """The keys that come more than once, each once."""
    keys = known.drop_null()
    if pc.count_distinct(keys).as_py() == len(keys):
        return keys.slice(0, 0)
    counts = keys.value_counts()
    return counts.field("values").filter(pc.greater(counts.field("counts"), 1))


def _last_part(key: str) -> str:
    return key.rpartition("/")[2]
