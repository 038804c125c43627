"""The objects of a manifest, one after the other: lines of JSON, or the elements of one array."""

import codecs
import json
from collections.abc import Callable, Iterator
from typing import Any, Final

from dataserver.dataset.errors import SampleError
from dataserver.dataset.kinds import BAD_JSON
from dataserver.dataset.shards.members import MAX_TEXT_BYTES, parse_document

Read = Callable[[int], bytes]
"""Reads up to so many bytes; nothing at the end."""
Found = tuple[int, dict[str, Any] | SampleError]
"""Number of an object, from 0, and the object, or why it is none."""
READ_BYTES: Final = 1 << 20
_SPACES: Final = " \t\r\n"


def json_lines(read: Read) -> Iterator[Found]:
    """Yield the object of each line that is not blank; numbers count the blank ones."""
    for number, line in enumerate(_lines(read)):
        if line is None:
            yield number, SampleError("text_too_large", f"line {number + 1} has more than {MAX_TEXT_BYTES} bytes")
        elif line.strip():
            try:
                yield number, parse_document(line.decode("utf-8-sig"))
            except SampleError as error:
                yield number, SampleError(error.kind, f"line {number + 1}: {error.detail}")
            except UnicodeDecodeError as error:
                yield number, SampleError("not_utf8", f"line {number + 1}: byte {error.start} is not UTF-8")


def _lines(read: Read) -> Iterator[bytes | None]:
    """Yield lines; None for one that is too long."""
    rest = b""
    is_long = False
    while data := read(READ_BYTES):
        *lines, last = data.split(b"\n")
        for line in lines:
            whole = rest + line
            yield None if is_long or len(whole) > MAX_TEXT_BYTES else whole
            rest, is_long = b"", False
        is_long |= len(rest) + len(last) > MAX_TEXT_BYTES
        rest = b"" if is_long else rest + last
    if rest or is_long:
        yield None if is_long else rest


def json_elements(read: Read) -> Iterator[Found]:
    """Yield the elements of one array; the rest of one that is damaged is one finding."""
    number = 0
    try:
        for text in _elements(read):
            try:
                yield number, parse_document(text)
            except SampleError as error:
                yield number, SampleError(error.kind, f"element {number}: {error.detail}")
            number += 1
    except UnicodeDecodeError as error:
        yield number, SampleError("not_utf8", f"after element {number}: {error.reason}; the rest is not read")
    except (ValueError, RecursionError) as error:
        yield number, SampleError(BAD_JSON, f"after element {number}: {error}; the rest is not read")


def _elements(read: Read) -> Iterator[str]:
    """Yield the text of each element of an array. Raises ValueError where it is none, or an element is too long."""
    decode = codecs.getincrementaldecoder("utf-8-sig")().decode
    scan = json.JSONDecoder().raw_decode
    buffer = ""
    at = 0
    is_open, is_last, has_element = False, False, False
    while True:
        while at < len(buffer) and buffer[at] in _SPACES:
            at += 1
        if at < len(buffer) and not is_open:
            if buffer[at] != "[":
                raise ValueError("it is no array of objects; JSON lines are called NAME.jsonl")
            is_open, at = True, at + 1
            continue
        if at < len(buffer) and has_element and buffer[at] == ",":
            has_element, at = False, at + 1
            continue
        if at < len(buffer) and buffer[at] == "]":
            return _check_end(buffer[at + 1 :], read, decode)
        try:
            if at < len(buffer) and not has_element:
                _, end = scan(buffer, at)
                if end < len(buffer) or is_last:  # a number may go on
                    yield buffer[at:end]
                    at, has_element = end, True
                    continue
        except ValueError as error:
            if is_last or len(buffer) - at > MAX_TEXT_BYTES:
                raise ValueError(f"no JSON, or more than {MAX_TEXT_BYTES} characters ({error})") from error
        if is_last or (has_element and at < len(buffer)):
            raise ValueError("the array does not end" if is_last else "no comma between two elements")
        data = read(max(READ_BYTES, len(buffer) - at))  # twice as much each time, so that no element is read often
        is_last = not data
        buffer, at = buffer[at:] + decode(data, final=is_last), 0


def _check_end(rest: str, read: Read, decode: Callable[[bytes], str]) -> None:
    """Raise ValueError if anything but white space follows an array."""
    while not rest.strip(_SPACES):
        data = read(READ_BYTES)
        if not data:
            return
        rest = decode(data)
    raise ValueError("more follows the end of the array")
