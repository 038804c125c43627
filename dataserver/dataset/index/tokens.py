"""Token ids of every text part, made once for a tokenizer: so planning and serving never tokenize.

Two files a shard and tokenizer lie beside the index. One holds the number of tokens of each text, as Arrow; the other
the ids of all texts one after the other, 1, 2 or 4 bytes each, so that the ids of a sample are one read. The first is
written last. It names the tokenizer's digest, the digest of the index columns that the texts come from, and the
checksum of the ids: counts of other texts, and ids that are not theirs, count as missing. A text that the tokenizer
cannot encode has a count of -1, where the rules of the index allow it, and a finding in the first file.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
import numpy.typing as npt
from crc32c import crc32c as crc32c_of

from dataserver.dataset.errors import (
    DatasetError,
    FindingReport,
    Findings,
    StaleIndexError,
    TextTransformError,
    TokenizingError,
    TokensMissingError,
    check_storage,
    printable,
)
from dataserver.dataset.index.chat_counts import ChatCounts, chat_counts
from dataserver.dataset.index.flags import index_command, transform_flags
from dataserver.dataset.index.format import (
    BATCH_ROWS,
    COLUMNS_KEY,
    FINDINGS_KEY,
    META_PREFIX,
    IndexHeader,
    arrow_writer,
    atomic_writer,
    read_batch,
    read_table,
)
from dataserver.dataset.index.fresh import IndexedShard, read_fresh_index
from dataserver.dataset.index.parts import WHOLE, Part
from dataserver.dataset.index.rules import Conversations, OnTokenError, read_rules
from dataserver.dataset.kinds import KINDS, TEXT_TRANSFORM, UNENCODABLE, Effect
from dataserver.dataset.progress import Progress, told, untold
from dataserver.dataset.shards.captions import COLUMN_PREFIX, OWN
from dataserver.dataset.shards.listing import ShardFile, find_shards
from dataserver.planning.stream.captions import CHAT_PREFIX, TEXT_MARK, text_key

if TYPE_CHECKING:
    import pyarrow as pa

I32 = npt.NDArray[np.int32]

TOKENIZER_KEY: Final = b"disttrain.tokenizer_digest"
IDS_TYPE_KEY: Final = b"disttrain.ids_type"
IDS_CRC_KEY: Final = b"disttrain.ids_crc32c"
FAILED: Final = -1
"""Count of a text that the tokenizer cannot encode."""
ID_TYPES: Final = {name: np.dtype(name) for name in ("|u1", "<u2", "<i4")}
"""How ids are stored, by numpy's name; the first that holds a vocabulary."""


class Tokenizer(Protocol):
    """Makes token ids of texts."""

    @property
    def name(self) -> str:
        """Name of the tokenizer, by which jobs ask for it."""

    @property
    def digest(self) -> str:
        """SHA-256, hexadecimal, of what defines it, which identifies it in a job."""

    @property
    def vocab_size(self) -> int:
        """All ids lie below it."""


class TextTokenizer(Tokenizer, Protocol):
    """What makes token ids of texts."""

    def encode_all(self, texts: list[str]) -> Sequence[I32]:
        """Return int32 [tokens] for each text, without special tokens.

        Raises:
            TokenizingError: it cannot encode one of them.
        """


@dataclass(frozen=True, slots=True)
class TokensReport:
    """What a count found: `num_counted` of `num_shards` were counted now; `num_tokens` are those of all shards."""

    num_shards: int
    num_counted: int
    num_texts: int
    num_tokens: int
    num_failed: int
    """Samples with a text that the tokenizer cannot encode."""
    findings: Mapping[str, int] = field(default_factory=dict)
    """Counts of what was found, by kind."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenCounts:
    """What the first file says."""

    counts: I32
    """int32 [texts]: tokens of each, in row and document order."""
    failed: npt.NDArray[np.int64]
    """int64 [k]: numbers of the texts that the tokenizer cannot encode; their counts are 0."""
    id_type: np.dtype[np.integer[npt.NBitBase]]
    """Type of an id in the second file, a name in `ID_TYPES`."""
    ids_crc32c: int
    """Checksum of the second file."""
    findings: FindingReport
    """What the tokenizer cannot encode, by the keys of samples."""
    chats: ChatCounts | None = None
    """Counts of conversations; then there is one count a sample."""

    @property
    def num_bytes(self) -> int:
        """Bytes that the counts take in memory."""
        return self.counts.nbytes + (0 if self.chats is None else self.chats.num_bytes)

    def digest(self) -> bytes:
        """SHA-256 of what samples get of texts: which have ids, how many, and the checksum of all ids."""
        told = f"{self.id_type.str} {self.ids_crc32c:08x} {self.failed.tolist()}".encode()
        return hashlib.sha256(told + self.counts.astype("<i4").tobytes()).digest()


def texts_key(tokenizer_digest: str, caption: str = OWN) -> str:
    """What stands for a tokenizer's digest where its ids are those of a named caption."""
    return tokenizer_digest if caption == OWN else f"{tokenizer_digest} caption {caption}"


