"""Conversations rendered and encoded batch by batch, in this process or in others: the same whoever does it."""

from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from dataserver.dataset.errors import DatasetError, Findings, TokenizingEndedError, TokenizingError, printable
from dataserver.dataset.index.chat_counts import CHAT_COLUMN, FLAG_BITS, IMAGE_ENTRY, TARGET
from dataserver.dataset.index.format import META_PREFIX, IndexHeader, read_batch
from dataserver.dataset.index.rules import OnTokenError, read_rules
from dataserver.dataset.index.tokens import I32, Tokenizer
from dataserver.dataset.kinds import CHAT_ERROR


@dataclass(frozen=True, slots=True, eq=False)
class EncodedChat:
    """The ids of one conversation."""

    ids: I32
    """Token ids of the conversation, int32 [n]."""
    targets: npt.NDArray[np.bool_]
    """bool [n]: tokens that are learned."""
    images: npt.NDArray[np.bool_]
    """bool [n]: tokens that stand for an image, a clip or a video each."""
    ends: Sequence[int]
    """Tokens up to the end of each answer, ascending."""
    flaws: Sequence[tuple[str, str]] = ()
    """Kinds of findings, and details, of what is not as it may have been meant."""


class ChatEncoder(Tokenizer, Protocol):
    """What renders conversations and makes ids of them. It can be pickled, for other processes."""

    @property
    def chat_digest(self) -> str:
        """Digest that identifies the template."""

    def begin_batch(self) -> None:
        """Forget what earlier conversations did: a batch becomes the same after any other one."""

    def encode_chat(self, conversation: str) -> EncodedChat:
        """Return the ids of a conversation, which is given as its index holds it.

        Raises:
            TokenizingEndedError: it takes too long.
            TokenizingError: the template refuses it, or what it renders cannot be used; says why.
            DatasetError: the template is of no use for any conversation.
        """


class BatchTask(NamedTuple):
    """A record batch of an index, and what encodes it."""

    encoder: ChatEncoder
    shard: Path
    """Path of the shard, for messages."""
    path: Path
    """Path of the index that the texts come from."""
    header: IndexHeader
    batch: int


@dataclass(slots=True)
class EncodedBatch:
    """What becomes of a batch."""

    entries: list[I32 | None] = field(default_factory=list)
    """Ids and flags of each conversation as the file of ids has them; None of one that is left out."""
    columns: dict[str, list[Any]] = field(default_factory=lambda: {"images": [], "targets": [], "ends": []})
    """Further columns of the file of counts."""
    findings: Findings = field(default_factory=Findings)


def encode_batch(task: BatchTask) -> EncodedBatch:
    """Encode the conversations of a batch.

    Raises:
        DatasetError: an id is no id of the tokenizer, the template is of no use, or a conversation takes too long and
            the rules of the index do not leave it out.
    """
    rows = read_batch(task.path, task.header, task.batch, ["key", META_PREFIX + CHAT_COLUMN]).to_pydict()
    found = EncodedBatch()
    task.encoder.begin_batch()
    for key, chat in zip(rows["key"], rows[META_PREFIX + CHAT_COLUMN], strict=True):
        encoded = _encode(task, key, chat, found.findings)
        for name, value in _counts(encoded).items():
            found.columns[name].append(value)
        found.entries.append(None if encoded is None else _stored(encoded))
    return found


def in_order(results: Iterable[tuple[int, EncodedBatch]]) -> Generator[EncodedBatch]:
    """Yield results by their positions; those that come too early wait."""
    waiting: dict[int, EncodedBatch] = {}
    next_one = 0
    for position, result in results:
        waiting[position] = result
        while next_one in waiting:
            yield waiting.pop(next_one)
            next_one += 1


def _encode(task: BatchTask, key: str, chat: str, findings: Findings) -> EncodedChat | None:
    encoder = task.encoder
    try:
        encoded = encoder.encode_chat(chat)
    except TokenizingEndedError as error:  # which samples exist must not depend on the speed of a machine
        if read_rules(task.header.rules)["on-token-error"] != OnTokenError.SKIP:
            raise DatasetError(
                f"shard {task.shard}, sample {key!a}: tokenizer {encoder.name}: {error}; run the command again on a "
                "machine with more time, take the conversation out, or index with --on-token-error skip, which leaves "
                "such samples out"
            ) from error
        findings.add(key, CHAT_ERROR, f"tokenizer {encoder.name}: {printable(str(error))}")
        return None
    except TokenizingError as error:
        findings.add(key, CHAT_ERROR, f"tokenizer {encoder.name}: {printable(str(error))}")
        return None
    if len(encoded.ids) and not 0 <= int(encoded.ids.min()) <= int(encoded.ids.max()) < encoder.vocab_size:
        raise DatasetError(
            f"shard {task.shard}, sample {key!a}: tokenizer {encoder.name} gave an id outside "
            f"0..{encoder.vocab_size - 1}; check its vocab_size"
        )
    for kind, detail in encoded.flaws:
        findings.add(key, kind, f"tokenizer {encoder.name}: {detail}")
    return encoded


def _stored(encoded: EncodedChat) -> I32:
    flags = encoded.targets.astype(np.int32) * TARGET + encoded.images.astype(np.int32) * IMAGE_ENTRY
    found: I32 = (encoded.ids.astype(np.int32) << FLAG_BITS) + flags
    return found


def _counts(encoded: EncodedChat | None) -> dict[str, Any]:
    """A row of the file of counts."""
    if encoded is None:
        return {"images": 0, "targets": 0, "ends": []}
    images, targets = np.cumsum(encoded.images), np.cumsum(encoded.targets)
    ends = [{"tokens": end, "images": int(images[end - 1]), "targets": int(targets[end - 1])} for end in encoded.ends]
    return {
        "images": int(encoded.images.sum()),
        "targets": int(encoded.targets.sum()),
        "ends": ends,
    }
