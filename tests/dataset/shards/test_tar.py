"""The tar reader against the standard library's, and against tars that are cut, absurd or hostile."""

import bz2
import gzip
import hashlib
import io
import lzma
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shards import write_pairs

from dataserver.dataset.errors import Findings, TarError
from dataserver.dataset.shards.hashing import READ_CHUNK_BYTES, HashingReader
from dataserver.dataset.shards.members import MAX_MEMBER_BYTES, Member
from dataserver.dataset.shards.tar import (
    BLOCK,
    MAX_EXTENSION_BYTES,
    MAX_NAME_CHARS,
    SPARSE_CONTINUES,
    sample_key,
    scan_members,
    show,
    split_name,
)

FORMATS = (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT)


def make_tar(members: list[tuple[str, bytes]], tar_format: int = tarfile.PAX_FORMAT) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tar_format) as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def scan(data: bytes) -> tuple[list[Member], Findings, TarError | None, HashingReader]:
    findings = Findings()
    reader = HashingReader(io.BytesIO(data), len(data))
    members: list[Member] = []
    error = None
    try:
        for member in scan_members(reader, findings):
            members.append(member)
    except TarError as caught:
        error = caught
    reader.skip(reader.remaining)
    return members, findings, error, reader


names = st.text(st.characters(codec="utf-8", categories=("L", "N")), min_size=1, max_size=150)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(names, st.binary(max_size=1500)), max_size=6), st.sampled_from(FORMATS[:2]))
def test_agrees_with_tarfile(members: list[tuple[str, bytes]], tar_format: int) -> None:
    data = make_tar(members, tar_format)
    found, findings, error, reader = scan(data)
    assert error is None
    assert not findings.counts
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        expected = [(info.name, info.offset_data, info.size) for info in tar]
    assert [(m.name, m.offset, m.length) for m in found] == expected
    assert [m.content for m in found] == [content for _, content in members]
    assert all(data[m.offset : m.offset + m.length] == m.content for m in found)
    assert reader.hexdigest() == hashlib.sha256(data).hexdigest()


def test_ustar_prefix_and_dot_slash() -> None:
    long = "d" * 90 + "/" + "n" * 90 + ".txt"
    found, _, _, _ = scan(make_tar([(long, b"a"), ("./0.txt", b"b")], tarfile.USTAR_FORMAT))
    assert [m.name for m in found] == [long, "0.txt"]


def test_a_cut_at_any_byte_keeps_the_complete_members(tmp_path: Path) -> None:
    data = make_tar([(f"{i}.txt", bytes([i]) * 300) for i in range(3)], tarfile.USTAR_FORMAT)
    ends = [(i + 1) * 2 * BLOCK for i in range(3)]
    for cut in [*range(0, len(data), 97), *ends, ends[2] + BLOCK - 1]:
        found, _, error, reader = scan(data[:cut])
        whole = sum(cut >= 2 * BLOCK * i + BLOCK + 300 for i in range(3))
        assert len(found) == whole
        assert (error is None) == (cut > ends[2]), "one byte of the end-of-archive marker is enough"
        assert error is None or error.kind == "cut_tar"
        assert reader.hexdigest() == hashlib.sha256(data[:cut]).hexdigest()


def patched(header: bytes, **fields: bytes) -> bytes:
    """Replace fields of a header block and mend its checksum."""
    places = {"name": (0, 100), "size": (124, 12), "type": (156, 1)}
    block = bytearray(header)
    for field, value in fields.items():
        start, length = places[field]
        block[start : start + length] = value.ljust(length, b"\0")
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def header_block() -> bytes:
    return make_tar([("0.txt", b"")], tarfile.USTAR_FORMAT)[:BLOCK]


