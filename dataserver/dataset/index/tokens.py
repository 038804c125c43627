"""Token ids of every text part, made once for a tokenizer: so planning and serving never tokenize.

Two files a shard and tokenizer lie beside the index. One holds the number of tokens of each text, as Arrow; the other
the ids of all texts one after the other, 1, 2 or 4 bytes each, so that the ids of a sample are one read. The first is
written last. It names the tokenizer's digest, the digest of the index columns that the texts come from, and the
checksum of the ids: counts of other texts, and ids that are not theirs, count as missing.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import google_crc32c
import numpy as np
import numpy.typing as npt

from dataserver.dataset.errors import DatasetError, TokensMissingError, check_storage, printable
from dataserver.dataset.index.format import BATCH_ROWS, IndexHeader, atomic_writer, read_batch
from dataserver.dataset.index.fresh import read_fresh_index
from dataserver.dataset.shards.listing import ShardFile, find_shards
from dataserver.dataset.storage.etags import check_regular

I32 = npt.NDArray[np.int32]

COLUMNS_KEY: Final = b"disttrain.columns_digest"
TOKENIZER_KEY: Final = b"disttrain.tokenizer_digest"
IDS_TYPE_KEY: Final = b"disttrain.ids_type"
IDS_CRC_KEY: Final = b"disttrain.ids_crc32c"
ID_TYPES: Final = {name: np.dtype(name) for name in ("|u1", "<u2", "<i4")}
"""How ids are stored, by numpy's name; the first that holds a vocabulary."""


class TextTokenizer(Protocol):
    """What makes token ids of texts."""

    @property
    def digest(self) -> str:
        """Identifies the tokenizer in a job."""

    @property
    def vocab_size(self) -> int:
        """All ids lie below it."""

    def encode_all(self, texts: list[str]) -> Sequence[I32]:
        """Return int32 [tokens] for each text, without special tokens."""


@dataclass(frozen=True, slots=True)
class TokensReport:
    """What a count found: `num_counted` of `num_shards` were counted now; `num_tokens` are those of all shards."""

    num_shards: int
    num_counted: int
    num_texts: int
    num_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class TokenCounts:
    """What the first file says."""

    counts: I32
    """int32 [texts]: tokens of each, in row and document order."""
    id_type: np.dtype[np.integer[npt.NBitBase]]
    """Type of an id in the second file, a name in `ID_TYPES`."""
    ids_crc32c: int
    """Checksum of the second file."""


