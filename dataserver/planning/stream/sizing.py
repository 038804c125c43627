"""Sizes from metadata: nominal tokens, tasks, truncation. All in integers.

Layout of a sample in the backbone (content_version 2):

    understanding:  BOS, parts in document order, EOS     a text part: its tokens
                                                          an image part: BOI, patches / merge^2 tokens, EOI; with
                                                          `sizing.marks` and of tiles also tokens between these
                                                          a clip: BOI, positions / audio.merge tokens, EOI
                                                          a video: as an image of all its groups of frames; with
                                                          timestamps each group has the tokens of its time before it
                                                          and `end` behind it
    generation:     BOS, text, BOI, query tokens          the target image takes no tokens; of a document its parts
                                                          before the target instead of the text, as understood
    part:           BOS, parts of its document, EOS       as understood; only the last part of a document learns EOS
    contrastive:    BOS, text, EOS                        in the text tower; the image takes no tokens
"""

from collections.abc import Sequence
from dataclasses import fields
from fractions import Fraction

import numpy as np

from dataserver.planning import I32, I64, U8, U64, Bool
from dataserver.planning.job.fields import Stream
from dataserver.planning.stream.item_sizes import (
    GENERATION_EXTRA,
    IMAGE_EXTRA,
    UNDERSTANDING_EXTRA,
    VideoLengths,
    is_pair,
    item_grids,
    item_marks,
    joined_media,
    picked_media,
    token_grids,
)
from dataserver.planning.stream.randomness import Operator, dataset_key, draw
from dataserver.planning.stream.samples import SampleSizes, ShardTable, StepSamples, Task, row_sums
from dataserver.planning.stream.targets import (
    DocumentTargets,
    draw_targets,
    generation_share,
    images_up_to,
    mixed_tokens,
)


class MicrobatchTooLargeError(ValueError):
    """Samples or images that fit alone, but that no plan of a step holds together."""


class SampleTooLargeError(ValueError):
    """A sample that cannot fit a sequence even without its text, or a module's memory."""


def shard_table(
    stream: Stream,
    row: I64,
    text_tokens: I64,
    image_offsets: I64,
    widths: I32,
    heights: I32,
    where: str = "shard",
    modality: U8 | None = None,
    lengths: VideoLengths | None = None,
) -> ShardTable:
    """The `sized_table` of samples with images, clips or videos of these sizes (`item_grids`)."""
    rows, columns, media = item_grids(image_offsets, widths, heights, modality, stream.sizing, lengths=lengths)
    return sized_table(stream, row, SampleSizes(text_tokens, image_offsets, rows, columns, **media), where)


def sized_table(stream: Stream, row: I64, sizes: SampleSizes, where: str, mean_tokens: I64 | None = None) -> ShardTable:
    """The table of n samples of a shard: how long each is on the dataset's axis.

    Args:
        stream: the job's stream.
        row: int64 [n], rows of the shard's index that are kept.
        sizes: of these samples.
        where: name of dataset and shard for error messages.
        mean_tokens: int64 [n], those that nominal tokens count, where samples draw captions; else their text tokens.

    Raises:
        SampleTooLargeError: a sample's images alone exceed `seq_len`.
    """
    fixed = _fixed_tokens(stream, sizes)
    too_large = np.flatnonzero(may_be_understood(stream, sizes) & (fixed > stream.seq_len))
    if len(too_large):
        worst = too_large[np.argmax(fixed[too_large])]
        bound = (
            stream.sizing.bounded_by if sizes.image_depths is None else "video.max_frames or sizing.video.max_pixels"
        )
        raise SampleTooLargeError(
            f"{where}, row {row[worst]}: its images take {fixed[worst]} tokens without any text, but seq_len is "
            f"{stream.seq_len} ({len(too_large)} such samples in this shard); raise seq_len, "
            f"lower sizing.{bound}, or leave such samples out with a filter or a quarantine list"
        )
    counted = sizes.text_tokens if mean_tokens is None else mean_tokens
    understood = np.minimum(fixed + counted, stream.seq_len)
    generated = np.minimum(counted + GENERATION_EXTRA + stream.generation.query_tokens, stream.seq_len)
    nominal = np.where(is_pair(sizes), mixed_tokens(generation_share(stream), understood, generated), understood)
    if (of_documents := DocumentTargets.of(stream)) is not None:
        nominal = of_documents.nominal_tokens(of_documents.find(stream.sizing, sizes), nominal)
    return ShardTable(**{f.name: getattr(sizes, f.name) for f in fields(SampleSizes)}, row=row, nominal=nominal)


def _fixed_tokens(stream: Stream, table: SampleSizes) -> I64:
    """Tokens of each sample that are not text, when it is understood or of a contrastive stream."""
    if stream.contrastive_batch is not None:
        return np.full(len(table), UNDERSTANDING_EXTRA, np.int64)
    from dataserver.planning.kernels.sized import image_tokens

    found = image_tokens(table.image_offsets, *token_grids(table, stream.sizing), IMAGE_EXTRA) + UNDERSTANDING_EXTRA
    if stream.sizing.marks is None and table.image_marks is None:
        return found
    return found + row_sums(item_marks(table, stream.sizing), table.image_offsets)


def pair_tasks(stream: Stream) -> tuple[bool, bool]:
    """Whether pairs may have to be understood, and whether they may have to be generated."""
    ratio = Fraction(stream.generation.ratio)
    return ratio < 1, ratio > 0


