"""A part of a document that is split, cut out of the whole."""

from collections.abc import Sequence
from typing import Final

from dataserver.dataset import TEXT, TokenizedDocument
from dataserver.planning import I32

WHOLE: Final = (0, 1, 0, 0)
"""The part that a whole document is (`SampleSizes.parts`)."""


class PartError(ValueError):
    """A document that does not have the part."""


def part_of(
    document: TokenizedDocument, part: Sequence[int], text_tokens: int, num_images: int, left_out: int | None = None
) -> TokenizedDocument:
    """Return a part of a document: as many text tokens and images as it has, behind those of the parts before it.

    Its texts are copies, so that nobody who keeps a part keeps the whole.

    Args:
        document: the whole.
        part: a row of `SampleSizes.parts`.
        text_tokens: of the part.
        num_images: of the part: images, clips and videos.
        left_out: text tokens of the part behind these, where it ends with the target of a generator.

    Raises:
        PartError: the document is shorter, or its last part does not end it.
    """
    number, count, text, image = part
    text_end, image_end = text + text_tokens, image + num_images
    kinds, texts = list[int](), list[I32]()
    at, images, bodies = 0, 0, iter(document.texts)
    for kind in document.kinds:
        if kind == TEXT:
            ids = next(bodies)
            piece = ids[max(text - at, 0) : max(text_end - at, 0)]
            at += len(ids)
            if len(piece):
                kinds.append(kind)
                texts.append(piece.copy())
        else:
            if image <= images < image_end:
                kinds.append(kind)
            images += 1
    text_end += left_out or 0
    fits = at >= text_end and images >= image_end
    if number == count - 1:
        fits &= at == text_end and (left_out is not None or images == image_end)
    if not fits:
        raise PartError(
            f"it has {at} text tokens and {images} images, clips and videos; part {number} of {count} ends at "
            f"{text_end} and {image_end}"
        )
    return TokenizedDocument(tuple(kinds), tuple(texts))