def count_tokens(
    path: Path,
    tokenizer: TextTokenizer,
    index_dir: Path | None = None,
    progress: Progress = untold,
    caption: str = OWN,
    part: Part = WHOLE,
    transforms: str = "",
) -> TokensReport:
    """Tokenize every text of the dataset at `path`, shard by shard, where that is not done yet.

    Args:
        path: folder of indexed shards, or one shard.
        tokenizer: called with the texts of at most `BATCH_ROWS` samples.
        index_dir: where the indexes lie instead of beside the shards.
        progress: called with (shards done, shards in total).
        caption: which is read instead of a sample's own text, where it has that one.
        part: the shards whose texts are tokenized here.
        transforms: key of those that the tokenizer applies to texts first (`TransformingTokenizer`); empty for none.

    Raises:
        StaleIndexError: a shard is not indexed.
        DatasetError: the tokenizer broke its contract or cannot encode a text, or a file cannot be written.
    """
    key = texts_key(tokenizer.digest, text_key(caption, transforms))
    return count_shards(
        path, key, lambda s, i: _tokenize_shard(s, i, tokenizer, caption, key), index_dir, progress, part
    )


def count_shards(
    path: Path,
    key: str,
    count: Callable[[ShardFile, IndexedShard], "TokenCounts"],
    index_dir: Path | None,
    progress: Progress,
    part: Part,
) -> TokensReport:
    """Count tokens as `count_tokens` does, with a key and what makes both files of a shard."""
    shards = part.of(find_shards(path, index_dir))
    num_counted = num_texts = num_tokens = 0
    found_kinds = Counter[str]()
    for shard in told(shards, progress):
        indexed = read_fresh_index(shard)
        header = indexed.header
        try:
            counts = read_counts(shard, header, key)
            if not shard.token_ids_path(key).is_file():
                raise _missing(shard, header, key, "has no ids")
        except TokensMissingError:
            counts = count(shard, indexed)
            num_counted += 1
        num_texts += len(counts.counts)
        num_tokens += int(counts.counts.sum(dtype=np.int64))
        found_kinds.update(counts.findings.counts)
    num_failed = sum(count for kind, count in found_kinds.items() if KINDS[kind] is Effect.LEFT_OUT)
    return TokensReport(len(shards), num_counted, num_texts, num_tokens, num_failed, found_kinds)


def read_counts(shard: ShardFile, header: IndexHeader, tokenizer_digest: str) -> TokenCounts:
    """Read the first file.

    Raises:
        TokensMissingError: not counted with this tokenizer, or counted before the shard was indexed again.
    """
    import pyarrow as pa

    path = shard.tokens_path(tokenizer_digest)
    try:
        table = read_table(path)
        metadata = table.schema.metadata or {}
        fresh = metadata.get(COLUMNS_KEY) == header.columns_digest.encode()
        same = metadata.get(TOKENIZER_KEY) == tokenizer_digest.encode()
        column = table.column("tokens")
        if column.type != pa.int32() or column.null_count:
            raise ValueError(f"its counts are {column.type} with {column.null_count} missing, not int32")
        counts: I32 = column.to_numpy().astype(np.int32, copy=False)
        if counts.min(initial=0) < FAILED:
            raise ValueError("it holds a negative count")
        id_type = ID_TYPES[metadata.get(IDS_TYPE_KEY, b"").decode()]
        failed = np.flatnonzero(counts == FAILED)
        found = TokenCounts(
            np.maximum(counts, 0) if len(failed) else counts,
            failed,
            id_type,
            int(metadata[IDS_CRC_KEY], 16),
            FindingReport.from_json(metadata[FINDINGS_KEY]),
            chat_counts(table),
        )
    except FileNotFoundError as error:
        raise _missing(shard, header, tokenizer_digest, "is not counted") from error
    except (OSError, pa.ArrowException, ValueError, KeyError) as error:
        check_storage(path, error)
        raise _missing(shard, header, tokenizer_digest, f"cannot be read ({printable(str(error))})") from error
    if not fresh or not same:
        raise _missing(shard, header, tokenizer_digest, "was counted from another index or tokenizer")
    return found