@pytest.mark.parametrize("size", [b"77777777777", b"\x80" + b"\xff" * 11])
def test_absurd_sizes_end_the_scan_without_allocating(size: bytes) -> None:
    found, _, error, _ = scan(patched(header_block(), size=size) + bytes(4 * BLOCK))
    assert not found
    assert error is not None
    assert error.kind == "cut_tar"


def test_absurd_pax_size() -> None:
    record = b"29 size=99999999999999999999\n"
    pax = patched(header_block(), type=b"x", size=b"%o" % len(record)) + record.ljust(BLOCK, b"\0")
    _, _, error, _ = scan(pax + header_block() + bytes(2 * BLOCK))
    assert error is not None
    assert error.kind == "cut_tar"


@pytest.mark.parametrize("data", [b"9 a=b\n", b"0 a=b\n", b"999 path=x\n", b"12 size=-55\n", b"abc", b"6 ab\n\n"])
def test_malformed_pax_records(data: bytes) -> None:
    pax = patched(header_block(), type=b"x", size=b"%o" % len(data)) + data.ljust(BLOCK, b"\0")
    found, _, error, _ = scan(pax + header_block() + bytes(2 * BLOCK))
    assert not found
    assert error is not None
    assert error.kind == "corrupt_tar"


def test_pax_bomb_costs_only_its_member() -> None:
    size = MAX_EXTENSION_BYTES + BLOCK
    bomb = patched(header_block(), type=b"x", size=b"%o" % size) + b"1" * size
    good = make_tar([("1.txt", b"good")], tarfile.USTAR_FORMAT)
    found, findings, error, _ = scan(bomb + header_block() + good)
    assert [m.name for m in found] == ["1.txt"]
    assert error is None
    assert findings.counts == {"extension_too_large": 1}


def test_links_devices_and_unsafe_names_are_counted() -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, kind in [("0.jpg", tarfile.SYMTYPE), ("1.jpg", tarfile.LNKTYPE), ("2.jpg", tarfile.FIFOTYPE)]:
            info = tarfile.TarInfo(name)
            info.type = kind
            info.linkname = "/etc/passwd"
            tar.addfile(info)
        folder = tarfile.TarInfo("folder")
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
        for name in ["../3.txt", "a/../4.txt", "/5.txt", "6\n.txt", "7.txt"]:
            tar.addfile(tarfile.TarInfo(name), io.BytesIO())
    found, findings, error, _ = scan(buffer.getvalue())
    assert [(m.name, m.special) for m in found] == [("0.jpg", True), ("1.jpg", True), ("2.jpg", True), ("7.txt", False)]
    assert error is None
    assert findings.counts == {"special_member": 3, "unsafe_name": 4}


def test_a_name_that_is_not_utf8() -> None:
    data = patched(header_block(), name=b"\xff\xfe.txt") + make_tar([("1.txt", b"x")])
    found, findings, _, _ = scan(data)
    assert [m.name for m in found] == ["1.txt"]
    assert findings.counts == {"unsafe_name": 1}


def test_sparse_members_are_no_files(tmp_path: Path) -> None:
    sparse = patched(header_block(), type=b"S", size=b"%o" % 100)
    continued = sparse[:482] + b"\1" + sparse[483:]
    blocks = patched(continued) + b"1".ljust(504, b"\0") + b"\1".ljust(8, b"\0") + bytes(BLOCK)
    records = b"22 GNU.sparse.major=1\n25 GNU.sparse.name=0.jpg\n"
    pax = patched(header_block(), type=b"x", size=b"%o" % len(records)) + records.ljust(BLOCK, b"\0")
    mapped = patched(header_block(), name=b"GNUSparseFile.1/0.jpg", size=b"%o" % BLOCK) + bytes(BLOCK)
    data = blocks + b"x" * 100 + bytes(BLOCK - 100) + pax + mapped + make_tar([("1.txt", b"x")])
    found, findings, error, _ = scan(data)
    assert error is None
    assert [(m.name, m.content, m.special) for m in found] == [
        ("0.txt", None, True),
        ("0.jpg", None, True),
        ("1.txt", b"x", False),
    ]
    assert [(o.key, o.kind) for o in findings.details] == [("0", "special_member"), ("0", "special_member")]


