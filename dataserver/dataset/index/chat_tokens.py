"""Token ids of conversations, made once for a tokenizer and its chat template.

They lie in the same two files as those of texts, under a name of their own. There is one run of ids a sample, each
stored as `id * 4 + image * 2 + target`: a target is a token that is learned, an image stands where an image goes. The
file of counts also says how many of either a sample has, and how many there are up to the end of each answer, behind
which a conversation may be cut.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from dataserver.dataset.errors import (
    DatasetError,
    Findings,
    StaleIndexError,
    TokenizingEndedError,
    TokenizingError,
    printable,
)
from dataserver.dataset.index.chat_counts import CHAT_COLUMN, FLAG_BITS, IMAGE_ENTRY, TARGET
from dataserver.dataset.index.format import BATCH_ROWS, META_PREFIX, IndexHeader, read_batch
from dataserver.dataset.index.fresh import IndexedShard
from dataserver.dataset.index.rules import OnTokenError, read_rules
from dataserver.dataset.index.tokens import (
    I32,
    TokenCounts,
    Tokenizer,
    TokensReport,
    count_shards,
    texts_key,
    write_tokens,
)
from dataserver.dataset.kinds import CHAT_ERROR
from dataserver.dataset.shards.listing import ShardFile
from dataserver.planning.stream.captions import CHAT_PREFIX

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True, slots=True, eq=False)
class EncodedChat:
    """The ids of one conversation."""

    ids: I32
    """int32 [n]."""
    targets: npt.NDArray[np.bool_]
    """bool [n]: tokens that are learned."""
    images: npt.NDArray[np.bool_]
    """bool [n]: tokens that stand for an image each."""
    ends: Sequence[int]
    """Tokens up to the end of each answer, ascending."""
    flaws: Sequence[tuple[str, str]] = ()
    """Kinds of findings, and details, of what is not as it may have been meant."""


class ChatEncoder(Tokenizer, Protocol):
    """What renders conversations and makes ids of them."""

    @property
    def chat_digest(self) -> str:
        """Identifies the template."""

    def encode_chat(self, conversation: str) -> EncodedChat:
        """Return the ids of a conversation, which is given as its index holds it.

        Raises:
            TokenizingEndedError: it takes too long.
            TokenizingError: the template refuses it, or what it renders cannot be used; says why.
            DatasetError: the template is of no use for any conversation.
        """


def chat_key(tokenizer_digest: str, chat_digest: str) -> str:
    """What stands for a tokenizer's digest where its ids are those of conversations."""
    return texts_key(tokenizer_digest, CHAT_PREFIX + chat_digest)


def count_chats(
    path: Path,
    encoder: ChatEncoder,
    index_dir: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
    choose: Callable[[Sequence[ShardFile]], Sequence[ShardFile]] | None = None,
) -> TokensReport:
    """Render and tokenize every conversation of the dataset at `path`; arguments and errors as `count_tokens`."""
    key = chat_key(encoder.digest, encoder.chat_digest)
    return count_shards(path, key, lambda s, i: _encode_shard(s, i, encoder, key), index_dir, progress, choose)


def _encode_shard(shard: ShardFile, indexed: IndexedShard, encoder: ChatEncoder, key: str) -> TokenCounts:
    """Write both files of one shard. Returns what the first one says."""
    header = indexed.header
    if CHAT_COLUMN not in indexed.columns:
        raise StaleIndexError(f"shard {shard.path} holds no conversations; index it with --conversations chat")
    most = (encoder.vocab_size << FLAG_BITS) - 1
    found, findings = list[EncodedChat | None](), Findings()

    def batches() -> Iterator[list[npt.NDArray[np.int64] | None]]:
        for batch in range(-(-header.num_samples // BATCH_ROWS)):
            rows = read_batch(shard.index_path, header, batch, ["key", META_PREFIX + CHAT_COLUMN]).to_pydict()
            chats = zip(rows["key"], rows[META_PREFIX + CHAT_COLUMN], strict=True)
            encoded = [_encode(shard, header, sample, chat, encoder, findings) for sample, chat in chats]
            found.extend(encoded)
            yield [None if one is None else _stored(one) for one in encoded]

    return write_tokens(shard, header, key, most, batches(), findings, lambda: _columns(found))


def _encode(
    shard: ShardFile, header: IndexHeader, key: str, chat: str, encoder: ChatEncoder, findings: Findings
) -> EncodedChat | None:
    try:
        encoded = encoder.encode_chat(chat)
    except TokenizingEndedError as error:  # which samples exist must not depend on the speed of a machine
        if read_rules(header.rules)["on-token-error"] != OnTokenError.SKIP:
            raise DatasetError(
                f"shard {shard.path}, sample {key!a}: tokenizer {encoder.name}: {error}; run the command again on a "
                "machine with more time, take the conversation out, or index with --on-token-error skip, which leaves "
                "such samples out"
            ) from error
        findings.add(key, CHAT_ERROR, f"tokenizer {encoder.name}: {printable(str(error))}")
        return None
    except TokenizingError as error:
        detail = printable(str(error))
        findings.add(key, CHAT_ERROR, f"tokenizer {encoder.name}: {detail}")
        return None
    if len(encoded.ids) and not 0 <= int(encoded.ids.min()) <= int(encoded.ids.max()) < encoder.vocab_size:
        raise DatasetError(
            f"shard {shard.path}, sample {key!a}: tokenizer {encoder.name} gave an id outside "
            f"0..{encoder.vocab_size - 1}; check its vocab_size"
        )
    for kind, detail in encoded.flaws:
        findings.add(key, kind, f"tokenizer {encoder.name}: {detail}")
    return encoded


def _stored(encoded: EncodedChat) -> npt.NDArray[np.int64]:
    flags = encoded.targets.astype(np.int64) * TARGET + encoded.images.astype(np.int64) * IMAGE_ENTRY
    return (encoded.ids.astype(np.int64) << FLAG_BITS) + flags


def _columns(found: Sequence[EncodedChat | None]) -> "dict[str, pa.Array]":
    import pyarrow as pa

    ends = []
    for one in found:
        images, targets = (np.cumsum(one.images), np.cumsum(one.targets)) if one is not None else ((), ())
        ends.append(
            [
                {"tokens": end, "images": images[end - 1], "targets": targets[end - 1]}
                for end in (one.ends if one else ())
            ]
        )
    kind = pa.list_(pa.struct([("tokens", pa.int32()), ("images", pa.int32()), ("targets", pa.int32())]))
    return {
        "images": pa.array([0 if one is None else int(one.images.sum()) for one in found], pa.int32()),
        "targets": pa.array([0 if one is None else int(one.targets.sum()) for one in found], pa.int32()),
        "ends": pa.array(ends, kind),
    }
