"""ZSTD pages: blocks that are stored are read from where they lie, of others no more than is needed."""

import io
import threading
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import zstandard
from builders.parquets import pairs_table, write_table
from PIL import Image
from shards import make_image

from dataserver.dataset import Dataset, build_index, open_shards
from dataserver.dataset.shards.pages import CODECS, MAX_PAGE_BYTES, STORED, Page, begin_bytes, unpack_begin
from dataserver.dataset.shards.parquet import chunk as chunk_module
from dataserver.dataset.shards.parquet.zstd import stored_blocks

RNG = np.random.default_rng(8)
NOISE = RNG.bytes(300_000)
IMAGE = make_image(RNG, 64, 48)


def picture(width: int, height: int) -> bytes:
    """A JPEG of noise, which has more bytes than a photograph of that size."""
    out = io.BytesIO()
    Image.fromarray(RNG.integers(0, 255, (height, width, 3), dtype=np.uint8)).save(out, "JPEG", quality=90)
    return out.getvalue()


def stored(*blocks: bytes, end: bytes = b"") -> bytes:
    """A frame of stored blocks, that does not say its size."""
    heads = [(len(block) << 3 | (n == len(blocks) - 1)).to_bytes(3, "little") for n, block in enumerate(blocks)]
    return b"\x28\xb5\x2f\xfd\x00\x58" + b"".join(h + b for h, b in zip(heads, blocks, strict=True)) + end


def test_blocks_lie_where_they_are_said_to_lie() -> None:
    for options in ({}, {"write_checksum": True}, {"write_content_size": False}):
        packed = zstandard.ZstdCompressor(**options).compress(NOISE)
        found = stored_blocks(packed, len(NOISE))
        assert found is not None
        assert b"".join(packed[part.start : part.start + part.plain_bytes] for part in found) == NOISE
        assert {(part.is_stored, part.packed_bytes == part.plain_bytes) for part in found} == {(True, True)}
    assert [part[:3] for part in stored_blocks(stored(b"ab", b"", b"c"), 3) or ()] == [(9, 2, 2), (17, 1, 1)]


@pytest.mark.parametrize(
    ("packed", "plain_bytes"),
    [
        (zstandard.compress(b"some words " * 999), 10_989),
        (zstandard.compress(NOISE)[:-1], 300_000),
        (zstandard.compress(NOISE) + b"x", 300_000),
        (zstandard.compress(NOISE), 299_999),
        (zstandard.compress(NOISE) * 2, 600_000),
        (stored(*[b"x"] * 100), 100),
        (stored(b""), 0),
        (b"\x28\xb5\x2f\xfd", 0),
        (b"", 0),
        (b"PAR1" + bytes(20), 5),
    ],
)
def test_what_is_not_stored_as_a_whole_is_not_read_so(packed: bytes, plain_bytes: int) -> None:
    assert stored_blocks(packed, plain_bytes) is None


def opened(folder: Path, images: list[bytes], **options: object) -> Dataset:
    table = pairs_table([(f"{n:03d}", image, "text") for n, image in enumerate(images)], pa.binary())
    write_table(folder / "0.parquet", table, "zstd", **options)
    report = build_index(folder, workers=1)
    assert (report.num_samples, report.findings) == (len(images), {})
    return Dataset.open(folder)


def test_pages_of_any_size_are_read_where_their_blocks_are_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = [picture(400, 300 + 10 * n) for n in range(20)]
    assert sum(map(len, images)) > MAX_PAGE_BYTES > max(map(len, images))
    dataset = opened(tmp_path, images, data_page_size=1 << 30, write_batch_size=1024)
    monkeypatch.setattr(open_shards, "unpack", None)  # nothing is decompressed
    monkeypatch.setattr(open_shards, "unpack_begin", None)
    (shard,) = dataset.shards
    for row in RNG.permutation(20).tolist():
        assert dataset.read(shard.image(row, 0)) == images[row]


def test_a_larger_page_with_one_compressed_block_is_named(tmp_path: Path) -> None:
    images = [IMAGE + RNG.bytes(600_000), IMAGE + bytes(600_000), IMAGE + RNG.bytes(MAX_PAGE_BYTES)]
    table = pairs_table([(f"{n}", image, "text") for n, image in enumerate(images)], pa.binary())
    write_table(tmp_path / "0.parquet", table, "zstd", data_page_size=1 << 30, write_batch_size=1024)
    assert build_index(tmp_path, workers=1).findings == {"needs_convert": 3}


def test_where_a_page_becomes_shorter_behind_a_value_all_of_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The share of the page that is read first is too small then."""
    images = [IMAGE + RNG.bytes(700_000), IMAGE + bytes(700_000)]
    sizes = []
    read = open_shards.OpenShards._read_file

    def noted(self: object, position: int, ranges: list[tuple[int, int]]) -> list[bytes]:
        sizes.append(ranges[0][1])
        return read(self, position, ranges)

    monkeypatch.setattr(open_shards.OpenShards, "_read_file", noted)
    dataset = opened(tmp_path, images, data_page_size=1 << 30, write_batch_size=1024)
    (shard,) = dataset.shards
    assert dataset.read(shard.image(0, 0)) == images[0]
    assert sizes[0] < sizes[1]
    assert dataset.read(shard.image(1, 0)) == images[1]


def test_the_begin_of_a_page_is_the_same_in_all_threads_whatever_was_read_before() -> None:
    texts = [b"".join(RNG.bytes(40) + bytes(200) for _ in range(900 + n)) for n in range(4)]
    pages = [zstandard.compress(text) for text in texts]
    wrong: list[int] = []

    def work(seed: int) -> None:
        draw = np.random.default_rng(seed)
        for _ in range(60):
            n, length = int(draw.integers(4)), int(draw.integers(1, 200_000))
            page = Page(0, len(pages[n]), len(texts[n]), CODECS.index("ZSTD"))
            begin = pages[n][: begin_bytes(page, length)]
            if unpack_begin(begin, length, "ZSTD") != texts[n][:length]:
                wrong.append(seed)
            with pytest.raises(ValueError, match="a page"):
                unpack_begin(b"\x28\xb5\x2f\xfd" + begin[4:40] + bytes(90), 1 << 20, "ZSTD")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_window_of_any_size_is_not_remembered() -> None:
    """Decompressors that threads have again would each have the memory of the largest window."""
    compressor = zstandard.ZstdCompressor(
        compression_params=zstandard.ZstdCompressionParameters(window_log=25, write_content_size=False)
    )
    stream = compressor.compressobj()
    packed = stream.compress(bytes(1000)) + stream.flush()
    assert zstandard.get_frame_parameters(packed).window_size == 1 << 25
    assert unpack_begin(packed, 500, "ZSTD") == bytes(500)
    assert STORED in CODECS
    assert set(chunk_module._CUT) == {"SNAPPY", "ZSTD"}
