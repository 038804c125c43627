"""Rewriting a dataset as plain tars: file by file, in parallel, and on from where it was after a kill.

What was done to a file is noted when its tars are whole; a second run leaves such files alone. The same source and
options give the same bytes.
"""

import hashlib
import json
import shutil
import tarfile
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from dataserver.dataset.conversion.mds_index import MdsShard
from dataserver.dataset.conversion.sources import (
    LANCE,
    LOOSE,
    MANIFESTS,
    MDS,
    PARQUET,
    ROWS,
    SourceFile,
    copy_name,
    find_sources,
)
from dataserver.dataset.errors import DatasetError, Finding, Findings
from dataserver.dataset.index.format import atomic_writer
from dataserver.dataset.index.notes import write_note
from dataserver.dataset.index.rules import MediaMembers
from dataserver.dataset.machine.cores import usable_cores
from dataserver.dataset.machine.workers import Engine, shared_out
from dataserver.dataset.progress import Progress, untold
from dataserver.dataset.shards.external import ExternalFiles, file_state
from dataserver.dataset.shards.modalities import Media, served_media
from dataserver.dataset.storage.registry import storage_of
from dataserver.dataset.storage.urls import Url

if TYPE_CHECKING:
    from dataserver.dataset.conversion.tar_writer import Members

STATE_FOLDER: Final = ".disttrain-convert"
"""Folder in the target that says what was done with which options. Listings of shards pass over hidden folders."""
OPTIONS_NAME: Final = "options.json"
SHARD_BYTES: Final = 1 << 30
"""A tar of rows is closed when it has so many, by default."""
_VERSION: Final = 2
"""Grows with every release that converts the same files with the same options to other samples."""
_MOST_DETAILS: Final = 4
"""Findings of one kind that a note has in words."""


@dataclass(frozen=True, slots=True)
class Converted:
    """What became of one file."""

    etag: tuple[int, int, int]
    """Size, mtime and ctime of the source."""
    tars: tuple[str, ...]
    """Files in the target that came of it."""
    sizes: tuple[int, ...]
    num_samples: int
    """Rows that became samples; 0 where members were not looked into."""
    findings: Mapping[str, int]
    details: tuple[Finding, ...] = ()
    """The first findings of each kind."""


class _Task(NamedTuple):
    """One file that is to be converted."""

    file: SourceFile
    target: Path
    shard_bytes: int
    images_root: Path | None
    has_audio: bool
    """Whether clips are read that rows hold or name."""
    has_videos: bool

    @property
    def media(self) -> Media:
        """The kinds of media that are read."""
        return served_media(self.has_audio, self.has_videos)


@dataclass(frozen=True, slots=True)
class ConversionReport:
    """What a conversion read, wrote and left out."""

    num_sources: int
    num_converted: int
    """Files that this run converted; the others were done before."""
    num_tars: int
    num_samples: int
    findings: Mapping[str, int]
    """Counts by kind of what no sample was made of."""
    passed_over: tuple[str, ...]
    """Files of the source that are no shards, and links to folders, which end in a slash."""
    details: tuple[tuple[str, Finding], ...] = ()
    """The first findings of each kind in each file, with the name of the file."""
    left_over: tuple[str, ...] = ()
    """Tars in the target of sources that are gone by now, and that stay."""


