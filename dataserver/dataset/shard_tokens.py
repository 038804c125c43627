"""Counts and ids of the tokens in one shard of an open dataset, by tokenizer."""

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from dataserver.dataset.errors import DatasetError, Finding, FindingReport, TokensMissingError
from dataserver.dataset.index.chat_counts import FLAG_BITS, IMAGE_ENTRY, TARGET, ChatCounts
from dataserver.dataset.index.format import IndexHeader
from dataserver.dataset.index.numeric import NumericColumns
from dataserver.dataset.index.token_ids import TokenIds
from dataserver.dataset.index.tokens import I32, TokenCounts, counted_tokenizers, read_counts
from dataserver.dataset.index_caches import IndexCaches
from dataserver.dataset.shards.listing import ShardFile
from dataserver.dataset.shards.parts import IMAGE, TEXT
from dataserver.planning.stream.captions import TEXT_MARK


@dataclass(frozen=True, slots=True, eq=False)
class TokenizedDocument:
    """One sample's parts in document order."""

    kinds: tuple[int, ...]
    """Kind of each part of a document, in order: 0 is text, 1 an image."""
    texts: tuple[I32, ...]
    """Tokens of each text part, int32 [tokens]."""
    chat: "ChatParts | None" = None
    """What a conversation has; then these tokens are all there are."""


@dataclass(frozen=True, slots=True, eq=False)
class ChatParts:
    """What a conversation has beside the tokens of its texts."""

    targets: tuple[npt.NDArray[np.bool_], ...]
    """bool [tokens] of each text: tokens that are learned."""
    images: tuple[int, ...]
    """Id of the token that stands for each image, clip and video."""


@dataclass(frozen=True, slots=True, eq=False)
class ShardTokens:
    """What tokenizers made of the texts of one shard.

    A tokenizer is named by its digest, or by a key that also names a caption, a chat template or transforms
    (`texts_key`, `chat_key`).
    """

    position: int
    file: ShardFile
    header: IndexHeader
    caches: IndexCaches

    def counts(self, tokenizer_digest: str) -> npt.NDArray[np.int32]:
        """Return int32[text parts] in the order of `Shard.sizes().text_bytes`.

        Raises:
            TokensMissingError: this tokenizer's counts are missing; names the command to run.
        """
        counts = self.stored(tokenizer_digest).counts
        num_texts = len(self._sizes().text_bytes)
        if len(counts) != num_texts:
            raise DatasetError(
                f"{self.file.tokens_path(tokenizer_digest)} has {len(counts)} counts for {num_texts} texts;"
                " remove the file and count again"
            )
        return counts

    def not_encodable(self, tokenizer_digest: str) -> npt.NDArray[np.bool_] | None:
        """Return bool [num_samples]: where a text is one that the tokenizer cannot encode; None if there is none.

        Raises as `counts`.
        """
        counts = self.stored(tokenizer_digest)
        if not len(counts.failed):
            return None
        found = np.zeros(self.header.num_samples, np.bool_)
        if counts.chats is not None:
            found[counts.failed] = True
            return found
        found[np.searchsorted(self._sizes().text_offsets, counts.failed, side="right") - 1] = True
        return found

    def chat_counts(self, key: str) -> tuple[npt.NDArray[np.int64], ChatCounts]:
        """Return the tokens of each conversation, int64 [num_samples], 0 of one that was left out, and what is in them.

        Raises:
            TokensMissingError: this tokenizer's counts are missing; names the command to run.
        """
        found = self.stored(key)
        if found.chats is None or len(found.counts) != self.header.num_samples:
            raise DatasetError(
                f"{self.file.tokens_path(key)} does not count the {self.header.num_samples} conversations of the "
                "shard; remove the file and count again"
            )
        return found.counts.astype(np.int64), found.chats

    def findings(self) -> FindingReport:
        """Return what the tokenizers that have counted the shard cannot encode."""
        counts: Counter[str] = Counter()
        details: list[Finding] = []
        for digest in counted_tokenizers(self.file, self.header):
            found = self.stored(digest).findings
            counts.update(found.counts)
            details += found.details
        return FindingReport(counts, tuple(details))

    def document(self, row: int, tokenizer_digest: str) -> TokenizedDocument:
        """Return the parts of the sample in a row that exists; raises as `Shard.document`."""
        ids = self.caches.token_ids.get((self.position, tokenizer_digest), lambda: self._ids(tokenizer_digest))
        if ids.are_chats:
            return _conversation(*ids.texts(row, row + 1))
        sizes = self._sizes()
        (first, end), images = sizes.text_offsets[row : row + 2].tolist(), sizes.image_offsets[row : row + 2].tolist()
        kinds = tuple(sizes.kinds[first + images[0] : end + images[1]].tolist())
        return TokenizedDocument(kinds, ids.texts(first, end))

    def stored(self, key: str) -> TokenCounts:
        """Return what the file of counts says.

        Raises:
            TokensMissingError: it is missing; names the command to run.
            StaleIndexError: the texts were transformed again since they were read first.
        """
        return self.caches.counts.get((self.position, key), lambda: self._read(key))

    def _read(self, key: str) -> TokenCounts:
        found = read_counts(self.file, self.header, key)
        if TEXT_MARK in key:
            self.caches.confirm(self.position, self.file, key, found.digest())
        return found

    def _ids(self, key: str) -> TokenIds:
        try:
            return TokenIds.open(self.file.token_ids_path(key), self.stored(key))
        except TokensMissingError:  # both files are made again then
            self.caches.counts.drop_where(lambda cached: cached == (self.position, key))
            raise

    def _sizes(self) -> NumericColumns:
        return self.caches.numeric(self.position, self.file, self.header)


def _conversation(entries: I32) -> TokenizedDocument:
    """The parts of a conversation from its entries, int32 [tokens]."""
    ids, targets = entries >> FLAG_BITS, (entries & TARGET).astype(np.bool_)
    at = np.flatnonzero(entries & IMAGE_ENTRY)
    texts, learned, kinds = list[I32](), list[npt.NDArray[np.bool_]](), list[int]()
    for first, end in pairwise([-1, *at.tolist(), len(ids)]):
        if end > first + 1:
            texts.append(ids[first + 1 : end])
            learned.append(targets[first + 1 : end])
            kinds.append(TEXT)
        if end < len(ids):
            kinds.append(IMAGE)
    return TokenizedDocument(tuple(kinds), tuple(texts), ChatParts(tuple(learned), tuple(ids[at].tolist())))
