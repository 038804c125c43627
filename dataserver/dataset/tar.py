"""Sequential reader of one tar that hashes every byte on the way: members with offsets and contents, in one pass.

Tars are hostile: nothing is allocated by a declared size before it is compared with a limit and with what the file
still holds. Formats: v7, ustar, GNU (long names, base-256 sizes) and PAX (path, size). Only regular files are members.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import BinaryIO

from dataserver.dataset.errors import Oddities, TarError

BLOCK = 512
READ_CHUNK_BYTES = 1 << 20
MAX_MEMBER_BYTES = 64 << 20
"""A larger member is skipped unread (but hashed)."""

MAX_EXTENSION_BYTES = 64 << 10
"""Limit of a PAX or GNU long-name header; webdataset's are about 20 bytes."""

MAX_NAME_CHARS = 1024

REGULAR = {b"0", b"\0", b"7"}
DIRECTORY = b"5"
WITHOUT_DATA = {b"1", b"2", b"3", b"4", b"5", b"6"}


@dataclass(frozen=True, slots=True)
class Member:
    """One regular file of a tar; `content` is None where `length` exceeds `MAX_MEMBER_BYTES`."""

    name: str
    offset: int
    length: int
    content: bytes | None


@dataclass(frozen=True, slots=True)
class _Header:
    name: bytes
    size: int
    kind: bytes


class HashingReader:
    """Sequential reader of a file of known size that feeds each byte to sha256 once."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file = file
        self._hash = hashlib.sha256()
        self.size = size
        self.position = 0

    @property
    def remaining(self) -> int:
        """Bytes between the position and the size that the file had when it was opened."""
        return self.size - self.position

    def read(self, length: int) -> bytes:
        """Read `length` bytes; fewer only where the file ends."""
        data = self._file.read(min(length, self.remaining))
        self._hash.update(data)
        self.position += len(data)
        return data

    def skip(self, length: int) -> bool:
        """Hash `length` bytes without keeping them; say whether any of them is not zero."""
        end = min(self.position + length, self.size)
        nonzero = False
        while self.position < end:
            data = self.read(min(READ_CHUNK_BYTES, end - self.position))
            if not data:
                break
            nonzero = nonzero or data.count(0) != len(data)
        return nonzero

    def hexdigest(self) -> str:
        """Return the sha256 of everything read so far."""
        return self._hash.hexdigest()


def scan_members(reader: HashingReader, oddities: Oddities) -> Iterator[Member]:
    """Yield the regular files of a tar in order; members that cannot be used are counted in `oddities`.

    Raises:
        TarError: the tar ends too early or a header is damaged; the members before it were yielded.
    """
    path: bytes | None = None
    size: int | None = None
    trusted = True
    while (header := _read_header(reader)) is not None:
        if header.kind in {b"x", b"L", b"g", b"K"}:
            extension = _read_extension(reader, header, oddities)
            if extension is None:
                trusted = False
            elif header.kind == b"L":
                path = extension.rstrip(b"\0")
            elif header.kind == b"x":
                records = _parse_pax(extension, reader.position)
                path = records.get(b"path", path)
                size = _pax_size(records[b"size"]) if b"size" in records else size
            continue
        member = _read_member(reader, path or header.name, header, size, trusted, oddities)
        path, size, trusted = None, None, True
        if member is not None:
            yield member
    if reader.skip(reader.remaining):
        oddities.add("", "trailing_data", "bytes after the end-of-archive marker are ignored")


def _read_header(reader: HashingReader) -> _Header | None:
    """Read one header block; None at the end-of-archive marker."""
    start = reader.position
    block = reader.read(BLOCK)
    if len(block) < BLOCK:
        raise TarError("cut_tar", f"the file ends at byte {reader.position} without an end-of-archive marker")
    if block.count(0) == BLOCK:
        return None
    total = sum(block[:148]) + 8 * 32 + sum(block[156:])
    if _octal(block[148:156], start) != total:
        raise TarError("corrupt_tar", f"the header at byte {start} has a wrong checksum")
    name = block[:100].rstrip(b"\0").split(b"\0", 1)[0]
    prefix = block[345:500].split(b"\0", 1)[0]
    if block[257:263] == b"ustar\0" and prefix:
        name = prefix + b"/" + name
    return _Header(name, _octal(block[124:136], start), block[156:157])


def _octal(field: bytes, start: int) -> int:
    """Parse a number field: octal digits, or GNU base-256 where the top bit is set."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    digits = field.strip(b" \0")
    if digits.strip(b"01234567"):
        raise TarError("corrupt_tar", f"the header at byte {start} has a malformed number")
    return int(digits or b"0", 8)


