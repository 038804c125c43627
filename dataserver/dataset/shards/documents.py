"""The forms in which datasets write interleaved documents: a line of `FORMS` each.

All become parallel lists of texts and of names of images; at each position exactly one of the two is null.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from dataserver.dataset.errors import SampleError

TEXTS_NAME: Final = "texts"
IMAGES_NAME: Final = "images"
SENTENCES_NAME: Final = "text_list"
INFOS_NAME: Final = "image_info"
"""Entries of MMC4's documents: sentences, and objects that say which sentence an image belongs to."""
IMAGE_NAME: Final = "image_name"
Lists = tuple[list[Any], list[Any]]
"""Texts, and the names of images."""


class DocumentForm(NamedTuple):
    """One form: an object is of it where both entries are lists."""

    texts: str
    images: str
    read: Callable[[list[Any], list[Any]], Lists]
    """Makes parallel lists of the two entries; SampleError where they contradict each other."""


def document_lists(document: Mapping[str, Any]) -> Lists | None:
    """Return the parallel lists of a document; None of an object that is none.

    Raises:
        SampleError: its entries contradict each other.
    """
    for form in FORMS:
        texts, images = document.get(form.texts), document.get(form.images)
        if isinstance(texts, list) and isinstance(images, list):
            return form.read(texts, images)
    return None


def with_lists(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return a document with lists `texts` and `images`; any other object as it is. Raises as `document_lists`."""
    if (lists := document_lists(document)) is None:
        return dict(document)
    rest = {name: value for name, value in document.items() if name != SENTENCES_NAME}
    return {**rest, TEXTS_NAME: lists[0], IMAGES_NAME: lists[1]}


def is_numbered(document: Mapping[str, Any]) -> bool:
    """Whether a document says by the numbers of sentences where its images go, and has no list `texts`."""
    sentences, infos, texts = (document.get(name) for name in (SENTENCES_NAME, INFOS_NAME, TEXTS_NAME))
    return isinstance(sentences, list) and isinstance(infos, list) and not isinstance(texts, list)


def image_order(document: Mapping[str, Any], num_images: int) -> tuple[list[str | None], list[int | None]]:
    """Return the texts of a document that `is_numbered`, and at each position the number of its image, or None.

    Args:
        document: its `image_info` has an entry for each image, in the same order.
        num_images: that there are.

    Raises:
        SampleError: there are other numbers of entries and of images, or a lie among the entries.
    """
    infos = document[INFOS_NAME]
    if len(infos) != num_images:
        raise SampleError("bad_document", f"{len(infos)} entries of {INFOS_NAME} but {num_images} images")
    numbered = [{**info, IMAGE_NAME: n} if isinstance(info, dict) else info for n, info in enumerate(infos)]
    return _sentences(document[SENTENCES_NAME], numbered)


def _sentences(sentences: list[Any], infos: list[Any]) -> Lists:
    """MMC4's form: an image goes before its sentence, and those of one sentence in the order of `image_info`."""
    before: dict[int, list[Any]] = {}
    for number, info in enumerate(infos):
        at = info.get("matched_text_index") if isinstance(info, dict) else None
        if type(at) is not int or not 0 <= at < len(sentences):
            wanted = f"a number below {len(sentences)}, the length of {SENTENCES_NAME}, is required"
            raise SampleError(
                "bad_document", f"{INFOS_NAME} {number} has the matched_text_index {str(at)[:40]!a}; {wanted}"
            )
        before.setdefault(at, []).append(info.get(IMAGE_NAME))
    texts: list[Any] = []
    names: list[Any] = []
    words: list[str] = []  # since the last image
    for number, sentence in enumerate(sentences):
        if not isinstance(sentence, str):
            raise SampleError("bad_document", f"{SENTENCES_NAME} {number} is a {type(sentence).__name__}, no text")
        if images := before.get(number):
            _add_text(words, texts, names)
            texts += [None] * len(images)
            names += images
            words = []
        words.append(sentence)
    _add_text(words, texts, names)
    return texts, names


def _add_text(sentences: list[str], texts: list[Any], names: list[Any]) -> None:
    """Add sentences without an image between them as one text, unless they are empty."""
    if text := " ".join(sentences):
        texts.append(text)
        names.append(None)


FORMS: Final = (
    DocumentForm(TEXTS_NAME, IMAGES_NAME, lambda texts, images: (texts, images)),  # OBELICS, OmniCorpus
    DocumentForm(SENTENCES_NAME, INFOS_NAME, _sentences),  # MMC4
)
DOCUMENT_FORMS: Final = " ".join(form.texts for form in FORMS)
"""What an index notes, so that it is made again when more forms are read."""
