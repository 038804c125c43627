"""Tokenizers: the built-in byte-level vocabulary, and Hugging Face `tokenizers` files.

A tokenizer turns text into tokens and nothing else: special tokens belong to the job (`TokenizerSpec`), and text that
looks like one is tokenized as text.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from dataserver.assembly.limits import MAX_TEXT_BATCH_BYTES, MAX_TOKENIZER_BYTES
from dataserver.planning.job.fields import SPECIAL_TOKENS, TokenizerSpec

I32 = NDArray[np.int32]

BYTES: Final = "bytes"
"""Name of the built-in tokenizer."""


class TokenizerError(ValueError):
    """A tokenizer cannot be loaded, or is not the one that a job names."""


class Tokenizer(Protocol):
    """Turns text into token ids; may be called from several threads."""

    @property
    def name(self) -> str:
        """Logical name."""

    @property
    def digest(self) -> str:
        """SHA-256, hexadecimal, of what defines it."""

    @property
    def vocab_size(self) -> int:
        """All ids lie below it."""

    def encode_all(self, texts: list[str]) -> list[I32]:
        """Return int32 [tokens] of each text, without special tokens."""


class ByteTokenizer:
    """Token ids are the bytes of the UTF-8 text."""

    name: Final = BYTES
    digest: Final = hashlib.sha256(b"disttrain bytes tokenizer 1").hexdigest()
    vocab_size: Final = 256

    def encode_all(self, texts: list[str]) -> list[I32]:
        """Return int32 [bytes] of each text."""
        return [np.frombuffer(text.encode(), np.uint8).astype(np.int32) for text in texts]


class HuggingFaceTokenizer:
    """A `tokenizer.json` of the Hugging Face `tokenizers` library.

    What would make its output depend on anything but the text is turned off: truncation, padding, BPE dropout; and so
    is the recognition of special tokens within the text, which comes from strangers.
    """

    def __init__(self, name: str, path: Path) -> None:
        """Load a file.

        Raises:
            TokenizerError: it cannot be read, or is not such a file.
        """
        from tokenizers import Tokenizer as HuggingFaceModel  # most servers have none

        self.name: Final = name
        data = _read_bounded(path)
        self.digest: Final = hashlib.sha256(data).hexdigest()
        try:
            self._model = HuggingFaceModel.from_buffer(data)
        except Exception as error:  # the bindings raise plain Exception
            raise TokenizerError(
                f"tokenizer {name}: {path} is no tokenizer of the Hugging Face tokenizers library ({error}); "
                "name a tokenizer.json"
            ) from error
        self._model.no_truncation()
        self._model.no_padding()
        self._model.encode_special_tokens = True
        if getattr(self._model.model, "dropout", None) is not None:
            self._model.model.dropout = None
        self.vocab_size: Final = max(self._model.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def encode_all(self, texts: list[str]) -> list[I32]:
        """Return int32 [tokens] of each text."""
        # the fast call leaves out character offsets
        return [
            np.array(encoding.ids, np.int32)
            for batch in text_batches(texts)
            for encoding in self._model.encode_batch_fast(batch, add_special_tokens=False)
        ]


def load_tokenizer(name: str, path: Path | None = None) -> Tokenizer:
    """Load a tokenizer by its logical name; only the built-in `bytes` needs no file.

    Raises:
        TokenizerError: the file is missing, or cannot be used.
    """
    if name == BYTES and path is not None:
        raise TokenizerError(f"tokenizer {BYTES!r} is built in and takes no file, but {path} was given; rename it")
    if name == BYTES:
        return ByteTokenizer()
    if path is None:
        raise TokenizerError(f"tokenizer {name!r} has no file; give it as {name}=FILE, or use {BYTES!r}")
    return HuggingFaceTokenizer(name, path)


def tokenizer_spec(tokenizer: Tokenizer) -> TokenizerSpec:
    """Return the job's description of a tokenizer, with special tokens that follow its vocabulary."""
    first = tokenizer.vocab_size
    return TokenizerSpec(
        name=tokenizer.name,
        digest=tokenizer.digest,
        vocab_size=first + len(SPECIAL_TOKENS),
        **{token: first + i for i, token in enumerate(SPECIAL_TOKENS)},
    )


def check_tokenizer(spec: TokenizerSpec, tokenizer: Tokenizer) -> None:
    """Compare a tokenizer with the one that a job names.

    Raises:
        TokenizerError: another digest, or ids that the job's vocabulary does not have.
    """
    if tokenizer.digest != spec.digest:
        raise TokenizerError(
            f"tokenizer {spec.name} has digest {tokenizer.digest} here, the job requires {spec.digest}; "
            "give the server the file that the job was made with, or leave digest out of a new job, to take this one"
        )
    if tokenizer.vocab_size > spec.vocab_size:
        raise TokenizerError(
            f"tokenizer {spec.name} has {tokenizer.vocab_size} ids, the job's vocab_size is {spec.vocab_size}; "
            f"raise tokenizer.vocab_size to at least {tokenizer.vocab_size}"
        )


def _read_bounded(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_TOKENIZER_BYTES + 1)
    except OSError as error:
        raise TokenizerError(f"cannot read tokenizer file {path}: {error.strerror}; name a tokenizer.json") from error
    if len(data) > MAX_TOKENIZER_BYTES:
        raise TokenizerError(f"tokenizer file {path} has more than {MAX_TOKENIZER_BYTES} bytes; name a tokenizer.json")
    return data


def text_batches(texts: list[str]) -> Iterator[list[str]]:
    """Split texts into runs of at most MAX_TEXT_BATCH_BYTES; a longer text stands alone."""
    first = 0
    size = 0
    for i, text in enumerate(texts):
        length = len(text.encode())
        if i > first and size + length > MAX_TEXT_BATCH_BYTES:
            yield texts[first:i]
            first, size = i, 0
        size += length
    if first < len(texts):
        yield texts[first:]
