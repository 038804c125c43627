"""Limits and words of headers, findings, quarantines, caches and token counts, on both sides."""

import io
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pytest
from crc32c import crc32c as crc32c_of
from PIL import Image
from shards import write_interleaved, write_texts

from dataserver.dataset import Dataset, DatasetError, TokensMissingError, build_index, count_tokens
from dataserver.dataset import quarantine as quarantine_module
from dataserver.dataset.cache import LruCache
from dataserver.dataset.errors import (
    MAX_DETAIL_CHARS,
    MAX_FINDING_BYTES,
    MAX_KEY_CHARS,
    Findings,
    QuarantineError,
    printable,
)
from dataserver.dataset.index.format import read_schema
from dataserver.dataset.index.tokens import read_counts
from dataserver.dataset.quarantine import Quarantine
from dataserver.dataset.shards.listing import find_shards
from dataserver.images import FORMAT_NAMES, ImageHeaderError, read_header, sniff_format
from dataserver.images import header as headers_module


def image(width: int = 3, height: int = 2, orientation: object = None, image_format: str = "JPEG") -> bytes:
    exif = Image.Exif()
    if orientation is not None:
        exif[0x0112] = orientation
    buffer = io.BytesIO()
    Image.new("RGB", (width, height)).save(buffer, image_format, exif=exif)
    return buffer.getvalue()


