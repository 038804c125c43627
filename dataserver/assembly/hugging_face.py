"""Tokenizers of the Hugging Face `tokenizers` library: ids depend on the text alone, which comes from strangers."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from dataserver.assembly.limits import MAX_TEXT_BATCH_BYTES, MAX_TOKENIZER_BYTES
from dataserver.dataset import TokenizingError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as HuggingFaceModel

I32 = NDArray[np.int32]

_SPACE_MARK: Final = "\u2581"
"""What many vocabularies write for a space."""


class TokenizerError(ValueError):
    """A tokenizer cannot be loaded, or is not the one that a job names."""


class HuggingFaceTokenizer:
    """A `tokenizer.json`.

    What would make its output depend on anything but the text is turned off: truncation, padding, BPE dropout. So is
    the recognition of added tokens, whether the file calls them special or not: `<image>` in a caption is text. Only
    added runs of white space, which vocabularies have for code, are found as the library finds them.
    """

    def __init__(self, name: str, path: Path) -> None:
        """Load a file.

        Raises:
            TokenizerError: it cannot be read, or is not such a file.
        """
        self.name: Final = name
        self.path: Final = path
        data = read_bounded(path)
        self.digest: Final = hashlib.sha256(data).hexdigest()
        self._model = _loaded(name, path, data)
        added = self._model.get_added_tokens_decoder()
        reserved = {id_: token for id_, token in added.items() if token.content.replace(_SPACE_MARK, "").strip()}
        self._model.add_special_tokens(list(reserved.values()))  # which changes none of their ids
        self._model.encode_special_tokens = True
        vocabulary = self._model.get_vocab(with_added_tokens=True)
        self.vocab_size: Final = max(vocabulary.values(), default=-1) + 1
        self.from_text: Final = frozenset(vocabulary.values()) - (reserved.keys() - _unknown(self._model, data))
        """Ids that texts may have."""
        self._is_reserved: Final = np.ones(self.vocab_size, np.bool_)
        self._is_reserved[list(self.from_text)] = False

    def with_added_tokens(self) -> "HuggingFaceModel":
        """The library's tokenizer of the same file, which finds added tokens: for what a chat template renders.

        Raises:
            TokenizerError: the file has changed.
        """
        data = read_bounded(self.path)
        if hashlib.sha256(data).hexdigest() != self.digest:
            raise TokenizerError(f"tokenizer file {self.path} changed while it was used; run the command again")
        return _loaded(self.name, self.path, data)

    def encode_all(self, texts: list[str]) -> list[I32]:
        """Return int32 [tokens] of each text; none of them is the id of an added token that is not white space.

        Raises:
            TokenizingError: the tokenizer cannot encode one of them.
        """
        return [ids for batch in text_batches(texts) for ids in self._encode(batch)]

    def _encode(self, texts: list[str]) -> list[I32]:
        try:
            # the fast call leaves out character offsets
            encodings = self._model.encode_batch_fast(texts, add_special_tokens=False)
        except BaseException as error:
            raise as_tokenizing_error(error) from error
        found = [np.array(encoding.ids, np.int32) for encoding in encodings]
        if not found or not self._is_reserved[np.concatenate(found)].any():
            return found
        return [
            self._encode_in_pieces(text) if self._is_reserved[ids].any() else ids
            for text, ids in zip(texts, found, strict=True)
        ]

    def _encode_in_pieces(self, text: str) -> I32:
        """Encode a text in which the vocabulary itself finds a reserved word, by cutting that word behind its first
        character."""
        pieces, found = [text], []
        while pieces:
            piece = pieces.pop()
            try:
                encoding = self._model.encode(piece, add_special_tokens=False)
            except BaseException as error:
                raise as_tokenizing_error(error) from error
            ids = np.array(encoding.ids, np.int32)
            reserved = np.flatnonzero(self._is_reserved[ids]).tolist()
            if not reserved:
                found.append(ids)
                continue
            cuts = sorted({encoding.offsets[i][0] + 1 for i in reserved if len(piece) > 1})
            if not cuts or cuts[0] >= len(piece):
                raise TokenizingError(f"{piece[:20]!a} alone is the reserved id {ids[reserved[0]]}")
            bounds = [0, *(cut for cut in cuts if cut < len(piece)), len(piece)]
            pieces += [piece[a:b] for a, b in pairwise(bounds)][::-1]
        return np.concatenate(found) if found else np.zeros(0, np.int32)


def _loaded(name: str, path: Path, data: bytes) -> "HuggingFaceModel":
    """The library's tokenizer, of whose output nothing depends on anything but the text."""
    from tokenizers import Tokenizer as HuggingFaceModel  # most servers have none

    try:
        model = HuggingFaceModel.from_buffer(data)
    except Exception as error:  # the bindings raise plain Exception
        raise TokenizerError(
            f"tokenizer {name}: {path} is no tokenizer of the Hugging Face tokenizers library ({error}); "
            "name a tokenizer.json"
        ) from error
    model.no_truncation()
    model.no_padding()
    if getattr(model.model, "dropout", None) is not None:
        model.model.dropout = None
    return model


def as_tokenizing_error(error: BaseException) -> TokenizingError:
    """What the bindings raise: a plain Exception, or a panic of theirs, which is none. Raises all else.

    Memory that is missing now says nothing of a text.
    """
    is_of_text = isinstance(error, Exception) or type(error).__name__ == "PanicException"
    if isinstance(error, MemoryError) or not is_of_text:
        raise error
    return TokenizingError(str(error))


def _unknown(model: "HuggingFaceModel", data: bytes) -> set[int]:
    """The id of characters that the vocabulary lacks; none where it has every byte."""
    from tokenizers import models, pre_tokenizers

    kind = model.model
    if isinstance(kind, models.Unigram):  # which tells the library nothing
        settings: dict[str, Any] = json.loads(data)["model"]
        unknown, has_bytes = settings.get("unk_id"), bool(settings.get("byte_fallback"))
    else:
        unknown = None if kind.unk_token is None else model.token_to_id(kind.unk_token)
        has_bytes = bool(getattr(kind, "byte_fallback", False))
    vocabulary = model.get_vocab(with_added_tokens=False).keys()
    is_byte_level = "ByteLevel(" in f"{model.normalizer!r} {model.pre_tokenizer!r}"
    if is_byte_level and vocabulary >= set(pre_tokenizers.ByteLevel.alphabet()):
        return set()
    if has_bytes and vocabulary >= {f"<0x{byte:02X}>" for byte in range(256)}:
        return set()
    return set() if unknown is None else {unknown}


def read_bounded(path: Path) -> bytes:
    """Read a file of a tokenizer. Raises TokenizerError where that is impossible, or it is too large."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_TOKENIZER_BYTES + 1)
    except OSError as error:
        raise TokenizerError(f"cannot read tokenizer file {path}: {error.strerror}; name a tokenizer.json") from error
    if len(data) > MAX_TOKENIZER_BYTES:
        raise TokenizerError(f"tokenizer file {path} has more than {MAX_TOKENIZER_BYTES} bytes; name a tokenizer.json")
    return data


def text_batches(texts: Sequence[str]) -> Iterator[list[str]]:
    """Split texts into runs of at most MAX_TEXT_BATCH_BYTES; a longer text stands alone."""
    first = 0
    size = 0
    for i, text in enumerate(texts):
        length = len(text.encode())
        if i > first and size + length > MAX_TEXT_BATCH_BYTES:
            yield list(texts[first:i])
            first, size = i, 0
        size += length
    if first < len(texts):
        yield list(texts[first:])
