"""Token ids of conversations, made once for a tokenizer and its chat template.

They lie in the same two files as those of texts, under a name of their own. There is one run of ids a sample, each
stored as `id * 4 + image * 2 + target`: a target is a token that is learned, an image stands where an image, a clip or
a video goes. The
file of counts also says how many of either a sample has, and how many there are up to the end of each answer, behind
which a conversation may be cut.
"""

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Final

from dataserver.dataset.errors import Findings, StaleIndexError, TokensMissingError
from dataserver.dataset.index.chat_batches import (
    BatchTask,
    ChatEncoder,
    EncodedBatch,
    encode_batch,
    in_order,
)
from dataserver.dataset.index.chat_counts import CHAT_COLUMN, FLAG_BITS
from dataserver.dataset.index.format import BATCH_ROWS, IndexHeader
from dataserver.dataset.index.fresh import read_fresh_index
from dataserver.dataset.index.parts import WHOLE, Part
from dataserver.dataset.index.tokens import I32, TokensReport, count_shards, read_counts, texts_key, write_tokens
from dataserver.dataset.machine.cores import usable_cores
from dataserver.dataset.machine.memory import processes_within, usable_memory
from dataserver.dataset.machine.workers import shared_out
from dataserver.dataset.progress import Progress, untold
from dataserver.dataset.shards.listing import ShardFile, find_shards
from dataserver.planning.stream.captions import CHAT_PREFIX

FEW_BATCHES: Final = 8
"""Fewer are rendered in this process: they take less time than processes take to start."""
WORKER_BYTES: Final = 512 << 20
"""Memory of a process with a large vocabulary, and of the one that renders for it."""
_AHEAD: Final = 4
"""Batches for each process that are rendered or wait for the one that is written next."""


def chat_key(tokenizer_digest: str, chat_digest: str) -> str:
    """What stands for a tokenizer's digest where its ids are those of conversations."""
    return texts_key(tokenizer_digest, CHAT_PREFIX + chat_digest)


def count_chats(
    path: Path,
    encoder: ChatEncoder,
    index_dir: Path | None = None,
    progress: Progress = untold,
    part: Part = WHOLE,
    workers: int | None = None,
) -> TokensReport:
    """Render and tokenize every conversation of the dataset at `path`, where that is not done yet.

    Arguments and errors are those of `count_tokens`, but for:

    Args:
        workers: processes; by default one for each usable core that there is memory for, where there is much to do.
            What they write is the same for any number.
    """
    key = chat_key(encoder.digest, encoder.chat_digest)
    uncounted = list(_uncounted(part.of(find_shards(path, index_dir)), key))
    tasks = [
        BatchTask(encoder, shard.path, shard.index_path, header, batch)
        for shard, header in uncounted
        for batch in range(_num_batches(header))
    ]
    if workers is None:
        most = min(usable_cores(), processes_within(WORKER_BYTES, usable_memory()))
        workers = 1 if len(tasks) < FEW_BATCHES else most
    rendered = shared_out(encode_batch, tasks, workers, None, _AHEAD * workers)
    with closing(in_order(rendered)) as batches:
        for done, (shard, header) in enumerate(uncounted):
            progress(done, len(uncounted))
            _write(shard, header, batches, encoder, key)
    report = count_shards(path, key, lambda s, i: read_counts(s, i.header, key), index_dir, untold, part)
    progress(report.num_shards, report.num_shards)
    return replace(report, num_counted=len(uncounted))


def _uncounted(shards: Sequence[ShardFile], key: str) -> Iterator[tuple[ShardFile, IndexHeader]]:
    """Yield the shards whose conversations have no ids yet."""
    for shard in shards:
        indexed = read_fresh_index(shard)
        if CHAT_COLUMN not in indexed.columns:
            raise StaleIndexError(f"shard {shard.path} holds no conversations; index it with --conversations chat")
        try:
            read_counts(shard, indexed.header, key)
            is_counted = shard.token_ids_path(key).is_file()
        except TokensMissingError:
            is_counted = False
        if not is_counted:
            yield shard, indexed.header


def _num_batches(header: IndexHeader) -> int:
    return -(-header.num_samples // BATCH_ROWS)


def _write(
    shard: ShardFile, header: IndexHeader, batches: Iterator[EncodedBatch], encoder: ChatEncoder, key: str
) -> None:
    """Write both files of one shard."""
    import pyarrow as pa

    of_end = pa.struct([("tokens", pa.int32()), ("images", pa.int32()), ("targets", pa.int32())])
    types = {"images": pa.int32(), "targets": pa.int32(), "ends": pa.list_(of_end)}
    columns: dict[str, list[pa.Array]] = {name: [] for name in types}
    findings = Findings()

    def entries() -> Iterator[Sequence[I32 | None]]:
        for _ in range(_num_batches(header)):
            found = next(batches)
            for name, type_ in types.items():
                columns[name].append(pa.array(found.columns[name], type_))
            findings.add_all(found.findings)
            yield found.entries

    write_tokens(
        shard,
        header,
        key,
        (encoder.vocab_size << FLAG_BITS) - 1,
        entries(),
        findings,
        lambda: {n: pa.concat_arrays(parts) if (parts := columns[n]) else pa.array([], t) for n, t in types.items()},
    )
