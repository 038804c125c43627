"""Rewriting a dataset as plain tars: file by file, in parallel, and on from where it was after a kill.

What was done to a file is noted when its tars are whole; a second run leaves such files alone. The same source and
options give the same bytes.
"""

import json
import re
import shutil
import tarfile
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final

from dataserver.dataset.errors import DatasetError, Findings
from dataserver.dataset.index.format import atomic_writer
from dataserver.dataset.machine.cores import usable_cores
from dataserver.dataset.machine.workers import Engine, shared_out
from dataserver.dataset.shards.external import ExternalFiles, file_state
from dataserver.dataset.storage.etags import Etag
from dataserver.dataset.storage.interface import EntryKind
from dataserver.dataset.storage.registry import storage_of
from dataserver.dataset.storage.urls import Url

STATE_FOLDER: Final = ".disttrain-convert"
"""In the target: what was done with which options. Listings of shards pass over hidden folders."""
OPTIONS_NAME: Final = "options.json"
SHARD_BYTES: Final = 1 << 30
"""A tar of rows is closed when it has so many, by default."""
ROWS: Final = (".parquet", ".jsonl")
"""What has rows: each becomes a sample."""
_RENAMED: Final = {".tgz": ".tar.gz", ".tar.zstd": ".tar.zst"}
_NUMBERED: Final = re.compile(r"(.*)-\d{5,}", re.DOTALL)
"""Stems of tars of rows."""
_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file that is converted."""

    root: Path
    name: str
    """Relative to the root, with slashes."""
    stem: str
    """Of its tars, relative to the target."""
    compression: str
    """Of a tar, a key of `COMPRESSIONS`; empty for what is copied; `.parquet` or `.jsonl` for rows."""


@dataclass(frozen=True, slots=True)
class Converted:
    """What became of one file."""

    etag: tuple[int, int]
    """Size and mtime of the source."""
    tars: tuple[str, ...]
    """Files in the target that came of it."""
    sizes: tuple[int, ...]
    num_samples: int
    """Rows that became samples; 0 where members were not looked into."""
    findings: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class ConversionReport:
    """What a conversion did."""

    num_sources: int
    num_converted: int
    """By this run; the others were done before."""
    num_tars: int
    num_samples: int
    findings: Mapping[str, int]
    """Counts by kind of what no sample was made of."""
    passed_over: tuple[str, ...]
    """Files of the source that are no shards."""


def convert(
    source: Path,
    target: Path,
    shard_bytes: int = SHARD_BYTES,
    workers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    engine: Engine | None = None,
) -> ConversionReport:
    """Rewrite compressed tars, Parquet files and JSONL manifests as plain tars; tars and their sidecars are copied.

    Args:
        source: a folder or one file.
        target: a folder; empty, missing, or of a conversion of the same source with the same options.
        shard_bytes: size at which a tar of rows is closed; compressed tars stay one tar each.
        workers: processes; one for each core by default.
        progress: called with (bytes done, bytes in total) of the source.
        engine: machines that share out the work and see the same files; by default it is done here.

    Raises:
        DatasetError: the source holds nothing that can be converted, or storage failed; the target is not empty or
            belongs to another conversion; or files are damaged, when all others are done.
    """
    if engine is not None:  # its tasks run in other folders
        source, target = source if isinstance(source, Url) else source.absolute(), target.absolute()
    try:
        files, passed_over = find_sources(source)
        _begin(source, target, {"version": _VERSION, "source": str(source.resolve()), "shard_bytes": shard_bytes})
        sizes = [_etag(file)[0] for file in files]
        found: dict[int, Converted] = {}
        for n, file in enumerate(files):
            if (done := _known(target, file)) is not None:
                found[n] = done
        left = [n for n in range(len(files)) if n not in found]
        num_known, num_done = len(found), sum(sizes[n] for n in found)
        tasks = [(files[n], target, shard_bytes) for n in left]
        num_workers = workers or (usable_cores() if engine is None else engine.num_workers)
        failed: list[str] = []
        for position, converted in shared_out(_try_one, tasks, num_workers, engine):
            if isinstance(converted, str):
                failed.append(converted)
            else:
                found[left[position]] = converted
            num_done += sizes[left[position]]
            if progress is not None:
                progress(num_done, sum(sizes))
    except OSError as error:
        raise DatasetError(f"cannot convert {source} into {target}: {error}; check both and run it again") from error
    if failed:
        others = f"; {len(files) - len(failed)} of {len(files)} files are done" if len(files) > 1 else ""
        more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
        raise DatasetError(f"{sorted(failed)[0]}{more}{others}")
    counts: Counter[str] = Counter()
    for converted in found.values():
        counts.update(converted.findings)
    return ConversionReport(
        len(files),
        len(files) - num_known,
        sum(name.endswith(".tar") for converted in found.values() for name in converted.tars),
        sum(converted.num_samples for converted in found.values()),
        dict(sorted(counts.items())),
        passed_over,
    )


def find_sources(source: Path) -> tuple[list[SourceFile], tuple[str, ...]]:
    """What can be converted below a path, and the names of what cannot; DatasetError where there is nothing."""
    storage = storage_of(source)
    is_file = storage.is_file(source)
    root = source.parent if is_file else source
    entries = [source.name] if is_file else []
    if not is_file:
        for name, kind, _ in storage.walk(source):
            if kind is EntryKind.LINK:
                storage.check(source, name)
            if kind is not EntryKind.FOLDER_LINK:
                entries.append(name)
    found = [_source_file(root, name) for name in sorted(entries)]
    files = [file for file in found if file is not None]
    tars = {file.stem for file in files if file.compression not in ROWS}
    # a parquet beside a tar holds its columns, and stays beside it
    files = [
        SourceFile(root, f.name, f.stem, "") if f.compression == ".parquet" and f.stem in tars else f for f in files
    ]
    if not files:
        raise DatasetError(
            f"{source} holds no tar, compressed tar, Parquet file or JSONL manifest; name a folder that does"
        )
    rows = {file.stem for file in files if file.compression in ROWS}
    for stem in sorted(tars):
        if (found_stem := _NUMBERED.fullmatch(stem)) and found_stem[1] in rows:
            raise DatasetError(
                f"rows of {found_stem[1]} would become {stem}.tar, which another file becomes; convert them apart"
            )
    outputs = Counter((f.stem, "rows" if f.compression in ROWS else Path(_copy_name(f)).suffix) for f in files)
    twice = sorted(stem for (stem, *_), count in outputs.items() if count > 1)
    if twice:
        raise DatasetError(f"several files would become {twice[0]}.tar; keep one of them, or convert them apart")
    known = {file.name for file in files}
    return files, tuple(name for name in sorted(entries) if name not in known)


def _source_file(root: Path, name: str) -> SourceFile | None:
    from dataserver.dataset.conversion.decompression import COMPRESSIONS  # servers do without

    lower = name.lower()
    for given, usual in _RENAMED.items():
        if lower.endswith(given):
            lower = lower.removesuffix(given) + usual
    for rows in ROWS:
        if lower.endswith(rows):
            return SourceFile(root, name, name[: -len(rows)], rows)
    if lower.endswith(".tar"):
        return SourceFile(root, name, name[: -len(".tar")], "")
    for compression in COMPRESSIONS:
        if lower.endswith(f".tar{compression}"):
            return SourceFile(root, name, name[: len(lower.removesuffix(f".tar{compression}"))], compression)
    return None


def _begin(source: Path, target: Path, options: dict[str, Any]) -> None:
    """Note the options in an empty target, or compare them. Raises DatasetError where it is another's."""
    inner, outer = target.resolve(), source.resolve()
    if inner == outer or inner.is_relative_to(outer) or outer.is_relative_to(inner):
        raise DatasetError(f"{target} and {source} lie in each other; name a target elsewhere")
    noted = target / STATE_FOLDER / OPTIONS_NAME
    if noted.is_file():
        try:
            before = dict(json.loads(noted.read_text()))
        except (ValueError, TypeError) as error:
            raise DatasetError(f"{noted} cannot be read ({error}); remove {target}, and run it again") from error
        if before != options:
            differ = sorted(name for name in options if before.get(name) != options[name])
            shown = ", ".join(f"{name} was {str(before.get(name))!a} and is {str(options[name])!a}" for name in differ)
            raise DatasetError(f"{target} was begun with other options ({shown}); give the same, or another target")
        return
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise DatasetError(f"{target} is not empty; name a folder that is, or that does not exist")
    with atomic_writer(noted) as temp:
        temp.write_text(f"{json.dumps(options)}\n")


