"""What the index of an MDS dataset (MosaicML Streaming) says of its shards."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final, Self

from dataserver.dataset.errors import DatasetError, printable
from dataserver.dataset.storage.registry import storage_of

MAX_INDEX_BYTES: Final = 128 << 20
"""Largest `index.json`; a shard takes about 1 KB in it."""
MAX_COLUMNS: Final = 4096
_NAME: Final = re.compile(r".*\.mds(\.[a-z0-9]+)?", re.DOTALL | re.IGNORECASE)
_VERSION: Final = 2


@dataclass(frozen=True, slots=True)
class MdsShard:
    """One shard as the index describes it."""

    name: str
    """Name of the file that is there, relative to the root."""
    stem: str
    """Name of the shard without what says how it is stored."""
    compression: str
    """Name of the algorithm; empty where the file holds the samples as they are."""
    num_samples: int
    num_bytes: int
    """Bytes of the samples, decompressed."""
    file_bytes: int
    hashes: tuple[tuple[str, str], ...]
    """Hashes of the file: algorithm and digest, hexadecimal."""
    columns: tuple[tuple[str, str, int | None], ...]
    """Name, encoding, and size in bytes where all values have the same."""

    def to_json(self) -> str:
        """A line that `from_json` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Make the shard from the text that `to_json` wrote."""
        held = json.loads(text)
        held["hashes"] = tuple((algorithm, digest) for algorithm, digest in held["hashes"])
        held["columns"] = tuple((name, encoding, size) for name, encoding, size in held["columns"])
        return cls(**held)


def is_mds(name: str) -> bool:
    """Whether a file looks like a shard, by its name."""
    return _NAME.fullmatch(name) is not None


def mds_shards(root: Path, name: str, present: frozenset[str]) -> Iterator[MdsShard]:
    """Yield the shards that an `index.json` names; none where it is the index of something else.

    Args:
        root: of all that is converted.
        name: of the index, relative to it.
        present: names of all files below the root; no other is ever opened.

    Raises:
        DatasetError: the index is damaged, or names a file that is not there.
        OSError: storage failed.
    """
    path = root / name
    with storage_of(path).open(path) as file:
        data = file.read(MAX_INDEX_BYTES + 1)
    if len(data) > MAX_INDEX_BYTES:
        raise DatasetError(f"{path} has more than {MAX_INDEX_BYTES} bytes; split the dataset")
    try:
        held = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DatasetError(f"{path} is no JSON ({error}); copy it again") from error
    entries = held.get("shards") if isinstance(held, dict) else None
    if not isinstance(entries, list):
        return
    if held.get("version") != _VERSION:
        raise DatasetError(f"{path} has version {printable(str(held.get('version')), 40)}, {_VERSION} is read")
    folder = PurePosixPath(name).parent
    for number, entry in enumerate(entries):
        try:
            yield _shard(entry, folder, present)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            reason = f"{type(error).__name__}: {error}" if not isinstance(error, ValueError) else str(error)
            raise DatasetError(f"{path}, shard {number}: {printable(reason)}; copy the dataset again") from error


def _shard(entry: Mapping[str, Any], folder: PurePosixPath, present: frozenset[str]) -> MdsShard:
    """Read an entry of an index. Raises ValueError, TypeError, KeyError or AttributeError where it is none."""
    if entry["format"] != "mds" or entry["version"] != _VERSION:
        raise ValueError(f"its format is {entry['format']!a}, version {entry['version']}; mds, version 2 is read")
    raw: Mapping[str, Any] = entry["raw_data"]
    stored = {str(folder / _relative(info["basename"])): info for info in (raw, entry.get("zip_data")) if info}
    name = next((one for one in stored if one in present and is_mds(one)), None)
    if name is None:
        raise ValueError(f"{' or '.join(map(ascii, stored))} is not there")
    info = stored[name]
    return MdsShard(
        name=name,
        stem=name[: name.lower().rindex(".mds")],
        compression="" if info is raw else str(entry["compression"]).partition(":")[0],
        num_samples=_count(entry["samples"]),
        num_bytes=_count(raw["bytes"]),
        file_bytes=_count(info["bytes"]),
        hashes=tuple(sorted((str(algorithm), str(digest)) for algorithm, digest in info["hashes"].items())),
        columns=_columns(entry),
    )


def _columns(entry: Mapping[str, Any]) -> tuple[tuple[str, str, int | None], ...]:
    names, encodings, sizes = (entry[key] for key in ("column_names", "column_encodings", "column_sizes"))
    if not len(names) == len(encodings) == len(sizes) <= MAX_COLUMNS:
        raise ValueError(f"{len(names)} names, {len(encodings)} encodings and {len(sizes)} sizes of columns")
    if len(set(names)) != len(names) or not all(isinstance(text, str) for text in (*names, *encodings)):
        raise ValueError("two columns have one name, or one has none")
    found = zip(names, encodings, (_count(size) if size else None for size in sizes), strict=True)
    return tuple(found)


def _count(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!a} where a count is required")
    return value


def _relative(name: object) -> PurePosixPath:
    """A path below the folder of the index. Raises ValueError where it leaves that."""
    if not isinstance(name, str) or not name or "\0" in name:
        raise ValueError(f"{str(name)[:80]!a} is no name of a file")
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        raise ValueError(f"{name[:80]!a} leaves the folder of the index")
    return path
