"""Token counts of every text part, one small Arrow file per shard and tokenizer beside the index.

So planning and new tokenizers never open a tar. The file names the tokenizer's digest and the digest of the index
columns it was counted from; counts of other texts are noticed and count as missing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dataserver.dataset.errors import DatasetError, TokensMissingError
from dataserver.dataset.files import ShardFile, find_shards, read_fresh_index
from dataserver.dataset.index import BATCH_ROWS, IndexHeader, atomic_writer, read_batch

COLUMNS_KEY: Final = b"disttrain.columns_digest"
TOKENIZER_KEY: Final = b"disttrain.tokenizer_digest"
MAX_TOKENS: Final = (1 << 31) - 1


class TokenCounter(Protocol):
    """What counting takes of a tokenizer."""

    @property
    def digest(self) -> str:
        """Identifies the tokenizer in a job."""

    def count(self, texts: list[str]) -> Sequence[int]:
        """Return the number of tokens of each text, without special tokens."""


@dataclass(frozen=True, slots=True)
class TokensReport:
    """What a count found: `num_counted` of `num_shards` were counted now; `num_tokens` are those of all shards."""

    num_shards: int
    num_counted: int
    num_texts: int
    num_tokens: int


def count_tokens(
    path: Path,
    tokenizer: TokenCounter,
    index_dir: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> TokensReport:
    """Count the tokens of every text of the dataset at `path`, shard by shard, where that is not done yet.

    Args:
        path: folder of indexed shards, or one shard.
        tokenizer: called with the texts of at most `BATCH_ROWS` samples.
        index_dir: where the indexes lie instead of beside the shards.
        progress: called with (shards done, shards in total).

    Raises:
        StaleIndexError: a shard is not indexed.
        DatasetError: `tokenizer.count` broke its contract, or a file cannot be written.
    """
    shards = find_shards(path, index_dir)
    num_counted = num_texts = num_tokens = 0
    for done, shard in enumerate(shards):
        if progress is not None:
            progress(done, len(shards))
        header = read_fresh_index(shard).header
        try:
            counts = read_counts(shard, header, tokenizer.digest)
        except TokensMissingError:
            counts = _count_shard(shard, header, tokenizer)
            _write_counts(shard, header, tokenizer.digest, counts)
            num_counted += 1
        num_texts += len(counts)
        num_tokens += int(counts.sum(dtype=np.int64))
    if progress is not None:
        progress(len(shards), len(shards))
    return TokensReport(len(shards), num_counted, num_texts, num_tokens)


def read_counts(shard: ShardFile, header: IndexHeader, tokenizer_digest: str) -> npt.NDArray[np.int32]:
    """Return int32[text parts] in row and document order.

    Raises:
        TokensMissingError: not counted with this tokenizer, or counted before the shard was indexed again.
    """
    path = shard.tokens_path(tokenizer_digest)
    if not path.exists():
        raise _missing(shard, tokenizer_digest, "is not counted")
    try:
        with pa.memory_map(str(path)) as source:
            table = pa.ipc.open_file(source).read_all()
        metadata = table.schema.metadata or {}
        fresh = metadata.get(COLUMNS_KEY) == header.columns_digest.encode()
        same = metadata.get(TOKENIZER_KEY) == tokenizer_digest.encode()
        column = table.column("tokens")
        if column.type != pa.int32() or column.null_count:
            raise ValueError(f"its counts are {column.type} with {column.null_count} missing, not int32")
        counts: npt.NDArray[np.int32] = np.array(column, dtype=np.int32)
        if (counts < 0).any():
            raise ValueError("it holds a negative count")
    except (OSError, pa.ArrowException, ValueError, KeyError) as error:
        raise _missing(shard, tokenizer_digest, f"cannot be read ({error})") from error
    if not fresh or not same:
        raise _missing(shard, tokenizer_digest, "was counted from another index or tokenizer")
    return counts


def _missing(shard: ShardFile, digest: str, reason: str) -> TokensMissingError:
    return TokensMissingError(
        f"shard {shard.path} {reason} for the tokenizer {digest}; run:"
        f" {shard.index_command} --tokenizer NAME=FILE (or --tokenizer bytes)"
    )


def _count_shard(shard: ShardFile, header: IndexHeader, tokenizer: TokenCounter) -> npt.NDArray[np.int32]:
    counted: list[npt.NDArray[np.int64]] = []
    for batch in range(-(-header.num_samples // BATCH_ROWS)):
        rows = read_batch(shard.index_path, header, batch, ["texts"])
        texts: list[str] = rows.column("texts").flatten().to_pylist()
        counts = np.asarray(tokenizer.count(texts), dtype=np.int64)
        if counts.shape != (len(texts),):
            raise DatasetError(
                f"the tokenizer gave {counts.shape} counts for {len(texts)} texts; it must give one each"
            )
        if len(counts) and not 0 <= int(counts.min()) <= int(counts.max()) <= MAX_TOKENS:
            raise DatasetError(f"the tokenizer gave a count outside 0..{MAX_TOKENS}; check its count")
        counted.append(counts)
    return np.concatenate(counted).astype(np.int32) if counted else np.zeros(0, np.int32)


def _write_counts(shard: ShardFile, header: IndexHeader, digest: str, counts: npt.NDArray[np.int32]) -> None:
    metadata = {COLUMNS_KEY: header.columns_digest, TOKENIZER_KEY: digest}
    table = pa.table({"tokens": pa.array(counts, pa.int32())}).replace_schema_metadata(metadata)
    with atomic_writer(shard.tokens_path(digest)) as temp, pa.ipc.new_file(str(temp), table.schema) as writer:
        writer.write_table(table)