def _etag(file: SourceFile) -> tuple[int, int]:
    found: Etag = storage_of(file.root).etag(f"{file.root}/{file.name}")
    return found.num_bytes, found.mtime_ns


def _note(target: Path, file: SourceFile) -> Path:
    return target / STATE_FOLDER / f"{file.name}.json"


def _known(target: Path, file: SourceFile) -> Converted | None:
    """What became of a file before, if it did not change and all of that is there."""
    try:
        held = json.loads(_note(target, file).read_text())
        found = Converted(
            tuple(held["etag"]), tuple(held["tars"]), tuple(held["sizes"]), held["num_samples"], held["findings"]
        )
        is_whole = found.etag == _etag(file) and all(
            (target / name).stat().st_size == size for name, size in zip(found.tars, found.sizes, strict=True)
        )
        folder = (file.root / file.name).parent
        is_whole = is_whole and all(
            file_state(folder, name)[:2] == (size, mtime_ns) for name, size, mtime_ns in held.get("images", [])
        )
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise DatasetError(f"{_note(target, file)} cannot be read ({error}); remove it, and run it again") from error
    if is_whole:
        return found
    for name in found.tars:  # of another content: there may be fewer now
        (target / name).unlink(missing_ok=True)
    return None


def _try_one(task: tuple[SourceFile, Path, int]) -> Converted | str:
    """As `_convert_one`; or what is wrong with a file, which ends nothing but its own conversion. Raises OSError."""
    try:
        return _convert_one(task)
    except DatasetError as error:
        return str(error)


