"""Sidecar columns: what the shard's parquet (or else its .json members) says about each sample, as typed columns."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa

from dataserver.dataset.errors import Findings
from dataserver.dataset.shards.parquet_columns import failed_rows, parquet_columns
from dataserver.dataset.shards.parts import Scalar
from dataserver.dataset.shards.row_match import RowMatch
from dataserver.dataset.shards.sidecar_columns import json_columns, refusing
from dataserver.dataset.shards.tar import MAX_NAME_CHARS
from dataserver.dataset.storage.registry import storage_of
from dataserver.images import IMAGE_SUFFIXES


def read_sidecar(
    path: Path | None,
    keys: Sequence[str],
    scalars: Sequence[dict[str, Scalar]],
    findings: Findings,
    match: RowMatch = RowMatch(),  # noqa: B008  it is frozen
) -> pa.Table:
    """Return the sidecar columns of a shard, one row per key, sorted by column name.

    Args:
        path: the shard's parquet; where there is none or it cannot be used (a finding), `scalars` are taken.
        keys: sample keys in row order.
        scalars: per sample, the scalar entries of its .json.
        findings: where an unusable parquet, unusable columns and odd values are counted.
        match: how rows of the parquet find samples.

    Raises:
        DatasetError: no row of the parquet finds a sample.
    """
    columns: dict[str, pa.Array] | None = None
    if path is not None and _exists(path):
        with refusing("bad_sidecar", path.name, findings):
            columns = parquet_columns(path, keys, findings, match).columns
    if columns is None:
        columns = json_columns(keys, scalars, findings)
    return pa.table(list(columns.values()), names=list(columns))


def _exists(path: Path) -> bool:
    try:
        storage_of(path).etag(str(path))
    except FileNotFoundError:
        return False
    return True


def failed_downloads(path: Path | None, by_last_part: bool) -> dict[str, str]:
    """Return the status of each row of a sidecar that is no success, by what `RowMatch` compares."""
    failed = failed_rows(path) if path is not None and _exists(path) else {}
    return {key.rpartition("/")[2]: status for key, status in failed.items()} if by_last_part else failed


def promised_images(
    rows: Sequence[int], columns: pa.Table, scalars: Sequence[dict[str, Scalar]]
) -> Iterator[tuple[int, str]]:
    """Yield those of `rows` whose sidecar or .json gives the size of an image, with that size.

    img2dataset writes the width and height of every image that it stored.
    """
    taken = pa.array(rows, pa.int64())
    widths, heights = (
        columns.column(name).take(taken).to_pylist() if name in columns.column_names else [None] * len(rows)
        for name in ("width", "height")
    )
    for row, width, height in zip(rows, widths, heights, strict=True):
        size = _size(width, height) or _size(scalars[row].get("width"), scalars[row].get("height"))
        if size:
            yield row, size


def named_images(rows: Sequence[int], keys: Sequence[str], scalars: Sequence[dict[str, Scalar]]) -> str:
    """Say how many of `rows` have an entry that is the name of an image's file; nothing where none has.

    URLs are none: metadata has them of images that nobody wanted.
    """
    found = [(row, *named) for row in rows if (named := next(filter(_names_image, scalars[row].items()), None))]
    if not found:
        return ""
    row, name, value = found[0]
    said = f"{len(found)} samples without an image have an entry that names one, the first is {keys[row]!a}"
    remedy = "served as text; manifests name images in the entry image, Parquet files have their bytes in a column"
    return f"{said}: {name!a} is {str(value)[:80]!a}; {remedy}"


def _names_image(entry: tuple[str, Scalar]) -> bool:
    value = entry[1]
    if not isinstance(value, str) or "://" in value or len(value) > MAX_NAME_CHARS:
        return False
    stem, _, suffix = value.rpartition(".")
    return bool(stem) and suffix.lower() in IMAGE_SUFFIXES


def _size(width: Scalar | None, height: Scalar | None) -> str:
    if not (isinstance(width, int | float) and isinstance(height, int | float) and width > 0 and height > 0):
        return ""
    return f"{width} x {height} pixels"
