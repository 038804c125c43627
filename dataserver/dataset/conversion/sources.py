"""What can be converted below a path: compressed tars, files with rows, MDS shards, Lance fragments, loose files."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dataserver.dataset.conversion.mds_index import is_mds, mds_shards
from dataserver.dataset.errors import DatasetError
from dataserver.dataset.storage.etags import Etag
from dataserver.dataset.storage.folder_listings import LISTING_NAME
from dataserver.dataset.storage.interface import EntryKind
from dataserver.dataset.storage.registry import storage_of

PARQUET: Final = ".parquet"
ARRAY: Final = ".json"
"""One array of JSON: only where the file itself is named, since other files have this suffix, too."""
MDS: Final = ".mds"
LANCE: Final = ".lance"
LOOSE: Final = ".images"
"""A folder of image, audio or video files."""
_ROWS: Final = (PARQUET, ".jsonl")
MANIFESTS: Final = (".jsonl", ARRAY)
ROWS: Final = (*_ROWS, ARRAY, MDS, LANCE, LOOSE)
"""What has rows: each becomes a sample."""
LOOSE_STEM: Final = "images"
"""Name of the tars that a folder of image files becomes, in the folder of that name."""
_RENAMED: Final = {".tgz": ".tar.gz", ".tar.zstd": ".tar.zst"}
_NUMBERED: Final = re.compile(r"(.*)-\d{5,}", re.DOTALL)
"""Stems of tars of rows."""
_MANIFEST: Final = re.compile(r"((?:.*/)?)_versions/[^/]+\.manifest", re.DOTALL)
"""A version of a Lance dataset; the group is its folder."""
_LANCE_FOLDERS: Final = ("_versions/", "data/", "_deletions/", "_indices/", "_transactions/")
"""What belongs to a Lance dataset, below its folder."""


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file that is converted, or a part of a dataset that several files make up."""

    root: Path
    name: str
    """Relative to the root, with slashes: the file whose size and time say whether it changed."""
    stem: str
    """Name of its tars, relative to the target."""
    compression: str
    """Compression of a tar, a key of `COMPRESSIONS`; empty for what is copied; one of `ROWS` for rows."""
    details: str = ""
    """What its reader has to know besides; JSON."""
    num_bytes: int = 0
    """About what there is to read, where that is more than the file."""

    @property
    def path(self) -> Path:
        """Path of the file below the source's root."""
        return self.root / self.name

    @property
    def note_name(self) -> str:
        """What a note of it is called: some sources share their file."""
        return f"{self.name}.{Path(self.stem).name}.json" if self.compression == LANCE else f"{self.name}.json"

    def etag(self) -> tuple[int, int, int]:
        """Size, mtime and ctime now. Raises OSError."""
        path = f"{self.root}/{self.name}"
        found: Etag = storage_of(path).etag(path)
        return found.num_bytes, found.mtime_ns, found.ctime_ns


def find_sources(source: Path) -> tuple[list[SourceFile], tuple[str, ...]]:
    """Return the files below a path that can be converted, and the names of those that cannot.

    The name of a link to a folder ends in a slash.

    Raises:
        DatasetError: there is nothing.
    """
    storage = storage_of(source)
    is_file = storage.is_file(source)
    root = source.parent if is_file else source
    entries = [source.name] if is_file else []
    links = list[str]()
    if not is_file:
        for name, kind, _ in storage.walk(source):
            if kind is EntryKind.LINK:
                storage.check(source, name)
            if kind is EntryKind.FOLDER_LINK:
                links.append(f"{name}/")
            elif not name.endswith("/"):  # as consoles of object stores mark folders
                entries.append(name)
    entries.sort()
    known = set[str]()
    files = _of_lance(source, entries, known) + _of_mds(root, entries, is_file, known)
    files += [f for name in entries if name not in known and (f := _source_file(root, name, is_file)) is not None]
    files = _with_sidecars(files)
    if not files and not is_file and storage.is_local:
        files = _of_folders(root, entries, known)
    if not files:
        raise DatasetError(
            f"{source} holds no tar, compressed tar, Parquet file, JSONL manifest, MDS or Lance dataset, and no image, "
            "clip or video"
            f"{f' (links to folders are not followed: {min(links)!a})' if links else ''}; "
            "name a folder that does, or a JSON array itself"
        )
    _check_outputs(files)
    known |= {file.name for file in files}
    return files, tuple(sorted([name for name in entries if name not in known] + links))


