"""What no plan could get around, found in the sizes of every shard before a job begins.

A sample that fits alone can be planned: memory that does not hold a whole wave only makes waves more and smaller, down
to one sample in a wave, with empty waves between where interleaved chunks hold several waves at once.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dataserver.planning import I64, Bool, yield_point
from dataserver.planning.job.fields import BalancePolicy, Modality, ModuleKind, ModuleSpec, Sizing, Stream
from dataserver.planning.job.spec import JobSpec
from dataserver.planning.plan.arranging import WaveTooLargeError, spread_images
from dataserver.planning.plan.naming import counted
from dataserver.planning.stream.item_sizes import is_pair, picked_media
from dataserver.planning.stream.samples import MODALITY_NUMBERS, ShardTable, row_sums, sums_before
from dataserver.planning.stream.sizing import (
    SampleTooLargeError,
    may_be_generated,
    may_be_understood,
    most_tokens,
    pair_tasks,
)
from dataserver.planning.stream.statistics import ShardStatistics, longest_pairs
from dataserver.planning.stream.targets import DocumentTargets


@dataclass(frozen=True, slots=True)
class BackboneLimits:
    """The `layout.Limits` of layouts with a backbone."""

    spec: JobSpec
    degree: int = 1
    """Backbone ranks that share a sample, at most."""
    remedy: str = "lower stream.seq_len"
    """What helps where the backbone does not hold a sample, beside more memory."""

    def add_statistics(self, dataset: int, statistics: ShardStatistics) -> Bool:
        """Say which shards have nothing that could be refused."""
        stream, backbone = self.spec.stream, self.spec.execution.backbone
        understood, generated = pair_tasks(stream)
        clear = fit_units(backbone, longest_samples(stream, statistics), self.degree)
        for kind, pairs, others in (
            (ModuleKind.ENCODER, understood, True),
            (ModuleKind.GENERATOR, generated, bool(stream.generation.interleaved)),
        ):
            module = self.spec.module_of_dataset(kind)[dataset]
            largest = np.maximum(largest_pair_images(stream, statistics) * pairs, statistics.other_image * others)
            if module is None:
                clear &= largest == 0
                continue
            clear &= fit_units(module, largest, 1)
            if kind is ModuleKind.ENCODER:
                clear &= self.clear_together(module, statistics)
        return clear

    def add(self, dataset: int, table: ShardTable, where: str) -> None:
        """Refuse samples of a shard that cannot be handled, or held alone."""
        spec = self.spec
        wanted = {
            (ModuleKind.ENCODER, Modality.IMAGE): may_be_understood(spec.stream, table),
            (ModuleKind.ENCODER, Modality.AUDIO): may_be_understood(spec.stream, table),
            (ModuleKind.ENCODER, Modality.VIDEO): may_be_understood(spec.stream, table),
            (ModuleKind.GENERATOR, Modality.IMAGE): may_be_generated(spec.stream, table),
        }
        for (kind, reads), samples in wanted.items():
            is_target = kind is ModuleKind.GENERATOR and samples.any()
            of = with_targets(spec.stream, table) if is_target else with_modality(table, reads)
            module = spec.module_of_dataset(kind, reads)[dataset]
            if module is None:
                _check_unhandled(spec.stream.datasets[dataset].name, kind, reads, of, samples, where)
                continue
            check_images(module, spec.stream.sizing, of, samples, where)
            if kind is ModuleKind.ENCODER:  # a sample has one target
                self.check_together(module, of, samples, where)
        backbone, tokens = spec.execution.backbone, most_tokens(spec.stream, table)
        check_units(backbone, table.row, tokens, "tokens", self.degree, self.remedy, where)

    def check(self, repeats: Sequence[int]) -> None:
        """Samples that fit alone never have to be held together."""

    def clear_together(self, module: ModuleSpec, statistics: ShardStatistics) -> Bool:
        """Say which shards have no sample whose images are too much together. bool [s]."""
        largest = largest_images(self.spec.stream, statistics)
        return fit_units(module, largest * statistics.several if module.padded else statistics.together, 1)

    def check_together(self, module: ModuleSpec, table: ShardTable, samples: Bool, where: str) -> None:
        """Refuse samples whose images the ranks of a module cannot hold together: they belong to one wave."""
        if module.memory is None:
            return
        for i, sizes, depths in together(module, table, samples, module.memory.units):
            zeros = np.zeros_like(sizes)
            try:
                spread_images(module, sizes, zeros, zeros, self.spec.execution.backbone.dp, 1, depths)
            except WaveTooLargeError as error:
                ranks = 1 if module.balance is BalancePolicy.NONE else module.dp
                raise SampleTooLargeError(
                    f"{where}, row {table.row[i]}: its {len(sizes)} images, which belong to one wave, have "
                    f"{sizes.sum()} patches{' before padding' if module.padded else ''}, but {counted(ranks, 'rank')} "
                    f"of module {module.name} with memory for {module.memory.units} each cannot hold them; raise "
                    f"memory.budget_bytes or dp of the module, lower stream.sizing."
                    f"{self.spec.stream.sizing.bounded_by}, or leave such samples out with a filter or a quarantine "
                    "list"
                ) from error


def with_modality(table: ShardTable, reads: Modality) -> ShardTable:
    """A table with the images of its samples, or their clips or videos, alone."""
    if table.image_modality is None:
        chosen = np.full(len(table.image_rows), reads is Modality.IMAGE)
    else:
        chosen = table.image_modality == MODALITY_NUMBERS[reads]
    return _with_images(table, chosen)


def with_targets(stream: Stream, table: ShardTable) -> ShardTable:
    """A table with the images of its pairs, and those of its documents that may be generated."""
    targets = np.repeat(is_pair(table), np.diff(table.image_offsets))
    of_documents = DocumentTargets.of(stream)
    if of_documents is not None:
        targets |= of_documents.find(stream.sizing, table).allowed
    return _with_images(table, targets)


def _with_images(table: ShardTable, chosen: Bool) -> ShardTable:
    """A table with some of its images, bool [m], alone."""
    if chosen.all():
        return table
    offsets = sums_before(row_sums(chosen, table.image_offsets))
    rows, columns = table.image_rows[chosen], table.image_columns[chosen]
    media = picked_media(table, chosen)
    return replace(table, image_offsets=offsets, image_rows=rows, image_columns=columns, **media)


def largest_pair_images(stream: Stream, statistics: ShardStatistics) -> I64:
    """Bound the patches of the largest image of a pair; 0 where there is no pair. int64 [s]."""
    if stream.sizing.tiles is not None:  # of the largest some embeddings are left out
        return np.where(statistics.pairs > 0, stream.sizing.max_patches, 0)
    return statistics.pair_images.last() * stream.sizing.merge**2


def largest_images(stream: Stream, statistics: ShardStatistics) -> I64:
    """Patches of the largest image. int64 [s]."""
    return np.maximum(largest_pair_images(stream, statistics), statistics.other_image)


def longest_samples(stream: Stream, statistics: ShardStatistics) -> I64:
    """What no sample's `most_tokens` is above. int64 [s]."""
    pairs = longest_pairs(stream, statistics.pair_images.last(), statistics.long_texts.first())
    longest: I64 = np.where(
        statistics.pairs > 0, np.maximum(pairs, statistics.long_others.first()), statistics.long_others.first()
    )
    return np.minimum(longest, stream.seq_len)