def _check_size(reader: HashingReader, size: int, what: str) -> None:
    if size > reader.remaining:
        raise TarError(
            "cut_tar", f"{what} declares {size} bytes at {reader.position}, the file holds {reader.remaining} more"
        )


def _padding(size: int) -> int:
    return -size % BLOCK


def _read_extension(reader: HashingReader, header: _Header, oddities: Oddities) -> bytes | None:
    """Read the data of an extension header; None where it is over the limit."""
    _check_size(reader, header.size, "an extension header")
    if header.size > MAX_EXTENSION_BYTES:
        reader.skip(header.size + _padding(header.size))
        oddities.add(
            "", "extension_too_large", f"{header.size} bytes before {reader.position}, limit {MAX_EXTENSION_BYTES}"
        )
        return None
    data = reader.read(header.size)
    reader.skip(_padding(header.size))
    return data


def _parse_pax(data: bytes, position: int) -> dict[bytes, bytes]:
    """Parse PAX records `LENGTH KEY=VALUE\\n`; the length counts the whole record."""
    records: dict[bytes, bytes] = {}
    start = 0
    while start < len(data) and data[start] != 0:
        space = data.find(b" ", start, start + 8)
        length = int(data[start:space]) if space > start and data[start:space].isdigit() else 0
        record = data[space + 1 : start + length]
        key, equals, value = record.partition(b"=")
        if length <= space - start + 1 or start + length > len(data) or not equals or value[-1:] != b"\n":
            raise TarError("corrupt_tar", f"the PAX header before byte {position} is malformed")
        records[key] = value[:-1]
        start += length
    return records


def _pax_size(value: bytes) -> int:
    if not value.isdigit() or len(value) > 20:
        raise TarError("corrupt_tar", f"a PAX header declares the size {value[:20]!r}")
    return int(value)


def _read_member(
    reader: HashingReader, raw_name: bytes, header: _Header, size: int | None, trusted: bool, oddities: Oddities
) -> Member | None:
    """Read one member's data; None for directories and for what cannot be used."""
    if header.kind in WITHOUT_DATA:
        if header.kind != DIRECTORY:
            oddities.add(_show(raw_name), "special_member", f"type {header.kind!r} is not a regular file")
        return None
    length = header.size if size is None else size
    _check_size(reader, length, _show(raw_name))
    name = _safe_name(raw_name, oddities) if trusted else None
    if header.kind not in REGULAR:
        oddities.add(_show(raw_name), "special_member", f"type {header.kind!r} is not a regular file")
        name = None
    elif name is not None and name.endswith("/"):
        name = None  # a directory as v7 writes it
    offset = reader.position
    if name is None or length > MAX_MEMBER_BYTES:
        reader.skip(length)
        content = None
    else:
        content = reader.read(length)
        if len(content) < length:
            raise TarError("cut_tar", f"{name} ends after {len(content)} of {length} bytes")
    reader.skip(_padding(length))
    return None if name is None else Member(name, offset, length, content)


def _safe_name(raw: bytes, oddities: Oddities) -> str | None:
    """Decode a member name; None (and an oddity) where it is not UTF-8, too long, or leaves the tar."""
    try:
        name = raw.decode()
    except UnicodeDecodeError:
        oddities.add(_show(raw), "not_utf8", "the member name is not UTF-8")
        return None
    name = name.removeprefix("./")
    if len(name) > MAX_NAME_CHARS or not name.isprintable() or name.startswith("/"):
        oddities.add(name, "unsafe_name", "the member name is absolute, too long or has control characters")
        return None
    if ".." in PurePosixPath(name).parts:
        oddities.add(name, "unsafe_name", "the member name has a '..' part")
        return None
    return name


def _show(raw: bytes) -> str:
    return raw[:MAX_NAME_CHARS].decode("utf-8", "backslashreplace")
