"""From the objects of a manifest to the members of samples.

Paths are relative to a root, by default the folder of the manifest, and never leave it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, Final, NamedTuple, TypeVar

from dataserver.dataset.errors import DatasetError, Findings, SampleError, printable
from dataserver.dataset.kinds import UNUSED_PART
from dataserver.dataset.shards.documents import with_lists
from dataserver.dataset.shards.external import ExternalFiles, is_gone
from dataserver.dataset.shards.interface import ShardSource
from dataserver.dataset.shards.manifest.objects import Found
from dataserver.dataset.shards.members import Member
from dataserver.dataset.shards.modalities import AUDIO, IMAGES, ONLY_IMAGES, VIDEO, Media, StoredModality
from dataserver.dataset.shards.parts import ExternalPart, ImagePart, Value
from dataserver.dataset.shards.row_members import CAPTION_LISTS, CAPTION_NAMES, KEY_NAMES, Row, no_keys, row_members

IMAGE_NAMES: Final = ("image", "images", "file_name", "image_path", "jpg")
"""The first of these that an object has as text or a list names its images."""
AUDIO_NAMES: Final = ("audio", "audios", "audio_path")
"""The same of its clips."""
VIDEO_NAMES: Final = ("video", "videos", "video_path")
"""The same of its videos."""

Taken = TypeVar("Taken")


class _Images(NamedTuple):
    """What an object has of images, as a column has it."""

    name: str
    is_list: bool
    ending: str
    has_bytes: bool = True


def scan_objects(objects: Iterable[Found], source: ShardSource, findings: Findings) -> Iterator[Member]:
    """Yield the members of each sample; as `ShardFormat.scan`."""
    files = source.external
    assert files is not None
    keys: set[str] = set()
    for number, found in objects:
        if isinstance(found, SampleError):
            findings.add("", found.kind, found.detail)
        else:
            yield from object_members(
                number,
                found,
                lambda names, modality: [load_image(files, one, _taking(files, modality), modality) for one in names],
                keys,
                findings,
                media=source.media,
                are_chats=source.are_chats,
            )


def object_members(
    number: int,
    document: dict[str, Any],
    load: Callable[[Sequence[object], StoredModality], Sequence[Value | bytes]],
    keys: set[str],
    findings: Findings,
    as_key: Callable[[str | None], str | None] = lambda key: key,
    media: Media = ONLY_IMAGES,
    are_chats: bool = False,
    keeps_documents: bool = False,
) -> Iterator[Member]:
    """Yield the members of one sample.

    Args:
        number: of the object, which is its key where it has none of its own.
        document: the object; what is used of it is taken out.
        load: reads the images, clips or videos that it names.
        keys: of the objects before; the own one is added.
        findings: where a key is counted that cannot be used, or came before.
        as_key: what becomes of a key.
        media: what it may name.
        are_chats: whether turns of a conversation stay as they are.
        keeps_documents: as `row_members`.
    """
    problem = None
    try:
        document = with_lists(document)
    except SampleError as error:
        problem = error
    columns, values = list[_Images](), list[Sequence[Value | bytes]]()
    for names, modality in ((IMAGE_NAMES, IMAGES), (AUDIO_NAMES, AUDIO), (VIDEO_NAMES, VIDEO)):
        if modality not in media:
            continue
        name = next((name for name in names if isinstance(document.get(name), str | list)), names[0])
        if columns and name not in document:
            continue
        held = document.pop(name, None)
        columns.append(_Images(name, isinstance(held, list), modality.ending))
        values.append(load(held if isinstance(held, list) else [] if held is None else [held], modality))
    caption, key = _taken(document, CAPTION_NAMES), as_key(_taken(document, KEY_NAMES))
    if key is None and (name := next((one for one in KEY_NAMES if document.get(one) is not None), "")):
        findings.add(f"{number:09d}", UNUSED_PART, f"{name}: {no_keys(type(document[name]).__name__)}")
    text = _no_caption(document) if caption is None else caption.encode()
    row = Row(key, text, document, [None] * len(columns), problem)
    yield from row_members(number, row, columns, values, keys, findings, are_chats, keeps_documents)


def _taking(files: ExternalFiles, modality: StoredModality) -> Callable[[bytes, ExternalPart], ImagePart]:
    """What takes a file that an object names as one of a modality."""
    return lambda content, part: files.image(content, part, modality)


def _no_caption(document: Mapping[str, Any]) -> SampleError:
    name = next((name for name in CAPTION_LISTS if isinstance(document.get(name), list)), None)
    hint = "" if name is None else f"; {name} is a list: these can be captions, index --caption 'NAME=json:{name}[0]'"
    return SampleError("missing_caption", f"the object has no text{hint}")


def _taken(document: dict[str, Any], names: Sequence[str]) -> str | None:
    """Take the first of these entries that is text out of an object."""
    name = next((name for name in names if isinstance(document.get(name), str)), None)
    found: str | None = None if name is None else document.pop(name)
    return found


def checked_name(name: object) -> str:
    """Return the name of a file that an object gives. Raises SampleError where it is none, or leaves the root."""
    shown = printable(str(name), 80)
    if not isinstance(name, str) or not name or "\0" in name:
        raise SampleError("missing_image", f"{shown!a} is no name of a file")
    parts = PurePosixPath(name)
    if "://" in name:
        raise SampleError("missing_image", f"{shown!a} is a URL; download the image, and give the path of its file")
    if parts.is_absolute() or ".." in parts.parts:
        raise SampleError("missing_image", f"{shown!a} leaves the folder of images; give a path below it")
    return str(parts)


def load_image(
    files: ExternalFiles,
    name: object,
    take: Callable[[bytes, ExternalPart], Taken],
    expected: StoredModality = IMAGES,
) -> Taken | SampleError | None:
    """Read an image, clip or video that an object names.

    Args:
        files: reads it; notes a file that cannot be used, so that it is looked at again when it changes.
        name: what the object says; None names no image, as in the list of a document.
        take: makes a value of its bytes and where they lie; it may raise SampleError.
        expected: what the object says that it is.

    Returns:
        What `take` made of it, why it cannot be used, or None where none is named.

    Raises:
        OSError: storage failed.
    """
    if name is None:
        return None
    try:
        checked = checked_name(name)
    except SampleError as error:
        return error
    try:
        return take(*files.read(checked, expected))
    except SampleError as error:
        found = error
    except DatasetError as error:
        found = SampleError("missing_image", str(error))
    except OSError as error:
        if not is_gone(error):
            raise
        detail = f"{printable(checked, 80)!a} is no file below {printable(str(files.root), 100)}"
        found = SampleError("missing_image", detail)
    files.note_unusable(checked)
    return found
