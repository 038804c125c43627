"""Tokenizers of tiktoken: a file of ranks, one token a line, and the pattern that cuts texts before it is used."""

import base64
import binascii
import hashlib
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from dataserver.assembly.hugging_face import I32, TokenizerError, as_tokenizing_error, read_bounded, text_batches
from dataserver.extras import pip_install

PATTERN_SUFFIX: Final = ".pattern"
"""End of the name of a file beside the ranks that holds their pattern, where it is none of `PATTERNS`."""
MAX_TOKENS: Final = 1 << 22
_CONTRACTIONS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS: Final = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST: Final = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_R50K: Final = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
_CL100K: Final = (
    r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]"""
    r"""|\s+(?!\S)|\s"""
)
_O200K: Final = "|".join(
    (
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""\p{N}{1,3}""",
        r""" ?[^\s\p{L}\p{N}]+[\r\n/]*""",
        r"""\s*[\r\n]+""",
        r"""\s+(?!\S)""",
        r"""\s+""",
    )
)
PATTERNS: Final = {
    50_256: _R50K,
    50_280: _R50K,
    100_256: _CL100K,
    128_000: rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}",
    151_643: rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}",
    199_998: _O200K,
}
"""Patterns by the number of ranks, which tells the published vocabularies apart: r50k, p50k, cl100k, Llama 3, Qwen,
o200k."""


class Ranks(NamedTuple):
    """What a file of ranks says."""

    ranks: dict[bytes, int]
    pattern: str
    digest: str
    """SHA-256, hexadecimal, of the file and its pattern."""


class TiktokenTokenizer:
    """Ranks of byte pairs. Special tokens are not in such a file, so that no text becomes one."""

    def __init__(self, name: str, path: Path) -> None:
        """Load a file.

        Raises:
            TokenizerError: it cannot be read, is not such a file, its pattern is not known, or tiktoken is missing.
        """
        try:
            import tiktoken
        except ImportError as error:
            raise TokenizerError(
                f"tokenizer {name}: {path} is read by tiktoken, which is not installed; run {pip_install('tiktoken')}"
            ) from error

        self.name: Final = name
        ranks, pattern, digest = read_ranks(name, path)
        self.digest: Final = digest
        try:
            self._model = tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
        except BaseException as error:
            found = as_tokenizing_error(error)
            raise TokenizerError(f"tokenizer {name}: {path} cannot be used ({found}); name another file") from error
        self.vocab_size: Final = max(ranks.values()) + 1
        self.from_text: Final = frozenset(ranks.values())
        """Ids that texts may have."""

    def encode_all(self, texts: list[str]) -> list[I32]:
        """Return int32 [tokens] of each text.

        Raises:
            TokenizingError: the tokenizer cannot encode one of them.
        """
        found = []
        for batch in text_batches(texts):
            try:
                found += self._model.encode_ordinary_batch(batch, num_threads=1)
            except BaseException as error:
                raise as_tokenizing_error(error) from error
        return [np.array(ids, np.int32) for ids in found]


def read_ranks(name: str, path: Path) -> Ranks:
    """Read a file of ranks, which tiktoken is not needed for.

    Raises:
        TokenizerError: it cannot be read, is not such a file, or its pattern is not known.
    """
    data = read_bounded(path)
    ranks = _parse(name, path, data)
    beside = path.with_name(f"{path.name}{PATTERN_SUFFIX}")
    pattern = read_bounded(beside).decode().strip("\n") if beside.is_file() else PATTERNS.get(len(ranks), "")
    if not pattern:
        raise TokenizerError(
            f"tokenizer {name}: {path} has {len(ranks)} ranks, as no published vocabulary; write the pattern that"
            f" cuts texts into {beside}, or name a tokenizer.json"
        )
    return Ranks(ranks, pattern, hashlib.sha256(data + b"\0" + pattern.encode()).hexdigest())


def is_ranks(begin: bytes) -> bool:
    """Whether a file that begins so is one of ranks: base64 and a number in its first line."""
    token, _, rank = begin.partition(b"\n")[0].rstrip(b"\r").partition(b" ")
    try:
        return rank.isdigit() and len(rank) < 10 and bool(base64.b64decode(token, validate=True))
    except binascii.Error:
        return False


def _parse(name: str, path: Path, data: bytes) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.splitlines()):
        if not line:
            continue
        if not is_ranks(line) or number > MAX_TOKENS:
            raise TokenizerError(f"tokenizer {name}: line {number + 1} of {path} is no token and rank; copy it again")
        token, _, rank = line.partition(b" ")
        ranks[base64.b64decode(token)] = int(rank)
    if len(set(ranks.values())) != len(ranks) or max(ranks.values(), default=MAX_TOKENS) >= MAX_TOKENS:
        raise TokenizerError(f"tokenizer {name}: {path} has a rank twice, or one beyond {MAX_TOKENS}; copy it again")
    return ranks