def copy_name(file: SourceFile) -> str:
    """What a file is called that is written as it is."""
    return f"{file.stem}{'.parquet' if file.name.lower().endswith('.parquet') else '.tar'}"


def _with_sidecars(files: Sequence[SourceFile]) -> list[SourceFile]:
    """A parquet beside a tar holds its columns, and stays beside it."""
    tars = {file.stem for file in files if file.compression not in ROWS}
    return [SourceFile(f.root, f.name, f.stem, "") if f.compression == PARQUET and f.stem in tars else f for f in files]


def _check_outputs(files: Sequence[SourceFile]) -> None:
    """Raise DatasetError where two files would become one tar."""
    tars = {file.stem for file in files if file.compression not in ROWS}
    rows = {file.stem for file in files if file.compression in ROWS}
    for stem in sorted(tars):
        if (found_stem := _NUMBERED.fullmatch(stem)) and found_stem[1] in rows:
            raise DatasetError(
                f"rows of {found_stem[1]} would become {stem}.tar, which another file becomes; convert them apart"
            )
    outputs = Counter((f.stem, "rows" if f.compression in ROWS else Path(copy_name(f)).suffix) for f in files)
    twice = sorted(stem for (stem, *_), count in outputs.items() if count > 1)
    if twice:
        raise DatasetError(f"several files would become {twice[0]}.tar; keep one of them, or convert them apart")


def _source_file(root: Path, name: str, is_named: bool) -> SourceFile | None:
    from dataserver.dataset.conversion.decompression import COMPRESSIONS  # servers do without

    lower = name.lower()
    for given, usual in _RENAMED.items():
        if lower.endswith(given):
            lower = lower.removesuffix(given) + usual
    for rows in (*_ROWS, ARRAY) if is_named else _ROWS:
        if lower.endswith(rows):
            return SourceFile(root, name, name[: -len(rows)], rows)
    if lower.endswith(".tar"):
        return SourceFile(root, name, name[: -len(".tar")], "")
    for compression in COMPRESSIONS:
        if lower.endswith(f".tar{compression}"):
            return SourceFile(root, name, name[: len(lower.removesuffix(f".tar{compression}"))], compression)
    return None


def _of_mds(root: Path, entries: Sequence[str], is_file: bool, known: set[str]) -> list[SourceFile]:
    """The shards that `index.json` files name. Raises DatasetError where there are shards that none names."""
    shards = [name for name in entries if is_mds(name)]
    if not shards:
        return []
    if is_file:
        raise DatasetError(f"{root / shards[0]} is one shard of an MDS dataset; name its folder, which has index.json")
    present = frozenset(entries)
    found: dict[str, SourceFile] = {}
    for name in entries:
        if name.rpartition("/")[2] == "index.json":
            for shard in mds_shards(root, name, present):
                found.setdefault(shard.name, SourceFile(root, shard.name, shard.stem, MDS, shard.to_json()))
                known.add(name)
    if not found:
        raise DatasetError(f"{root / shards[0]} is an MDS shard that no index.json names; copy index.json beside it")
    known |= found.keys()
    return list(found.values())


def _of_lance(source: Path, entries: Sequence[str], known: set[str]) -> list[SourceFile]:
    """The fragments of the newest version of each Lance dataset."""
    folders = sorted({found[1] for name in entries if (found := _MANIFEST.fullmatch(name))})
    if not folders:
        return []
    from dataserver.dataset.conversion.lance_samples import lance_fragments

    files = []
    for folder in folders:
        inside = tuple(folder + name for name in _LANCE_FOLDERS)
        known |= {name for name in entries if name.startswith(inside)}
        stem = folder.removesuffix("/").removesuffix(LANCE) or source.resolve().name.removesuffix(LANCE)
        for manifest, number, details, num_bytes in lance_fragments(source, folder):
            files.append(SourceFile(source, manifest, f"{stem}-{number:05d}", LANCE, details, num_bytes))
    return files


def _of_folders(root: Path, entries: Sequence[str], known: set[str]) -> list[SourceFile]:
    """The folders that hold image, audio or video files."""
    from dataserver.dataset.storage.folder_listings import is_media, is_member

    folders = sorted({n.rpartition("/")[0] for n in entries if is_media(n)})
    known |= {name for name in entries if name.rpartition("/")[0] in folders and is_member(name.rpartition("/")[2])}
    return [
        SourceFile(root, f"{folder}/{LISTING_NAME}".lstrip("/"), f"{folder}/{LOOSE_STEM}".lstrip("/"), LOOSE)
        for folder in folders
    ]
