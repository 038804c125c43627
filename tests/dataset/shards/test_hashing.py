"""What is told of a shard's bytes when all of them were read once."""

import hashlib
import io
from pathlib import Path

import pytest
from crc32c import crc32c as crc32c_of
from shards import write_pairs

from dataserver.dataset import Dataset, build_index
from dataserver.dataset.index.format import read_block_sums
from dataserver.dataset.index.rules import IndexRules, KeyEnd
from dataserver.dataset.shards import hashing
from dataserver.dataset.shards.hashing import BlockSums, HashingReader

DATA = bytes(range(251)) * 10


def test_all_bytes_are_hashed_once_and_each_block_has_its_checksum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashing, "BLOCK_BYTES", 1000)
    monkeypatch.setattr(hashing, "READ_CHUNK_BYTES", 300)
    sums = BlockSums()
    reader = HashingReader(io.BytesIO(DATA), len(DATA), sums=sums)
    assert reader.read(10) == DATA[:10]
    assert reader.peek(700) == DATA[10:710]
    assert reader.skip(1200)
    assert reader.read(400) == DATA[1210:1610]
    reader.skip(reader.remaining)
    assert reader.hexdigest() == hashlib.sha256(DATA).hexdigest()
    assert sums.values == [crc32c_of(DATA[start : start + 1000]) for start in range(0, len(DATA), 1000)]


def test_bytes_of_ranges_are_held_while_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashing, "READ_CHUNK_BYTES", 300)
    reader = HashingReader(io.BytesIO(DATA), len(DATA))
    assert reader.read(350) == DATA[:350]  # 600 bytes are here
    reader.hold([(900, 1000), (400, 450), (450, 700), (299, 400), (1500, 1500), (2400, 2600), (800, 850)])
    assert reader.held(400, 200) == DATA[400:600]
    assert [reader.held(*piece) for piece in ((400, 201), (299, 10), (350, 10), (600, 1))] == [None] * 4
    assert reader.peek(300) == DATA[350:650]
    assert reader.skip(1050)
    assert reader.held(400, 300) == DATA[400:700]
    assert reader.held(430, 40) == DATA[430:470], "ranges that touch are one"
    assert (reader.held(800, 50), reader.held(905, 95)) == (DATA[800:850], DATA[905:1000])
    assert [reader.held(*piece) for piece in ((400, 301), (850, 50), (899, 2), (2400, 1))] == [None] * 4
    reader.skip(reader.remaining)
    assert reader.held(2400, 110) == DATA[2400:2510]
    assert reader.held(2400, 111) is None, "the file ends"
    assert reader.hexdigest() == hashlib.sha256(DATA).hexdigest()
    reader.hold([])
    assert reader.held(400, 1) is None


def test_an_index_has_the_checksums_of_its_blocks_by_whatever_rules(tmp_path: Path) -> None:
    folder = write_pairs(tmp_path, 4, 4)
    (tar,) = folder.glob("*.tar")
    for rules in (IndexRules(), IndexRules(key=KeyEnd.LAST_DOT)):  # the second time its digest is known
        assert build_index(folder, workers=1, rules=rules).num_built == 1
        (shard,) = Dataset.open(folder).shards
        assert read_block_sums(shard.file.index_path, shard.header).tolist() == [crc32c_of(tar.read_bytes())]
