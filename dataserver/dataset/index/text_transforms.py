"""Texts that transforms of users change before they become tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dataserver.dataset.errors import DatasetError, TextTransformError
from dataserver.dataset.shards.members import MAX_TEXT_BYTES
from dataserver.planning.job.fields import InstalledTransform
from dataserver.transforms import TransformFailedError, TransformPool, TransformUnavailableError

if TYPE_CHECKING:
    from dataserver.dataset.index.tokens import I32, TextTokenizer


@dataclass(frozen=True, slots=True)
class TransformingTokenizer:
    """A tokenizer of texts that a chain of transforms changes first."""

    tokenizer: "TextTokenizer"
    pool: TransformPool
    chain: tuple[InstalledTransform, ...]

    @property
    def name(self) -> str:
        """Name of the tokenizer, for messages."""
        return self.tokenizer.name

    @property
    def digest(self) -> str:
        """Digest of the tokenizer that is wrapped."""
        return self.tokenizer.digest

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary of the tokenizer that is wrapped."""
        return self.tokenizer.vocab_size

    def encode_all(self, texts: list[str]) -> "Sequence[I32]":
        """Ids of each transformed text, as `TextTokenizer.encode_all`.

        Raises:
            TextTransformError: a transform fails for one of them.
            TokenizingError: the tokenizer cannot encode one of them.
            DatasetError: a transform took too long, or its process died.
        """
        for wanted in self.chain:
            texts = self._transformed(texts, wanted)
        return self.tokenizer.encode_all(texts)

    def _transformed(self, texts: list[str], wanted: InstalledTransform) -> list[str]:
        found = []
        try:
            made = self.pool.texts(texts, wanted)
        except (TransformFailedError, TransformUnavailableError) as error:
            raise DatasetError(f"{error}; mend the transform, or its options") from error
        for one in made:
            if one.text is None:
                raise TextTransformError(f"the transform {wanted.name}={wanted.version}: {one.reason}")
            if len(one.text.encode()) > MAX_TEXT_BYTES:
                raise TextTransformError(
                    f"the transform {wanted.name}={wanted.version} made {len(one.text)} characters of it; at most "
                    f"{MAX_TEXT_BYTES} bytes are allowed"
                )
            found.append(one.text)
        return found