def counted_tokenizers(shard: ShardFile, header: IndexHeader) -> Iterator[str]:
    """Yield the digests of the tokenizers with which a shard, as it is indexed now, was counted."""
    import pyarrow as pa

    begin = f"{shard.path.name}.tokens-"
    for path in sorted(p for p in shard.index_path.parent.iterdir() if p.name.startswith(begin)):
        try:
            metadata = read_table(path).schema.metadata or {}
            digest = metadata.get(TOKENIZER_KEY, b"").decode()
        except (OSError, pa.ArrowException, ValueError) as error:
            check_storage(path, error)
            continue  # a damaged file counts as missing
        if path == shard.tokens_path(digest) and metadata.get(COLUMNS_KEY) == header.columns_digest.encode():
            yield digest


def _missing(shard: ShardFile, header: IndexHeader, key: str, reason: str) -> TokensMissingError:
    digest, _, caption = key.partition(" caption ")
    are_chats = read_rules(header.rules).get("conversations") == Conversations.CHAT
    if caption.startswith(CHAT_PREFIX):
        template = caption.removeprefix(CHAT_PREFIX)
        return TokensMissingError(
            f"shard {shard.path} {reason} for the chat template {template} of the tokenizer {digest}; run:"
            f" {index_command(shard)} --tokenizer NAME=FOLDER{_other_templates(shard, header, digest)}"
        )
    if are_chats:
        return TokensMissingError(
            f"shard {shard.path} {reason} for the tokenizer {digest} as text: it holds conversations; give its dataset "
            "conversations: {} in the job, the command --tokenizer NAME=FOLDER of the chat model, or index it without "
            "--conversations chat"
        )
    named, mark, transforms = key.partition(TEXT_MARK)
    if mark:
        return TokensMissingError(
            f"shard {shard.path} {reason} for the tokenizer {named} with the transforms of text {transforms}; run:"
            f" {index_command(shard)} --tokenizer NAME=FILE {transform_flags(transforms)}"
        )
    return TokensMissingError(
        f"shard {shard.path} {reason} for the tokenizer {key}; run:"
        f" {index_command(shard)} --tokenizer NAME=FILE (or --tokenizer bytes)"
    )


def _other_templates(shard: ShardFile, header: IndexHeader, digest: str) -> str:
    """Say which other templates of a tokenizer a shard was rendered by, and why they may differ."""
    begin = texts_key(digest, CHAT_PREFIX)
    others = [key.removeprefix(begin) for key in counted_tokenizers(shard, header) if key.startswith(begin)]
    if not others:
        return ""
    return (
        f" (it was rendered by {', '.join(others)}: the template or the processor of the folder is another one, or an "
        "earlier release wrote no tokens of the processors of Gemma 3, InternVL, Idefics3 and SmolVLM around images; a "
        "new job takes the template that is there if it leaves conversations.template out, a run that goes on needs "
        "the index that it began with)"
    )