def convert(
    source: Path,
    target: Path,
    shard_bytes: int = SHARD_BYTES,
    workers: int | None = None,
    progress: Progress = untold,
    engine: Engine | None = None,
    images_root: Path | None = None,
    audio: MediaMembers = MediaMembers.SERVE,
    video: MediaMembers = MediaMembers.SERVE,
) -> ConversionReport:
    """Rewrite a dataset as plain tars; tars and their sidecars are copied.

    Args:
        source: a folder or one file.
        target: a folder; empty, missing, or of a conversion of the same source with the same options.
        shard_bytes: size at which a tar of rows is closed; compressed tars stay one tar each.
        workers: processes; one for each core by default.
        progress: called with (bytes done, bytes in total) of the source.
        engine: machines that share out the work and see the same files; by default it is done here.
        images_root: what paths in manifests are relative to; by default the folder of each manifest.
        audio: whether clips are read that manifests name or columns of bytes hold; where not, names stay entries.
        video: the same of videos.

    Raises:
        DatasetError: the source holds nothing that can be converted, or storage failed; the target is not empty or
            belongs to another conversion; or files are damaged, when all others are done.
    """
    if engine is not None:  # its tasks run in other folders
        source, target = source if isinstance(source, Url) else source.absolute(), target.absolute()
        images_root = images_root if images_root is None or isinstance(images_root, Url) else images_root.absolute()
    served = {"audio": audio is MediaMembers.SERVE, "video": video is MediaMembers.SERVE}
    ignored = [name for name, is_served in served.items() if not is_served]
    try:
        files, passed_over = find_sources(source)
        _begin(source, target, _options(source, files, shard_bytes, images_root, ignored))
        sizes = [file.num_bytes or file.etag()[0] for file in files]
        found: dict[int, Converted] = {}
        for n, file in enumerate(files):
            if (done := _known(target, file, images_root)) is not None:
                found[n] = done
        left = [n for n in range(len(files)) if n not in found]
        num_known, num_done = len(found), sum(sizes[n] for n in found)
        tasks = [_Task(files[n], target, shard_bytes, images_root, *served.values()) for n in left]
        num_workers = workers or (usable_cores() if engine is None else engine.num_workers)
        failed: list[str] = []
        for position, converted in shared_out(_try_one, tasks, num_workers, engine):
            if isinstance(converted, str):
                failed.append(converted)
            else:
                found[left[position]] = converted
            num_done += sizes[left[position]]
            progress(num_done, sum(sizes))
    except OSError as error:
        raise DatasetError(f"cannot convert {source} into {target}: {error}; check both and run it again") from error
    if failed:
        others = f"; {len(files) - len(failed)} of {len(files)} files are done" if len(files) > 1 else ""
        more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
        raise DatasetError(f"{sorted(failed)[0]}{more}{others}")
    counts: Counter[str] = Counter()
    details = []
    for n, converted in sorted(found.items()):
        counts.update(converted.findings)
        details += [(files[n].name, finding) for finding in converted.details]
    return ConversionReport(
        len(files),
        len(files) - num_known,
        sum(name.endswith(".tar") for converted in found.values() for name in converted.tars),
        sum(converted.num_samples for converted in found.values()),
        dict(sorted(counts.items())),
        passed_over,
        tuple(details),
        _left_over(target, files, {name for converted in found.values() for name in converted.tars}),
    )


def _options(
    source: Path, files: Sequence[SourceFile], shard_bytes: int, images_root: Path | None, ignored: Sequence[str]
) -> dict[str, Any]:
    """What a conversion is begun with."""
    options: dict[str, Any] = {"version": _VERSION, "source": str(source.resolve()), "shard_bytes": shard_bytes}
    if images_root is not None:
        options["images_root"] = str(images_root.resolve())
    if ignored:
        options["ignored"] = [*ignored]
    if versions := {file.name: file.etag()[1] for file in files if file.compression == LANCE}:
        options["lance_versions"] = versions  # fragments of another one may be fewer, and none of this may stay
    return options


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
            if before.get("version") != _VERSION:
                raise DatasetError(
                    f"{target} was begun by a release that converts otherwise (version {before.get('version')!a}, this"
                    f" one has {_VERSION}); use it as it is if it was ended; else remove it, name another target, or"
                    " end it with that release"
                )
            differ = sorted(name for name in before | options if before.get(name) != options.get(name))
            values = [(name, str(before.get(name)), str(options.get(name))) for name in differ]
            shown = ", ".join(f"{name} was {was!a} and is {now!a}" for name, was, now in values)
            raise DatasetError(f"{target} was begun with other options ({shown}); give the same, or another target")
        return
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise DatasetError(f"{target} is not empty; name a folder that is, or that does not exist")
    write_note(noted, f"{json.dumps(options)}\n".encode())


def _note(target: Path, file: SourceFile) -> Path:
    return target / STATE_FOLDER / file.note_name


