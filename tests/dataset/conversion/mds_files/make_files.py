#!/usr/bin/env python
"""Writes the MDS files of this folder, and what is in them, with MosaicML's own writer.

Its package wants older numpy, transformers and more than we have, so the files are part of the tests, not the package.
Of version 0.13.0 the writer was imported alone:

    pip install --no-deps --target PACKAGES mosaicml-streaming brotli python-snappy cramjam zstd xxhash
    PYTHONPATH=PACKAGES python make_files.py
"""

import functools
import hashlib
import importlib.util
import io
import json
import sys
import types
from collections.abc import Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

FOLDER = Path(__file__).parent
RNG = np.random.default_rng(7)
COLUMNS = {
    "key": "str",
    "image": "jpeg",
    "caption": "str",
    "width": "int",
    "score": "float32",
    "half": "float16",
    "count": "str",
    "digits": "str_int",
    "ratio": "str_float",
    "price": "str_decimal",
    "embedding": "ndarray:float32:2,2",
    "meta": "json",
    "extra": "bytes",
    "blob": "bytes",
}


@functools.cache
def writer() -> Any:
    """The class of the writer, without all that its package imports besides."""
    spec = importlib.util.find_spec("streaming")
    assert spec is not None
    assert spec.submodule_search_locations
    for name, path in (("streaming", ""), ("streaming.base", "base")):
        module = types.ModuleType(name)
        module.__path__ = [str(Path(spec.submodule_search_locations[0]) / path)]
        sys.modules[name] = module
    return importlib.import_module("streaming.base.format.mds").MDSWriter


def image(width: int, height: int, mode: str = "RGB") -> Image.Image:
    small = RNG.integers(0, 255, (height // 8 + 1, width // 8 + 1, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((width, height)).convert(mode)


def encoded(picture: Image.Image, kind: str) -> bytes:
    out = io.BytesIO()
    picture.save(out, kind)
    return out.getvalue()


def write(name: str, columns: Mapping[str, str], samples: Sequence[Mapping[str, Any]], **options: Any) -> None:
    with writer()(out=str(FOLDER / name), columns=dict(columns), **options) as mds:
        for sample in samples:
            mds.write(sample)


def main() -> None:
    pairs = [
        {
            "key": f"a/{n}.x", "image": encoded(image(40 + n, 32), "JPEG"), "caption": f"caption {n} é",
            "width": 40 + n, "score": n / 4, "half": np.float16(n), "count": str(n), "digits": 10**20 + n,
            "ratio": 1.5 * n, "price": Decimal("1.25"), "embedding": np.full((2, 2), n, np.float32),
            "meta": {"tags": ["x", n]}, "extra": encoded(image(16, 16), "PNG"), "blob": b"no image %d" % n,
        }
        for n in range(5)
    ]  # fmt: skip
    for compression in (None, "zstd", "gz", "bz2", "br", "snappy"):
        options = {"compression": compression, "hashes": ["sha1", "xxh64"], "size_limit": 4500}
        write(compression or "plain", COLUMNS, pairs, **options)
    chats = [
        {
            "conversations": [
                {"from": "human", "value": "<image>\n" * n + f"What {n}?"},
                {"from": "gpt", "value": "That."},
            ],
            "images": [image(24 + k, 24) for k in range(n)],
            "id": n,
        }
        for n in range(3)
    ]  # fmt: skip
    write("chats/train", {"conversations": "json", "images": "list[jpeg]", "id": "int64"}, chats)
    arrays = [{"photos": [encoded(image(20 + k, 20), "JPEG") for k in range(2)], "text": f"t{n}"} for n in range(2)]
    write("chats/val", {"photos": "jpeg_array", "text": "str"}, arrays)
    pixels = [{"image": image(18, 12, mode), "text": mode} for mode in ("RGB", "L", "RGBA", "1", "CMYK", "P")]
    write("pixels", {"image": "pil", "text": "str"}, pixels)
    pickled = [{"image": encoded(image(20, 20), "JPEG"), "text": f"t{n}", "meta": {"n": n}} for n in range(2)]
    write("pickled", {"image": "jpeg", "text": "str", "meta": "pkl"}, pickled)
    expected = {
        "pairs": [[hashlib.sha256(p["image"]).hexdigest(), hashlib.sha256(p["extra"]).hexdigest()] for p in pairs],
        "photos": [[hashlib.sha256(photo).hexdigest() for photo in sample["photos"]] for sample in arrays],
        "pixels": {p["text"]: hashlib.sha256(p["image"].tobytes()).hexdigest() for p in pixels},
    }
    (FOLDER / "expected.json").write_text(f"{json.dumps(expected, indent=1)}\n")


if __name__ == "__main__":
    main()