def may_be_understood(stream: Stream, table: SampleSizes) -> Bool:
    """Samples whose images the backbone may have to see. bool [n]."""
    if pair_tasks(stream)[0]:
        return np.ones(len(table), np.bool_)
    return ~is_pair(table)


def may_be_generated(stream: Stream, table: SampleSizes) -> Bool:
    """Samples with an image that a generator may have to learn. bool [n]."""
    if not pair_tasks(stream)[1]:
        return np.zeros(len(table), np.bool_)
    of_documents = DocumentTargets.of(stream)
    return (
        is_pair(table)
        if of_documents is None
        else is_pair(table) | (of_documents.find(stream.sizing, table).counts > 0)
    )


def most_tokens(stream: Stream, table: SampleSizes) -> I64:
    """Backbone tokens of each sample after truncation, in the longest of the tasks that it may have. int64 [n]."""
    understood = np.where(may_be_understood(stream, table), _fixed_tokens(stream, table), 0)
    asked = np.where(is_pair(table) & pair_tasks(stream)[1], GENERATION_EXTRA + stream.generation.query_tokens, 0)
    longest: I64 = np.minimum(np.maximum(understood, asked) + table.text_tokens, stream.seq_len)
    of_documents = DocumentTargets.of(stream)
    return (
        longest if of_documents is None else np.maximum(longest, of_documents.find(stream.sizing, table).most_tokens())
    )


def draw_tasks(stream: Stream, dataset: int, epoch: int, sample: U64, pairs: Bool) -> I32:
    """Task of each sample of one dataset and epoch: a keyed draw, so that it never depends on step or rank.

    In a contrastive stream all have that task; samples that are no pairs are refused beforehand (`limits`).
    """
    if stream.contrastive_batch is not None:
        return np.full(len(sample), Task.CONTRASTIVE, np.int32)
    threshold = int(Fraction(stream.generation.ratio) * 2**64)
    words = draw(stream.seed, Operator.TASK, dataset_key(stream.datasets[dataset].name), epoch, sample)
    below = np.ones(len(sample), np.bool_) if threshold >= 2**64 else words < np.uint64(threshold)
    return np.where(pairs & below, np.int32(Task.GENERATION), np.int32(Task.UNDERSTANDING))


def size_samples(stream: Stream, dataset: int, epoch: int, sample: U64, table: SampleSizes) -> StepSamples:
    """The samples of one epoch of a dataset, a position in the job's list, with their tasks and truncated sizes.

    Their numbers are uint64 [n], the table has their sizes in the same order.
    """
    task = draw_tasks(stream, dataset, epoch, sample, may_be_generated(stream, table))
    generated = task == Task.GENERATION
    fixed = np.where(generated, GENERATION_EXTRA + stream.generation.query_tokens, _fixed_tokens(stream, table))
    kept = np.minimum(table.text_tokens, stream.seq_len - fixed)
    read = table
    if (of_documents := DocumentTargets.of(stream)) is not None:
        found, key = of_documents.find(stream.sizing, table), dataset_key(stream.datasets[dataset].name)
        target = np.where(generated, draw_targets(found, stream.seed, key, epoch, sample, table.parts), -1)
        read, chosen = images_up_to(table, target), np.flatnonzero(target >= 0)
        kept[chosen] = found.texts[target[chosen]]
        fixed[chosen] = found.tokens[target[chosen]] - kept[chosen]
    media = picked_media(read, slice(None))
    media.pop("image_texts", None)
    targets = table.targets
    if table.parts is not None:  # only the last part of a document ends it
        targets = kept + (table.parts[:, 0] == table.parts[:, 1] - 1)
    n = len(sample)
    return StepSamples(
        dataset=np.full(n, dataset, np.int32),
        epoch=np.full(n, epoch, np.int64),
        sample=sample,
        task=task,
        text_tokens=kept,
        truncated_tokens=table.text_tokens - kept,
        tokens=fixed + kept,
        image_offsets=read.image_offsets,
        image_rows=read.image_rows,
        image_columns=read.image_columns,
        **media,
        targets=targets,
        parts=table.parts,
    )


def concatenate(parts: list[StepSamples]) -> StepSamples:
    """Samples one after the other."""
    if not parts:
        empty = np.zeros(0, np.int64)
        narrow = empty.astype(np.int32)
        offsets = np.zeros(1, np.int64)
        return StepSamples(narrow, empty, empty.astype(np.uint64), narrow, empty, empty, empty, offsets, narrow, narrow)
    optional = ("image_modality", "image_depths", "image_layout", "targets", "parts", "image_marks")
    columns = {f.name: [getattr(p, f.name) for p in parts] for f in fields(StepSamples) if f.name not in optional}
    images = np.cumsum([0, *(len(p.image_rows) for p in parts[:-1])])
    behind = [p.image_offsets[1:] + before for p, before in zip(parts, images, strict=True)]
    columns["image_offsets"] = [np.zeros(1, np.int64), *behind]
    joined = {name: np.concatenate(arrays) for name, arrays in columns.items()}
    targets = None
    if any(part.targets is not None for part in parts):
        targets = np.concatenate([part.num_targets for part in parts])
    return StepSamples(**joined, **joined_media(parts), targets=targets, parts=joined_parts(parts))


def joined_parts(tables: Sequence[SampleSizes | StepSamples]) -> I64 | None:
    """The parts of several, one after the other; where only some have any, the samples of the others are whole."""
    if all(table.parts is None for table in tables):
        return None
    whole = np.array([[0, 1, 0, 0]], np.int64)
    return np.concatenate([whole.repeat(len(t), axis=0) if t.parts is None else t.parts for t in tables])
