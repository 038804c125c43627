"""Building indexes: one sequential pass per shard, in spawned processes, only where the index is missing or stale.

Each index is complete or absent, so a build that was killed continues by being run again.
"""

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

from dataserver.dataset.errors import DatasetError, Oddities, StaleIndexError
from dataserver.dataset.files import ShardFile, find_shards, read_fresh_index, read_index
from dataserver.dataset.index import (
    FORMAT_VERSION,
    NO_SIDECAR,
    IndexHeader,
    RowCollector,
    digest_columns,
    read_oddities,
    write_index,
)
from dataserver.dataset.kinds import LOST_IMAGE
from dataserver.dataset.samples import Scalar, read_samples
from dataserver.dataset.sidecar import promised_images, read_sidecar
from dataserver.dataset.stamps import digest_file
from dataserver.dataset.tar import READ_CHUNK_BYTES, HashingReader, scan_members

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in total)."""


@dataclass(frozen=True, slots=True)
class BuildReport:
    """What a build found: `num_built` of `num_shards` were indexed now, the others were fresh."""

    num_shards: int
    num_built: int
    num_samples: int
    num_bytes: int
    oddities: Mapping[str, int]
    """Counts by kind over all shards."""


def index_shard(shard: ShardFile) -> None:
    """Index one shard in one sequential pass.

    Raises:
        DatasetError: the shard cannot be read, changes meanwhile, or the index cannot be written.
    """
    oddities = Oddities()
    rows = RowCollector()
    scalars: list[dict[str, Scalar]] = []
    without_image: list[int] = []
    try:
        stamp, sidecar = before = shard.stamps()
        with shard.path.open("rb", buffering=READ_CHUNK_BYTES) as file:
            reader = HashingReader(file, stamp.num_bytes)
            for sample in read_samples(scan_members(reader, oddities), oddities):
                rows.add(sample)
                scalars.append(sample.scalars)
                if not sample.images:
                    without_image.append(len(scalars) - 1)
            reader.skip(reader.remaining)
        core_digest = rows.finish()
        meta = read_sidecar(shard.sidecar_path, rows.keys, scalars, oddities)
        for row, size in promised_images(without_image, meta, scalars):
            oddities.add(rows.keys[row], LOST_IMAGE, f"the sidecar gives {size}, the tar has no image; served as text")
        sidecar_sha256 = digest_file(shard.sidecar_path) if sidecar else ""
        after = shard.stamps()
    except OSError as error:
        raise DatasetError(f"cannot read shard {shard.path}: {error}; make it readable and index again") from error
    if before != after:
        raise DatasetError(f"shard {shard.path} changed while it was indexed; index again when it is complete")
    header = IndexHeader(
        format_version=FORMAT_VERSION,
        shard_bytes=stamp.num_bytes,
        sidecar_bytes=sidecar.num_bytes if sidecar else NO_SIDECAR,
        sha256=reader.hexdigest(),
        sidecar_sha256=sidecar_sha256,
        columns_digest=digest_columns(core_digest, meta),
        num_samples=len(rows.keys),
    )
    write_index(shard.index_path, header, oddities, rows.batches, meta)


def build_index(
    path: Path, index_dir: Path | None = None, workers: int | None = None, progress: Progress | None = None
) -> BuildReport:
    """Index every shard at `path` whose index is missing or stale.

    Args:
        path: folder of shards, or one shard.
        index_dir: where indexes go instead of beside the shards, under the same relative paths.
        workers: number of processes; all usable cores by default. One works in this process.
        progress: called as shards finish.

    Raises:
        DatasetError: there is no shard, or one cannot be read or its index not written.
    """
    if workers is not None and workers < 1:
        raise DatasetError(f"workers is {workers}; give at least 1")
    shards = find_shards(path, index_dir)
    sizes = {shard.name: shard.path.stat().st_size for shard in shards}
    stale = [shard for shard in shards if not _is_older(shard)]
    total = sum(sizes.values())
    num_built = 0
    done = total - sum(sizes[shard.name] for shard in stale)

    def advance(shard: ShardFile, built: bool) -> None:
        nonlocal done, num_built
        done += sizes[shard.name]
        num_built += built
        if progress is not None:
            progress(done, total)

    if progress is not None:
        progress(done, total)
    num_workers = min(workers or len(os.sched_getaffinity(0)), len(stale))
    if num_workers <= 1:
        for shard in stale:
            advance(shard, _refresh(shard))
    else:
        _build_parallel(stale, num_workers, advance)
    return _report(shards, num_built, total)


def _is_older(shard: ShardFile) -> bool:
    """Say whether a shard has an index and did not change since, as far as the files' times tell."""
    try:
        return not read_index(shard).younger
    except StaleIndexError:
        return False


def _refresh(shard: ShardFile) -> bool:
    """Index a shard, unless its index describes its content; then touch the index, so that nobody compares them again.

    Returns:
        Whether it was indexed.
    """
    try:
        indexed = read_fresh_index(shard)
        with contextlib.suppress(OSError):  # a read-only index is as good, only slower to open
            os.utime(shard.index_path)
        if indexed.stamps == shard.stamps():
            return False
    except StaleIndexError:
        pass
    index_shard(shard)
    return True


def _report(shards: Sequence[ShardFile], num_built: int, num_bytes: int) -> BuildReport:
    counts: Counter[str] = Counter()
    num_samples = 0
    for shard in shards:
        num_samples += read_index(shard).header.num_samples
        counts.update(read_oddities(shard.index_path).counts)
    return BuildReport(len(shards), num_built, num_samples, num_bytes, dict(sorted(counts.items())))


def _build_parallel(shards: Sequence[ShardFile], num_workers: int, advance: Callable[[ShardFile, bool], None]) -> None:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_workers, context, initializer=_end_with_parent) as executor:
        try:
            futures = _submit(executor, shards)
            for future in as_completed(futures):
                advance(futures[future], future.result())
        except BrokenProcessPool as error:
            raise DatasetError("an indexing process died, perhaps for lack of memory; use fewer workers") from error
        finally:
            executor.shutdown(wait=True, cancel_futures=True)


def _submit(executor: ProcessPoolExecutor, shards: Sequence[ShardFile]) -> dict[Future[bool], ShardFile]:
    """Submit all shards, with Ctrl-C blocked: workers are spawned here and inherit that until `_end_with_parent`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return {executor.submit(_refresh, shard): shard for shard in shards}
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_with_parent() -> None:
    """End this worker on Ctrl-C without a traceback, and when its parent dies.

    Without the second a worker whose parent was killed would wait for ever: it holds both ends of the pool's queue.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_exit_after, args=(parent.sentinel,), daemon=True).start()


def _exit_after(sentinel: int) -> None:
    multiprocessing.connection.wait([sentinel])
    os._exit(1)
