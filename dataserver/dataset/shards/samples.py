"""From tar members to samples: grouping by key as webdataset does, and the three kinds of samples.

`SampleRules` say how names are cut into keys, which images of a sample count, and where further captions lie.

An image-text pair is `KEY.<image>` + `KEY.txt` (or the `caption` of `KEY.json`); an interleaved document is
`KEY.json` in a form of `documents.py`, which names members; text alone is `KEY.txt`.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

from dataserver.dataset.errors import Findings, SampleError, TarError
from dataserver.dataset.kinds import (
    BAD_CONVERSATION,
    BAD_JSON,
    DROPPED_IMAGE,
    DUPLICATE_KEY,
    MISSING_CAPTION,
    NEEDS_SPECIAL_MEMBER,
    TOO_MANY_SCALARS,
    UNUSED_PART,
)
from dataserver.dataset.shards.captions import entry_of
from dataserver.dataset.shards.chat import read_conversation
from dataserver.dataset.shards.conversations import (
    IMAGE_KIND,
    MEDIA_ENTRIES,
    MEDIA_NAMES,
    PART_TYPES,
    TURN_NAMES,
    turns_of,
)
from dataserver.dataset.shards.documents import TEXTS_NAME, document_lists
from dataserver.dataset.shards.groups import MAX_SAMPLE_MEMBERS, Group, add_member
from dataserver.dataset.shards.members import BYTE_ORDER_MARK, Member, usable_caption
from dataserver.dataset.shards.modalities import AUDIO, MODALITIES, VIDEO, StoredModality
from dataserver.dataset.shards.parts import IMAGE, TEXT, ImagePart, Scalar
from dataserver.dataset.shards.sample_rules import SampleRules
from dataserver.dataset.shards.seen import Seen, without_spelling
from dataserver.dataset.shards.tar import sample_key, show
from dataserver.images import OTHER_SUFFIXES

MAX_SCALARS: Final = 1024
"""Limit of the scalar entries of one .json member."""

NO_CAPTION: Final = "no text in .txt or in the caption of .json"
"""What is said of an image without a text."""

_OF_TEXTS: Final = frozenset({MISSING_CAPTION, "not_utf8", "text_too_large", BAD_JSON, NEEDS_SPECIAL_MEMBER})
"""Why a pair has no text."""
_MOST_SHOWN: Final = 4
"""Extensions that one message shows at most."""
_SOUND_OR_VIDEO: Final = AUDIO.suffixes | VIDEO.suffixes
"""What rules may leave unused."""


class Sample(NamedTuple):
    """One sample: `kinds` in document order (TEXT or IMAGE), its texts and images each in that order."""

    key: str
    kinds: tuple[int, ...]
    texts: tuple[str, ...]
    images: tuple[ImagePart, ...]
    scalars: dict[str, Scalar]
    """Scalar entries of the member .json."""
    is_lone_text: bool = False
    """Whether it is a `KEY.txt` without an image, which may be half of a pair."""
    captions: Mapping[str, str] | None = None
    """Further texts for its one text, by the names of their captions; None of a document, whose texts are its parts."""
    chat: str = ""
    """The conversation as JSON, where it is one that is stored so."""


class Joined(Protocol):
    """Finds members of the same key in other files."""

    def take(self, key: str, has: frozenset[str]) -> Iterator[tuple[str, Member]]:
        """Yield extension and member of all that belongs to a key; DatasetError where the sample has one itself."""


def read_samples(
    members: Iterable[Member],
    findings: Findings,
    seen: Seen | None = None,
    rules: SampleRules = SampleRules(),  # noqa: B008  it is frozen
    joined: "Joined | None" = None,
) -> Iterator[Sample]:
    """Yield the usable samples in tar order; everything else is counted in `findings`.

    The sample in which the tar is cut or damaged is left out, since nobody knows what is missing.

    Args:
        members: of one tar, in order.
        findings: where everything else is counted.
        seen: notes what the tar holds.
        rules: how members become samples.
        joined: members of other files for the same keys.
    """
    seen = Seen() if seen is None else seen
    split_member = rules.split
    before: Group | None = None
    group: Group | None = None
    try:
        for member in members:
            split = split_member(member.name) if member.key is None else (member.key, member.name)
            if split is None:
                seen.note_keyless(member.name)
                continue
            key, extension = split
            if group is None or group.key != key:
                yield from _finish(group, seen, findings, joined)
                before, group = group, Group(key, rules)
            add_member(group, extension, member, findings)
    except TarError as error:
        seen.has_images |= group is not None and group.has_media
        key = sample_key(show(error.member), rules.split) if error.member else ""
        after = f"; the last sample before it is {group.key}" if group else ""
        if group is None or _is_whole(group, before, key):
            yield from _finish(group, seen, findings, joined)
        else:
            key, after = group.key, ""
        findings.add(key, error.kind, error.detail + after)
        return
    yield from _finish(group, seen, findings, joined)


def _is_whole(group: Group, before: Group | None, cut_key: str) -> bool:
    """Say whether the last sample before a cut is complete: the cut member has another key (`cut_key`), or no name any
    more, but then the sample has members of every type that the one before it has (or is the first)."""
    if cut_key:
        return cut_key != group.key
    return before is None or group.types >= before.types


def _finish(group: Group | None, seen: Seen, findings: Findings, joined: "Joined | None") -> Iterator[Sample]:
    """Yield the sample of a complete group, if there is one."""
    if group is None:
        return
    if group.has_media or _image_not_read(group):
        seen.has_images = True
    for extension in group.extensions:
        if extension.rpartition(".")[2] in _SOUND_OR_VIDEO and (unused := group.rules.unused(extension)):
            seen.num_unused[unused] += 1
    if group.key in seen.keys:
        findings.add(
            group.key,
            DUPLICATE_KEY,
            "the key came before in this shard, and its first members count; those of a sample must lie together: make"
            " the tar with --sort=name",
        )
        return
    seen.keys.add(group.key)
    if joined is not None:
        own = group.extensions.copy()
        for extension, member in joined.take(group.key, frozenset(own)):
            add_member(group, extension, member, findings)
        group.extensions = own  # they tell whether the next sample is whole
        seen.has_images |= group.has_media
    try:
        yield _assemble(group, findings)
    except SampleError as error:
        if group.has_media and error.kind in _OF_TEXTS:
            seen.without_text.add(group.key)
            if error.kind == MISSING_CAPTION:
                seen.lone_images[without_spelling(group.key)] = group.key
        findings.add(group.key, error.kind, error.detail)


def _assemble(group: Group, findings: Findings) -> Sample:
    """Make the sample of a group. A part that it does not need is a finding where it cannot be used.

    Raises:
        SampleError: it cannot be used, and why.
    """
    if group.num_members > MAX_SAMPLE_MEMBERS:
        raise SampleError("too_many_members", f"{group.num_members} members, limit {MAX_SAMPLE_MEMBERS}")
    document = group.document if isinstance(group.document, dict) else {}
    scalars = {name: value for name, value in document.items() if isinstance(value, Scalar)}
    if len(scalars) > MAX_SCALARS:
        detail = f"{len(scalars)} entries in .json, limit {MAX_SCALARS}; the sample has no columns"
        findings.add(group.key, TOO_MANY_SCALARS, detail)
        scalars = {}
    if group.rules.are_chats:
        return _conversation(group, scalars, findings)
    if (lists := document_lists(document)) is not None:
        drops = group.rules.drops_images and not turns_of(document)  # a turn asks for its image
        kinds, texts, images = _interleaved(group, *lists, findings if drops else None)
        _unused(group, group.text, findings)
        _unnamed(group, group.media, lists[1], "its .json does not name {}; the document goes without", findings)
        return Sample(group.key, kinds, texts, images, scalars)
    if not group.has_media and (unread := _image_not_read(group)):
        raise SampleError("unreadable_header", f"its image .{unread} is of a format that is not read; convert it")
    if not group.has_media and group.text is None:
        if isinstance(group.document, SampleError):
            raise group.document
        raise SampleError("missing_image", f"the sample has neither an image nor a text{_dots(group)}")
    captions = _named_captions(group, findings) if group.rules.captions else {}
    caption = _caption(group, document, captions)
    if not group.has_media:
        _unused(group, group.document, findings)
        return Sample(group.key, (TEXT,), (caption,), (), scalars, is_lone_text=True, captions=captions)
    images = _images_of(group, findings)
    if isinstance(group.document, SampleError):
        _unused(group, group.document, findings)
    if isinstance(group.text, SampleError):
        _unused(group, group.text, findings)
    elif group.text is not None and not group.text.strip():
        findings.add(group.key, UNUSED_PART, ".txt is blank; another caption is used")
    return Sample(group.key, (*[IMAGE] * len(images), TEXT), (caption,), images, scalars, captions=captions)


def _conversation(group: Group, scalars: dict[str, Scalar], findings: Findings) -> Sample:
    """Make the sample of a conversation: its images, clips and videos go where its turns have them."""
    if isinstance(group.document, SampleError):
        raise group.document
    document = group.document or {}
    if not (name := turns_of(document)):
        wanted = " or ".join(TURN_NAMES)
        raise SampleError(BAD_CONVERSATION, f"no list {wanted} in .json; index without --conversations chat")
    names = {kind: _names_of(group, document, kind) for kind in PART_TYPES}
    counts = {kind: len(of_kind) for kind, of_kind in names.items() if of_kind or _is_served(group, kind)}
    chat = read_conversation(document, document[name], counts.pop(IMAGE_KIND), counts)
    left = {kind: iter(of_kind) for kind, of_kind in names.items()}
    ordered = [next(left[kind]) for kind in chat.media]
    kinds, words, found = _interleaved(group, *chat.document(ordered))
    _unused(group, group.text, findings)
    for kind, entry in MEDIA_ENTRIES.items():
        detail = f"its entry {entry} does not name {{}}; the conversation goes without"
        _unnamed(group, _of_kind(group, kind), ordered, detail, findings)
    return Sample(group.key, kinds, words, found, scalars, chat=chat.to_json())


def _names_of(group: Group, document: Mapping[str, Any], kind: str) -> list[str]:
    """Names of the images, clips or videos of a conversation: those that an entry lists, or else all.

    An entry whose names are all of other folders, as where files were renamed, stands for all if it has as many.

    Raises:
        SampleError: the entry lists a member of another kind, some names that are of no member, or, where none is,
            another number of names than there are members.
    """
    entry, of_kind = MEDIA_ENTRIES[kind], _of_kind(group, kind)
    listed = document.get(entry)
    names = [name for name in listed if name is not None] if isinstance(listed, list) else []
    strange = [name for name in names if not (isinstance(name, str) and _names_a_member(group, name))]
    if names and not strange:
        if isinstance(document.get(TEXTS_NAME), list):  # as `convert` writes it: of all kinds, in the order of the text
            names = [name for name in names if (one := _extension_of(group, name)) is None or one in of_kind]
        for name in names:
            if (extension := _extension_of(group, name)) is not None and extension not in of_kind:
                other = next(one for one in PART_TYPES if extension in _of_kind(group, one))
                raise SampleError(
                    BAD_CONVERSATION,
                    f"its entry {entry} names {name!r}, one of its {MEDIA_NAMES[other]}; {MEDIA_NAMES[kind]} alone "
                    f"are required: name it in {MEDIA_ENTRIES[other]}",
                )
        return names
    if strange and _is_served(group, kind) and (len(strange) < len(names) or len(names) != len(of_kind)):
        raise SampleError(
            "missing_image" if len(names) > len(of_kind) else BAD_CONVERSATION,
            f"its entry {entry} names {len(names)} {MEDIA_NAMES[kind]}, {_shown(strange)} among them, and the tar "
            f"holds {len(of_kind)} under its key, none of that name; name each as {group.key}.EXTENSION, or leave the "
            "entry out for all of them",
        )
    return [f"{group.key}.{extension}" for extension in sorted(of_kind, key=_in_numbers)]


def _shown(names: Sequence[object]) -> str:
    """The first of some names, as a message has it."""
    return repr(next((name for name in names if isinstance(name, str)), str(names[0]))[:80])


def _names_a_member(group: Group, name: str) -> bool:
    """Whether a name is one of a sample's members, also of one that is missing: it begins with the sample's key."""
    return bool(_member_of(group, name)) or name.lower() in group.media


def _is_served(group: Group, kind: str) -> bool:
    return _modality(kind) in group.rules.media


def _modality(kind: str) -> StoredModality:
    return MODALITIES[list(PART_TYPES).index(kind)]


def _of_kind(group: Group, kind: str) -> Mapping[str, object]:
    """The members that are images, clips or videos, by extension."""
    if kind == IMAGE_KIND:
        return group.images
    modality = _modality(kind)
    return {extension: part for extension, part in group.others.items() if group.modalities[extension] == modality}


def _unnamed(
    group: Group, media: Mapping[str, object], names: Iterable[object], detail: str, findings: Findings
) -> None:
    """Count the images, clips and videos that a document does not name, in a detail that shows some of them."""
    named = {_extension_of(group, name) for name in names if isinstance(name, str)}
    if unnamed := media.keys() - named:
        shown = ", ".join(f".{extension}" for extension in sorted(unnamed, key=_in_numbers)[:_MOST_SHOWN])
        more = f" and {len(unnamed) - _MOST_SHOWN} more" if len(unnamed) > _MOST_SHOWN else ""
        findings.add(group.key, UNUSED_PART, detail.format(shown + more))


def _unused(group: Group, part: object, findings: Findings) -> None:
    """Count a part that is broken, not one that is missing, and that its sample does without."""
    if isinstance(part, SampleError) and part.kind != MISSING_CAPTION:
        findings.add(group.key, UNUSED_PART, f"{part.detail} ({part.kind}); the sample does without it")


def _named_captions(group: Group, findings: Findings) -> dict[str, str]:
    """Return the captions that the members of a sample hold, by name; a broken member is a finding."""
    found: dict[str, str] = {}
    broken: dict[str, object] = {}
    for source in group.rules.captions:
        part: object = group.text if source.part == "txt" else group.texts.get(source.part)
        if source.field:
            part = group.document if source.part == "json" else group.entries.get(source.part)
            if isinstance(part, dict):
                part = entry_of(part, source.field)
        if (text := usable_caption(part)) is not None:
            found[source.name] = text
        elif part is not group.text and part is not group.document:
            broken[source.part] = part
    for part in broken.values():
        _unused(group, part, findings)
    return found


def _caption(group: Group, document: dict[str, Any], captions: dict[str, str]) -> str:
    """Return the text of .txt, or else, beside an image, the caption of .json or the first of the named ones."""
    if isinstance(group.text, str) and group.text.strip():
        return group.text
    caption = document.get("caption") if group.has_media else None
    if isinstance(caption, str) and caption.strip():
        return caption.removeprefix(BYTE_ORDER_MARK)
    if group.has_media and captions:
        return next(iter(captions.values()))
    if group.has_media and group.key in group.rules.texts:
        return group.rules.texts[group.key]
    for part in (group.text, group.document if group.has_media else None):
        if isinstance(part, SampleError):
            raise part
    reason = NO_CAPTION if group.has_media else "the text in .txt is blank"
    if turns := turns_of(document):
        raise SampleError(MISSING_CAPTION, f"{reason}; its .json has {turns}: index with --conversations chat")
    if group.has_media and isinstance(caption, list):
        reason += "; it is a list: these can be captions, index --caption 'NAME=json:caption[0]'"
    raise SampleError(MISSING_CAPTION, f"{reason}{_dots(group)}")


def _image_not_read(group: Group) -> str:
    """The extension of a member that is an image of another format by its name; empty where there is none."""
    return next((one for one in group.extensions if one.rpartition(".")[2] in OTHER_SUFFIXES), "")


def _dots(group: Group) -> str:
    """Say how names were cut, if members have dots where the sample lacks something."""
    dotted = sorted({extension for extension in group.extensions if "." in extension})
    if not dotted:
        return ""
    shown = ", ".join(f".{extension}" for extension in dotted[:_MOST_SHOWN])
    return (
        f"; a key ends at the first dot of a name, so that its members are {shown}: rename them to KEY.jpg, KEY.txt,"
        " or index with --key last-dot"
    )


def _images_of(group: Group, findings: Findings) -> tuple[ImagePart, ...]:
    """Return the images of a sample without a document, all or the first one, and then all of its clips and videos."""
    others = _in_name_order(group.others) if group.others else ()
    if not group.images:
        return others
    return ((*_in_name_order(group.images),) if group.rules.all_images else (_pair_image(group, findings),)) + others


def _pair_image(group: Group, findings: Findings) -> ImagePart:
    """Return the first usable image in tar order; `KEY.<image>` goes before `KEY.<name>.<image>`."""
    if len(group.images) == 1:
        return _image(*group.images.values())
    extensions = sorted(group.images, key=lambda extension: "." in extension)
    usable = [extension for extension in extensions if not isinstance(group.images[extension], SampleError)]
    if not usable:
        return _image(group.images[extensions[0]])
    for extension in extensions:
        _unused(group, group.images[extension], findings)
    if len(usable) > 1:
        hint = _dots(group) if "." in usable[0] else ""
        wanted = hint or "; index with --several-images all to serve all of them"
        findings.add(group.key, "extra_image", f"{len(usable)} images, only .{usable[0]} is used{wanted}")
    return _image(group.images[usable[0]])


def _in_name_order(media: Mapping[str, ImagePart | SampleError]) -> tuple[ImagePart, ...]:
    """Return all images, or all else, by their names, numbers in these by their values, and the sound of each video
    directly behind it; one that is broken takes the sample with it, as in a document."""
    found = (_image(media[extension]) for extension in sorted(media, key=_in_numbers))
    return tuple(part for one in found for part in one.with_sound())


def _in_numbers(extension: str) -> list[tuple[int, str]]:
    """What sorts `1.jpg` before `10.jpg`, and `jpg` before both."""
    name = extension.rpartition(".")[0]
    parts = re.findall(r"[0-9]{1,18}|[^0-9]+", name)
    return [*((int(part), "") if part.isdecimal() else (-1, part) for part in parts), (-2, extension)]


def _image(part: ImagePart | SampleError) -> ImagePart:
    if isinstance(part, SampleError):
        raise part
    return part


def _interleaved(
    group: Group, texts: list[Any], images: list[Any], dropped: Findings | None = None
) -> tuple[tuple[int, ...], tuple[str, ...], tuple[ImagePart, ...]]:
    """Return kinds, texts and images of an interleaved document.

    With `dropped` images that are missing or broken are counted there, and the document does without them; so are
    positions with neither a text nor an image, where other programs note an image that they did not get.
    """
    if len(texts) != len(images):
        raise SampleError("bad_document", f"{len(texts)} texts but {len(images)} images")
    if len(texts) > MAX_SAMPLE_MEMBERS:
        raise SampleError("too_many_members", f"{len(texts)} parts, limit {MAX_SAMPLE_MEMBERS}")
    kinds: list[int] = []
    usable_texts: list[str] = []
    usable_images: list[ImagePart] = []
    for position, (text, name) in enumerate(zip(texts, images, strict=True)):
        if isinstance(text, str) and name is None:
            kinds.append(TEXT)
            usable_texts.append(text.removeprefix(BYTE_ORDER_MARK))
        elif isinstance(name, str) and text is None:
            try:
                image = _named_image(group, name)
            except SampleError as error:
                if dropped is None:
                    raise
                _drop(group, position, f"{error.detail} ({error.kind})", dropped)
                continue
            parts = image.with_sound()
            kinds += [IMAGE] * len(parts)
            usable_images += parts
        elif text is None and name is None and dropped is not None:
            _drop(group, position, "no text and no image", dropped)
        else:
            raise SampleError("bad_document", f"position {position} needs one string, in texts or in images")
    if not usable_images and not any(text.strip() for text in usable_texts):
        raise SampleError("empty_document", "the document has neither images nor text")
    return tuple(kinds), tuple(usable_texts), tuple(usable_images)


def _drop(group: Group, position: int, why: str, dropped: Findings) -> None:
    dropped.add(group.key, DROPPED_IMAGE, f"position {position}: {why}; the document does without it")


def _named_image(group: Group, name: str) -> ImagePart:
    """Find the image that a document names: by its full name, its name in the document's folder, or what follows its
    key."""
    extension = _extension_of(group, name)
    if extension is None:
        raise SampleError("missing_image", f"the document names {name!r}, which the tar does not hold under its key")
    return _image(group.media[extension])


def _extension_of(group: Group, name: str) -> str | None:
    """The extension of the image, clip or video that a document names; None where the sample has none of that name."""
    return next((one for one in (_member_of(group, name), name.lower()) if one in group.media), None)


def _member_of(group: Group, name: str) -> str:
    """The extension of a member of a group that a document names; nothing where the name is none of its names."""
    keys = (group.key, group.key.rpartition("/")[2])
    return next((name[len(key) + 1 :].lower() for key in keys if name.startswith(f"{key}.")), "")