def _tokenize_shard(
    shard: ShardFile, indexed: IndexedShard, tokenizer: TextTokenizer, caption: str, key: str
) -> TokenCounts:
    """Write both files. Returns what the first one says."""
    header, findings = indexed.header, Findings()
    column = COLUMN_PREFIX + caption if COLUMN_PREFIX + caption in indexed.columns else None
    batches = (
        _encode_batch(shard, header, _texts_of(shard, header, batch, column), tokenizer, findings)
        for batch in range(-(-header.num_samples // BATCH_ROWS))
    )
    return write_tokens(shard, header, key, tokenizer.vocab_size - 1, batches, findings)


def write_tokens(
    shard: ShardFile,
    header: IndexHeader,
    key: str,
    most: int,
    batches: Iterable[Sequence[npt.NDArray[Any] | None]],
    findings: Findings,
    more: "Callable[[], dict[str, pa.Array]]" = dict,
) -> TokenCounts:
    """Write both files of a shard.

    Args:
        shard: whose texts they are.
        header: of its index.
        key: what stands for the tokenizer's digest.
        most: the largest id.
        batches: ids of texts in order; None of a text that cannot be encoded.
        findings: read after all batches.
        more: gives further columns of the first file, after all batches.

    Returns:
        What the first file says.

    Raises:
        DatasetError: an id is larger than `most` or negative, or a file cannot be written.
    """
    import pyarrow as pa

    name, id_type = next((n, t) for n, t in ID_TYPES.items() if most <= np.iinfo(t).max)
    counts, crc = list[int](), 0
    with atomic_writer(shard.token_ids_path(key)) as temp, temp.open("wb") as file:
        for encoded in batches:
            counts += (FAILED if ids is None else len(ids) for ids in encoded)
            given = np.concatenate([np.zeros(0, np.int32), *(ids for ids in encoded if ids is not None)])
            if given.min(initial=0) < 0 or given.max(initial=0) > most:
                raise DatasetError(f"the tokenizer gave an id outside 0..{most}; check its vocab_size")
            data = given.astype(id_type).tobytes()
            crc = crc32c_of(data, crc)
            file.write(data)
    metadata = {
        COLUMNS_KEY: header.columns_digest,
        TOKENIZER_KEY: key,
        IDS_TYPE_KEY: name,
        IDS_CRC_KEY: f"{crc:08x}",
        FINDINGS_KEY: findings.to_json(),
    }
    table = pa.table({"tokens": pa.array(counts, pa.int32()), **more()}).replace_schema_metadata(metadata)
    with arrow_writer(shard.tokens_path(key), table.schema) as writer:
        writer.write_table(table)
    return read_counts(shard, header, key)


def _texts_of(shard: ShardFile, header: IndexHeader, batch: int, caption: str | None) -> list[tuple[str, list[str]]]:
    """Return key and texts of each row of one record batch; the caption of a column stands for the text of its row."""
    names = ["key", "texts", *([META_PREFIX + caption] if caption else [])]
    rows = read_batch(shard.index_path, header, batch, names).to_pydict()
    named = rows[names[2]] if caption else [None] * len(rows["key"])
    found = []
    for key, texts, text in zip(rows["key"], rows["texts"], named, strict=True):
        if text is not None and len(texts) != 1:
            raise StaleIndexError(f"{shard.index_path} has a caption for {len(texts)} texts; remove it and index again")
        found.append((key, texts if text is None else [text]))
    return found


def _encode_batch(
    shard: ShardFile,
    header: IndexHeader,
    rows: list[tuple[str, list[str]]],
    tokenizer: TextTokenizer,
    findings: Findings,
) -> list[I32 | None]:
    """Return the ids of the texts of some rows, None for those that the tokenizer cannot encode."""
    texts = [text for _, own in rows for text in own]
    try:
        encoded: list[I32 | None] = list(tokenizer.encode_all(texts))
    except TokenizingError:
        encoded = []
        for key, own in rows:
            encoded += _encode_sample(shard, header, key, own, tokenizer, findings)
    if len(encoded) != len(texts):
        raise DatasetError(
            f"the tokenizer gave ids of {len(encoded)} texts for {len(texts)}; it must give those of each"
        )
    return encoded


def _encode_sample(
    shard: ShardFile, header: IndexHeader, key: str, texts: list[str], tokenizer: TextTokenizer, findings: Findings
) -> list[I32 | None]:
    found: list[I32 | None] = []
    reasons: list[tuple[str, str]] = []
    for text in texts:
        try:
            found += tokenizer.encode_all([text])
        except TokenizingError as error:
            found.append(None)
            reasons.append(_fault(tokenizer, error))
    if reasons and read_rules(header.rules)["on-token-error"] != OnTokenError.SKIP:
        raise DatasetError(
            f"shard {shard.path}, sample {key!a}: {reasons[0][1]};"
            " mend the text, the transform or the tokenizer's file, or index with --on-token-error skip, which leaves"
            " such samples out"
        )
    if reasons:
        findings.add(key, *reasons[0])
    return found


def _fault(tokenizer: TextTokenizer, error: TokenizingError) -> tuple[str, str]:
    """Kind and detail of a finding."""
    why = printable(str(error))
    if isinstance(error, TextTransformError):
        return TEXT_TRANSFORM, why
    return UNENCODABLE, f"tokenizer {tokenizer.name} cannot encode its text ({why})"