def fit_units(module: ModuleSpec, units: I64, degree: int) -> Bool:
    """Whether `degree` ranks of a module hold items of at most these sizes alone. bool [s]."""
    if module.memory is None:
        return np.ones(len(units), np.bool_)
    return units <= module.memory.units * degree


def _check_unhandled(
    name: str, kind: ModuleKind, reads: Modality, table: ShardTable, samples: Bool, where: str
) -> None:
    """Refuse images of a dataset without a module of a kind."""
    found = np.flatnonzero(samples & (np.diff(table.image_offsets) > 0))
    if len(found):
        purpose = "understand" if kind is ModuleKind.ENCODER else "generate"
        what, module = ("images", f"kind {kind}")
        if reads is not Modality.IMAGE:
            what, module = str(reads), f"kind {kind}, modality {reads},"
        raise ValueError(
            f"{where}, row {table.row[found[0]]}: the sample has {what} to {purpose} ({len(found)} such samples in "
            f"this shard) but no module of {module} handles dataset {name}; add one, name the dataset in the "
            "datasets of one, or leave such samples out with a filter or a quarantine list"
        )


def check_images(module: ModuleSpec, sizing: Sizing, table: ShardTable, samples: Bool, where: str) -> None:
    """Refuse images of some samples that the module cannot hold alone."""
    sample = np.repeat(np.arange(len(table.row)), np.diff(table.image_offsets))
    images = np.flatnonzero(samples[sample])
    patches = table.image_rows[images].astype(np.int64) * table.image_columns[images]
    rows = table.row[sample[images]]
    named = ("patches of an image", 1, f"lower stream.sizing.{sizing.bounded_by}")
    if module.reads is Modality.AUDIO:
        named = ("positions of a clip", 1, "lower stream.sizing.audio.max_seconds")
    if module.reads is Modality.VIDEO:
        named = ("patches of a video", 1, "lower stream.sizing.video.max_frames or max_pixels")
    check_units(module, rows, patches, *named, where)


def together(module: ModuleSpec, table: ShardTable, samples: Bool, units: int) -> Iterator[tuple[int, I64, I64 | None]]:
    """Yield the samples whose several images a rank of `units` may not hold: their number, patches and depths.

    Both arrays are int64 [k]; depths are None where there is no video.
    """
    patches = table.image_rows.astype(np.int64) * table.image_columns
    first, last = table.image_offsets[:-1], table.image_offsets[1:]
    before = sums_before(patches)
    most = int(patches.max(initial=0)) * (last - first) if module.padded else before[last] - before[first]
    for i in np.flatnonzero(samples & (last - first > 1) & (most > units)).tolist():
        yield_point()
        found = slice(first[i], last[i])
        yield i, patches[found], None if table.image_depths is None else table.image_depths[found].astype(np.int64)


def check_units(module: ModuleSpec, row: I64, units: I64, name: str, degree: int, remedy: str, where: str) -> None:
    """Refuse items that `degree` ranks of a module cannot hold alone; int64 [k] their rows, int64 [k] their sizes."""
    if module.memory is None:
        return
    limit = module.memory.units * degree
    over = np.flatnonzero(units > limit)
    if len(over):
        worst = over[np.argmax(units[over])]
        ranks = f"{degree} ranks" if degree > 1 else "a rank"
        raise SampleTooLargeError(
            f"{where}, row {row[worst]}: it has {units[worst]} {name}, but the memory of {ranks} of module "
            f"{module.name} holds {limit} ({len(over)} too large in this shard); raise memory.budget_bytes of the "
            f"module, {remedy}, or leave such samples out with a filter or a quarantine list"
        )
