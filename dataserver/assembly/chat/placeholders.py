"""Where the images, clips and videos of a conversation are among the ids of what a template renders."""

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from dataserver.assembly.chat.expansion import known_processors
from dataserver.assembly.chat.template import ChatTemplate
from dataserver.dataset import IMAGE_KIND, MEDIA_NAMES, TokenizingError
from dataserver.planning import I32, Bool

PLACEHOLDERS: Final[Mapping[str, tuple[str, ...]]] = {
    "image": ("<|image_pad|>", "<image>", "<|image|>", "<start_of_image>", "<image_soft_token>", "[IMG]"),
    "audio": ("<|AUDIO|>", "<|audio_pad|>", "<audio>"),
    "video": ("<|video_pad|>", "<video>"),
}
"""What released templates write for an image, a clip or a video, where no file says it."""


class Placeholders:
    """What a template writes for images, clips and videos, each once."""

    def __init__(self, template: ChatTemplate, ids: Mapping[str, int]) -> None:
        """Find the words.

        Args:
            template: of a folder.
            ids: of the tokenizer's added tokens, by their words.
        """
        named = {kind: template.tokens.get(f"{kind}_token", "") for kind in PLACEHOLDERS}
        named[IMAGE_KIND] = template.image_token
        self._ids, self._processor = ids, template.processor
        self._words: Final = {
            kind: [word for word in dict.fromkeys([named[kind], *known]) if word in ids]
            for kind, known in PLACEHOLDERS.items()
        }

    @property
    def of_images(self) -> list[str]:
        """Words that may stand for an image."""
        return self._words[IMAGE_KIND]

    def found(self, ids: I32, media: Sequence[str]) -> Bool:
        """Where the images, clips and videos of a conversation go, bool [tokens].

        Args:
            ids: int32 [tokens].
            media: their kinds, in the order of the conversation.
        """
        kinds = np.zeros(len(ids), np.int8)  # 0 is none, then those of `PLACEHOLDERS`
        for number, kind in enumerate(PLACEHOLDERS, 1):
            if kind in media or kind == IMAGE_KIND:
                kinds[self._of_kind(ids, kind, media.count(kind))] = number
        order = [list(PLACEHOLDERS)[number - 1] for number in kinds[kinds > 0].tolist()]
        if order != list(media):
            first = next(n for n, (found, given) in enumerate(zip(order, media, strict=True)) if found != given)
            raise TokenizingError(
                f"the chat template writes {order[first]} where the conversation has {media[first]}, in another order "
                "than the conversation; put them in the order of the template"
            )
        return kinds > 0

    def _of_kind(self, ids: I32, kind: str, number: int) -> Bool:
        """Where so many images, clips or videos go, bool [tokens]."""
        several = MEDIA_NAMES[kind]
        if number and (known := known_processors(self._processor, kind)):
            raise TokenizingError(
                f"it has {several}, and which tokens {self._processor} writes for these is not known; use a "
                f"model whose processor is one of {', '.join(known)}, or take them out"
            )
        words = [word for word in self._words[kind] if (ids == self._ids[word]).any()]
        if not number and words:
            raise TokenizingError(
                f"the chat template writes {words[0]}, which stands for an image, and the conversation has none; use a "
                "template that writes it for images alone"
            )
        if not number:
            return np.zeros(len(ids), np.bool_)
        if not words:
            raise TokenizingError(
                f"the chat template writes no token for its {number} {several}, of {self._words[kind]}; use the "
                f"template of a model that takes {several}, or name its {kind}_token in tokenizer_config.json"
            )
        found: Bool = ids == self._ids[words[0]]
        at = np.flatnonzero(found)
        if len(at) != number:
            raise TokenizingError(f"the chat template writes {len(at)} tokens {words[0]} for {number} {several}")
        if (runs := np.flatnonzero(np.diff(at) == 1)).size:
            raise TokenizingError(
                f"{several} {runs[0]} and {runs[0] + 1} follow each other as one run of {words[0]}, which trainers "
                f"take for one {kind}; put text between them"
            )
        return found
