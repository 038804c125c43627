"""The members of a shard, and what single ones hold: texts and JSON."""

import codecs
import json
from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeVar

from dataserver.dataset.errors import SampleError
from dataserver.dataset.kinds import BAD_JSON, NEEDS_SPECIAL_MEMBER

MAX_MEMBER_BYTES: Final = 64 << 20
"""A larger member is skipped unread (but hashed)."""
MAX_TEXT_BYTES: Final = 4 << 20
"""Limit of one .txt or .json member, and so of all texts of one sample."""

BYTE_ORDER_MARK: Final = "\ufeff"
Parsed = TypeVar("Parsed")


class Member(NamedTuple):
    """One member of a shard; `content` is None where `length` exceeds `MAX_MEMBER_BYTES`, and where it is special."""

    name: str
    offset: int
    length: int
    content: bytes | None
    special: bool = False
    """Whether it is no regular file: its sample does without it, or is left out."""
    key: str | None = None
    """Key of the sample, where the format has keys; `name` is what follows it. Else it is a part of the name."""
    parsed: Any = None
    """What the member says, where the format reads that itself: an ImagePart, a dictionary, or a SampleError."""
    modality: int = 0
    """Number of the modality that it must be of, whatever its name and content say; 0 where these decide."""


Split = Callable[[str], tuple[str, str] | None]
"""Splits a member name into key and extension; None where there is no key."""


def caught(parse: Callable[[Member], Parsed], member: Member) -> Parsed | SampleError:
    """Parse a member; a failure is kept, because it matters only where the sample needs this member."""
    if member.parsed is not None:
        found: Parsed | SampleError = member.parsed
        return found
    if member.special:
        remedy = "store the file itself: tar --hard-dereference --dereference, without --sparse"
        return SampleError(NEEDS_SPECIAL_MEMBER, f"{member.name} is a link, device or sparse file; {remedy}")
    try:
        return parse(member)
    except SampleError as error:
        return SampleError(error.kind, f"{member.name}: {error.detail}")


def decode_text(member: Member) -> str:
    """Return the text of a member. Raises SampleError if it is too large or not UTF-8."""
    if member.content is None or member.length > MAX_TEXT_BYTES:
        raise SampleError("text_too_large", f"{member.length} bytes, limit {MAX_TEXT_BYTES}")
    try:
        return member.content.removeprefix(codecs.BOM_UTF8).decode()
    except UnicodeDecodeError as error:
        raise SampleError("not_utf8", f"byte {error.start} is not UTF-8") from error


def usable_caption(value: object) -> str | None:
    """Return a caption without its byte order mark; None where it is no text, blank, or too long for a member."""
    text = value.removeprefix(BYTE_ORDER_MARK) if isinstance(value, str) else ""
    return text if text.strip() and len(text) <= MAX_TEXT_BYTES else None


def parse_json(member: Member) -> dict[str, Any]:
    """Return the object that a member holds. Raises SampleError if it is none, or as `decode_text`."""
    return parse_document(decode_text(member))


def parse_document(text: str) -> dict[str, Any]:
    """Return the object that a JSON text is, after a byte order mark or not. Raises SampleError where it is none."""
    document = parse_value(text)
    if not isinstance(document, dict):
        raise SampleError(BAD_JSON, f"is a {type(document).__name__}, not an object")
    return document


def parse_value(text: str) -> Any:
    """Return what a JSON text says, after a byte order mark or not. Raises SampleError where it is none."""
    try:
        found = json.loads(text.removeprefix(BYTE_ORDER_MARK))
        if "\\u" in text:
            # JSON can escape a lone surrogate, which no UTF-8 text can hold
            json.dumps(found, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise SampleError("not_utf8", "a string holds a lone surrogate") from error
    except (ValueError, RecursionError) as error:
        raise SampleError(BAD_JSON, f"{type(error).__name__}: {error}") from error
    return found
