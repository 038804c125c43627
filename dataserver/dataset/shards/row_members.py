"""The members that a row of a table, or an object of a manifest, becomes."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

from dataserver.dataset.errors import Findings, SampleError
from dataserver.dataset.kinds import DUPLICATE_KEY, UNUSED_PART
from dataserver.dataset.shards.conversations import (
    IMAGE_KIND,
    MEDIA_ENTRIES,
    MEDIA_NAMES,
    conversation_document,
    turns_of,
)
from dataserver.dataset.shards.documents import IMAGES_NAME, SENTENCES_NAME, TEXTS_NAME, image_order, is_numbered
from dataserver.dataset.shards.members import MAX_TEXT_BYTES, Member, parse_document
from dataserver.dataset.shards.modalities import AUDIO, ENDINGS, IMAGES, MODALITIES, VIDEO, modality_of_part
from dataserver.dataset.shards.parts import ImagePart, Value
from dataserver.dataset.shards.tar import name_problem

KEY_NAMES: Final = ("__key__", "key")
CAPTION_NAMES: Final = ("txt", "text", "caption")
"""The first of these that a file has as a column of strings is used; else rows have numbers, and no caption."""
CAPTION_LISTS: Final = (*CAPTION_NAMES, "captions")
"""Lists of texts with these names are taken for captions in what is said of rows without one."""
JSON_NAME: Final = "json"


def no_keys(kind: object) -> str:
    """What is said of keys that are no texts."""
    return (
        f"keys of type {str(kind)[:80]}, strings are required: samples are called by their numbers; write them as text"
    )


class Row(NamedTuple):
    """What the other columns say of one row."""

    key: str | None
    caption: bytes | SampleError
    """Or why there is none."""
    document: dict[str, Any]
    paths: list[Any]
    """What `path` says in each column of images, in that order."""
    problem: SampleError | None = None
    """Why nothing of it was read."""


class NamedColumn(Protocol):
    """What is asked of a column of images."""

    @property
    def name(self) -> str:
        """Name of the column in its shard."""

    @property
    def is_list(self) -> bool:
        """Whether a row has a list of images."""

    @property
    def has_bytes(self) -> bool:
        """Whether it holds any; else it is named as one that does, and its one value says what it holds."""

    @property
    def ending(self) -> str:
        """What names of members end in (`StoredModality.ending`): all but `img` say what they must be."""


def row_members(
    number: int,
    row: Row,
    columns: Sequence[NamedColumn],
    images: Sequence[Sequence[Value | bytes]],
    keys: set[str],
    findings: Findings,
    are_chats: bool = False,
    keeps_documents: bool = False,
) -> Iterator[Member]:
    """Yield the members of one row: its images, `txt` and `json`, or what is wrong with all of it.

    Args:
        number: of the row in the file, which is its key where it has none of its own.
        row: its other columns.
        columns: of images.
        images: values of each, or their bytes.
        keys: of the rows before; the row's own one is added.
        findings: where a key is counted that cannot be used, or came before.
        are_chats: whether turns of a conversation stay as they are; else they become a document.
        keeps_documents: whether a document goes without the clips and videos that its text has no places for, which are
            counted; else it is left out.
    """
    key = _key_of(number, row, findings)
    if key in keys:
        findings.add(key, DUPLICATE_KEY, f"row {number}: the key came before in this file, and its first row counts")
        return
    keys.add(key)
    if row.problem is not None:
        yield Member("json", 0, 0, None, key=key, parsed=row.problem)
        return
    document, listed = _document(key, row.document, findings), _first_list(columns)
    try:
        document, images, paths = _interleaved(document, columns, images, row.paths)
    except SampleError as error:
        yield Member("json", 0, 0, None, key=key, parsed=error)
        return
    is_document = isinstance(document.get(TEXTS_NAME), list)
    named: list[list[str | None]] = []
    others = dict[str, str]()
    for position, (column, values, path) in enumerate(zip(columns, images, paths, strict=True)):
        prefix = f"{column.name.lower()}." if position else ""
        found = dict(_column_members(key, prefix, column, values, path, is_document))
        yield from (member for member in found.values() if member is not None)
        others |= {name: kind for name, m in found.items() if m is not None and (kind := _other_than_image(m))}
        named.append([name if member is not None else None for name, member in found.items()])
    first = named[listed or 0] if named else []
    if is_document and listed is not None:
        document[IMAGES_NAME] = first
    turns = turns_of(document)
    names = _images_in([first, *named] if are_chats or others else [first], others)  # the list may be one of clips
    is_conversation = bool(turns) and (are_chats or not (isinstance(row.caption, bytes) or is_document))
    if is_conversation and are_chats:
        entries = {IMAGES_NAME: names, **{MEDIA_ENTRIES[k]: found for k, found in _by_kind(others).items() if found}}
        yield Member("json", 0, 0, None, key=key, parsed=_too_large(document) or {**document, **entries})
        return
    if is_document and not others.keys() <= _names_in(document):
        problem = _unread_media(list(others.values()))
        if not keeps_documents:
            yield Member("json", 0, 0, None, key=key, parsed=problem)
            return
        findings.add(key, UNUSED_PART, f"{problem.detail}; its text goes without them")
    if is_conversation:
        yield _conversation(key, document, turns, names, others)
        return
    if isinstance(row.caption, bytes):
        yield Member("txt", 0, len(row.caption), row.caption, key=key)
    elif not is_document and not isinstance(document.get("caption"), str):
        yield Member("txt", 0, 0, None, key=key, parsed=row.caption)
    yield Member("json", 0, 0, None, key=key, parsed=_too_large(document) or document)


def _first_list(columns: Sequence[NamedColumn]) -> int | None:
    """The column whose images are those of documents."""
    return next((position for position, column in enumerate(columns) if column.is_list), None)


def _interleaved(
    document: dict[str, Any],
    columns: Sequence[NamedColumn],
    images: Sequence[Sequence[Value | bytes]],
    paths: Sequence[Any],
) -> tuple[dict[str, Any], Sequence[Sequence[Value | bytes]], Sequence[Any]]:
    """Return a row whose document has a list `texts`, and an image or None for each of these.

    Raises:
        SampleError: the entries of the document contradict each other, or no bytes are where its images should be.
    """
    listed, numbered = _first_list(columns), is_numbered(document)
    if listed is None or not (numbered or isinstance(document.get(TEXTS_NAME), list)):
        return document, images, paths
    values, path = images[listed], paths[listed]
    if not columns[listed].has_bytes and isinstance(values[0], SampleError):
        raise values[0]
    if not numbered:
        return document, images, paths
    texts, order = image_order(document, len(values))
    rest = {name: value for name, value in document.items() if name != SENTENCES_NAME}
    images, paths = list(images), list(paths)
    images[listed] = [None if n is None else values[n] for n in order]
    if isinstance(path, list) and len(path) == len(values):
        paths[listed] = [None if n is None else path[n] for n in order]
    return {**rest, TEXTS_NAME: texts}, images, paths


def _key_of(number: int, row: Row, findings: Findings) -> str:
    """The key of a row: its own, or its number where it has none that can be used."""
    key = f"{number:09d}"
    if row.key and (problem := name_problem(row.key)):
        findings.add("", "unsafe_name", f"row {number}: its key {row.key[:80]!a} {problem}; it is called {key}")
        return key
    return row.key or key


def _column_members(
    key: str, prefix: str, column: NamedColumn, values: Sequence[Value | bytes], path: Any, is_document: bool
) -> Iterator[tuple[str, Member | None]]:
    """Yield the full name of each image in a column of one row, and its member; None where there is no image."""
    paths = path if column.is_list else [path]
    for n, value in enumerate(values if column.is_list or values else [None]):
        name = prefix + (f"{n}." if column.is_list and (len(values) > 1 or is_document) else "") + column.ending
        part: Value | bytes = value
        if part is None and (stated := _path(paths, n)):
            part = _without_bytes(column.name, stated)
        member = None if part is None else _image_member(name, key, part)
        yield f"{key}.{name}", member if member is None else member._replace(modality=ENDINGS[column.ending].number)


def _conversation(
    key: str, document: dict[str, Any], turns: str, images: Sequence[str], others: Mapping[str, str]
) -> Member:
    """The member `json` of a row whose texts are the turns of a conversation, which it has as they are, too.

    Args:
        key: of the row.
        document: its columns.
        turns: name of the one with turns.
        images: full names of its images, in order.
        others: of each clip and video, in order, by full name the modality.
    """
    try:
        texts, names = conversation_document(document[turns], images, _by_kind(others))
    except SampleError as error:
        return Member("json", 0, 0, None, key=key, parsed=SampleError(error.kind, f"{turns}: {error.detail}"))
    found = {**document, TEXTS_NAME: texts, "images": names}
    return Member("json", 0, 0, None, key=key, parsed=_too_large(found) or found)


def _by_kind(others: Mapping[str, str]) -> dict[str, list[str]]:
    """Full names of clips and videos, in order, by what marks and parts call them."""
    kinds = {kind: several for kind, several in MEDIA_NAMES.items() if kind != IMAGE_KIND}
    return {kind: [name for name, of in others.items() if of == several] for kind, several in kinds.items()}


def _images_in(named: Sequence[Sequence[str | None]], others: Mapping[str, str]) -> list[str]:
    """The images of the first column that has any, where columns of clips and videos stand beside it."""
    found = ([name for name in column if name is not None and name not in others] for column in named)
    return next((names for names in found if names), [])


def _other_than_image(member: Member) -> str:
    """The modality of a member of a column, or what it would be if it could be used; nothing of an image."""
    found = MODALITIES[member.modality]
    if isinstance(member.parsed, ImagePart):
        found = modality_of_part(member.parsed)
    return "" if found is IMAGES else found.name


def _names_in(document: Mapping[str, Any]) -> set[str]:
    """What a document names as its images, clips and videos."""
    named = document.get("images")
    return {name for name in named if isinstance(name, str)} if isinstance(named, list) else set()


def _unread_media(kinds: Sequence[str]) -> SampleError:
    """Why a document with clips or videos that its text has no places for is left out."""
    found = ", ".join(f"{number} {kind}" for kind, number in sorted(Counter(kinds).items()))
    named = " and ".join(word for kind, word in ((AUDIO.name, "audio"), (VIDEO.name, "videos")) if kind in kinds)
    what = "a document, whose places its first list fills,"
    return SampleError("bad_document", f"{what} names {named} ({found}); that is not read yet")


def _image_member(name: str, key: str, part: ImagePart | SampleError | bytes) -> Member:
    if isinstance(part, bytes):
        return Member(name, 0, len(part), part, key=key)
    offset, length = (part.offset, part.length) if isinstance(part, ImagePart) else (0, 0)
    return Member(name, offset, length, None, key=key, parsed=part)


def _document(key: str, given: dict[str, Any], findings: Findings) -> dict[str, Any]:
    """The columns of a row, with what its column `json` says."""
    held = given.get(JSON_NAME)
    if held is None:
        return given
    rest = {name: value for name, value in given.items() if name != JSON_NAME}
    if isinstance(held, str):
        try:
            if len(held) > MAX_TEXT_BYTES:
                raise SampleError("text_too_large", f"{len(held)} characters, limit {MAX_TEXT_BYTES}")
            held = parse_document(held)
        except SampleError as error:
            findings.add(key, UNUSED_PART, f"json: {error.detail} ({error.kind}); the sample does without it")
            return rest
    elif not isinstance(held, dict):
        findings.add(key, UNUSED_PART, f"json: is a {type(held).__name__}, not an object; the sample does without it")
        return rest
    return {**held, **rest}


def _too_large(document: Mapping[str, Any]) -> SampleError | None:
    """Why the columns of a row are refused, as a member .json of that size would be."""
    texts = (text for value in document.values() for text in (value if isinstance(value, list) else [value]))
    size = sum(len(text) for text in texts if isinstance(text, str))
    if size <= MAX_TEXT_BYTES:
        return None
    return SampleError("text_too_large", f"{size} characters in its columns, limit {MAX_TEXT_BYTES}")


def _without_bytes(column: str, path: str) -> SampleError:
    remedy = "write the file again with its images in it (datasets: embed_table_storage)"
    return SampleError("missing_image", f"{column}: the row names {path[:80]!a} and holds no bytes; {remedy}")


def _path(paths: Any, n: int) -> str:
    """What stands beside the bytes of a value, if that is the name of a file."""
    if not isinstance(paths, list) or n >= len(paths) or not isinstance(paths[n], dict):
        return ""
    found = paths[n].get("path")
    return found if isinstance(found, str) else ""
