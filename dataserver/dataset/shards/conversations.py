"""Conversations as interleaved documents: the turns in their order, with images where the texts have their marks.

Turns are objects as LLaVA writes them, {"from": ..., "value": ...}, or chat messages, {"role": ..., "content": ...},
whose content is a text or a list of parts of the types `text` and `image`. A turn becomes `ROLE: TEXT`, with a line
break between two turns; what a tokenizer's chat template would add is no part of a dataset.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from dataserver.dataset.errors import SampleError

TURN_NAMES: Final = ("conversations", "messages")
"""What lists of turns are called; the first that a row has is used."""
MARK: Final = "<image>"
IMAGE_TYPES: Final = frozenset({"image", "image_url"})


def turns_of(document: Mapping[str, Any]) -> str:
    """Return the name of the entry that holds turns; nothing where there is none."""
    return next((name for name in TURN_NAMES if isinstance(document.get(name), list)), "")


def conversation_document(turns: Sequence[Any], images: Sequence[str]) -> tuple[list[str | None], list[str | None]]:
    """Return the parallel lists `texts` and `images` of a document.

    Args:
        turns: of a conversation.
        images: names of its images, in order. Without a mark in any text, they go before all texts.

    Raises:
        SampleError: a turn is none, or there are other numbers of marks and of images.
    """
    texts: list[str | None] = []
    names: list[str | None] = []
    text = ""
    num_marks = 0
    parts: list[str | None] = []  # None stands for an image
    for number, turn in enumerate(turns):
        for part in _parts(number, turn):
            if part is None:
                num_marks += 1
                parts += [text, None]
                text = ""
            else:
                text += part
    parts.append(text)
    if num_marks not in (0, len(images)):
        raise SampleError("bad_document", f"{num_marks} marks {MARK} in the turns and {len(images)} images")
    left = iter(images)
    if not num_marks:
        parts = [*(None for _ in images), *parts]
    for part in parts:
        if part is None:
            texts.append(None)
            names.append(next(left))
        elif part:
            texts.append(part)
            names.append(None)
    return texts, names


def _parts(number: int, turn: Any) -> Iterator[str | None]:
    """Yield the texts of a turn, and None for each image."""
    if not isinstance(turn, dict):
        raise SampleError("bad_document", f"turn {number} is a {type(turn).__name__}, no object")
    role = turn.get("from", turn.get("role"))
    content = turn.get("value", turn.get("content"))
    if not isinstance(role, str) or not isinstance(content, str | list):
        raise SampleError("bad_document", f"turn {number} has no role and text: from and value, or role and content")
    yield f"{chr(10) if number else ''}{role}: "
    for part in [content] if isinstance(content, str) else content:
        if isinstance(part, dict) and part.get("type") in IMAGE_TYPES:
            yield None
            continue
        text = part.get("text") if isinstance(part, dict) else part
        if not isinstance(text, str):
            raise SampleError("bad_document", f"turn {number} has a part that is neither a text nor an image")
        first, *others = text.split(MARK)
        yield first
        for other in others:
            yield None
            yield other