def count_tokens(
    path: Path,
    tokenizer: TextTokenizer,
    index_dir: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> TokensReport:
    """Tokenize every text of the dataset at `path`, shard by shard, where that is not done yet.

    Args:
        path: folder of indexed shards, or one shard.
        tokenizer: called with the texts of at most `BATCH_ROWS` samples.
        index_dir: where the indexes lie instead of beside the shards.
        progress: called with (shards done, shards in total).

    Raises:
        StaleIndexError: a shard is not indexed.
        DatasetError: the tokenizer broke its contract, or a file cannot be written.
    """
    shards = find_shards(path, index_dir)
    num_counted = num_texts = num_tokens = 0
    for done, shard in enumerate(shards):
        if progress is not None:
            progress(done, len(shards))
        header = read_fresh_index(shard).header
        try:
            counts = read_counts(shard, header, tokenizer.digest).counts
            if not shard.token_ids_path(tokenizer.digest).is_file():
                raise _missing(shard, tokenizer.digest, "has no ids")
        except TokensMissingError:
            counts = _tokenize_shard(shard, header, tokenizer)
            num_counted += 1
        num_texts += len(counts)
        num_tokens += int(counts.sum(dtype=np.int64))
    if progress is not None:
        progress(len(shards), len(shards))
    return TokensReport(len(shards), num_counted, num_texts, num_tokens)


def read_counts(shard: ShardFile, header: IndexHeader, tokenizer_digest: str) -> TokenCounts:
    """Read the first file.

    Raises:
        TokensMissingError: not counted with this tokenizer, or counted before the shard was indexed again.
    """
    import pyarrow as pa

    path = shard.tokens_path(tokenizer_digest)
    try:
        check_regular(path)
        table = pa.ipc.open_file(pa.py_buffer(path.read_bytes())).read_all()  # to map so small a file takes longer
        metadata = table.schema.metadata or {}
        fresh = metadata.get(COLUMNS_KEY) == header.columns_digest.encode()
        same = metadata.get(TOKENIZER_KEY) == tokenizer_digest.encode()
        column = table.column("tokens")
        if column.type != pa.int32() or column.null_count:
            raise ValueError(f"its counts are {column.type} with {column.null_count} missing, not int32")
        counts: I32 = column.to_numpy().astype(np.int32, copy=False)
        if counts.min(initial=0) < 0:
            raise ValueError("it holds a negative count")
        id_type = ID_TYPES[metadata.get(IDS_TYPE_KEY, b"").decode()]
        found = TokenCounts(counts, id_type, int(metadata[IDS_CRC_KEY], 16))
    except FileNotFoundError as error:
        raise _missing(shard, tokenizer_digest, "is not counted") from error
    except (OSError, pa.ArrowException, ValueError, KeyError) as error:
        check_storage(path, error)
        raise _missing(shard, tokenizer_digest, f"cannot be read ({printable(str(error))})") from error
    if not fresh or not same:
        raise _missing(shard, tokenizer_digest, "was counted from another index or tokenizer")
    return found


def _missing(shard: ShardFile, digest: str, reason: str) -> TokensMissingError:
    return TokensMissingError(
        f"shard {shard.path} {reason} for the tokenizer {digest}; run:"
        f" {shard.index_command} --tokenizer NAME=FILE (or --tokenizer bytes)"
    )


def _tokenize_shard(shard: ShardFile, header: IndexHeader, tokenizer: TextTokenizer) -> I32:
    """Write both files. Returns the counts."""
    import pyarrow as pa

    most = tokenizer.vocab_size - 1
    name, id_type = next((n, t) for n, t in ID_TYPES.items() if most <= np.iinfo(t).max)
    parts: list[I32] = []
    crc = 0
    with atomic_writer(shard.token_ids_path(tokenizer.digest)) as temp, temp.open("wb") as file:
        for batch in range(-(-header.num_samples // BATCH_ROWS)):
            rows = read_batch(shard.index_path, header, batch, ["texts"])
            texts: list[str] = rows.column("texts").flatten().to_pylist()
            encoded = tokenizer.encode_all(texts)
            if len(encoded) != len(texts):
                raise DatasetError(
                    f"the tokenizer gave ids of {len(encoded)} texts for {len(texts)}; it must give those of each"
                )
            parts.append(np.fromiter((len(ids) for ids in encoded), np.int32, len(encoded)))
            ids = np.concatenate(encoded) if encoded else np.zeros(0, np.int32)
            if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) <= most:
                raise DatasetError(f"the tokenizer gave an id outside 0..{most}; check its vocab_size")
            data = ids.astype(id_type).tobytes()
            crc = google_crc32c.extend(crc, data)
            file.write(data)
    counts = np.concatenate(parts) if parts else np.zeros(0, np.int32)
    metadata = {
        COLUMNS_KEY: header.columns_digest,
        TOKENIZER_KEY: tokenizer.digest,
        IDS_TYPE_KEY: name,
        IDS_CRC_KEY: f"{crc:08x}",
    }
    table = pa.table({"tokens": pa.array(counts, pa.int32())}).replace_schema_metadata(metadata)
    with (
        atomic_writer(shard.tokens_path(tokenizer.digest)) as temp,
        pa.OSFile(os.fsencode(temp), "w") as file,
        pa.ipc.new_file(file, table.schema) as writer,
    ):
        writer.write_table(table)
    return counts
