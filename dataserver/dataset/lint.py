"""Lint: everything that is odd in a dataset, and a quarantine list of the samples that it names."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from dataserver.dataset.dataset import Dataset
from dataserver.dataset.errors import ShardFinding, printable
from dataserver.dataset.index.dataset_findings import dataset_findings
from dataserver.dataset.index.summary import IndexContent
from dataserver.dataset.index.twins import with_images_elsewhere
from dataserver.dataset.kinds import KINDS, TRUNCATED_IMAGE, UNDECODABLE, Effect
from dataserver.dataset.machine.cores import usable_cores
from dataserver.dataset.progress import Progress, untold
from dataserver.dataset.quarantine import Quarantine
from dataserver.dataset.shard import ImageRef, Shard
from dataserver.dataset.shards.listing import list_shards
from dataserver.images import ImageFault

Judge = Callable[[bytes, ImageRef], ImageFault | None]
"""Says what is wrong with an image's bytes, or None."""


@dataclass(frozen=True, slots=True)
class LintReport:
    """Everything odd in a dataset."""

    findings: tuple[ShardFinding, ...]
    """Findings in the order of shards; of what was found while indexing, at most `MAX_FINDING_BYTES` of each shard."""
    counts: Mapping[str, int]
    """Exact counts by kind, also of what is not among the findings."""
    num_samples: int
    """Usable samples, the quarantined ones included."""
    quarantine: Quarantine
    """The samples that are left out or invalid; empty where it was not wanted."""

    @property
    def num_unlisted(self) -> int:
        """What is counted and not among the findings."""
        return sum(self.counts.values()) - len(self.findings)


def lint(
    path: Path,
    index_dir: Path | None = None,
    judge: Judge | None = None,
    quarantine_file: Path | None = None,
    progress: Progress = untold,
    max_listed: int | None = None,
    wants_quarantine: bool = True,
) -> LintReport:
    """List everything odd in the indexed dataset at `path`.

    Args:
        path: folder of shards, or one shard.
        index_dir: where the indexes lie instead of beside the shards.
        judge: is given every image, by several threads; its faults are findings of the kinds `undecodable` and
            `truncated_image`.
        quarantine_file: where the quarantine list is written.
        progress: called with (samples done, samples in total).
        max_listed: findings beyond these are counted and not listed; by default all are.
        wants_quarantine: whether the quarantine list is wanted, which has each sample that is left out; without it the
            report's is empty, and `max_listed` bounds memory.

    Raises:
        StaleIndexError: a shard is not indexed as it is now.
        ShardReadError: storage failed.
    """
    listing = list_shards(path, index_dir)
    listing.warn_of_links()
    dataset = Dataset.open(path, index_dir, may_be_empty=True, lazily=False)
    contents = [(s.name, IndexContent(s.header, s.sidecar_columns, 0, None)) for s in dataset.shards]
    findings = list(dataset_findings(listing, contents))
    counts = Counter(finding.kind for finding in findings)
    dropped: list[tuple[str, str]] = []
    num_samples = sum(shard.num_samples for shard in dataset.shards)
    done = 0
    for shard in dataset.shards:
        report, of_tokens = shard.findings(), shard.tokens.findings()
        for some in (report, of_tokens):
            counts.update(some.counts)
            room = None if max_listed is None else max(max_listed - len(findings), 0)
            findings += [ShardFinding(shard.name, o.key, o.kind, o.detail) for o in some.details[:room]]
        left_out = {o.key for o in report.details if o.key and KINDS[o.kind] is Effect.LEFT_OUT}
        if left_out and wants_quarantine:  # of a repeated key the first sample is served
            dropped += [(shard.name, key) for key in left_out.difference(shard.keys())]
        if judge is not None:
            failures = list(_judge_shard(dataset, shard, judge))
            counts.update(failure.kind for failure in failures)
            findings += failures
            dropped += [(failure.shard, failure.key) for failure in failures if failure.kind == UNDECODABLE]
        done += shard.num_samples
        progress(done, num_samples)
    findings = with_images_elsewhere(findings)
    quarantine = Quarantine.from_samples(dropped)
    if quarantine_file is not None:
        quarantine.save(quarantine_file)
    return LintReport(
        tuple(findings[:max_listed]), {k: n for k, n in sorted(counts.items()) if n}, num_samples, quarantine
    )


def _judge_shard(dataset: Dataset, shard: Shard, judge: Judge) -> Iterator[ShardFinding]:
    """Decode all images of a shard in threads, yielding one finding per sample that does not decode."""
    num_workers = usable_cores()
    keys = shard.keys()
    rows = iter(range(shard.num_samples))
    with ThreadPoolExecutor(num_workers) as executor:
        # `map` submits all that it is given: a window bounds what waits. The threads share only `Dataset.read`.
        while window := list(itertools.islice(rows, 16 * num_workers)):
            refs = [shard.images_of(row) for row in window]
            for row, found in zip(
                window, executor.map(lambda images: _worst(dataset, images, judge), refs), strict=True
            ):
                if found is not None:
                    number, fault = found
                    kind = TRUNCATED_IMAGE if fault.is_served else UNDECODABLE
                    yield ShardFinding(shard.name, keys[row], kind, printable(f"image {number}: {fault.detail}"))


def _worst(dataset: Dataset, refs: list[ImageRef], judge: Judge) -> tuple[int, ImageFault] | None:
    """The first image that is invalid, or else that is served in part, by its number; None where all are whole."""
    faults = [(number, fault) for number, ref in enumerate(refs) if (fault := judge(dataset.read(ref), ref))]
    return min(faults, key=lambda found: found[1].is_served, default=None)
