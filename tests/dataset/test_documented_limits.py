"""The limits of docs/datasets.md, as whoever indexes a folder meets them: files just within each, and just beyond."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from odd_shards.images import declared_png
from shards import make_image, write_tar

from dataserver.dataset import build_index, lint

JPEG = make_image(np.random.default_rng(0), 32, 32)
MIB = 1 << 20


def of_bytes(num_bytes: int) -> list[tuple[str, bytes]]:
    """A pair whose image has so many bytes."""
    return [("0.jpg", JPEG + bytes(num_bytes - len(JPEG))), ("0.txt", b"a")]


def of_pixels(num_pixels: int) -> list[tuple[str, bytes]]:
    """A pair whose image says that it has so many pixels."""
    return [("0.png", declared_png(1, num_pixels)), ("0.txt", b"a")]


def of_scalars(count: int) -> list[tuple[str, bytes]]:
    """A text whose JSON has so many entries."""
    return [("0.txt", b"a"), ("0.json", json.dumps({str(n): n for n in range(count)}).encode())]


DOCUMENT = b'{"texts": ["a"], "images": [null]}'
FINDINGS: dict[str, tuple[str, Callable[[int], list[tuple[str, bytes]]], int]] = {
    "bytes of an image": ("image_too_large", of_bytes, 64 * MIB),
    "pixels of an image": ("image_too_large", of_pixels, 1 << 27),
    "bytes of a text": ("text_too_large", lambda n: [("0.txt", b"x" * n)], 4 * MIB),
    "bytes of a JSON": ("text_too_large", lambda n: [("0.json", DOCUMENT.ljust(n))], 4 * MIB),
    "members": ("too_many_members", lambda n: [("0.txt", b"a"), *((f"0.{i}", b"") for i in range(n - 1))], 4096),
    "scalars": ("too_many_scalars", of_scalars, 1024),
    "characters of a name": ("unsafe_name", lambda n: [("0." + "x" * (n - 2), b""), ("1.txt", b"a")], 1024),
}


def kinds(folder: Path) -> dict[str, int]:
    build_index(folder, workers=1)
    return dict(lint(folder).counts)


@pytest.mark.parametrize("limit", FINDINGS)
def test_what_is_beyond_a_limit_is_a_finding(tmp_path: Path, limit: str) -> None:
    kind, members, most = FINDINGS[limit]
    for size, beyond in ((most, False), (most + 1, True)):
        folder = tmp_path / str(size)
        write_tar(folder / "0.tar", members(size))
        found = kinds(folder)
        assert (kind in found) == beyond, f"{size}: {found}"


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (lambda beyond: [f"c{n}" for n in range(256 + beyond)], "too_many_columns"),
        (lambda beyond: ["n" * (128 + beyond)], "unusable_column"),
    ],
)
def test_columns_beyond_a_limit_are_ignored_and_named(tmp_path: Path, names: Any, kind: str) -> None:
    for beyond in (0, 1):
        folder = tmp_path / str(beyond)
        write_tar(folder / "0.tar", [("0.txt", b"a")])
        pq.write_table(pa.table({"key": ["0"], **{name: [1] for name in names(beyond)}}), folder / "0.parquet")
        assert kinds(folder) == ({kind: 1} if beyond else {})
