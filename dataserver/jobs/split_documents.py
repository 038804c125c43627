"""Documents that a job splits: counted for its notes, and listed as findings."""

from collections.abc import Iterator
from dataclasses import replace

from dataserver.dataset import SPLIT_DOCUMENT, Dataset, ShardFinding
from dataserver.jobs.cache import JobCache
from dataserver.jobs.catalog import dataset_of
from dataserver.jobs.shard_statistics import Rules
from dataserver.jobs.tables import ShardTables
from dataserver.planning.job.fields import DatasetSpec, Sizing, SplitAt, Stream
from dataserver.planning.job.identity import hash_of
from dataserver.planning.stream.documents import Split

ITEMS = "images", "clips", "videos"
"""What budgets count, in their order."""


def whole_rules(rules: Rules) -> Rules:
    """The rules that count the documents of a dataset whose parts others count.

    How they are sized changes no number, so that it is as `dataserver index` leaves it.
    """
    return replace(rules, sizing=Sizing(), split=None, of_documents=None)


def counts_as_indexed(rules: Rules) -> bool:
    """Whether all documents of a dataset are served, so that what `dataserver index` left counts them: otherwise that
    takes a second pass over the index, which a note is not worth."""
    return not (rules.filter or rules.quarantine or rules.metadata or rules.captions.transformed)


def split_note(spec: DatasetSpec, split: Split, documents: int, parts: int, *, has_sound: bool) -> str:
    """Say how many parts the documents of a dataset become, and what may be parted; empty where none is split.

    Args:
        spec: of the dataset.
        split: how its documents are split.
        documents: of the dataset.
        parts: that they become.
        has_sound: whether the sound of its videos is served.
    """
    if parts <= documents:
        return ""
    parted = "; some of them may part a video from its sound, which documents.split videos keeps together"
    return (
        f"dataset {spec.name!r}: {documents} documents are served as {parts} parts, since those "
        f"{_beyond(split)} are split; dataserver lint --job lists them"
    ) + (parted if has_sound and split.rule == SplitAt.ITEMS else "")


def split_findings(stream: Stream, dataset: Dataset) -> Iterator[ShardFinding]:
    """Yield a finding for each document of a dataset that is split.

    Args:
        stream: of a job, with this dataset alone.
        dataset: the open dataset.

    Raises:
        DatasetMismatchError: it is not the job's: it has another fingerprint or quarantine list.
        TokensMissingError: the dataset is not counted for the job's tokenizer; names the command.
        FilterError: the filter does not fit the dataset's columns.
        SampleTooLargeError: an image alone exceeds a sequence.
    """
    dataset = dataset_of(stream.datasets[0], dataset, stream.tokenizer.digest)
    tables = ShardTables(hash_of(stream), stream, [dataset], JobCache())
    for number, shard in enumerate(dataset.shards):
        table = tables.table(0, number)
        if table.parts is None:
            continue
        first = (table.parts[:, 0] == 0) & (table.parts[:, 1] > 1)
        keys = shard.keys() if first.any() else []
        for row, parts in zip(table.row[first].tolist(), table.parts[first, 1].tolist(), strict=True):
            detail = f"{parts} parts, each of at most {stream.seq_len} tokens (seq_len) and the items of its budget"
            yield ShardFinding(shard.name, keys[row], SPLIT_DOCUMENT, detail)


def _beyond(split: Split) -> str:
    """Which documents are split: `of more than 640 tokens or 4 images`."""
    said = [f"{most} {what}" for most, what in zip(split.budget, ITEMS, strict=True) if most is not None]
    return f"of more than {' or '.join([f'{split.seq_len} tokens', *said])}"
