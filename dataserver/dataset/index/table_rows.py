"""Which rows of tables that cover several shards belong to a sample of any of them."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from dataserver.dataset.errors import DatasetError, ShardFinding
from dataserver.dataset.index.format import IndexHeader, read_columns, read_findings
from dataserver.dataset.kinds import ROW_WITHOUT_SAMPLE
from dataserver.dataset.shards.listing import ShardFile
from dataserver.dataset.shards.parquet_columns import MAX_SIDECAR_ROWS, RUN_ROWS, keys_and_failures
from dataserver.dataset.shards.row_match import RowMatch, repeated_keys


def lost_rows(
    shards: Sequence[ShardFile],
    headers: Mapping[str, IndexHeader],
    tables: Sequence[Sequence[Path]],
    by_last_part: bool,
) -> Iterator[ShardFinding]:
    """Yield a finding for each file with rows that belong to no sample, though their status is no failure.

    And one for each with rows that repeat the key of a sample's earlier row, in this file or another one of its table.

    Args:
        shards: of the dataset.
        headers: of their indexes.
        tables: each the parquet files that hold its rows.
        by_last_part: whether keys are compared by what follows their last slash.

    Raises:
        DatasetError: no row of a table belongs to a sample, or one belongs to samples of several shards.
    """
    served, starts = _served_keys(shards, headers, RowMatch(by_last_part))
    left_out = {found.key for shard in shards for found in read_findings(shard.index_path).details if found.key}
    search = _Search(served, starts, left_out, by_last_part)
    for table in tables:
        yield from search.lost_rows(table)


def _served_keys(
    shards: Sequence[ShardFile], headers: Mapping[str, IndexHeader], match: RowMatch
) -> tuple[pa.LargeStringArray, list[tuple[int, str]]]:
    """The keys of all samples as rows are compared with them, and the number of the first one of each shard."""
    parts, starts, start = [], [], 0
    for shard in shards:
        keys = read_columns(shard.index_path, headers[shard.name], ["key"]).column("key")
        parts.append(_compared(keys, match))
        starts.append((start, shard.name))
        start += len(keys)
    return pa.concat_arrays(parts), starts


def _compared(keys: pa.Array, match: RowMatch) -> pa.LargeStringArray:
    if match.by_last_part:
        return pa.array(match.form(keys.to_pylist()), pa.large_string())
    return keys.cast(pa.large_string())


class _Search:
    """Compares rows with the samples of a dataset."""

    def __init__(
        self,
        served: pa.LargeStringArray,
        starts: Sequence[tuple[int, str]],
        left_out: set[str],
        by_last_part: bool,
    ) -> None:
        """Prepare for samples with the keys `served`; those `left_out` are not served, and have rows all the same."""
        self._match = RowMatch(by_last_part)
        self._served = served
        self._starts = starts
        self._left_out = pa.array(self._match.form(sorted(left_out)), pa.large_string())
        self._repeated = repeated_keys(served)
        # by last part, keys must be compared with all others of their file: `parquet_columns` refused any longer one
        self._max_rows = MAX_SIDECAR_ROWS if by_last_part else RUN_ROWS

    def lost_rows(self, table: Sequence[Path]) -> Iterator[ShardFinding]:
        """Yield findings for each file of a table, and raise DatasetError, as the function."""
        num_found = 0
        has_row = np.zeros(len(self._served), np.bool_)
        first_wrong = ""
        for path in table:
            num_rows = num_lost = num_again = 0
            first_lost = first_again = ""
            for keys, failed in keys_and_failures(path, self._max_rows):
                rows = _compared(keys, self._match)
                self._check_one_shard(path, rows)
                samples = pc.index_in(rows, value_set=self._served, skip_nulls=True)
                left_out = pc.is_in(rows, value_set=self._left_out, skip_nulls=True)
                is_found = pc.or_(samples.is_valid(), left_out)
                again = _noted_again(samples.drop_null().to_numpy(zero_copy_only=False), has_row)
                if len(again) and not num_again:
                    first_again = self._served[int(again[0])].as_py()
                num_again += len(again)
                num_found += pc.sum(is_found).as_py() or 0
                first_wrong = first_wrong or str(keys[0].as_py() if len(keys) else "")
                lost = pc.invert(pc.or_(is_found, failed))
                if (count := pc.sum(lost).as_py()) and not num_lost:
                    first_lost = keys.filter(lost)[0].as_py()
                num_lost += count or 0
                num_rows += len(rows)
            if num_lost:
                detail = f"{num_lost} of {num_rows} rows have no sample in any shard, the first is {first_lost!a}"
                yield ShardFinding(str(path), "", ROW_WITHOUT_SAMPLE, detail)
            if num_again:
                detail = f"{num_again} of {num_rows} rows repeat the key of an earlier row, which counts, the first is"
                yield ShardFinding(str(path), "", ROW_WITHOUT_SAMPLE, f"{detail} {first_again!a}")
        if not num_found and len(self._served):
            raise DatasetError(
                f"no row of {table[0]}{' and the others there' if len(table) > 1 else ''} belongs to a sample: the"
                f" samples are called {self._served[0].as_py()!a} where it says {first_wrong!a}; name the files whose"
                " rows have the same keys, or index with --metadata-keys last-part"
            )

    def _check_one_shard(self, path: Path, rows: pa.LargeStringArray) -> None:
        """Raise DatasetError if a row belongs to samples of several shards."""
        hit = self._repeated.filter(pc.is_in(self._repeated, value_set=rows, skip_nulls=True))
        if not len(hit):
            return
        key = hit[0]
        numbers = pc.indices_nonzero(pc.equal(self._served, key)).to_pylist()[:2]
        names = [max(entry for entry in self._starts if entry[0] <= number)[1] for number in numbers]
        raise DatasetError(
            f"a row of {path} for {key.as_py()!a} belongs to samples of several shards, {names[0]} and {names[1]}; join"
            " files that have the names of the shards, or give the samples keys of their own"
        )


def _noted_again(samples: npt.NDArray[np.int32], has_row: npt.NDArray[np.bool_]) -> npt.NDArray[np.int32]:
    """Note that samples, by number, have a row; return those that had one before, in their order."""
    fresh, firsts = np.unique(samples, return_index=True)
    is_again = np.ones(len(samples), np.bool_)
    is_again[firsts] = has_row[fresh]
    has_row[fresh] = True
    return samples[is_again]
