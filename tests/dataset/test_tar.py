"""The tar reader against the standard library's, and against tars that are cut, absurd or hostile."""

import hashlib
import io
import tarfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shards import write_pairs

from dataserver.dataset.errors import Oddities, TarError
from dataserver.dataset.tar import (
    BLOCK,
    MAX_EXTENSION_BYTES,
    MAX_MEMBER_BYTES,
    HashingReader,
    Member,
    scan_members,
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


def scan(data: bytes) -> tuple[list[Member], Oddities, TarError | None, HashingReader]:
    oddities = Oddities()
    reader = HashingReader(io.BytesIO(data), len(data))
    members: list[Member] = []
    error = None
    try:
        for member in scan_members(reader, oddities):
            members.append(member)
    except TarError as caught:
        error = caught
    reader.skip(reader.remaining)
    return members, oddities, error, reader


names = st.text(st.characters(codec="utf-8", categories=("L", "N")), min_size=1, max_size=150)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(names, st.binary(max_size=1500)), max_size=6), st.sampled_from(FORMATS[:2]))
def test_agrees_with_tarfile(members: list[tuple[str, bytes]], tar_format: int) -> None:
    data = make_tar(members, tar_format)
    found, oddities, error, reader = scan(data)
    assert error is None
    assert not oddities.counts
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
    found, oddities, error, _ = scan(bomb + header_block() + good)
    assert [m.name for m in found] == ["1.txt"]
    assert error is None
    assert oddities.counts == {"extension_too_large": 1}


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
    found, oddities, error, _ = scan(buffer.getvalue())
    assert [m.name for m in found] == ["7.txt"]
    assert error is None
    assert oddities.counts == {"special_member": 3, "unsafe_name": 4}


def test_a_name_that_is_not_utf8() -> None:
    data = patched(header_block(), name=b"\xff\xfe.txt") + make_tar([("1.txt", b"x")])
    found, oddities, _, _ = scan(data)
    assert [m.name for m in found] == ["1.txt"]
    assert oddities.counts == {"unsafe_name": 1}


def test_sparse_members_are_no_files(tmp_path: Path) -> None:
    sparse = patched(header_block(), type=b"S", size=b"%o" % 100)
    continued = sparse[:482] + b"\1" + sparse[483:]
    blocks = patched(continued) + b"1".ljust(504, b"\0") + b"\1".ljust(8, b"\0") + bytes(BLOCK)
    records = b"22 GNU.sparse.major=1\n25 GNU.sparse.name=0.jpg\n"
    pax = patched(header_block(), type=b"x", size=b"%o" % len(records)) + records.ljust(BLOCK, b"\0")
    mapped = patched(header_block(), name=b"GNUSparseFile.1/0.jpg", size=b"%o" % BLOCK) + bytes(BLOCK)
    data = blocks + b"x" * 100 + bytes(BLOCK - 100) + pax + mapped + make_tar([("1.txt", b"x")])
    found, oddities, error, _ = scan(data)
    assert error is None
    assert [m.name for m in found] == ["1.txt"]
    assert [(o.key, o.kind) for o in oddities.details] == [("0", "special_member"), ("0", "special_member")]


def test_a_member_over_the_limit_is_skipped_and_hashed(tmp_path: Path) -> None:
    path = tmp_path / "big.tar"
    size = MAX_MEMBER_BYTES + 1
    with path.open("wb") as file:
        file.write(patched(header_block(), size=b"%011o" % size))
        file.seek(-(-size // BLOCK) * BLOCK, io.SEEK_CUR)
        file.write(make_tar([("1.txt", b"x")]))
    oddities = Oddities()
    with path.open("rb") as file:
        reader = HashingReader(file, path.stat().st_size)
        members = list(scan_members(reader, oddities))
        file.seek(0)
        assert reader.hexdigest() == hashlib.file_digest(file, "sha256").hexdigest()
    assert [(m.name, m.length, m.content) for m in members] == [("0.txt", size, None), ("1.txt", 1, b"x")]


def test_data_after_the_end_is_counted() -> None:
    data = make_tar([("0.txt", b"x")])
    found, oddities, _, reader = scan(data + data)
    assert [m.name for m in found] == ["0.txt"]
    assert oddities.counts == {"trailing_data": 1}
    assert reader.hexdigest() == hashlib.sha256(data + data).hexdigest()


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
