"""Conversations as interleaved documents: the turns in order, with images, clips and videos where their marks stand.

Turns are objects as LLaVA writes them, {"from": ..., "value": ...}, or chat messages, {"role": ..., "content": ...},
whose content is a text or a list of parts of the types `text`, `image`, `audio` and `video`. A turn becomes
`ROLE: TEXT`, with a line break between two turns; what a tokenizer's chat template would add is no part of a dataset.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from dataserver.dataset.errors import SampleError
from dataserver.dataset.shards.members import BYTE_ORDER_MARK

TURN_NAMES: Final = ("conversations", "messages")
"""What lists of turns are called; the first that a row has is used."""
IMAGE_KIND: Final = "image"
IMAGE_TYPES: Final = frozenset({"image", "image_url"})
PART_TYPES: Final[Mapping[str, frozenset[str]]] = {
    IMAGE_KIND: IMAGE_TYPES,
    "audio": frozenset({"audio", "audio_url", "input_audio"}),
    "video": frozenset({"video", "video_url"}),
}
"""Types of the parts of messages that are no texts, by what they are; in a text they are marked `<image>` and so on.
They come in the order of the numbers of modalities."""
MEDIA_NAMES: Final[Mapping[str, str]] = {IMAGE_KIND: "images", "audio": "clips", "video": "videos"}
"""What several of a kind are called, as modalities are."""
MEDIA_ENTRIES: Final[Mapping[str, str]] = {IMAGE_KIND: "images", "audio": "audios", "video": "videos"}
"""Entries of a chat that list the names of its images, clips and videos."""


def turns_of(document: Mapping[str, Any]) -> str:
    """Return the name of the entry that holds turns; nothing where there is none."""
    return next((name for name in TURN_NAMES if isinstance(document.get(name), list)), "")


def conversation_document(
    turns: Sequence[Any], images: Sequence[str], others: Mapping[str, Sequence[str]] | None = None
) -> tuple[list[str | None], list[str | None]]:
    """Return the parallel lists `texts` and `images` of a document.

    Args:
        turns: of a conversation.
        images: names of its images, in order. Without a mark in any text, they go before all texts.
        others: names of its clips and videos in the same way, by modality: `audio`, `video`. What goes before all texts
            comes in this order: images, clips, videos. Without a clip, `<audio>` is text, and so on.

    Raises:
        SampleError: a turn is none, or there are other numbers of marks and of images, clips or videos.
    """
    media = {IMAGE_KIND: images, **{kind: names for kind, names in (others or {}).items() if names}}
    parts: list[_Part] = []
    text = ""
    for number, turn in enumerate(turns):
        for part in _parts(number, turn, media):
            if part.kind:
                parts += [_Part("", text), part]
                text = ""
            else:
                text += part.text
    parts.append(_Part("", text))
    marks = Counter(part.kind for part in parts if part.kind)
    for kind, names in media.items():
        if marks[kind] not in (0, len(names)):
            what = f"{marks[kind]} marks <{kind}> in the turns and {len(names)} {MEDIA_NAMES[kind]}"
            raise SampleError("bad_document", what)
    first = [_Part(kind) for kind, names in media.items() if not marks[kind] for _ in names]
    left = {kind: iter(names) for kind, names in media.items()}
    found = [part for part in (*first, *parts) if part.kind or part.text]
    texts = [None if part.kind else part.text for part in found]
    return texts, [next(left[part.kind]) if part.kind else None for part in found]


class _Part(NamedTuple):
    """A piece of text, or the place of an image, a clip or a video."""

    kind: str
    """Kind of the medium; empty for a text."""
    text: str = ""


def _parts(number: int, turn: Any, media: Mapping[str, Sequence[str]]) -> Iterator[_Part]:
    """Yield the texts of a turn, and the places of `media` among them."""
    if not isinstance(turn, dict):
        raise SampleError("bad_document", f"turn {number} is a {type(turn).__name__}, no object")
    role = turn.get("from", turn.get("role"))
    content = turn.get("value", turn.get("content"))
    if not isinstance(role, str) or not isinstance(content, str | list):
        raise SampleError("bad_document", f"turn {number} has no role and text: from and value, or role and content")
    yield _Part("", f"{chr(10) if number else ''}{role}: ")
    marks = re.compile(f"<({'|'.join(media)})>")
    for part in [content] if isinstance(content, str) else content:
        kind = kind_of_part(part.get("type")) if isinstance(part, dict) else ""
        if kind in media:
            yield _Part(kind)
            continue
        text = part.get("text") if isinstance(part, dict) else part
        if not isinstance(text, str):
            raise SampleError("bad_document", f"turn {number} has a part that is neither a text nor an image")
        pieces = marks.split(text.removeprefix(BYTE_ORDER_MARK))  # texts, and between two of them the kind of a mark
        for n, piece in enumerate(pieces):
            yield _Part(piece) if n % 2 else _Part("", piece)


def kind_of_part(name: Any) -> str:
    """The kind of a part of a message by its `type`; empty of a text."""
    return next((kind for kind, types in PART_TYPES.items() if isinstance(name, str) and name in types), "")
