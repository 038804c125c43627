"""Tars written block by block, so that they can be cut and damaged at places that are known."""

import tarfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

BLOCK = 512
END = bytes(2 * BLOCK)
"""The end-of-archive marker."""

Format = Literal[0, 1, 2]
FORMATS: tuple[Format, ...] = (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT)


@dataclass(frozen=True)
class TarEntry:
    """Where a member lies in its tar, in bytes."""

    name: str
    start: int
    """Of its first header, which may be a PAX or long-name header."""
    header: int
    """Of the header that declares it."""
    data: int
    end: int
    """Of its data; padding follows."""


@dataclass
class Tar:
    """A tar in the making."""

    tar_format: Format = tarfile.PAX_FORMAT
    content: bytearray = field(default_factory=bytearray)
    places: list[TarEntry] = field(default_factory=list)

    def add(self, name: str, content: bytes, kind: bytes = tarfile.REGTYPE, **fields: object) -> TarEntry:
        """Append a member."""
        info = tarfile.TarInfo(name)
        info.type, info.size = kind, len(content)
        # a time with a fraction needs a PAX header, which webdataset writes for every member
        info.mtime = 1.5 if self.tar_format == tarfile.PAX_FORMAT else 1
        for key, value in fields.items():
            setattr(info, key, value)
        return self.add_raw(name, info.tobuf(self.tar_format, "utf-8", "surrogateescape"), content)

    def add_raw(self, name: str, headers: bytes, content: bytes) -> TarEntry:
        """Append a member with the header blocks given; data follow the last of them."""
        start = len(self.content)
        data = start + len(headers)
        self.content += headers + content + bytes(-len(content) % BLOCK)
        self.places.append(TarEntry(name, start, data - BLOCK, data, data + len(content)))
        return self.places[-1]

    def add_all(self, key: str, members: Iterable[tuple[str, bytes]]) -> None:
        """Append the members of a sample."""
        for extension, content in members:
            self.add(f"{key}.{extension}", content)

    def whole(self) -> bytes:
        """The tar with its end-of-archive marker."""
        return bytes(self.content) + END


def mended(block: bytes, **fields: tuple[int, bytes]) -> bytes:
    """A header block with other bytes at some offsets, and the checksum that they need."""
    changed = bytearray(block)
    for offset, value in fields.values():
        changed[offset : offset + len(value)] = value
    changed[148:156] = b" " * 8
    changed[148:156] = b"%06o\0 " % sum(changed)
    return bytes(changed)


def plain_header(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    """One header block."""
    info = tarfile.TarInfo(name)
    info.type, info.size = kind, size
    return info.tobuf(tarfile.USTAR_FORMAT, "utf-8", "surrogateescape")


def pax_header(records: Iterable[tuple[str, str]]) -> bytes:
    """A PAX header for the member that follows."""
    content = b"".join(_record(key, value) for key, value in records)
    return plain_header("PaxHeader", len(content), tarfile.XHDTYPE) + content + bytes(-len(content) % BLOCK)


def _record(key: str, value: str) -> bytes:
    text = f" {key}={value}\n".encode()
    length = len(text) + 1
    while length != len(text) + len(str(length)):
        length = len(text) + len(str(length))
    return str(length).encode() + text