def _known(target: Path, file: SourceFile, images_root: Path | None) -> Converted | None:
    """What became of a file before, if it did not change and all of that is there."""
    try:
        held = json.loads(_note(target, file).read_text())
        found = Converted(
            tuple(held["etag"]),
            tuple(held["tars"]),
            tuple(held["sizes"]),
            held["num_samples"],
            held["findings"],
            tuple(Finding(*detail) for detail in held.get("details", [])),
        )
        is_same = found.etag == file.etag() and held.get("described") == _described(file)
        is_whole = is_same and all(
            (target / name).stat().st_size == size for name, size in zip(found.tars, found.sizes, strict=True)
        )
        folder = _images_root(file, images_root)
        is_whole = is_whole and all(
            file_state(folder, name) == (size, *times_ns) for name, size, *times_ns in held.get("images", [])
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


def _left_over(target: Path, files: Sequence[SourceFile], made: Collection[str]) -> tuple[str, ...]:
    """What notes say of sources that are gone, and is there: all but what became of the files. Raises DatasetError."""
    folder = target / STATE_FOLDER
    known = {folder / OPTIONS_NAME, *(_note(target, file) for file in files)}
    names = set[str]()
    for note in {path for path in folder.rglob("*.json") if path.is_file()} - known:
        try:
            names.update(map(str, json.loads(note.read_text())["tars"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DatasetError(f"{note} cannot be read ({error}); remove it, and run it again") from error
    return tuple(sorted(name for name in names.difference(made) if (target / name).is_file()))


def _described(file: SourceFile) -> str | None:
    """A digest of what other files say of a file, such as the index of an MDS dataset; None where none does."""
    return hashlib.sha256(file.details.encode()).hexdigest() if file.details else None


def _images_root(file: SourceFile, images_root: Path | None) -> Path:
    """What the names of image files are relative to."""
    return images_root if images_root is not None and file.compression in MANIFESTS else file.path.parent


def _try_one(task: _Task) -> Converted | str:
    """As `_convert_one`; or what is wrong with a file, which ends nothing but its own conversion. Raises OSError."""
    try:
        return _convert_one(task)
    except DatasetError as error:
        return str(error)


def _convert_one(task: _Task) -> Converted:
    """Convert one file and note that. Raises DatasetError or OSError."""
    file, target = task.file, task.target
    etag = file.etag()
    findings, num_samples = Findings(), 0
    images: list[tuple[str, int, int, int]] = []
    if file.compression in ROWS:
        files = ExternalFiles(_images_root(file, task.images_root), 0)
        names, num_samples = _rows(task, findings, files)
        images = sorted({(part.name, part.file_bytes, part.mtime_ns, part.ctime_ns) for part in files.parts})
    else:
        names = [_bytes(file, target)]
    if file.etag() != etag:
        raise DatasetError(f"{file.path} changed while it was converted; run it again when it is complete")
    sizes = tuple((target / name).stat().st_size for name in names)
    found = Converted(etag, tuple(names), sizes, num_samples, dict(findings.counts), _first_of_each(findings))
    noted = {
        "etag": etag,
        "tars": names,
        "sizes": sizes,
        "num_samples": num_samples,
        "findings": found.findings,
        "details": [(one.key, one.kind, one.detail) for one in found.details],
        "described": _described(file),
        "images": images,
    }
    write_note(_note(target, file), f"{json.dumps(noted)}\n".encode())
    return found


def _first_of_each(findings: Findings) -> tuple[Finding, ...]:
    """The first findings of each kind."""
    counts: Counter[str] = Counter()
    found = []
    for one in findings.details:
        counts[one.kind] += 1
        if counts[one.kind] <= _MOST_DETAILS:
            found.append(one)
    return tuple(found)


def _rows(task: _Task, findings: Findings, files: ExternalFiles) -> tuple[list[str], int]:
    from dataserver.dataset.conversion.tar_writer import TarWriter

    writer = TarWriter(task.target, task.file.stem, task.shard_bytes)
    num_samples = 0
    try:
        for sample in _samples(task, findings, files):
            writer.add(sample)
            num_samples += 1
        writer.close()
        writer.remove_rest()
    except BaseException as error:
        writer.abandon(error)
        raise
    return writer.written, num_samples


def _samples(task: _Task, findings: Findings, files: ExternalFiles) -> "Iterator[Members]":
    """The members of each row, by what has the rows. Each reader is imported where it is needed."""
    file, media = task.file, task.media
    if file.compression == PARQUET:
        from dataserver.dataset.conversion.parquet_samples import parquet_samples

        return parquet_samples(file.path, findings, media)
    if file.compression == MDS:
        from dataserver.dataset.conversion.mds_samples import mds_samples

        return mds_samples(file.path, MdsShard.from_json(file.details), findings, media)
    if file.compression == LANCE:
        from dataserver.dataset.conversion.lance_samples import lance_samples

        return lance_samples(file.root, file.details, findings, media)
    if file.compression == LOOSE:
        from dataserver.dataset.conversion.loose_samples import loose_samples

        return loose_samples(file.path, findings, files)
    from dataserver.dataset.conversion.manifest_samples import manifest_samples

    return manifest_samples(file.path, findings, files, media)


def _bytes(file: SourceFile, target: Path) -> str:
    """Write a tar as it is, decompressed; or copy a file."""
    from dataserver.dataset.conversion.decompression import decompressed

    path = file.path
    name = copy_name(file)
    storage = storage_of(file.root)
    with storage.open(path) as source, atomic_writer(target / name) as temp:
        if storage.is_local and not file.compression:
            shutil.copyfile(path, temp)  # within the kernel
        else:
            with temp.open("wb") as out:  # what is larger than its buffer is not copied into it
                if file.compression:
                    out.writelines(decompressed(source, file.compression, str(path)))
                else:
                    shutil.copyfileobj(source, out, 1 << 20)
        if file.compression and not _is_tar(temp):
            raise DatasetError(f"{path} is no compressed tar: what it holds does not begin as one; rename it")
    return str(PurePosixPath(name))


def _is_tar(path: Path) -> bool:
    with path.open("rb") as file:
        if not file.read(tarfile.BLOCKSIZE).strip(b"\0"):
            return True  # an empty one
    return tarfile.is_tarfile(path)
