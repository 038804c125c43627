"""Statistics of shards: their samples are looked at once, in processes of their own where there are many."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from dataserver.dataset import (
    DatasetError,
    Filter,
    Progress,
    Quarantine,
    Shard,
    ShardSizes,
    compile_filter,
    in_processes,
    processes_within,
    texts_key,
    untold,
    usable_cores,
    usable_memory,
)
from dataserver.jobs.single_flight import LOOK_S
from dataserver.planning import I64
from dataserver.planning.job.fields import Sizing
from dataserver.planning.stream.captions import OWN_CAPTION, Captions
from dataserver.planning.stream.chats import around
from dataserver.planning.stream.columns import ChatColumns, ShardColumns
from dataserver.planning.stream.documents import Split
from dataserver.planning.stream.item_sizes import VideoLengths
from dataserver.planning.stream.samples import row_sums
from dataserver.planning.stream.sizing import SampleTooLargeError
from dataserver.planning.stream.statistics import ShardStatistics, row_statistics
from dataserver.planning.stream.targets import DocumentTargets

MANY: Final = 256
"""So many shards are worth the second that it takes to start processes."""
MOST_WORKERS: Final = 8
"""Most processes that compute statistics at once."""
WORKER_BYTES: Final = 100 << 20
"""Memory of one. Half of what there is is for them together: the rest is the server's."""
TASK: Final = 16
"""Shards that a process is given at once."""
NICENESS: Final = 10
"""Niceness of the processes that a server starts: its streams come first."""
_has_processes: Final = threading.Lock()


@dataclass(frozen=True, slots=True)
class Rules:
    """Which samples of a shard are served, and how they are sized: what its statistics depend on beside the shard."""

    tokenizer_digest: str
    sizing: Sizing
    filter: str = ""
    quarantine: Quarantine | None = None
    captions: Captions = OWN_CAPTION
    longest: bool = False
    """Whether a sample counts with the longest of its captions, not with their mean, where it draws one."""
    metadata: tuple[str, ...] = ()
    """Keys of the transforms of metadata, whose columns the filter may name."""
    split: Split | None = None
    """How documents are split: statistics are then those of their parts."""
    of_documents: DocumentTargets | None = None
    """How images of documents are generated, on which their nominal tokens depend."""

    @property
    def transformed_texts(self) -> list[str]:
        """What stands for the tokenizer where its ids are those of transformed texts."""
        return [texts_key(self.tokenizer_digest, name) for name in self.captions.transformed]

    def key(self) -> list[Any]:
        """What tells rules apart; how pixels are decoded and scaled changes no size."""
        grid = [self.sizing.patch, self.sizing.merge, self.sizing.max_patches]
        key = [self.tokenizer_digest, *grid, self.filter, self.quarantine.digest if self.quarantine else ""]
        if self.captions != OWN_CAPTION:
            key += [self.captions.key(), self.longest]
        if self.sizing.audio is not None:
            key.append({"audio": self.sizing.audio.model_dump(exclude_none=True)})
        if self.sizing.video is not None:
            key.append({"video": self.sizing.video.model_dump(mode="json", exclude_none=True)})
        if self.metadata:
            key.append({"metadata": list(self.metadata)})  # as JSON gives it back
        if self.sizing.marks is not None:
            key.append({"marks": self.sizing.marks.counts})
        if self.split is not None:
            key.append({"split": self.split.key()})
        if self.of_documents is not None:
            key.append({"targets": self.of_documents.key()})
        return key if self.sizing.rule is None else [*key, self.sizing.of_rule()]


def compute_statistics(
    shards: Sequence[Shard],
    rules: Rules,
    progress: Progress = untold,
    look: Callable[[], object] = lambda: None,
    workers: int | None = None,
    niceness: int = NICENESS,
) -> list[ShardStatistics]:
    """Look at the samples of some shards.

    Args:
        shards: of one dataset.
        rules: which samples count, and how they are sized.
        progress: called with (shards done, shards in total).
        look: called often; what it raises ends the work.
        workers: processes; by default one for each core, a few at most, and no more than there is memory for.
        niceness: by how much these give way to others.

    Raises:
        TokensMissingError: a shard is not counted for the tokenizer; names the command.
        DatasetError: an index cannot be read.
    """
    progress(0, len(shards))
    parts: dict[int, list[ShardStatistics]] = {}
    done = 0
    for number, found in _computed(shards, rules, look, workers, niceness):
        parts[number] = found
        done += len(found)
        progress(done, len(shards))
    return [statistics for number in range(len(parts)) for statistics in parts[number]]


def _computed(
    shards: Sequence[Shard], rules: Rules, look: Callable[[], object], workers: int | None, niceness: int
) -> Iterator[tuple[int, list[ShardStatistics]]]:
    """Statistics of a few shards at a time, with the number of these few, in the order in which they are done."""
    if len(shards) >= MANY and workers != 1:
        cores = min(MOST_WORKERS, usable_cores(), processes_within(2 * WORKER_BYTES, usable_memory()))
        some = [shards[i : i + TASK] for i in range(0, len(shards), TASK)]
        with _one_at_a_time(look):
            yield from in_processes(
                _compute_all, [(few, _reduced(rules, few)) for few in some], workers or cores, look, niceness
            )
        return
    compiled = compile_filter(rules.filter) if rules.filter else None
    for number, shard in enumerate(shards):
        look()
        yield number, [_compute(shard, rules, compiled)]


