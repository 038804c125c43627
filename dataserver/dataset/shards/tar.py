"""Members of one tar with offsets and contents, in the one pass that hashes every byte.

Tars are hostile: nothing is allocated by a declared size before it is compared with a limit and with what the file
still holds. Formats: v7, ustar, GNU (long names, base-256 sizes) and PAX (path, size). Links, devices and sparse files
are members without content; folders are none.
"""

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import PurePosixPath
from typing import NamedTuple

from dataserver.dataset.errors import Findings, TarError, is_safe
from dataserver.dataset.shards.hashing import HashingReader
from dataserver.dataset.shards.members import MAX_MEMBER_BYTES, Member, Split

BLOCK = 512

MAX_EXTENSION_BYTES = 64 << 10
"""Limit of a PAX or GNU long-name header; webdataset's are about 20 bytes."""

MAX_NAME_CHARS = 1024

REGULAR = {b"0", b"\0", b"7"}
EXTENSIONS = {b"x", b"g", b"L", b"K"}
DIRECTORY = b"5"
SPARSE = b"S"
SPARSE_RECORDS = b"GNU.sparse."
SPARSE_CONTINUES = 482, 504
"""Where the header of a GNU sparse file, and each block that continues it, says that another block follows."""
COMPRESSIONS = {
    b"\x1f\x8b": ("gzip", "gunzip < OLD > NEW"),
    b"\x28\xb5\x2f\xfd": ("Zstandard", "zstd -d < OLD > NEW"),
    b"BZh": ("bzip2", "bunzip2 < OLD > NEW"),
    b"\xfd7zXZ\0": ("xz", "xz -d < OLD > NEW"),
    b"\x04\x22\x4d\x18": ("LZ4", "lz4 -d < OLD > NEW"),
    b"7z\xbc\xaf\x27\x1c": ("7-Zip", "7z x OLD, then make a tar of the files with tar --sort=name"),
    b"Rar!\x1a\x07": ("RAR", "unrar x OLD, then make a tar of the files with tar --sort=name"),
    b"PK\x03\x04": ("zip", "unzip it, then make a tar of the files with tar --sort=name"),
}
"""By how compressed files begin: what they are compressed with, and the command that helps."""
OTHER_FILES = (
    (b"version https://git-lfs.github.com/spec/", "a pointer of Git LFS: git lfs pull brings the tar"),
    (b"PAR1", "a Parquet file; call it NAME.parquet"),
    (b"<!doctype html", "a page of a web server and no tar; download it again"),
    (b"<html", "a page of a web server and no tar; download it again"),
    (b"<?xml", "XML, such as the error of a store, and no tar; download it again"),
)
"""How other files begin in lower case, and what they are."""
WITHOUT_DATA = {b"1", b"2", b"3", b"4", b"5", b"6"}


class _Header(NamedTuple):
    name: bytes
    size: int
    kind: bytes


@dataclass(slots=True)
class _Extensions:
    """What extension headers say of the member that follows them."""

    path: bytes | None = None
    size: int | None = None
    sparse: bool = False
    known: bool = True
    """Whether all extension headers were read. Where one was too large, the member's name may be another one."""


def scan_members(reader: HashingReader, findings: Findings, split: Split | None = None) -> Iterator[Member]:
    """Yield the members of a tar in order; those that cannot be used, or not as files, are counted in `findings`.

    Args:
        reader: of the tar, from its beginning.
        findings: see above.
        split: splits a member name into key and extension; by default at the first dot.

    Raises:
        TarError: the tar ends too early or a header is damaged; the members before it were yielded.
    """
    split = split or split_name
    yield from _scan_archive(reader, findings, split)
    while reader.skip_zeros(BLOCK):  # tars put together with `cat` are read on
        start = reader.position
        block = reader.peek(BLOCK)
        if _parse_header(block, block.count(0)) is None:
            num_bytes = reader.remaining
            reader.skip(num_bytes)
            findings.add(
                "", "trailing_data", f"{num_bytes} bytes after an end-of-archive marker, from byte {start}, are no tar"
            )
            return
        yield from _scan_archive(reader, findings, split)


def _scan_archive(reader: HashingReader, findings: Findings, split: Split) -> Iterator[Member]:
    """Yield the members up to the next end-of-archive marker."""
    extensions = _Extensions()
    while (header := _read_header(reader, extensions.path)) is not None:
        if header.kind in EXTENSIONS:
            _read_extension(reader, header, extensions, findings)
            continue
        member = _read_member(reader, header, extensions, findings, split)
        extensions = _Extensions()
        if member is not None:
            yield member


