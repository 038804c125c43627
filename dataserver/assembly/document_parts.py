"""A part of a document that is split, cut out of the whole."""

from collections.abc import Sequence

from dataserver.dataset import TEXT, TokenizedDocument
from dataserver.planning import I32


class PartError(ValueError):
    """A document that does not have the part."""


def part_of(document: TokenizedDocument, part: Sequence[int], text_tokens: int, num_images: int) -> TokenizedDocument:
    """Return a part of a document: as many text tokens and images as it has, behind those of the parts before it.

    Its texts are copies, so that nobody who keeps a part keeps the whole.

    Args:
        document: the whole.
        part: a row of `SampleSizes.parts`.
        text_tokens: of the part.
        num_images: of the part: images, clips and videos.

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
    is_last = number == count - 1
    if at < text_end or images < image_end or (is_last and (at, images) != (text_end, image_end)):
        raise PartError(
            f"it has {at} text tokens and {images} images, clips and videos; part {number} of {count} ends at "
            f"{text_end} and {image_end}"
        )
    return TokenizedDocument(tuple(kinds), tuple(texts))
