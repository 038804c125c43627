"""The table of a shard's images in other files, beside its index: `NAME.files`, Arrow IPC.

It stands apart from the index, whose schema is read whenever a dataset is opened.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Final

from dataserver.dataset.errors import StaleIndexError, check_storage, printable
from dataserver.dataset.index.flags import index_command
from dataserver.dataset.index.format import IndexHeader, arrow_writer, read_external_digest
from dataserver.dataset.index.rules import IndexRules
from dataserver.dataset.shards.external import MAX_EXTERNAL, ExternalFiles, ExternalTable
from dataserver.dataset.shards.listing import ShardFile
from dataserver.dataset.shards.parts import ExternalPart
from dataserver.dataset.storage.etags import check_regular

if TYPE_CHECKING:
    import pyarrow as pa

FILES_SUFFIX: Final = ".files"
_KEY: Final = b"disttrain.files"


def _schema() -> "pa.Schema":
    import pyarrow as pa

    numbers = [(field, pa.int64()) for field in ExternalPart._fields if field != "name"]
    return pa.schema([("name", pa.string()), *numbers])


def files_path(index: Path) -> Path:
    """The file beside an index."""
    return index.with_suffix(FILES_SUFFIX)


def write_external(shard: ShardFile, files: ExternalFiles) -> None:
    """Write the table. Raises DatasetError where that is impossible."""
    import pyarrow as pa

    schema = _schema()
    root = files.root.resolve()
    beside = root == shard.path.parent.resolve()  # then it moves with the shard
    about = json.dumps({"digest": files.digest, "root": "" if beside else str(root)}).encode()
    columns = [*zip(*files.parts, strict=True)] or [()] * len(schema)
    arrays = [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)]
    table = pa.Table.from_arrays(arrays, schema=schema.with_metadata({_KEY: about}))
    with arrow_writer(files_path(shard.index_path), table.schema, "lz4") as writer:
        writer.write_table(table)


def read_external(shard: ShardFile, header: IndexHeader) -> ExternalTable:
    """Read the table of a shard whose images lie in other files.

    Raises:
        StaleIndexError: it is missing, damaged, or that of another index.
        ShardReadError: storage failed.
    """
    import pyarrow as pa

    path = files_path(shard.index_path)
    digest = read_external_digest(shard.index_path, header)
    try:
        check_regular(path)
        table = pa.ipc.open_file(pa.py_buffer(path.read_bytes())).read_all()
        about = json.loads((table.schema.metadata or {})[_KEY])
        if table.schema.remove_metadata() != _schema() or table.num_rows > MAX_EXTERNAL or about["digest"] != digest:
            raise ValueError("it is that of another index")
        table.validate(full=True)
        parts = [ExternalPart(*row) for row in zip(*(column.to_pylist() for column in table.columns), strict=True)]
        root = Path(about["root"]) if about["root"] else shard.path.parent.resolve()
        return ExternalTable(root, parts, header.shard_bytes)
    except (OSError, pa.ArrowException, ValueError, KeyError, TypeError) as error:
        check_storage(path, error)
        raise StaleIndexError(
            f"{path} cannot be read ({printable(str(error))}); remove it and run: {index_command(shard)}"
        ) from error


def images_root(shard: ShardFile, rules: IndexRules) -> Path:
    """The folder below which the images of a shard lie that are in other files."""
    return rules.images_root or shard.path.parent


def are_as_indexed(shard: ShardFile, header: IndexHeader, rules: IndexRules) -> bool:
    """Whether the images of a shard in other files lie where they are looked for now, and did not change since."""
    if not shard.format.has_external:
        return True
    try:
        table = read_external(shard, header)
        return table.root == images_root(shard, rules).resolve() and table.changed_file() is None
    except (StaleIndexError, OSError):
        return False
