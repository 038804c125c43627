"""Which rows of tables that cover several shards belong to a sample of any of them."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from dataserver.dataset.errors import DatasetError, ShardFinding
from dataserver.dataset.index.format import IndexHeader, read_columns, read_findings
from dataserver.dataset.kinds import ROW_WITHOUT_SAMPLE
from dataserver.dataset.shards.listing import ShardFile
from dataserver.dataset.shards.parquet_columns import keys_and_failures
from dataserver.dataset.shards.row_match import RowMatch


def lost_rows(
    shards: Sequence[ShardFile],
    headers: Mapping[str, IndexHeader],
    tables: Sequence[Sequence[Path]],
    by_last_part: bool,
) -> Iterator[ShardFinding]:
    """Yield a finding for each file with rows that belong to no sample, though their status is no failure.

    Args:
        shards: of the dataset.
        headers: of their indexes.
        tables: each the parquet files that hold its rows.
        by_last_part: whether keys are compared by what follows their last slash.

    Raises:
        DatasetError: no row of a table belongs to a sample, or one belongs to samples of several shards.
    """
    match = RowMatch(by_last_part)
    served, starts = _served_keys(shards, headers, match)
    left_out = {found.key for shard in shards for found in read_findings(shard.index_path).details if found.key}
    for table in tables:
        yield from _lost_rows(table, served, starts, left_out, match)


def _served_keys(
    shards: Sequence[ShardFile], headers: Mapping[str, IndexHeader], match: RowMatch
) -> tuple[pa.Array, list[tuple[int, str]]]:
    """The keys of all samples as rows are compared with them, and the number of the first one of each shard."""
    parts, starts, start = [], [], 0
    for shard in shards:
        keys = read_columns(shard.index_path, headers[shard.name], ["key"]).column("key")
        parts.append(pa.array(match.form(keys.to_pylist()), pa.string()) if match.by_last_part else keys)
        starts.append((start, shard.name))
        start += len(keys)
    return pa.concat_arrays(parts), starts


def _lost_rows(
    table: Sequence[Path],
    served: pa.Array,
    starts: Sequence[tuple[int, str]],
    left_out: set[str],
    match: RowMatch,
) -> Iterator[ShardFinding]:
    num_found = 0
    first_wrong = ""
    others = pa.array(match.form(sorted(left_out)), pa.string())
    for path in table:
        known, failed = keys_and_failures(path)
        rows = pa.array(match.form(known.to_pylist()), pa.string()) if match.by_last_part else known
        _check_one_shard(path, rows, served, starts)
        is_found = pc.or_(
            pc.is_in(rows, value_set=served, skip_nulls=True), pc.is_in(rows, value_set=others, skip_nulls=True)
        )
        num_found += pc.sum(is_found).as_py() or 0
        lost = pc.invert(pc.or_(is_found, failed))
        first_wrong = first_wrong or str(known[0].as_py() if len(known) else "")
        if count := pc.sum(lost).as_py():
            first = known.filter(lost)[0].as_py()
            detail = f"{count} of {len(rows)} rows have no sample in any shard, the first is {first!a}"
            yield ShardFinding(str(path), "", ROW_WITHOUT_SAMPLE, detail)
    if not num_found and len(served):
        raise DatasetError(
            f"no row of {table[0]}{' and the others there' if len(table) > 1 else ''} belongs to a sample: the samples"
            f" are called {served[0].as_py()!a} where it says {first_wrong!a}; name the files whose rows have the same"
            " keys, or index with --metadata-keys last-part"
        )


def _check_one_shard(path: Path, rows: pa.Array, served: pa.Array, starts: Sequence[tuple[int, str]]) -> None:
    """Raise DatasetError if a row belongs to samples of several shards."""
    with_row = pc.indices_nonzero(pc.is_in(served, value_set=rows, skip_nulls=True))
    keys = served.take(with_row)
    if len(keys) == pc.count_distinct(keys).as_py():
        return
    counts = keys.value_counts()
    key = counts.filter(pc.greater(counts.field("counts"), 1))[0]["values"].as_py()
    numbers = pc.indices_nonzero(pc.equal(served, key)).to_pylist()[:2]
    names = [max(entry for entry in starts if entry[0] <= number)[1] for number in numbers]
    raise DatasetError(
        f"a row of {path} for {key!a} belongs to samples of several shards, {names[0]} and {names[1]}; join files that"
        " have the names of the shards, or give the samples keys of their own"
    )
