"""The registry of image formats: a line makes a format known to headers, decoding and indexes."""

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dataserver.images import ImageHeader, ImageHeaderError, ImageShape, decode_patches, formats, read_header
from dataserver.images.formats import FORMATS, ImageFormat
from dataserver.planning.job.fields import Sizing

PPM = ImageFormat("ppm", "PPM", ((0, b"P6"),), "PIL.PpmImagePlugin.PpmImageFile")


def ppm() -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (12, 8), "teal").save(buffer, "PPM")
    return buffer.getvalue()


def test_every_format_is_told_by_its_magic() -> None:
    for known in FORMATS:
        begin = bytearray(16)
        for at, text in known.magic:
            begin[at : at + len(text)] = text
        assert formats.format_of(bytes(begin)) is known
    assert formats.format_of(b"") is None


def test_a_line_adds_a_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = ppm()
    with pytest.raises(ImageHeaderError, match="it is PPM; neither JPEG, PNG, WebP, GIF, BMP, AVIF nor TIFF"):
        read_header(data)
    monkeypatch.setattr(formats, "FORMATS", (*FORMATS, PPM))
    assert read_header(data) == ImageHeader("ppm", 12, 8, 1)
    out = np.zeros((6, 48), np.uint8)
    assert decode_patches(data, ImageShape(12, 8, 1, 2, 3), Sizing(patch=4, merge=1), out)
    assert (out.reshape(-1, 3) == (0, 128, 128)).all()
