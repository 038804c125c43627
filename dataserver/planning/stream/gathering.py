"""From the columns of shards to the samples of a step: rows picked out and put in order."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dataserver.planning import I64, U64, Bool, yield_point
from dataserver.planning.job.fields import SINGLE_STEP, PlanLimits, Sizing, Stream
from dataserver.planning.stream.captions import OWN_CAPTION, Captions
from dataserver.planning.stream.chats import FittedChats, fit_chats
from dataserver.planning.stream.columns import ShardColumns
from dataserver.planning.stream.documents import TEXT_KIND, Documents, Split, split_documents
from dataserver.planning.stream.item_sizes import (
    IMAGE_EXTRA,
    item_marks,
    item_tokens,
    joined_media,
    picked_media,
)
from dataserver.planning.stream.order import StreamOrder
from dataserver.planning.stream.randomness import dataset_key
from dataserver.planning.stream.samples import (
    IMAGE,
    SampleSizes,
    ShardTable,
    StepSamples,
    ranges,
    row_sums,
    sums_before,
)
from dataserver.planning.stream.sizing import (
    MicrobatchTooLargeError,
    concatenate,
    joined_parts,
    size_samples,
    sized_table,
)
from dataserver.planning.stream.windows import Part, Span, WindowOrder


class PickedRows(NamedTuple):
    """The k samples that some rows of a shard become: parts of documents that are split, rows as they are otherwise."""

    row: I64
    """Row of each sample in its shard, int64 [k]."""
    text_tokens: I64
    """Text tokens of each sample, int64 [k]."""
    image_offsets: I64
    """int64 [k + 1]: first image of each."""
    images: I64 | slice
    """Their images among those of the shard."""
    lone: Bool | None
    """bool [images]: whether each is the only image of its document; None where offsets say it."""
    parts: I64 | None
    """int64 [k, 4], as in `SampleSizes`."""

    def sizes(self, columns: ShardColumns, sizing: Sizing) -> SampleSizes:
        """Their sizes; `columns` are those of the shard."""
        rows, sides, media = columns.grids(self.images, self.image_offsets, sizing, self.lone)
        return SampleSizes(self.text_tokens, self.image_offsets, rows, sides, **media, parts=self.parts)

    def texts_before(self, columns: ShardColumns) -> I64:
        """Text tokens of its sample before each image, int64 [images]; `columns` are those of the shard."""
        if columns.kinds is None:
            raise ValueError("images of documents are to be generated, and nothing says where texts stand")
        lengths = np.zeros(len(columns.kinds), np.int64)
        lengths[columns.kinds == TEXT_KIND] = columns.text_tokens
        before = np.cumsum(lengths)[columns.kinds != TEXT_KIND]
        sums = sums_before(columns.text_tokens)
        before -= np.repeat(sums[columns.text_offsets[:-1]], np.diff(columns.image_offsets))
        found: I64 = before[self.images]
        return found if self.parts is None else found - np.repeat(self.parts[:, 2], np.diff(self.image_offsets))


def picked_rows(columns: ShardColumns, row: I64, split: Split | None, sizing: Sizing) -> PickedRows:
    """The samples of some rows, int64 [n], which are split as `split` says."""
    counts = np.diff(columns.image_offsets)[row]
    all_rows = len(row) == len(columns.image_offsets) - 1
    images = slice(None) if all_rows else ranges(columns.image_offsets[row], counts)
    offsets = sums_before(counts)
    if split is None:
        return PickedRows(row, row_sums(columns.text_tokens, columns.text_offsets)[row], offsets, images, None, None)
    if columns.kinds is None:
        raise ValueError("documents are to be split, and nothing says in which order their parts come")
    rows, sides, media = columns.grids(images, offsets, sizing)
    modality = media.get("image_modality")
    nothing = np.zeros(len(row), np.int64)
    sized = SampleSizes(nothing, offsets, rows, sides, **media)
    texts = np.diff(columns.text_offsets)[row]
    of = ranges(columns.text_offsets[row] + columns.image_offsets[row], texts + counts)
    documents = Documents(
        kinds=columns.kinds[of],
        text_offsets=sums_before(texts),
        text_tokens=columns.text_tokens[ranges(columns.text_offsets[row], texts)],
        image_offsets=offsets,
        image_tokens=item_tokens(sized, sizing) + item_marks(sized, sizing) + IMAGE_EXTRA,
        image_modality=modality,
    )
    found = split_documents(split, documents)
    is_image = np.ones(len(rows), np.bool_) if modality is None else modality == IMAGE
    lone = np.repeat(row_sums(is_image, offsets) == 1, counts)
    return PickedRows(row[found.document], found.text_tokens, found.image_offsets, images, lone, found.parts)


def size_rows(
    stream: Stream,
    columns: ShardColumns,
    row: I64,
    where: str,
    captions: Captions = OWN_CAPTION,
    split: Split | None = None,
) -> ShardTable:
    """The sized samples of some rows of a shard.

    Args:
        stream: the job's stream.
        columns: of all rows.
        row: int64 [k], the rows that are kept.
        where: name of dataset and shard for error messages.
        captions: among which samples draw, if they do.
        split: how documents are split, if they are.

    Raises:
        SampleTooLargeError: a sample's images alone exceed `seq_len`.
    """
    if columns.chats is not None:
        return _size_chats(stream, columns, row, where, captions)
    picked = picked_rows(columns, row, split, stream.sizing)
    sizes = picked.sizes(columns, stream.sizing)
    if stream.generation.interleaved:
        sizes = replace(sizes, image_texts=picked.texts_before(columns))
    drawn = None if columns.caption_tokens is None else columns.caption_tokens[:, row]
    expected = None if drawn is None else captions.expected(drawn)
    return replace(sized_table(stream, picked.row, sizes, where, expected), caption_tokens=drawn)


def picked_chats(columns: ShardColumns, row: I64, fitted: FittedChats) -> PickedRows:
    """The conversations of some rows, int64 [n], as far as a sequence holds them; those that do not fit are left out.

    Args:
        columns: of all rows.
        row: those that are kept.
        fitted: how much of each conversation of the shard a sequence holds.
    """
    row = row[fitted.fits[row]]
    counts, modality = fitted.images[row], columns.image_modality
    is_image = np.ones(len(columns.image_width), np.bool_) if modality is None else modality == IMAGE
    return PickedRows(
        row,
        fitted.text[row],
        sums_before(counts),
        ranges(columns.image_offsets[:-1][row], counts),
        np.repeat(row_sums(is_image, columns.image_offsets)[row] == 1, counts),
        None,
    )


def _size_chats(stream: Stream, columns: ShardColumns, row: I64, where: str, captions: Captions) -> ShardTable:
    """As `size_rows`, of conversations: one that is longer than a sequence is cut, or left out."""
    fitted = fit_chats(stream.sizing, stream.seq_len, columns, cut_at_turn=captions.cut_at_turn)
    picked = picked_chats(columns, row, fitted)
    sizes = replace(picked.sizes(columns, stream.sizing), targets=fitted.targets[picked.row])
    return sized_table(stream, picked.row, sizes, where)


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """The n samples of a shuffle window of one epoch, or of a slice of it, in canonical order."""

    sample: U64
    """uint64 [n]: shard << ROW_BITS | row."""
    first: I64
    """int64 [n]: first unit of each sample, from the start of the epoch."""
    sizes: SampleSizes
    """Sizes of the samples, in the same order."""

    def part(self, span: Span) -> tuple[U64, SampleSizes]:
        """The samples that begin in a span, uint64 [k], and their sizes."""
        begin, end = np.searchsorted(self.first, (span.first, span.last)).tolist()
        offsets = self.sizes.image_offsets[begin : end + 1]
        images = slice(int(offsets[0]), int(offsets[-1]))
        targets, parts = self.sizes.targets, self.sizes.parts
        return self.sample[begin:end], SampleSizes(
            text_tokens=self.sizes.text_tokens[begin:end],
            image_offsets=offsets - offsets[0],
            image_rows=self.sizes.image_rows[images],
            image_columns=self.sizes.image_columns[images],
            **picked_media(self.sizes, images),
            targets=None if targets is None else targets[begin:end],
            parts=None if parts is None else parts[begin:end],
        )


def gather_window(order: WindowOrder, span: Span, tables: Iterable[ShardTable]) -> Window:
    """The window in which a span lies, from the tables of its shards; no more of them is held than it has."""
    parts, picked = list[Part](), list[ShardTable]()
    for at, table in enumerate(tables):
        part = order.part(span, at, table)
        parts.append(part)
        picked.append(table if part.at is None else pick_rows(table, part.at))
    sample, first, position = order.merged(span, parts)
    sizes = pick_sizes(picked, position)
    tokens = [table.caption_tokens for table in picked if table.caption_tokens is not None]
    if tokens:
        spec = order.stream.datasets[span.dataset]
        drawn = Captions.of(spec).drawn(order.stream.seed, dataset_key(spec.name), span.epoch, sample)
        sizes = replace(sizes, text_tokens=np.concatenate(tokens, axis=1)[drawn, position])
    return Window(sample, first, sizes)


def gather_step(
    stream: Stream, order: StreamOrder, step: int, windows: Callable[[Span], Iterable[Window]], most: PlanLimits
) -> StepSamples:
    """The samples of one step in canonical order; `windows` gives the window in which a span lies, or its parts.

    Raises:
        StepOutOfRangeError: the job ends before.
        MicrobatchTooLargeError: the step has `SINGLE_STEP` times as many samples or images as `most` says of the mean.
    """
    parts, samples, images = list[StepSamples](), 0, 0
    pieces = ((span, window) for span in order.spans(step) for window in windows(span))
    for of, window in pieces:
        yield_point()
        numbers, picked = window.part(of)
        samples, images = samples + len(numbers), images + len(picked.image_rows)
        if samples > most.step_samples * SINGLE_STEP or images > most.step_images * SINGLE_STEP:
            raise MicrobatchTooLargeError(
                f"step {step} has more than {most.step_samples * SINGLE_STEP:,} samples or "
                f"{most.step_images * SINGLE_STEP:,} images, {SINGLE_STEP} times what plan_version takes on average "
                "(step_samples, step_images): lower stream.global_batch, or raise shuffle_window, which mixes short "
                "samples with long ones"
            )
        parts.append(size_samples(stream, of.dataset, of.epoch, numbers, picked))
    return concatenate(parts)


def pick_sizes(tables: Sequence[SampleSizes], at: I64) -> SampleSizes:
    """Return the sizes of samples of several tables in the order of `at`.

    `at`, int64 [k], has the row of each sample in the tables put one below the other."""
    from dataserver.planning.kernels.gathered import Sizes, picked

    sizes = Sizes(*map(np.concatenate, _columns(tables)))
    media = joined_media(tables)
    if media:
        first = sizes.image_offsets[at]
        images = ranges(first, sizes.image_offsets[at + 1] - first)
        media = {name: column[images] for name, column in media.items()}
    targets = [table.targets for table in tables if table.targets is not None]  # of all tables of a dataset or of none
    of = np.concatenate(targets)[at] if targets else None
    parts = joined_parts(tables)
    return SampleSizes(*picked(sizes, at), **media, targets=of, parts=None if parts is None else parts[at])


def pick_rows(table: ShardTable, at: I64) -> ShardTable:
    """Some samples of a table, int64 [k]."""
    sizes = pick_sizes([table], at)
    images = sizes.image_offsets, sizes.image_rows, sizes.image_columns
    tokens = None if table.caption_tokens is None else table.caption_tokens[:, at]
    rest = table.row[at], table.nominal[at], tokens
    media = picked_media(sizes, slice(None))
    return ShardTable(sizes.text_tokens, *images, *rest, **media, targets=sizes.targets, parts=sizes.parts)


def _columns(tables: Sequence[SampleSizes]) -> tuple[list[NDArray[Any]], ...]:
    """The columns of several tables, with offsets as those of one table."""
    before = np.cumsum([0, *(len(t.image_rows) for t in tables)])
    offsets = [t.image_offsets[:-1] + b for t, b in zip(tables, before[:-1], strict=True)]
    rows, columns = [t.image_rows for t in tables], [t.image_columns for t in tables]
    return [t.text_tokens for t in tables], [*offsets, before[-1:]], rows, columns