def _read_header(reader: HashingReader, path: bytes | None) -> _Header | None:
    """Read one header block; None at the end-of-archive marker.

    A block that the end of the file cuts is filled up with zeros: headers end in zeros, so that the checksum often
    still proves it whole.
    """
    found = reader.read(BLOCK)
    block = found if len(found) == BLOCK else found.ljust(BLOCK, b"\0")
    zeros = block.count(0)
    if zeros == BLOCK and found:
        return None
    header = _parse_header(block, zeros)
    if header is None:
        start = reader.position - len(found)
        if start == 0 and (what := _other_file(found)):
            raise TarError("corrupt_tar", what, path)
        if not found:
            raise TarError("cut_tar", f"the file ends at byte {start} without an end-of-archive marker", path)
        if len(found) < BLOCK:
            raise TarError("cut_tar", f"the file ends at byte {reader.position}, within a header", path)
        raise TarError("corrupt_tar", f"the header at byte {start} has a malformed size or a wrong checksum", path)
    continues = header.kind == SPARSE and block[SPARSE_CONTINUES[0]] != 0
    while continues:
        continues = reader.read(BLOCK).ljust(BLOCK, b"\0")[SPARSE_CONTINUES[1]] != 0
    return header


def _parse_header(block: bytes, zeros: int) -> _Header | None:
    """Parse a header block with so many zeros; None where it is short, all zeros, or has a wrong size or checksum."""
    if len(block) < BLOCK or zeros == BLOCK:
        return None
    stated = block[148:156]
    total = _sum(block, zeros) - sum(stated) + 8 * 32
    size = _number(block[124:136])
    if size is None or (stated != b"%06o\0 " % total and _number(stated) != total):
        return None
    name = block[:100].partition(b"\0")[0]
    if block[345] and block[257:263] == b"ustar\0":
        name = block[345:500].partition(b"\0")[0] + b"/" + name
    return _Header(name, size, block[156:157])


def _other_file(start: bytes) -> str:
    """Say what a file is that begins so, if that is known and no tar; nothing where it is not."""
    for magic, (what, command) in COMPRESSIONS.items():
        if start.startswith(magic):
            return f"the file is compressed with {what}, whatever its name says; unpack it: {command}"
    begin = start.lstrip().lower()
    return next((f"the file is {what}" for magic, what in OTHER_FILES if begin.startswith(magic.lower())), "")


def _sum(block: bytes, zeros: int) -> int:
    """The sum of all bytes of a block with so many zeros.

    Adler-32 holds it in its lower half, plus one, as long as it is below 65,521: 256 bytes cannot sum up to more.
    """
    return (zlib.adler32(block) & 0xFFFF) - 1 if zeros >= BLOCK - 256 else sum(block)


