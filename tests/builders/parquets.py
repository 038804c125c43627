"""Parquet files with the samples of tars, in the settings of writers that people use."""

import json
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

IMAGE: Final = pa.struct([("bytes", pa.binary()), ("path", pa.string())])

_SMALL_PAGES: Final = {"use_dictionary": False, "data_page_size": 16_384, "write_batch_size": 2}

WRITERS: Final[Mapping[str, Mapping[str, Any]]] = {
    # As `datasets` 5.2 writes images: stored plain, small pages.
    "datasets": {"compression": "none", "use_dictionary": False, "data_page_size": 750_000, "row_group_size": 7},
    # pyarrow's defaults: SNAPPY, and the first values of a row group in a dictionary.
    "pyarrow": {"row_group_size": 5},
    "plain dictionary": {"compression": "none", "data_page_version": "2.0"},
    "zstd": {"compression": "zstd", "data_page_version": "2.0", **_SMALL_PAGES},
    "gzip": {"compression": "gzip", **_SMALL_PAGES},
}
"""Arguments of `pyarrow.parquet.write_table`."""


def write_table(path: Path, table: pa.Table, writer: str = "datasets", **options: Any) -> Path:
    """Write a table; options go before those of the writer."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, **{**WRITERS[writer], **options})
    return path


def pairs_table(rows: list[tuple[str, bytes | None, str | None]], kind: pa.DataType = IMAGE, **more: Any) -> pa.Table:
    """A table of (key, image, text); `kind` of the images is a structure, or bytes."""
    images = [image if image is None or kind != IMAGE else {"bytes": image, "path": None} for _, image, _ in rows]
    columns = {"key": [row[0] for row in rows], "image": pa.array(images, kind), "text": [row[2] for row in rows]}
    return pa.table({**columns, **more})


def tar_pairs(path: Path) -> list[tuple[str, bytes | None, str | None]]:
    """The pairs of a tar that `shards.write_pairs` wrote."""
    with tarfile.open(path) as tar:
        held = {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]
    keys = dict.fromkeys(name.partition(".")[0] for name in held)
    return [(key, held[f"{key}.jpg"], held[f"{key}.txt"].decode()) for key in keys]


def tar_documents(path: Path) -> pa.Table:
    """The interleaved documents of a tar, as columns of lists."""
    with tarfile.open(path) as tar:
        held = {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]
    documents = {name.removesuffix(".json"): json.loads(held[name]) for name in held if name.endswith(".json")}
    images = [
        [None if name is None else {"bytes": held[name], "path": name} for name in document["images"]]
        for document in documents.values()
    ]
    texts = [document["texts"] for document in documents.values()]
    columns = {"key": [*documents], "images": pa.array(images, pa.list_(IMAGE)), "texts": texts}
    return pa.table(columns)


def varint(number: int) -> bytes:
    found = b""
    while number >= 0x80:
        found += bytes([number & 0x7F | 0x80])
        number >>= 7
    return found + bytes([number])
