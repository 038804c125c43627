"""Lint: everything that is odd in a dataset, and a quarantine list of the samples that do not decode.

What is left out of the index already (unreadable headers, missing captions, ...) is listed but not quarantined: no job
sees it. The quarantine list holds samples of the index whose pixels cannot be decoded, found with `decode`.
"""

import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from dataserver.dataset.dataset import Dataset
from dataserver.dataset.errors import SampleError, printable
from dataserver.dataset.headers import TRANSPOSED, open_image
from dataserver.dataset.quarantine import Quarantine
from dataserver.dataset.shard import ImageRef, Shard

UNDECODABLE = "undecodable"


@dataclass(frozen=True, slots=True)
class Finding:
    """One oddity with the shard it is in; `key` is empty where it belongs to no sample."""

    shard: str
    key: str
    kind: str
    detail: str


@dataclass(frozen=True, slots=True)
class LintReport:
    """Everything odd in a dataset."""

    findings: tuple[Finding, ...]
    """In shard order; of the oddities found while indexing, the first `MAX_ODDITY_DETAILS` of each shard."""
    counts: Mapping[str, int]
    """Exact counts by kind."""
    num_samples: int
    """Usable samples, the quarantined ones included."""
    quarantine: Quarantine


def lint(
    path: Path,
    index_dir: Path | None = None,
    decode: bool = False,
    quarantine_file: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> LintReport:
    """List everything odd in the indexed dataset at `path`.

    Args:
        path: folder of shards, or one shard.
        index_dir: where the indexes lie instead of beside the shards.
        decode: decode every image fully; failures are findings of the kind `undecodable` and quarantined.
        quarantine_file: where the quarantine list is written.
        progress: called with (samples done, samples in total).

    Raises:
        StaleIndexError: a shard is not indexed.
        ShardReadError: storage failed.
    """
    dataset = Dataset.open(path, index_dir)
    findings: list[Finding] = []
    counts: Counter[str] = Counter()
    num_samples = sum(shard.num_samples for shard in dataset.shards)
    done = 0
    for shard in dataset.shards:
        report = shard.oddities()
        counts.update(report.counts)
        findings += [Finding(shard.name, o.key, o.kind, o.detail) for o in report.details]
        if decode:
            failures = list(_decode_shard(dataset, shard))
            counts[UNDECODABLE] += len(failures)
            findings += failures
        done += shard.num_samples
        if progress is not None:
            progress(done, num_samples)
    quarantine = Quarantine.from_samples((f.shard, f.key) for f in findings if f.kind == UNDECODABLE)
    if quarantine_file is not None:
        quarantine.save(quarantine_file)
    return LintReport(tuple(findings), {k: n for k, n in sorted(counts.items()) if n}, num_samples, quarantine)


def _decode_shard(dataset: Dataset, shard: Shard) -> Iterator[Finding]:
    """Decode all images of a shard in threads, yielding one finding per sample that does not decode."""
    num_workers = len(os.sched_getaffinity(0))
    keys = shard.keys()
    offsets = shard.sizes().image_offsets
    rows = iter(range(shard.num_samples))
    with ThreadPoolExecutor(num_workers) as executor:
        # `map` submits all that it is given: a window bounds what waits. The threads share only `Dataset.read`.
        while window := list(itertools.islice(rows, 16 * num_workers)):
            refs = [[shard.image(row, i) for i in range(int(offsets[row + 1] - offsets[row]))] for row in window]
            reasons = executor.map(lambda images: _first_failure(dataset, images), refs)
            for row, reason in zip(window, reasons, strict=True):
                if reason is not None:
                    yield Finding(shard.name, keys[row], UNDECODABLE, printable(reason))


def _first_failure(dataset: Dataset, refs: list[ImageRef]) -> str | None:
    for number, ref in enumerate(refs):
        reason = decode_failure(dataset.read(ref), ref)
        if reason is not None:
            return f"image {number}: {reason}"
    return None


def decode_failure(data: bytes, ref: ImageRef) -> str | None:
    """Decode an image fully; say why it does not decode to the size that its index entry promises, or None."""
    try:
        with open_image(data) as image:
            size = image.size[::-1] if ref.orientation in TRANSPOSED else image.size
            if size != (ref.width, ref.height):
                return f"is {size[0]} x {size[1]} pixels, the index says {ref.width} x {ref.height}"
            image.load()
    except SampleError as error:
        return error.detail
    except MemoryError:
        raise
    except Exception as error:  # as for headers: hostile bytes make a third-party decoder raise nearly anything
        return f"{type(error).__name__}: {error}"
    return None
