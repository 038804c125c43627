"""Tokenizers of SentencePiece: a `.model` file."""

import hashlib
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np

from dataserver.assembly.hugging_face import I32, TokenizerError, as_tokenizing_error, read_bounded, text_batches
from dataserver.dataset import TokenizingError
from dataserver.extras import pip_install
from dataserver.varints import read_varint

_SPACE_MARK: Final = "\u2581"
_NORMAL, _USER_DEFINED = 1, 4
"""Types of pieces in a model file: plain text, and symbols that users defined."""


class SentencePieceTokenizer:
    """A model of pieces. Control and user-defined symbols are no part of texts, as added tokens of other tokenizers.

    Only user-defined runs of white space, which vocabularies have for code, are found as the library finds them.
    """

    def __init__(self, name: str, path: Path) -> None:
        """Load a file.

        Raises:
            TokenizerError: it cannot be read, is not such a file, or sentencepiece is missing.
        """
        try:
            from sentencepiece import SentencePieceProcessor
        except ImportError as error:
            raise TokenizerError(
                f"tokenizer {name}: {path} is read by sentencepiece, which is not installed; run"
                f" {pip_install('sentencepiece')}"
            ) from error

        self.name: Final = name
        data = read_bounded(path)
        self.digest: Final = hashlib.sha256(data).hexdigest()
        try:
            self._model: Any = SentencePieceProcessor(model_proto=data)
            self.vocab_size: Final = int(self._model.vocab_size())
            reserved = set(_reserved(data, self._model))
        except Exception as error:  # the bindings raise RuntimeError and others
            raise TokenizerError(
                f"tokenizer {name}: {path} is no model of sentencepiece ({error}), no tokenizer.json, and no ranks of"
                " tiktoken; name one of these"
            ) from error
        self.from_text: Final = frozenset(range(self.vocab_size)) - reserved
        """Ids that texts may have."""
        self._is_reserved: Final = np.ones(self.vocab_size, np.bool_)
        self._is_reserved[list(self.from_text)] = False
        symbols = sorted((self._model.id_to_piece(number) for number in reserved), key=len, reverse=True)
        written = (re.escape(symbol.replace(_SPACE_MARK, " ")) for symbol in symbols)
        self._symbols: Final = re.compile("|".join(written) or "(?!)")

    def encode_all(self, texts: list[str]) -> list[I32]:
        """Return int32 [tokens] of each text; none of them is the id of a reserved symbol.

        Raises:
            TokenizingError: the tokenizer cannot encode one of them.
        """
        return [ids for batch in text_batches(texts) for ids in self._encode(batch)]

    def _encode(self, texts: list[str]) -> list[I32]:
        try:
            encoded = self._model.encode(texts, out_type=int, num_threads=1)
        except Exception as error:
            raise as_tokenizing_error(error) from error
        found = [np.array(ids, np.int32) for ids in encoded]
        return [
            self._encode_in_pieces(text) if self._is_reserved[ids].any() else ids
            for text, ids in zip(texts, found, strict=True)
        ]

    def _encode_in_pieces(self, text: str) -> I32:
        """Encode a text that holds a reserved symbol, by cutting that behind its first character.

        The library makes some symbols of other spellings, such as wide letters: there a text is cut in halves.
        """
        pending, found = [text], []
        while pending:
            piece = pending.pop()
            try:
                ids = np.array(self._model.encode(piece, out_type=int), np.int32)
            except Exception as error:
                raise as_tokenizing_error(error) from error
            if not self._is_reserved[ids].any():
                found.append(ids)
                continue
            if len(piece) < 2:
                raise TokenizingError(f"{piece!a} alone is a reserved id")
            cuts = {match.start() + 1 for match in self._symbols.finditer(piece)} - {len(piece)}
            bounds = [0, *sorted(cuts or {len(piece) // 2}), len(piece)]
            pending += [piece[a:b] for a, b in pairwise(bounds)][::-1]
        return np.concatenate(found) if found else np.zeros(0, np.int32)


def _reserved(data: bytes, model: Any) -> Iterator[int]:
    """The ids of control symbols, of user-defined ones that are not white space, and of an unknown one without use."""
    has_bytes = all(model.is_byte(model.piece_to_id(f"<0x{byte:02X}>")) for byte in range(256))
    defined = frozenset(number for number, kind in enumerate(_types(data)) if kind == _USER_DEFINED)
    for number in range(model.vocab_size()):
        is_special = model.is_control(number) or model.is_unused(number) or (model.is_unknown(number) and has_bytes)
        if is_special or (number in defined and model.id_to_piece(number).replace(_SPACE_MARK, "").strip()):
            yield number


def _types(data: bytes) -> Iterator[int]:
    """The type of each piece, which the library does not tell: `ModelProto.pieces[i].type`.

    Read here, since the module that the library brings for this message was generated for a newer protobuf than the
    one that gRPC's stubs need.
    """
    for number, content in _fields(data):
        if number == 1 and isinstance(content, bytes):
            found = [value for field, value in _fields(content) if field == 3 and isinstance(value, int)]
            yield found[-1] if found else _NORMAL


def _fields(message: bytes) -> Iterator[tuple[int, bytes | int]]:
    """The fields of a message of protobuf, by number. Its wire types 0, 1, 2 and 5 are the ones in use."""
    at = 0
    while at < len(message):
        tag, at = read_varint(message, at)
        kind = tag & 7
        if kind == 0:
            value, at = read_varint(message, at)
            yield tag >> 3, value
            continue
        length = {1: 8, 5: 4}.get(kind)
        if length is None:
            length, at = read_varint(message, at)
        yield tag >> 3, message[at : at + length]
        at += length