def _convert_one(task: tuple[SourceFile, Path, int]) -> Converted:
    """Convert one file and note that. Raises DatasetError or OSError."""
    file, target, shard_bytes = task
    etag = _etag(file)
    findings, num_samples = Findings(), 0
    images: list[tuple[str, int, int]] = []
    if file.compression in ROWS:
        files = ExternalFiles((file.root / file.name).parent, 0)
        names, num_samples = _rows(file, target, shard_bytes, findings, files)
        images = sorted({(part.name, part.file_bytes, part.mtime_ns) for part in files.parts})
    else:
        names = [_bytes(file, target)]
    if _etag(file) != etag:
        raise DatasetError(f"{file.root / file.name} changed while it was converted; run it again when it is complete")
    sizes = tuple((target / name).stat().st_size for name in names)
    found = Converted(etag, tuple(names), sizes, num_samples, dict(findings.counts))
    noted = {
        "etag": etag,
        "tars": names,
        "sizes": sizes,
        "num_samples": num_samples,
        "findings": found.findings,
        "images": images,
    }
    with atomic_writer(_note(target, file)) as temp:
        temp.write_text(f"{json.dumps(noted)}\n")
    return found


def _rows(
    file: SourceFile, target: Path, shard_bytes: int, findings: Findings, files: ExternalFiles
) -> tuple[list[str], int]:
    from dataserver.dataset.conversion.manifest_samples import manifest_samples
    from dataserver.dataset.conversion.parquet_samples import parquet_samples
    from dataserver.dataset.conversion.tar_writer import TarWriter

    writer = TarWriter(target, file.stem, shard_bytes)
    num_samples = 0
    try:
        path = file.root / file.name
        is_parquet = file.compression == ".parquet"
        for sample in parquet_samples(path, findings) if is_parquet else manifest_samples(path, findings, files):
            writer.add(sample)
            num_samples += 1
        writer.close()
        writer.remove_rest()
    except BaseException as error:
        writer.abandon(error)
        raise
    return writer.written, num_samples


def _bytes(file: SourceFile, target: Path) -> str:
    """Write a tar as it is, decompressed; or copy a file."""
    from dataserver.dataset.conversion.decompression import decompressed

    path = file.root / file.name
    name = _copy_name(file)
    with storage_of(file.root).open(path) as source, atomic_writer(target / name) as temp:
        with temp.open("wb", buffering=1 << 20) as out:
            if file.compression:
                out.writelines(decompressed(source, file.compression, str(path)))
            else:
                shutil.copyfileobj(source, out, 1 << 20)
        if file.compression and not _is_tar(temp):
            raise DatasetError(f"{path} is no compressed tar: what it holds does not begin as one; rename it")
    return str(PurePosixPath(name))


def _copy_name(file: SourceFile) -> str:
    """What a file is called that is written as it is."""
    return f"{file.stem}{'.parquet' if file.name.lower().endswith('.parquet') else '.tar'}"


def _is_tar(path: Path) -> bool:
    with path.open("rb") as file:
        if not file.read(tarfile.BLOCKSIZE).strip(b"\0"):
            return True  # an empty one
    return tarfile.is_tarfile(path)