def test_headers_of_images(monkeypatch: pytest.MonkeyPatch) -> None:
    for orientation, size in (
        (0, (3, 2)),
        (1, (3, 2)),
        (4, (3, 2)),
        (5, (2, 3)),
        (8, (2, 3)),
        (9, (3, 2)),
        (None, (3, 2)),
    ):
        header = read_header(image(orientation=orientation))
        assert (header.width, header.height) == size
        assert header.orientation == (orientation if orientation in range(1, 9) else 1)
    magics = {b"\xff\xd8\xff": "jpeg", b"\x89PNG\r\n\x1a\n": "png", b"RIFF1234WEBP": "webp"}
    for magic, name in magics.items():
        for data, found in ((magic, name), (magic + b"x", name), (magic[:-1], None), (magic[:-1] + b"x", None)):
            assert sniff_format(data) == found
    assert sniff_format(b"RIFX1234WEBP") is None
    assert sniff_format(b"x" + b"\xff\xd8\xff") is None
    assert FORMAT_NAMES == ("jpeg", "png", "webp", "gif", "bmp", "avif", "tiff")
    assert read_header(image(1, 1)).width == 1
    assert (headers_module.MAX_IMAGE_BYTES, headers_module.MAX_IMAGE_PIXELS) == (64 << 20, 1 << 27)
    assert headers_module.ORIENTATION_TAG == 0x0112
    data = image()
    for name, limit, words in (
        ("MAX_IMAGE_BYTES", len(data), f"{len(data)} bytes, limit {len(data) - 1}"),
        ("MAX_IMAGE_PIXELS", 6, "declares 3 x 2 pixels, limit 5"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(headers_module, name, limit)
            assert read_header(data).width == 3
            patch.setattr(headers_module, name, limit - 1)
            with pytest.raises(ImageHeaderError) as caught:
                read_header(data)
            assert (caught.value.kind, caught.value.detail) == ("image_too_large", words)
    with pytest.raises(ImageHeaderError) as caught:
        read_header(b"123456789")
    assert caught.value.detail == "neither JPEG, PNG, WebP, GIF, BMP, AVIF nor TIFF: starts with 3132333435363738"
    with pytest.raises(ImageHeaderError, match="unreadable_header"):
        read_header(magic)


def test_findings_are_cut_and_counted_to_the_byte() -> None:
    assert (MAX_DETAIL_CHARS, MAX_KEY_CHARS, MAX_FINDING_BYTES) == (200, 1024, 4 << 20)
    assert printable("x" * 201) == "x" * 200
    assert printable("a\nb", 2) == "a\\n"
    assert printable("\ud800\u00e4") == "\\ud800\\xe4"
    findings = Findings()
    findings.add("k" * 1025, "kind", "d" * 201)
    assert [(o.key, o.kind, o.detail) for o in findings.details] == [("k" * 1024, "kind", "d" * 200)]
    assert findings.num_bytes == 1024 + 4 + 200
    findings.num_bytes = (4 << 20) - 3
    findings.add("k", "o", "d")
    assert (len(findings.details), findings.num_bytes) == (2, 4 << 20)
    findings.add("", "o", "")
    assert (len(findings.details), findings.counts) == (2, {"kind": 1, "o": 2})


def test_quarantine_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "list"
    path.write_text('["b", "2"]\n\n["a", "1"]\n["b", "10"]\n["b", "2"]\n')
    found = Quarantine.load(path)
    assert (found.keys, found.num_samples) == ({"a": frozenset({"1"}), "b": frozenset({"2", "10"})}, 3)
    found.save(path)
    assert path.read_text() == '["a", "1"]\n["b", "10"]\n["b", "2"]\n'
    assert quarantine_module.MAX_QUARANTINE_BYTES == 256 << 20
    size = path.stat().st_size
    monkeypatch.setattr(quarantine_module, "MAX_QUARANTINE_BYTES", size)
    assert Quarantine.load(path).digest == found.digest
    monkeypatch.setattr(quarantine_module, "MAX_QUARANTINE_BYTES", size - 1)
    with pytest.raises(QuarantineError, match=f"has {size} bytes, the limit is {size - 1}; shorten the list"):
        Quarantine.load(path)
    monkeypatch.undo()
    for line in ('["a"]', '["a", "b", "c"]', '["a", 1]', '{"a": "b"}', "[", '"ab"', "[" * 90_000):
        path.write_text(f'["a", "1"]\n{line}\n')
        with pytest.raises(QuarantineError) as caught:
            Quarantine.load(path)
        assert str(caught.value) == f'{path}, line 2: found {line[:80]!r}, each line must be ["SHARD", "KEY"]'


def test_a_cache_holds_exactly_its_budget() -> None:
    cache: LruCache[int] = LruCache(10, lambda value: value)

    def get(key: str, value: int) -> bool:
        """Whether it had to be loaded."""
        loads: list[int] = []
        found = cache.get(key, lambda: loads.append(value) or value)  # type: ignore[func-returns-value]
        return found == value and loads == [value]

    def cached() -> list[object]:
        return list(cache._values)

    for key, value, expected in (
        ("a", 4, ["a"]),
        ("b", 6, ["a", "b"]),
        ("c", 1, ["b", "c"]),
        ("d", 11, ["b", "c"]),
        ("e", 10, ["e"]),
        ("f", 0, ["e", "f"]),
    ):
        assert get(key, value)
        assert cached() == expected
    cache.drop("e")
    cache.drop("e")
    for key in ("g", "h", "i"):
        assert get(key, 3)
    assert cache.get("g", lambda: 99) == 3
    cache.drop_where(lambda key: key in ("h", "f"))
    assert cached() == ["i", "g"]
    assert get("j", 4)
    assert cached() == ["i", "g", "j"]
    assert get("k", 1)
    assert cached() == ["g", "j", "k"]


def test_token_counts_at_their_limits(tmp_path: Path) -> None:
    folder = write_texts(tmp_path, 3, 3)
    build_index(folder, workers=1)
    (shard,) = find_shards(folder)
    header, _ = read_schema(shard.index_path)

    class Fixed(NamedTuple):
        lengths: tuple[int, ...]
        id: int = 0
        vocab_size: int = 300
        digest: str = "d"

        def encode_all(self, _texts: list[str]) -> list[np.ndarray]:
            return [np.full(length, self.id, np.int32) for length in self.lengths]

    for wrong in (300, -1):
        with pytest.raises(DatasetError, match=r"the tokenizer gave an id outside 0..299; check its vocab_size"):
            count_tokens(folder, Fixed((0, 1, 2), wrong))
    with pytest.raises(DatasetError, match="the tokenizer gave ids of 2 texts for 3; it must give those of each"):
        count_tokens(folder, Fixed((1, 2)))
    with pytest.raises(TokensMissingError) as caught:
        read_counts(shard, header, "d")
    run = f"run: dataserver index {folder} --tokenizer NAME=FILE (or --tokenizer bytes)"
    assert str(caught.value) == f"shard {shard.path} is not counted for the tokenizer d; {run}"
    report = count_tokens(folder, Fixed((0, 4, 70_000), 299))
    assert (report.num_shards, report.num_counted, report.num_texts, report.num_tokens) == (1, 1, 3, 70_004)
    found = read_counts(shard, header, "d")
    assert (found.counts.tolist(), found.id_type) == ([0, 4, 70_000], np.dtype("<u2"))
    assert found.ids_crc32c == crc32c_of(shard.token_ids_path("d").read_bytes())
    assert count_tokens(folder, Fixed(())).num_counted == 0
    path = shard.tokens_path("d")
    metadata = pa.ipc.open_file(path.read_bytes()).schema.metadata
    assert metadata == {
        b"disttrain.columns_digest": header.columns_digest.encode(),
        b"disttrain.tokenizer_digest": b"d",
        b"disttrain.ids_type": b"<u2",
        b"disttrain.ids_crc32c": f"{found.ids_crc32c:08x}".encode(),
        b"disttrain.findings": b'{"counts":{},"details":[]}\n',
    }
    for column, changed, words in (
        (pa.array([0, -2, 1], pa.int32()), {}, "cannot be read (it holds a negative count)"),
        (pa.array([0, None, 1], pa.int32()), {}, "cannot be read (its counts are int32 with 1 missing, not int32)"),
        (pa.array([0, 1, 1]), {}, "cannot be read (its counts are int64 with 0 missing, not int32)"),
        (pa.array([0, 1, 1], pa.int32()), {b"disttrain.ids_type": b"<f4"}, "cannot be read ('<f4')"),
        (
            pa.array([0, 1, 1], pa.int32()),
            {b"disttrain.columns_digest": b"x"},
            "was counted from another index or tokenizer",
        ),
        (
            pa.array([0, 1, 1], pa.int32()),
            {b"disttrain.tokenizer_digest": b"x"},
            "was counted from another index or tokenizer",
        ),
    ):
        table = pa.table({"tokens": column}).replace_schema_metadata({**metadata, **changed})
        with pa.ipc.new_file(str(path), table.schema) as writer:
            writer.write_table(table)
        with pytest.raises(TokensMissingError) as caught:
            read_counts(shard, header, "d")
        assert str(caught.value) == f"shard {shard.path} {words} for the tokenizer d; {run}"


def test_images_that_a_sample_does_not_have_are_refused(tmp_path: Path) -> None:
    build_index(write_interleaved(tmp_path / "d", 6, 6, seed=1), tmp_path / "deep" / "er", workers=1)
    (shard,) = Dataset.open(tmp_path / "d", tmp_path / "deep" / "er").shards
    for row in range(shard.num_samples):
        count = shard.parts(row).kinds.count(1)
        assert len({shard.image(row, i).offset for i in range(count)}) == count
        for i in (-1, count, count + 1):
            with pytest.raises(IndexError, match=rf"row {row} of shard .* has {count} images, image {i} was asked for"):
                shard.image(row, i)
    for row in (-1, 6):
        with pytest.raises(IndexError, match=rf"has 6 samples, row {row} was asked for"):
            shard.image(row, 0)