def _number(field: bytes) -> int | None:
    """Parse a number field: octal digits, or GNU base-256 where the top bit is set; None where it is neither."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    digits = field.strip(b" \0")
    return None if digits.strip(b"01234567") else int(digits or b"0", 8)


def _cut(reader: HashingReader, size: int, what: bytes, name: bytes | None) -> TarError:
    holds = f"the file holds {reader.remaining} more"
    return TarError("cut_tar", f"{show(what)} declares {size} bytes at {reader.position}, {holds}", name)


def _padding(size: int) -> int:
    return -size % BLOCK


def _read_extension(reader: HashingReader, header: _Header, extensions: _Extensions, findings: Findings) -> None:
    """Read an extension header into `extensions`."""
    if header.size > reader.remaining:
        raise _cut(reader, header.size, b"an extension header", extensions.path)
    if header.size > MAX_EXTENSION_BYTES:
        reader.skip(header.size + _padding(header.size))
        detail = f"{header.size} bytes before {reader.position}, limit {MAX_EXTENSION_BYTES}; its member is left out"
        findings.add("", "extension_too_large", detail)
        extensions.known = False
        return
    data = reader.read(header.size)
    reader.skip(_padding(header.size))
    if header.kind == b"L":
        extensions.path = data.rstrip(b"\0")
    elif header.kind == b"x":
        records = _parse_pax(data)
        if records is None:
            raise TarError("corrupt_tar", f"the PAX header before byte {reader.position} is malformed")
        extensions.sparse |= any(key.startswith(SPARSE_RECORDS) for key in records)
        extensions.path = records.get(SPARSE_RECORDS + b"name", records.get(b"path", extensions.path))
        extensions.size = _pax_size(records[b"size"]) if b"size" in records else extensions.size


@lru_cache(64)  # writers repeat theirs for every member
def _parse_pax(data: bytes) -> Mapping[bytes, bytes] | None:
    """Parse PAX records `LENGTH KEY=VALUE\\n`, whose length counts the whole record; None if malformed."""
    records: dict[bytes, bytes] = {}
    start = 0
    while start < len(data) and data[start] != 0:
        space = data.find(b" ", start, start + 8)
        length = int(data[start:space]) if space > start and data[start:space].isdigit() else 0
        record = data[space + 1 : start + length]
        key, equals, value = record.partition(b"=")
        if length <= max(space - start + 1, 0) or start + length > len(data) or not equals or value[-1:] != b"\n":
            return None
        records[key] = value[:-1]
        start += length
    return records


def _pax_size(value: bytes) -> int:
    if not value.isdigit() or len(value) > 20:
        raise TarError("corrupt_tar", f"a PAX header declares the size {value[:20]!r}")
    return int(value)


def _read_member(
    reader: HashingReader, header: _Header, extensions: _Extensions, findings: Findings, split: Split
) -> Member | None:
    """Read one member's data; None for directories and for what has no name that can be used."""
    raw_name = extensions.path or header.name
    known = raw_name if extensions.known else None
    directory = header.kind == DIRECTORY
    special = not directory and (header.kind not in REGULAR or extensions.sparse)
    length = 0
    if header.kind not in WITHOUT_DATA:
        length = header.size if extensions.size is None else extensions.size
        if length > reader.remaining:
            raise _cut(reader, length, raw_name, known)
    if special:
        findings.add(sample_key(show(raw_name), split), "special_member", f"{show(raw_name)} is no regular file")
    name = None if directory or not extensions.known else _safe_name(raw_name, findings)
    if name is not None and name.endswith("/"):
        name = None  # a directory as v7 writes it
    offset = reader.position
    if name is None or special or length > MAX_MEMBER_BYTES:
        reader.skip(length)
        content = None
    else:
        content = reader.read(length)
        if len(content) < length:
            raise TarError("cut_tar", f"{name} ends after {len(content)} of {length} bytes", known)
    reader.skip(_padding(length))
    return None if name is None else Member(name, offset, length, content, special)


def _safe_name(raw: bytes, findings: Findings) -> str | None:
    """Decode a member name; None (and a finding) where it is not UTF-8, too long, or leaves the tar."""
    try:
        name = raw.decode()
    except UnicodeDecodeError:
        findings.add("", "unsafe_name", f"{show(raw)}: the member name is not UTF-8")
        return None
    name = name.removeprefix("./")
    problem = name_problem(name)
    if problem:
        findings.add("", "unsafe_name", f"{name}: the member name {problem}")
        return None
    return name


def name_problem(name: str) -> str:
    """Say why a member name cannot be used; nothing where it can."""
    if len(name) > MAX_NAME_CHARS:
        return f"has {len(name)} characters, limit {MAX_NAME_CHARS}"
    if name.startswith("/"):
        return "is absolute"
    if not is_safe(name):
        return "has control characters or line breaks"
    return "has a '..' part" if ".." in name and ".." in PurePosixPath(name).parts else ""


def split_name(name: str) -> tuple[str, str] | None:
    """Split a member name into key and extension at the first dot of its last part; None where there is no key."""
    folder, slash, base = name.rpartition("/")
    stem, dot, extension = base.partition(".")
    return (folder + slash + stem, extension.lower()) if stem and dot else None


def split_at_last_dot(name: str) -> tuple[str, str] | None:
    """Split a member name into key and extension at the last dot of its last part; None where there is no key."""
    folder, slash, base = name.rpartition("/")
    stem, dot, extension = base.rpartition(".")
    return (folder + slash + stem, extension.lower()) if stem and dot else None


def sample_key(name: str, split: Split = split_name) -> str:
    """The key of the sample to which a member belongs; empty where it belongs to none."""
    found = split(name.removeprefix("./"))
    return found[0] if found else ""


def show(raw: bytes) -> str:
    """A member name as text, whatever its bytes are."""
    return raw[:MAX_NAME_CHARS].decode("utf-8", "backslashreplace")
