"""Tokenizers: the built-in byte-level vocabulary, and files of Hugging Face, SentencePiece and tiktoken.

A tokenizer turns text into tokens and nothing else: special tokens belong to the job (`TokenizerSpec`), and text that
looks like one is tokenized as text.
"""

import hashlib
from pathlib import Path
from typing import Final, Protocol

import numpy as np

from dataserver.assembly.hugging_face import I32, HuggingFaceTokenizer, TokenizerError, read_bounded
from dataserver.assembly.sentence_piece import SentencePieceTokenizer
from dataserver.assembly.tiktoken_ranks import TiktokenTokenizer, is_ranks, read_ranks
from dataserver.dataset import TextTokenizer
from dataserver.planning.job.fields import SPECIAL_TOKENS, TokenizerSpec

BYTES: Final = "bytes"
"""Name of the built-in tokenizer."""
_BEGIN_BYTES: Final = 4096
"""What tells kinds of files apart."""


class Tokenizer(TextTokenizer, Protocol):
    """Turns text into token ids; may be called from several threads."""

    @property
    def from_text(self) -> frozenset[int]:
        """Ids that texts may have."""


class ByteTokenizer:
    """Token ids are the bytes of the UTF-8 text."""

    name: Final = BYTES
    digest: Final = hashlib.sha256(b"disttrain bytes tokenizer 1").hexdigest()
    vocab_size: Final = 256
    from_text: Final = frozenset(range(256))

    def encode_all(self, texts: list[str]) -> list[I32]:
        """Return int32 [bytes] of each text."""
        return [np.frombuffer(text.encode(), np.uint8).astype(np.int32) for text in texts]


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
    file = _file_of(name, path)
    begin = _begin_of(file)
    if begin.lstrip().startswith(b"{"):
        return HuggingFaceTokenizer(name, file)
    if is_ranks(begin):
        return TiktokenTokenizer(name, file)
    if begin.startswith(b"\n"):  # the first field of the message that a model of sentencepiece is
        return SentencePieceTokenizer(name, file)
    return HuggingFaceTokenizer(name, file)  # which says what it is not


def tokenizer_digest(name: str, file: Path) -> str:
    """The digest of the tokenizer of a file, as `load_tokenizer` has it; needs no library of tokenizers.

    Raises:
        TokenizerError: the file cannot be read, or has ranks that cannot be used.
    """
    if is_ranks(_begin_of(file)):
        return read_ranks(name, file).digest
    return hashlib.sha256(read_bounded(file)).hexdigest()


def _file_of(name: str, path: Path) -> Path:
    """The file of a tokenizer: the path itself, or what it is called in a folder."""
    if not path.is_dir():
        return path
    ranks = sorted(path.glob("*.tiktoken"))
    for found in (path / "tokenizer.json", path / "tokenizer.model", *ranks[:1]):
        if found.is_file():
            return found
    raise TokenizerError(
        f"tokenizer {name}: the folder {path} has no tokenizer.json, tokenizer.model or NAME.tiktoken; name the file"
    )


def _begin_of(path: Path) -> bytes:
    """The first bytes of a file; nothing where it cannot be read, which its reader says."""
    try:
        with path.open("rb") as file:
            return file.read(_BEGIN_BYTES)
    except OSError:
        return b""


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
        TokenizerError: another digest, ids that the job's vocabulary does not have, or a special token with an id that
            texts have, too.
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
    for token in SPECIAL_TOKENS:
        if (id_ := getattr(spec, token)) in tokenizer.from_text:
            raise TokenizerError(
                f"tokenizer.{token} is {id_}, which tokenizer {spec.name} makes of text, too: name one of its added "
                f"tokens, or an id from {tokenizer.vocab_size} on, which no text has"
            )