@contextmanager
def _one_at_a_time(look: Callable[[], object]) -> Iterator[None]:
    """Wait until nothing else has processes here: one dataset's take all cores, several datasets' too much memory."""
    while not _has_processes.acquire(timeout=LOOK_S):
        look()
    try:
        yield
    finally:
        _has_processes.release()


def rows_left(shard: Shard, compiled: Filter | None, rules: Rules) -> I64:
    """The rows of a shard that filter, quarantine, transforms of metadata and the tokenizer leave. int64 [k].

    Raises:
        TokensMissingError: the shard is not counted for the tokenizer, or not transformed; names the command.
    """
    keys = [texts_key(rules.tokenizer_digest, name) for name in rules.captions.names]
    failed = [shard.tokens.not_encodable(key) for key in keys]
    not_encodable = [rows for rows in failed if rows is not None]
    if compiled is None and rules.quarantine is None and not not_encodable and not rules.metadata:
        return _all_rows(shard.num_samples)
    kept = shard.keep(compiled, rules.quarantine, rules.metadata)
    for rows in not_encodable:
        kept &= ~rows
    return np.flatnonzero(kept)


@lru_cache(maxsize=16)
def _all_rows(count: int) -> I64:
    """What shards share that have as many samples, none of them left out. int64 [count], read-only."""
    rows = np.arange(count)
    rows.setflags(write=False)
    return rows


def columns_of(shard: Shard, rules: Rules) -> ShardColumns:
    """What the index and the token counts say of all samples of a shard.

    Raises:
        TokensMissingError: the shard is not counted for the tokenizer; names the command.
    """
    sizes, captions = shard.sizes(), rules.captions
    keys = [texts_key(rules.tokenizer_digest, name) for name in captions.names]
    if captions.are_chats:
        return _chat_columns(shard, sizes, keys[0])
    text_offsets, tokens = sizes.text_offsets, None
    counts = [shard.tokens.counts(key) for key in keys]
    text_tokens: NDArray[Any] = counts[0]
    if captions.are_drawn:  # the texts of a sample count as one
        tokens = np.stack([row_sums(found, text_offsets) for found in counts])
        text_offsets, text_tokens = np.arange(shard.num_samples + 1), tokens.max(axis=0, initial=0)
    return ShardColumns(
        text_offsets=text_offsets,
        text_tokens=text_tokens,
        image_offsets=sizes.image_offsets,
        image_width=sizes.image_width,
        image_height=sizes.image_height,
        caption_tokens=tokens,
        image_modality=sizes.image_modality,
        lengths=_video_lengths(sizes),
        kinds=sizes.kinds,
    )


def _video_lengths(sizes: ShardSizes) -> VideoLengths | None:
    if sizes.image_frames is None or sizes.image_microseconds is None:
        return None
    return VideoLengths(sizes.image_frames, sizes.image_microseconds)


def _chat_columns(shard: Shard, sizes: ShardSizes, key: str) -> ShardColumns:
    """The columns of conversations. Each is one text."""
    tokens, chats = shard.tokens.chat_counts(key)
    images = np.diff(sizes.image_offsets)
    counted = tokens > 0
    if (chats.images[counted] != images[counted]).any():
        raise DatasetError(
            f"shard {shard.name}: its conversations have other numbers of images than the index; remove the shard's "
            ".tokens files and run dataserver index again"
        )
    ends = ChatColumns(
        chats.targets, chats.end_offsets, chats.end_tokens - chats.end_images, chats.end_images, chats.end_targets
    )
    text = np.where(counted, tokens - chats.images - around(images), 0)
    offsets = np.arange(shard.num_samples + 1)
    return ShardColumns(
        offsets,
        text,
        sizes.image_offsets,
        sizes.image_width,
        sizes.image_height,
        image_modality=sizes.image_modality,
        lengths=_video_lengths(sizes),
        chats=ends,
    )


def _compute_all(task: tuple[Sequence[Shard], Rules]) -> list[ShardStatistics]:
    shards, rules = task
    compiled = compile_filter(rules.filter) if rules.filter else None
    return [_compute(shard, rules, compiled) for shard in shards]


def _compute(shard: Shard, rules: Rules, compiled: Filter | None) -> ShardStatistics:
    row = rows_left(shard, compiled, rules)
    null_drops = 0 if compiled is None else shard.dropped_for_nulls(compiled, rules.metadata)
    columns = columns_of(shard, rules)
    if columns.caption_tokens is not None and not rules.longest:
        columns = replace(columns, text_tokens=rules.captions.expected(columns.caption_tokens))
    try:
        return row_statistics(rules.sizing, columns, row, null_drops, rules.split, rules.of_documents)
    except SampleTooLargeError as error:
        raise SampleTooLargeError(f"shard {shard.name}: {error}") from None


def _reduced(rules: Rules, shards: Sequence[Shard]) -> Rules:
    """The rules with as much of the quarantine list as some shards need."""
    if rules.quarantine is None:
        return rules
    listed = rules.quarantine.keys
    some = Quarantine({shard.name: listed[shard.name] for shard in shards if shard.name in listed})
    return replace(rules, quarantine=some)