def test_a_member_over_the_limit_is_skipped_and_hashed(tmp_path: Path) -> None:
    path = tmp_path / "big.tar"
    size = MAX_MEMBER_BYTES + 1
    with path.open("wb") as file:
        file.write(patched(header_block(), size=b"%011o" % size))
        file.seek(-(-size // BLOCK) * BLOCK, io.SEEK_CUR)
        file.write(make_tar([("1.txt", b"x")]))
    findings = Findings()
    with path.open("rb") as file:
        reader = HashingReader(file, path.stat().st_size)
        members = list(scan_members(reader, findings))
        file.seek(0)
        assert reader.hexdigest() == hashlib.file_digest(file, "sha256").hexdigest()
    assert [(m.name, m.length, m.content) for m in members] == [("0.txt", size, None), ("1.txt", 1, b"x")]


def test_what_follows_the_end_of_a_tar_is_read_on_or_counted() -> None:
    data = make_tar([("0.txt", b"x")])
    found, findings, _, reader = scan(data + data)
    assert [m.name for m in found] == ["0.txt", "0.txt"]
    assert [(data + data)[m.offset : m.offset + m.length] for m in found] == [b"x", b"x"]
    assert not findings.counts
    assert reader.hexdigest() == hashlib.sha256(data + data).hexdigest()
    found, findings, _, reader = scan(data + b"no tar" + data)
    assert [m.name for m in found] == ["0.txt"]
    assert findings.counts == {"trailing_data": 1}
    assert reader.hexdigest() == hashlib.sha256(data + b"no tar" + data).hexdigest()


@pytest.mark.parametrize("gap", [0, 1, 20, READ_CHUNK_BYTES // BLOCK - 3, 2 * READ_CHUNK_BYTES // BLOCK])
def test_tars_put_together_are_read_on_whatever_lies_between(gap: int) -> None:
    data = make_tar([("0.txt", b"x"), ("1.txt", b"y" * 700)])
    whole = data + bytes(gap * BLOCK) + data + bytes(3 * BLOCK)
    found, findings, _, reader = scan(whole)
    assert [m.name for m in found] == ["0.txt", "1.txt"] * 2
    assert [whole[m.offset : m.offset + m.length] for m in found] == [b"x", b"y" * 700] * 2
    assert not findings.counts
    assert reader.hexdigest() == hashlib.sha256(whole).hexdigest()


@pytest.mark.parametrize(
    ("compress", "command"), [(gzip.compress, "gunzip"), (bz2.compress, "bunzip2"), (lzma.compress, "xz -d")]
)
def test_compressed_tars_say_how_to_unpack_them(compress: Callable[[bytes], bytes], command: str) -> None:
    noise = np.random.default_rng(0).bytes(4000)
    _, _, error, _ = scan(compress(make_tar([("0.txt", noise)])))
    assert error is not None
    assert (error.kind, command in error.detail) == ("corrupt_tar", True)


@pytest.fixture(scope="module")
def small_tar(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = write_pairs(tmp_path_factory.mktemp("fuzz"), 3, 3, median_size=24)
    return (folder / "00000.tar").read_bytes()


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_damage_never_raises_anything_else(small_tar: bytes, data: st.DataObject) -> None:
    damaged = bytearray(small_tar)
    for _ in range(data.draw(st.integers(1, 8))):
        block = data.draw(st.integers(0, len(damaged) // BLOCK - 1)) * BLOCK
        start = block + data.draw(st.integers(0, BLOCK - 1))
        damaged[start : start + 4] = data.draw(st.binary(min_size=4, max_size=4))
        if data.draw(st.booleans()):
            damaged[block : block + BLOCK] = patched(bytes(damaged[block : block + BLOCK]))
    cut = bytes(damaged[: data.draw(st.integers(0, len(damaged)))])
    _, _, error, reader = scan(cut)
    assert error is None or error.kind in {"cut_tar", "corrupt_tar"}
    assert reader.hexdigest() == hashlib.sha256(cut).hexdigest()


def extension(kind: bytes, data: bytes) -> bytes:
    """An extension header with its data."""
    return patched(header_block(), type=kind, size=b"%o" % len(data)) + data + bytes(-len(data) % BLOCK)


def regular(name: bytes, content: bytes, **fields: bytes) -> bytes:
    """A member with its data."""
    header = patched(header_block(), **{"name": name, "size": b"%o" % len(content), **fields})
    return header + content + bytes(-len(content) % BLOCK)


def at(data: bytes, start: int, value: bytes) -> bytes:
    """The same member with other bytes in its header from `start` on."""
    return patched(data[:start] + value + data[start + len(value) : BLOCK]) + data[BLOCK:]


END = bytes(2 * BLOCK)
Fault = tuple[str, str, bytes | None]


def test_what_is_read_of_odd_tars() -> None:
    """Names, places and contents, each limit on both sides, and the words of every finding."""
    pairs = b"11 aa=bbbb\n6 a=b\n"
    prefixed = at(regular(b"n" * 100, b"x"), 345, b"p" * 155 + b"q")
    gnu = at(regular(b"0.txt", b"x"), 257, b"ustar  \0" + bytes(80) + b"\xff" * 155)
    longest, longer = b"l" * 1020 + b".txt", b"l" * 1021 + b".txt"
    large = b"%d comment=" % (64 << 10) + b"c" * ((64 << 10) - 15) + b"\n"
    cases: list[tuple[bytes, list[tuple[str, int, bytes | None]], list[tuple[str, str, str]]]] = [
        (prefixed, [("p" * 155 + "/" + "n" * 100, 512, b"x")], []),
        (gnu, [("0.txt", 512, b"x")], []),
        (regular(b"0.txt", b"x" * 512), [("0.txt", 512, b"x" * 512)], []),
        (regular(b"0.txt", b"ab", size=b"\x80" + bytes(10) + b"\2"), [("0.txt", 512, b"ab")], []),
        (regular(b"0.txt", b"ab", size=b" 2 "), [("0.txt", 512, b"ab")], []),
        (regular(b"0.txt", b"", size=b""), [("0.txt", 512, b"")], []),
        (
            regular(b"0.txt", b"a", type=b"\0") + regular(b"1", b"b", type=b"7"),
            [("0.txt", 512, b"a"), ("1", 1536, b"b")],
            [],
        ),
        (regular(b"0/", b""), [], []),
        (regular(b"0", b"", type=b"5", size=b"777"), [], []),
        *(
            (
                regular(b"0.a", b"", type=kind, size=b"777"),
                [("0.a", 512, None)],
                [("0", "special_member", "0.a is no regular file")],
            )
            for kind in (b"1", b"2", b"3", b"4", b"6")
        ),
        (
            regular(b"0.a", b"abc", type=b"V"),
            [("0.a", 512, None)],
            [("0", "special_member", "0.a is no regular file")],
        ),
        (
            regular(b"../0.a", b"", type=b"2"),
            [],
            [
                ("../0", "special_member", "../0.a is no regular file"),
                ("", "unsafe_name", "../0.a: the member name has a '..' part"),
            ],
        ),
        (extension(b"g", b"9 path=x\n") + regular(b"0.a", b"x"), [("0.a", 1536, b"x")], []),
        (extension(b"K", b"elsewhere\0") + regular(b"0.a", b"x"), [("0.a", 1536, b"x")], []),
        (extension(b"L", longest + b"\0") + regular(b"0", b"x"), [(longest.decode(), 2560, b"x")], []),
        (extension(b"L", longer + b"\0") + regular(b"0", b"x"), [], [("", "unsafe_name", longer.decode()[:200])]),
        (regular(b"/0", b""), [], [("", "unsafe_name", "/0: the member name is absolute")]),
        (regular(b"a/../0", b""), [], [("", "unsafe_name", "a/../0: the member name has a '..' part")]),
        (regular(b"a..0", b""), [("a..0", 512, b"")], []),
        (regular(b"\xff", b""), [], [("", "unsafe_name", "\\xff: the member name is not UTF-8")]),
        (extension(b"x", pairs) + regular(b"0", b"x"), [("0", 1536, b"x")], []),
        (extension(b"x", b"0000012 a=b\n\0" + b"?" * 9) + regular(b"0", b"x"), [("0", 1536, b"x")], []),
        (extension(b"x", b"4 =\n9 size=2\n") + regular(b"0", b"ab", size=b"7"), [("0", 1536, b"ab")], []),
        (
            extension(b"x", b"9 size=2\n") + extension(b"x", b"9 path=n\n") + regular(b"0", b"ab", size=b"7"),
            [("n", 2560, b"ab")],
            [],
        ),
        (
            extension(b"x", b"21 GNU.sparse.major=\n9 path=n\n") + regular(b"0.a", b"ab"),
            [("n", 1536, None)],
            [("", "special_member", "n is no regular file")],
        ),
        (extension(b"x", large) + regular(b"0", b"x"), [("0", 66560, b"x")], []),
        (
            extension(b"x", large + b"\0") + regular(b"0.a", b"x") + regular(b"1", b"y"),
            [("1", 68096, b"y")],
            [("", "extension_too_large", "65537 bytes before 66560, limit 65536; its member is left out")],
        ),
    ]
    for data, members, findings in cases:
        found, counted, error, _ = scan(data + END)
        assert error is None
        assert [(m.name, m.offset, m.content) for m in found] == members
        assert all(m.length == len(m.content) for m in found if not m.special)
        assert [m.special for m in found] == [content is None for _, _, content in members]
        assert [(o.key, o.kind, o.detail) for o in counted.details] == findings
    assert (BLOCK, READ_CHUNK_BYTES, MAX_MEMBER_BYTES, MAX_EXTENSION_BYTES) == (512, 1 << 20, 64 << 20, 64 << 10)
    assert (MAX_NAME_CHARS, SPARSE_CONTINUES) == (1024, (482, 504))
    assert (show(b"a" * 1025), show(b"\xff.a"), sample_key("./d.e/k.b.A")) == ("a" * 1024, "\\xff.a", "d.e/k")
    assert [split_name(name) for name in ("d/k.B.a", ".a", "k", "d.e/k")] == [("d/k", "b.a"), None, None, None]


def test_what_is_said_of_tars_that_cannot_be_read() -> None:
    whole, malformed = regular(b"0.txt", b"x"), "the PAX header before byte 1024 is malformed"
    wrong = "has a malformed size or a wrong checksum"
    named = extension(b"L", b"long.txt\0")
    records = (b"00000013 a=b\n", b"7 a=b\n", b"6 a=bc", b" 6 a=b\n", b"3 =\n", b"6 ab\n\n", b"11 aa=bbbb\n2 a=b\n")
    records += (b"6 a=b\nzzz", b"6 a=b\n\n", b"7 aa=b\n\n", b"6 a=b\n 6 a=b\n")
    cases: list[tuple[bytes, int, Fault]] = [
        (b"", 0, ("cut_tar", "the file ends at byte 0 without an end-of-archive marker", None)),
        (whole, 1, ("cut_tar", "the file ends at byte 1024 without an end-of-archive marker", None)),
        (whole[:200], 0, ("cut_tar", "the file ends at byte 200, within a header", None)),
        (b"y" + whole[1:], 0, ("corrupt_tar", f"the header at byte 0 {wrong}", None)),
        (whole + b"y" + whole[1:], 1, ("corrupt_tar", f"the header at byte 1024 {wrong}", None)),
        (regular(b"0.txt", b"", size=b"9"), 0, ("corrupt_tar", f"the header at byte 0 {wrong}", None)),
        (regular(b"0.txt", b"", size=b"\xff" * 12), 0, ("corrupt_tar", f"the header at byte 0 {wrong}", None)),
        (named + b"y" * BLOCK, 0, ("corrupt_tar", f"the header at byte 1024 {wrong}", b"long.txt")),
        (named, 0, ("cut_tar", "the file ends at byte 1024 without an end-of-archive marker", b"long.txt")),
        (whole[:513], 1, ("cut_tar", "the file ends at byte 513 without an end-of-archive marker", None)),
        (whole[:512], 0, ("cut_tar", "0.txt declares 1 bytes at 512, the file holds 0 more", b"0.txt")),
        (
            regular(b"0.txt", b"y", size=b"\x80\1" + bytes(10)),
            0,
            ("cut_tar", f"0.txt declares {1 << 80} bytes at 512, the file holds 512 more", b"0.txt"),
        ),
        (
            named + extension(b"x", b"6 a=b\n")[:515],
            0,
            ("cut_tar", "an extension header declares 6 bytes at 1536, the file holds 3 more", b"long.txt"),
        ),
        *((extension(b"x", data) + END, 0, ("corrupt_tar", malformed, None)) for data in records),
        (
            extension(b"x", b"30 size=" + b"1234567890" * 2 + b"1\n"),
            0,
            ("corrupt_tar", "a PAX header declares the size b'12345678901234567890'", None),
        ),
        (extension(b"x", b"9 size=x\n"), 0, ("corrupt_tar", "a PAX header declares the size b'x'", None)),
        (
            extension(b"x", b"29 size=" + b"99999999999999999999\n") + regular(b"0.a", b"x") + END,
            0,
            ("cut_tar", f"0.a declares {10**20 - 1} bytes at 1536, the file holds 1536 more", b"0.a"),
        ),
    ]
    for data, count, fault in cases:
        found, _, error, _ = scan(data)
        assert error is not None
        assert len(found) == count, fault
        assert (error.kind, error.detail, error.member) == fault


def test_a_file_that_shrinks_while_it_is_read() -> None:
    data = regular(b"0.txt", b"x" * 100)
    with pytest.raises(TarError, match=r"0\.txt ends after 99 of 100 bytes"):
        list(scan_members(HashingReader(io.BytesIO(data[:611]), len(data)), Findings()))
    reader = HashingReader(io.BytesIO(bytes(10)), 100)
    assert not reader.skip(100)
    assert (reader.position, reader.remaining) == (10, 90)


def test_members_at_the_limit_are_kept_and_bytes_after_the_end_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dataserver.dataset.shards.tar.MAX_MEMBER_BYTES", 600)
    found, _, _, _ = scan(regular(b"0", b"x" * 600) + regular(b"1", b"y" * 601) + regular(b"2", b"z") + END)
    assert [(m.name, m.length, m.content) for m in found] == [("0", 600, b"x" * 600), ("1", 601, None), ("2", 1, b"z")]
    for place in (0, READ_CHUNK_BYTES - 1, READ_CHUNK_BYTES, READ_CHUNK_BYTES + 5):
        after = bytearray(READ_CHUNK_BYTES + 6)
        _, clean, _, _ = scan(bytes(BLOCK) + after)
        assert not clean.details
        after[place] = 1
        _, findings, _, _ = scan(bytes(BLOCK) + after)
        start = BLOCK + place - place % BLOCK
        detail = f"{BLOCK + len(after) - start} bytes after an end-of-archive marker, from byte {start}, are no tar"
        assert [(o.key, o.kind, o.detail) for o in findings.details] == [("", "trailing_data", detail)]
